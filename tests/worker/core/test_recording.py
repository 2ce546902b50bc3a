"""A segment reads as it was written, up to where its writer was ended; damage is named, never replayed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from tests.worker.core.engines import make_engine
from tests.worker.core.families import Families
from tests.worker.recorders import header_of
from worker.core import checkpoint
from worker.core.plan import Plan, decode, encode
from worker.core.recording import (
    FRAME,
    MAGIC,
    START,
    VERSION,
    Failure,
    Framer,
    Kind,
    RecordingError,
    Step,
    Unfinished,
    read,
)
from worker.core.replay import replay
from worker.core.replica import Replica
from worker.core.tiers import Tier

FAILURE = Failure("rank 1 decided otherwise", plan=3, rank=1, ours=[[3, "chunk", 1, [], [4]]], theirs=[])


def recorded(
    replica: Replica, steps: Sequence[tuple[bytes, bytes]], start: bytes, failure: Failure | None = None
) -> bytes:
    """A segment of these plans and digests, behind the checkpoint `start`."""
    framer = Framer()
    parts = framer.begin(header_of(replica), start)
    for plan, digest in steps:
        parts += framer.step(plan, digest)
    if failure is not None:
        parts += framer.failure(failure)
    return b"".join(parts)


def a_segment(failure: Failure | None = None) -> bytes:
    """Three steps of one request."""
    engine = make_engine()
    engine.submit(1, [1, 2, 3], max_tokens=3)
    start = checkpoint.save(engine.replica)
    steps = []
    for now_ms in range(3):
        made = engine.scheduler.plan(now_ms)
        assert made is not None
        steps.append((encode(made[0]), engine.replica.digest))
    return recorded(engine.replica, steps, start, failure)


def last_record(data: bytes) -> int:
    """Where the last record begins."""
    offset = START
    while True:
        end = offset + FRAME.size + FRAME.unpack_from(data, offset)[1]
        if end == len(data):
            return offset
        offset = end


def test_what_was_written_is_read() -> None:
    engine = make_engine()
    plan = encode(Plan(1, 12, ()))

    segment = read(recorded(engine.replica, [(plan, b"d" * 16)], b"the checkpoint", FAILURE))

    assert segment.header == header_of(engine.replica)
    assert segment.header.config == engine.replica.config
    assert bytes(segment.checkpoint) == b"the checkpoint"
    assert list(segment.steps()) == [Step(Plan(1, 12, ()), b"d" * 16)]
    assert segment.failure == FAILURE
    assert segment.torn_at is None


def test_a_segment_cut_anywhere_in_its_last_record_gives_what_stands_before_it() -> None:
    data = a_segment()
    torn_at = last_record(data)

    for end in range(torn_at + 1, len(data)):
        segment = read(data[:end])
        assert (segment.num_steps, segment.torn_at) == (2, torn_at)
        assert replay(segment).departure is None
    assert read(data[:torn_at]).torn_at is None


def test_a_segment_cut_before_its_checkpoint_ends_is_told_from_a_damaged_one() -> None:
    engine = make_engine()
    data = recorded(engine.replica, [], checkpoint.save(engine.replica))

    for end in range(len(data)):
        with pytest.raises(Unfinished):
            read(data[:end])
    assert read(data).num_steps == 0


def test_a_flipped_bit_anywhere_is_refused() -> None:
    data = a_segment(FAILURE)

    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises(RecordingError, match=r"at offset \d+: .* was due"):
            read(bytes(damaged))


def test_damage_is_named_with_where_it_is_and_what_was_due() -> None:
    data = bytearray(a_segment())
    offset = last_record(bytes(data))
    data[-1] ^= 1

    with pytest.raises(RecordingError, match=f"at offset {offset}: a record of .* bytes was due: it is damaged"):
        read(bytes(data))


def test_a_record_that_is_gone_is_missed() -> None:
    plans = [encode(Plan(number, 0, ())) for number in (1, 2, 3)]
    framer = Framer()
    begin = framer.begin(header_of(make_engine().replica), b"")
    _, second, third = (framer.step(plan, bytes(16)) for plan in plans)

    with pytest.raises(RecordingError, match="one before it is gone"):
        read(b"".join([*begin, *second, *third]))


def test_another_version_is_refused_by_name() -> None:
    data = a_segment().replace(MAGIC + bytes([VERSION]), MAGIC + b"\x07", 1)

    with pytest.raises(RecordingError, match=f"at offset {len(MAGIC)}: version {VERSION} was due, not 7"):
        read(data)


def test_a_foreign_file_is_refused() -> None:
    with pytest.raises(RecordingError, match="at offset 0: KINROUTE-REC was due"):
        read(b"root:x:0:0:root:/root:/bin/bash\n")


def test_a_configuration_with_other_keys_is_of_another_release() -> None:
    class Older(Framer):
        def _frame(self, kind: Kind, record: bytes) -> list[bytes]:
            if kind is Kind.HEADER:
                members = msgspec.msgpack.decode(record)
                members["config"].pop("num_host_pages")
                record = msgspec.msgpack.encode(members)
            return super()._frame(kind, record)

    with pytest.raises(RecordingError, match="another configuration was due"):
        read(b"".join(Older().begin(header_of(make_engine().replica), b"")))


@pytest.mark.parametrize(
    ("numbers", "message"), [((1, 3), "plan 2 was due, not plan 3"), ((2, 2), "plan 3 was due, not plan 2")]
)
def test_plans_must_follow_each_other(numbers: tuple[int, ...], message: str) -> None:
    replica = make_engine().replica
    steps = [(encode(Plan(number, 0, ())), bytes(16)) for number in numbers]
    segment = read(recorded(replica, steps, b""))

    with pytest.raises(RecordingError, match=message):
        list(segment.steps())


def test_a_checkpoint_in_the_middle_of_any_load_leads_to_the_same_digests() -> None:
    families = Families(random.Random(3))
    for _ in families.steps(400):
        pass
    start = checkpoint.save(families.replica)
    steps = [(plan, families.replica.digest) for plan in families.steps(400)]

    replayed = replay(read(recorded(families.replica, steps, start)), check=True, keep=5)

    assert replayed.departure is None
    assert (replayed.steps, replayed.last_plan) == (400, families.replica.number)
    assert list(replayed.last_decisions) == list(families.replica.decisions)[-5:]
    admitted = [act for plan, _ in steps for act in decode(plan).acts if type(act).__name__ == "Admit"]
    assert replayed.requests + replayed.resumed == len(admitted)
    assert min(replayed.stats.demoted_conversations, sum(replayed.stats.evicted_pages.values())) > 0


def test_a_replay_names_the_first_plan_that_decides_otherwise() -> None:
    engine = make_engine()
    start = checkpoint.save(engine.replica)
    engine.submit(1, [1, 2, 3], max_tokens=3)
    steps = []
    for now_ms in range(3):
        made = engine.scheduler.plan(now_ms)
        assert made is not None
        steps.append((encode(made[0]), engine.replica.digest))
        free = engine.replica.cache.pools.free[Tier.DEVICE]
        if now_ms == 0:
            # From here on this rank takes another page than one that goes by its plans alone.
            free.give(free.take(2)[::-1])
            engine.submit(2, [4, 5, 6])

    departure = replay(read(recorded(engine.replica, steps, start))).departure

    assert departure is not None
    assert departure.plan == 2
    assert "digest" in departure.why
    assert "chunk" in [decision.act for decision in departure.decisions]


def test_a_plan_that_cannot_be_carried_out_is_a_difference_and_not_a_crash() -> None:
    engine = make_engine(num_pages=4)
    engine.submit(1, [1, 2, 3])
    made = engine.scheduler.plan(0)
    assert made is not None
    smaller = make_engine(num_pages=1).replica

    segment = read(recorded(smaller, [(encode(made[0]), engine.replica.digest)], checkpoint.save(smaller)))
    departure = replay(segment).departure

    assert departure is not None
    assert "rank 0 had pages" in departure.why
