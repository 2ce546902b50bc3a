"""All that one call of the command found, and how JSON shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kinroute.replay import arguments
from kinroute.replay.arguments import Asked
from kinroute.replay.arms import Failed
from kinroute.replay.rows import Outcome, Row, Summary, first_orders, rows_of, summaries_of
from kinroute.replay.service import CostModel
from kinroute.replay.tasks import SweepTask
from kinroute.replay.told_traces import ToldTrace

CLOSED = (
    "Closed loop: requests wait for the answers before them, so arrivals depend on the arm and there is no optimum. "
    "The arms ran in both orders"
)


@dataclass(frozen=True, slots=True)
class Findings:
    """`command`: as it was typed. `shown`: the rows that people see; of a closed loop that came to the same in both
    orders of arms, those of the first. `summaries`: of several seeds, else none."""

    asked: Asked
    costs: CostModel
    command: str
    version: str
    traces: tuple[ToldTrace, ...]
    notes: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    rows: tuple[Row, ...]
    shown: tuple[Row, ...]
    summaries: tuple[Summary, ...]
    failed: tuple[Failed[SweepTask], ...]

    @property
    def shown_summaries(self) -> list[Summary]:
        orders = {row.order for row in self.shown}
        return [summary for summary in self.summaries if summary.order in orders]

    def told(self) -> dict[str, Any]:
        """As JSON shows it."""
        ceilings = {outcome.load: outcome.ceiling for outcome in self.outcomes}
        return {
            "command": self.command,
            "version": self.version,
            "asked": arguments.told(self.asked),
            "costs": asdict(self.costs) if self.asked.closed_loop else None,
            "traces": [trace.told() for trace in self.traces],
            "notes": self.notes,
            "ceiling": [
                {
                    "gap_s": load.gap_s,
                    "lanes": load.lanes,
                    "seed": load.seed,
                    "prompt_blocks": bound.prompt_blocks,
                    "hit_blocks": bound.hit_blocks,
                    "block_hit_ratio": bound.hit_blocks / bound.prompt_blocks if bound.prompt_blocks else 0.0,
                }
                for load, bound in ceilings.items()
            ],
            "runs": [row.told() for row in self.rows],
            "summaries": [summary.told() for summary in self.summaries],
            "windows": [
                {"capacity_blocks": outcome.place.capacity_blocks, **asdict(window)}
                for outcome in self.outcomes
                for window in outcome.windows
            ],
            "failed": [{"step": one.task.name, "why": one.why} for one in self.failed],
        }


def findings(
    asked: Asked,
    costs: CostModel,
    traces: Sequence[ToldTrace],
    outcomes: Sequence[Outcome],
    failed: Sequence[Failed[SweepTask]],
    *,
    command: str,
    version: str,
) -> Findings:
    rows = shown = [row for outcome in outcomes for row in rows_of(outcome)]
    notes = [note for trace in traces for note in trace.notes]
    if asked.closed_loop:
        same = first_orders(rows)
        notes.append(f"{CLOSED}, and came to the same in both; one is shown." if same else f"{CLOSED}.")
        shown = same or rows
    return Findings(
        asked=asked,
        costs=costs,
        command=command,
        version=version,
        traces=tuple(traces),
        notes=tuple(notes),
        outcomes=tuple(outcomes),
        rows=tuple(rows),
        shown=tuple(shown),
        summaries=tuple(summaries_of(rows)) if len({row.load.seed for row in rows}) > 1 else (),
        failed=tuple(failed),
    )
