from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kinroute.replay.arm import Arm
from kinroute.replay.faults import TraceError
from kinroute.replay.plays import as_recorded
from kinroute.replay.readers import read_sessions
from kinroute.replay.recorded_runs import SOURCE, is_recording, sessions_of
from kinroute.replay.simulation import simulate
from kinroute.replay.traces import Session
from tests.worker.core.engines import TestEngine, make_engine
from tests.worker.core.families import Families
from tests.worker.recorders import header_of
from worker.core import checkpoint
from worker.core.config import ReusePolicy, SchedulerConfig
from worker.core.conversations import News, StopReason
from worker.core.outputs import Rejection
from worker.core.plan import encode
from worker.core.recording import MAGIC, VERSION, Framer
from worker.core.replica import Replica
from worker.core.scheduler import Scheduler
from worker.core.types import Phase, Request

PLAN_MS = 500


class Recorded:
    """An engine with blocks of 4 and what it records."""

    def __init__(self) -> None:
        self.engine = make_engine(num_pages=32, tokens_per_block=4, policy=ReusePolicy.PER_CONVERSATION)
        self.framer = Framer()
        self.parts = self.begun()

    def begun(self) -> list[bytes]:
        return self.framer.begin(header_of(self.engine.replica), checkpoint.save(self.engine.replica))

    def ask(self, key: int, prompt: Sequence[int], **members: object) -> None:
        self.engine.submit(key, prompt, **members)

    def run(self, steps: int | None = None) -> None:
        """Until there is nothing to do, or so many steps."""
        for _ in range(steps if steps is not None else 1000):
            self.engine.now_ms += PLAN_MS
            made = self.engine.scheduler.plan(self.engine.now_ms)
            if made is None:
                break
            self.parts += self.framer.step(encode(made[0]), self.engine.replica.digest)
            self.engine.scheduler.complete(made[0], TestEngine.sampled(made[1]))

    def write(self, file: Path) -> Path:
        file.write_bytes(b"".join(self.parts))
        return file


def the_only(path: Path) -> Session:
    (session,) = sessions_of(path)
    return session


def test_a_recording_tells_who_asked_when_and_for_what(tmp_path: Path) -> None:
    recorded = Recorded()
    prompt = list(range(11, 21))
    recorded.ask(1, prompt, max_tokens=5, conversation="a")
    recorded.run()
    recorded.engine.scheduler.heard("a", News.ENDED, StopReason.TOOL_CALL, final=False)
    recorded.ask(2, [1, 2, 3, 4], max_tokens=1, conversation="b", parent="a")
    recorded.run()
    recorded.ask(3, [*prompt, 9, 9, 9, 9, 9, 7, 7, 7, 7], max_tokens=1, conversation="a")
    recorded.run()

    session = the_only(recorded.write(tmp_path / "segment-000001.kinrec"))

    assert (session.source, session.block_tokens) == (SOURCE, 4)
    first, child, again = session.requests
    # Ten tokens are three blocks: the answer filled the third, with two of its five tokens.
    assert (first.blocks, first.output_tokens) == (((0, 3),), 3)
    assert (first.t_s, first.duration_s, first.stop) == (0.0, 2.5, "tool")
    assert (child.conversation, child.parent, child.kind, child.stop) == ("b", "a", "sub", None)
    assert (child.blocks, child.output_tokens) == (((3, 1),), 1)
    # Nineteen tokens, of which twelve were there, are five blocks.
    assert again.blocks == ((0, 3), (4, 2))
    assert again.t_s > child.t_s > first.t_s


def test_a_context_leg_lasts_until_its_conversation_is_told_to_have_ended(tmp_path: Path) -> None:
    recorded = Recorded()
    recorded.ask(1, [1, 2, 3, 4, 5], max_tokens=9, conversation="a", phase=Phase.CONTEXT)
    recorded.run(2)
    recorded.engine.scheduler.heard("a", News.GENERATING, final=False)
    recorded.run(4)
    recorded.engine.scheduler.heard("a", News.ENDED, StopReason.END_OF_TURN, final=False)
    ended_s = recorded.engine.now_ms / 1000
    recorded.run()

    (request,) = the_only(recorded.write(tmp_path / "one")).requests

    assert (request.duration_s, request.stop, request.output_tokens) == (ended_s, "end", 1)
    assert ended_s > 1.0


def test_segments_that_go_on_are_one_session_and_a_new_start_begins_another(tmp_path: Path) -> None:
    first, other = Recorded(), Recorded()
    first.ask(1, [1, 2, 3, 4, 5], max_tokens=3, conversation="a")
    first.run()
    first.write(tmp_path / "segment-000001.kinrec")
    first.framer = Framer()
    first.parts = first.begun()
    first.ask(2, [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1, conversation="a")
    first.run()
    first.write(tmp_path / "segment-000002.kinrec")
    other.ask(1, [1, 2, 3], max_tokens=3, conversation="z")
    other.run()
    other.write(tmp_path / "segment-000003.kinrec")

    session, after = sessions_of(tmp_path)

    assert [one.conversation for one in session.requests] == ["a", "a"]
    # Its second block was filled by the first answer.
    assert [one.blocks for one in session.requests] == [((0, 2),), ((0, 1), (2, 2))]
    assert [one.conversation for one in after.requests] == ["z"]
    assert read_sessions([tmp_path]) == [session, after]


class Listening(Scheduler):
    """Remembers what it was asked for."""

    def submit(self, request: Request) -> Rejection | None:
        self.asked = [*getattr(self, "asked", ()), request]
        return super().submit(request)


def families_recorded(seed: int, steps: int, file: Path) -> list[Request]:
    """What was asked for, in that order."""
    families = Families(random.Random(seed))
    listening = Listening(SchedulerConfig(max_batch_size=8, max_num_tokens=64), families.replica, lambda request: b"")
    families.scheduler = listening
    framer = Framer()
    parts = framer.begin(header_of(families.replica), checkpoint.save(families.replica))
    for plan in families.steps(steps):
        parts += framer.step(plan, families.replica.digest)
    file.write_bytes(b"".join(parts))
    return listening.asked


def ids(session: Session, index: int) -> list[int]:
    return [first + at for first, count in session.requests[index].blocks for at in range(count)]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("seed", [1, 2])
def test_prompts_share_the_blocks_that_their_tokens_share(tmp_path: Path, seed: int) -> None:
    asked = families_recorded(seed, 600, tmp_path / "one")

    session = the_only(tmp_path / "one")

    prompts: list[list[int]] = []
    left = list(asked)
    for request in session.requests[:60]:
        # Admission follows the order of submission, but for those that wait for a sibling or were cancelled.
        fits = next(
            one
            for one in left
            if one.conversation == request.conversation and -(-len(one.token_ids) // 4) == request.num_blocks
        )
        left.remove(fits)
        prompts.append(fits.token_ids.tolist())
        assert request.parent in (fits.parent, None)
    assert len(prompts) == 60
    blocks = [ids(session, index) for index in range(60)]
    for one, other in itertools.combinations(range(60), 2):
        whole = min(len(prompts[one]), len(prompts[other])) // 4
        assert min(common(blocks[one], blocks[other]), whole) == common(prompts[one], prompts[other]) // 4


def test_a_recording_is_played_once_as_it_stands_under_any_policy(tmp_path: Path) -> None:
    families_recorded(3, 400, tmp_path / "one")
    sessions = read_sessions([tmp_path / "one"])

    played = as_recorded(sessions)

    assert [one.t_s for one in played] == [one.t_s for one in sessions[0].requests]
    assert [one.output_tokens for one in played] == [one.output_tokens for one in sessions[0].requests]
    for policy in ("lru", "subagent"):
        result = simulate(played, Arm(policy, 128, warmup=0.0), lambda ended: None)
        assert result.requests == len(played)
        assert 0 < result.hit_blocks < result.prompt_blocks


def test_of_a_torn_recording_what_stands_before_its_end_is_read(tmp_path: Path) -> None:
    families_recorded(4, 100, tmp_path / "one")
    whole = (tmp_path / "one").read_bytes()
    (tmp_path / "torn").write_bytes(whole[:-3])

    assert len(the_only(tmp_path / "torn").requests) <= len(the_only(tmp_path / "one").requests)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:40], "expected a recording that ends no sooner"),
        (lambda data: data[:-20] + bytes(20), "expected a sound recording (at offset"),
        (
            lambda data: data[: len(MAGIC)] + b"\xff\0\0\0" + data[len(MAGIC) + 4 :],
            f"version {VERSION} was due, not 255",
        ),
    ],
)
def test_a_damaged_recording_is_named_with_what_was_due(tmp_path: Path, change: object, said: str) -> None:
    families_recorded(5, 40, tmp_path / "one")
    file = tmp_path / "damaged"
    assert callable(change)
    file.write_bytes(change((tmp_path / "one").read_bytes()))

    with pytest.raises(TraceError) as refused:
        read_sessions([file])

    assert str(refused.value).startswith(str(file))
    assert said in str(refused.value)


def test_a_recording_without_requests_is_refused(tmp_path: Path) -> None:
    file = Recorded().write(tmp_path / "one")

    assert is_recording(file)
    with pytest.raises(TraceError, match="some request is admitted"):
        sessions_of(file)


def test_one_that_decides_otherwise_is_refused(tmp_path: Path) -> None:
    families = Families(random.Random(6))
    framer = Framer()
    parts = framer.begin(header_of(families.replica), checkpoint.save(Replica(families.replica.config)))
    for plan in families.steps(30):
        parts += framer.step(plan, families.replica.digest[::-1])
    (tmp_path / "one").write_bytes(b"".join(parts))

    with pytest.raises(TraceError, match="plan 1 ends otherwise"):
        sessions_of(tmp_path / "one")
