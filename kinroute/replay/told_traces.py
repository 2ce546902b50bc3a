"""What a replay says of the traces that it plays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kinroute.replay.recorded_runs import SOURCE
from kinroute.replay.traces import Session

RECORDED = (
    "A worker's recording: its arrivals and lengths are played again, not its plans; once, as it stands and from an "
    "empty cache, so --gap, --lanes and --seed change nothing."
)


@dataclass(frozen=True, slots=True)
class ToldTrace:
    """`sub_agents`: conversations that have a parent. `notes`: what a reader of the figures must know."""

    name: str
    sessions: int
    requests: int
    conversations: int
    sub_agents: int
    block_tokens: int
    sources: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_recording(self) -> bool:
        return self.sources == (SOURCE,)

    def told(self) -> dict[str, Any]:
        return asdict(self)


def tell(path: Path, sessions: Sequence[Session]) -> ToldTrace:
    everyone = {(number, one.conversation) for number, session in enumerate(sessions) for one in session.requests}
    children = {
        (number, one.conversation)
        for number, session in enumerate(sessions)
        for one in session.requests
        if one.parent is not None
    }
    sources = tuple(sorted({session.source for session in sessions}))
    return ToldTrace(
        name=path.name,
        sessions=len(sessions),
        requests=sum(len(session.requests) for session in sessions),
        conversations=len(everyone),
        sub_agents=len(children),
        block_tokens=sessions[0].block_tokens if sessions else 0,
        sources=sources,
        notes=(RECORDED,) if sources == (SOURCE,) else (),
    )
