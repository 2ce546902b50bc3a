"""A worker's own recording as a trace: who asked when, for which blocks, and how long the answers were.

A replica follows the plans while they are read, so that what a plan leaves out is known: of a prompt it has only what
was not cached, the rest are the blocks of the run that it names. A block is known by its key, which is the same for the
same tokens behind the same blocks in the same scope. What the worker decided is left out: its arrivals and lengths are
played, not its plans.

All that a worker did without a break is one session, from the first plan on. Requests that were running then are left
out. Lengths are whole blocks, as a trace has them: a prompt's last block is what the answer made of it, and the answer
is shorter by as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from enginelink.block_keys import BlockKey, BlockScope, block_keys, scope_key
from kinroute.replay.checks import fault_of
from kinroute.replay.faults import TraceError
from kinroute.replay.traces import Session, Stop, TracedRequest
from worker.core import checkpoint
from worker.core import plan as plans
from worker.core.conversations import News, StopReason
from worker.core.recording import MAGIC, RecordingError, Segment, Step, Unfinished, read
from worker.core.replica import Replica
from worker.recording_ring import latest

SOURCE = "recording"
STOPS: dict[StopReason, Stop] = {StopReason.TOOL_CALL: "tool", StopReason.END_OF_TURN: "end"}
SCALE = 1000
"""Plan times are in milliseconds."""


def is_recording(path: Path) -> bool:
    """Whether it is a segment, or a folder that holds some. Raises OSError."""
    if path.is_dir():
        return bool(latest(path))
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def sessions_of(path: Path) -> list[Session]:
    """What a segment holds, or those of a folder's ring that was written last; one session for each time a worker ran.

    Raises OSError, or TraceError that names the file and what was due in it.
    """
    files = latest(path)[::-1] if path.is_dir() else [path]
    runs: list[_Run] = []
    for file in files:
        try:
            segment = read(file.read_bytes())
        except Unfinished as problem:
            if file is files[-1] and runs:
                break
            raise TraceError(file, 0, f"a recording that ends no sooner ({problem})") from problem
        except RecordingError as problem:
            raise TraceError(file, 0, f"a sound recording ({problem})") from problem
        if not runs or not runs[-1].goes_on_in(segment):
            runs.append(_Run(file, segment))
        runs[-1].follow(file, segment)
    sessions = [run.session() for run in runs if run.asked]
    if not sessions:
        raise TraceError(path, 0, "a recording in which some request is admitted")
    return sessions


@dataclass(slots=True)
class _Asked:
    """A request. `keys`: of its prompt's full blocks; `before`: the key that the block behind those follows; `tail`:
    the tokens from there on, of the prompt and then of the answer; `told`: tokens of the answer but the last one.
    """

    t_s: float
    conversation: str
    parent: str | None
    keys: list[bytes]
    before: bytes
    tail: bytes
    told: int = 0
    is_context: bool = False
    ended_s: float | None = None
    stop: Stop | None = None
    tail_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.tail_tokens = len(self.tail) // 4


class _Run:
    """A worker between two starts."""

    def __init__(self, file: Path, segment: Segment) -> None:
        self.asked: list[_Asked] = []
        self._file = file
        self._header = segment.header
        self._replica = _loaded(file, segment)
        self._block = segment.header.config.tokens_per_block
        self._running: dict[int, _Asked] = {}
        self._latest: dict[str, _Asked] = {}
        self._began_ms: int | None = None
        self._now_ms = 0
        self._ids: dict[bytes, int] = {}

    def goes_on_in(self, segment: Segment) -> bool:
        """Whether that segment begins where this one ended."""
        first = next(iter(segment.steps()), None)
        is_ours = segment.header.instance_id == self._header.instance_id
        return is_ours and (first is None or first.plan.number == self._replica.number + 1)

    def follow(self, file: Path, segment: Segment) -> None:
        for step in _steps(file, segment):
            plan = step.plan
            self._now_ms = plan.time_ms
            if self._began_ms is None:
                self._began_ms = plan.time_ms
            now_s = (plan.time_ms - self._began_ms) / SCALE
            self._replica.begin(plan.number, plan.time_ms)
            for act in plan.acts:
                self._note(act, now_s)
                try:
                    done = self._replica.act(act)
                except (AssertionError, LookupError, ValueError) as problem:
                    raise _unlike(file, plan.number) from problem
                if not done:
                    raise _unlike(file, plan.number)
            self._replica.finish()
            if self._replica.digest != step.digest:
                raise _unlike(file, plan.number)

    def _note(self, act: plans.AnyAct, now_s: float) -> None:
        match act:
            case plans.Admit() if not act.resumed:
                self._admit(act, now_s)
            case plans.Pin():
                asked = self._running.get(act.key)
                if asked is not None:
                    asked.is_context = True
            case plans.Sampled():
                for key, token in zip(act.keys, act.token_ids, strict=True):
                    asked = self._running.get(key)
                    if asked is not None:
                        asked.tail += token.to_bytes(4, "little")
                        asked.told += 1
            case plans.Release():
                asked = self._running.pop(act.key, None)
                if asked is not None:
                    asked.ended_s = now_s
            case plans.Heard():
                asked = self._latest.get(act.conversation)
                if asked is not None:
                    asked.stop = STOPS.get(act.reason, asked.stop)
                    if act.news is News.ENDED and asked.is_context:
                        asked.ended_s = now_s

    def _admit(self, act: plans.Admit, now_s: float) -> None:
        """Its prompt: what it found, by the keys of those blocks, and what the plan says."""
        tree = self._replica.cache.tree
        run, length, keys = (tree.run(act.run) if act.run else None), act.length, list[bytes]()
        before = run.key_before(length) if run is not None else scope_key(BlockScope(act.scope))
        while run is not None and run.parent is not None:
            keys += [run.key(at) for at in reversed(range(length))]
            run = run.parent
            length = run.length
        keys.reverse()
        more = block_keys(BlockKey(before), act.token_ids, self._block)
        keys += more
        asked = _Asked(
            t_s=now_s,
            conversation=act.conversation or f"request {act.key}",
            parent=act.parent,
            keys=keys,
            before=keys[-1] if keys else before,
            tail=act.token_ids[4 * self._block * len(more) :],
        )
        self.asked.append(asked)
        self._running[act.key] = asked
        self._latest[asked.conversation] = asked

    def session(self) -> Session:
        """Raises TraceError where it does not hold together."""
        known = {asked.conversation for asked in self.asked}
        assert self._began_ms is not None
        until_s = (self._now_ms - self._began_ms) / SCALE
        requests = tuple(self._request(asked, known, until_s) for asked in self.asked)
        session = Session(f"{self._header.instance_id} {self._header.began_at}".strip(), SOURCE, self._block, requests)
        fault = fault_of(session)
        if fault is not None:
            raise TraceError(self._file, 0, fault)
        return session

    def _request(self, asked: _Asked, known: set[str], until_s: float) -> TracedRequest:
        output = 1 + asked.told
        keys = asked.keys
        if asked.tail_tokens:
            keys = [*keys, self._tail_key(asked)]
            output = max(1, output - (self._block - asked.tail_tokens))
        ended_s = until_s if asked.ended_s is None else asked.ended_s
        parent = asked.parent if asked.parent in known else None
        return TracedRequest(
            t_s=asked.t_s,
            duration_s=max(0.0, ended_s - asked.t_s),
            conversation=asked.conversation,
            parent=parent,
            kind="root" if asked.parent is None else "sub",
            stop=asked.stop,
            output_tokens=output,
            blocks=self._numbered(keys),
        )

    def _tail_key(self, asked: _Asked) -> bytes:
        """Of the block that a prompt's last tokens begin, as the answer filled it, or as it was left."""
        filled = asked.tail[: 4 * self._block]
        whole = block_keys(BlockKey(asked.before), filled, self._block)
        return whole[0] if whole else asked.before + filled

    def _numbered(self, keys: list[bytes]) -> tuple[tuple[int, int], ...]:
        """Ids by the order in which keys are met, as runs."""
        runs: list[tuple[int, int]] = []
        for key in keys:
            number = self._ids.setdefault(key, len(self._ids))
            if runs and sum(runs[-1]) == number:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((number, 1))
        return tuple(runs)


def _loaded(file: Path, segment: Segment) -> Replica:
    # Events leave a worker and decide nothing.
    config = replace(segment.header.config, tells_events=False)
    try:
        return checkpoint.load(config, bytes(segment.checkpoint))
    except (msgspec.MsgspecError, AssertionError, LookupError, TypeError, ValueError) as problem:
        raise TraceError(file, 0, f"a recording whose checkpoint can be loaded ({problem!r})") from problem


def _steps(file: Path, segment: Segment) -> Iterator[Step]:
    try:
        yield from segment.steps()
    except RecordingError as problem:
        raise TraceError(file, 0, f"a sound recording ({problem})") from problem


def _unlike(file: Path, plan: int) -> TraceError:
    return TraceError(file, 0, f"a recording that this release carries out alike, but plan {plan} ends otherwise")
