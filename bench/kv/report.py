"""`kinroute bench kv`: everything that the KV cache manager's cost is judged by, in one run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.kv import demotion, idle, limits, memory, recorded, turns
from bench.kv.demotion import DemotionSize
from bench.kv.idle import IdleSize
from bench.kv.laps import Laps
from bench.kv.limits import LimitsSize
from bench.kv.memory import MemorySize
from bench.kv.recorded import RecordedSize
from bench.kv.turns import TurnsSize

REQUEST_US = 150.0
RATIO = 20.0
BLOCK_BYTES = 230.0
REFERENCE_US = 12_000.0
"""The per-block manager must not be slower than this at 142,000 tokens: what is beaten has to be worth beating."""
FLAT = 1.5
"""The dearest of what should be flat may cost so many times the cheapest, as may the last unit of what should be
linear, the first."""


@dataclass(frozen=True, slots=True)
class Sizes:
    turns: TurnsSize = field(default_factory=TurnsSize)
    recorded: RecordedSize = field(default_factory=RecordedSize)
    demotion: DemotionSize = field(default_factory=DemotionSize)
    idle: IdleSize = field(default_factory=IdleSize)
    memory: MemorySize = field(default_factory=MemorySize)
    limits: LimitsSize = field(default_factory=LimitsSize)


def run(trace: Path | None = None, sizes: Sizes | None = None) -> dict[str, Any]:
    """CPU times of one thread in µs, garbage collection on. Without a `trace` there is nothing of `recorded`."""
    sizes = sizes or Sizes()
    # First what needs little memory: a large heap makes the collections that hit the others dearer.
    results: dict[str, Any] = {"stopwatch_ns": Laps.own_ns, "limits": [limits.measure(sizes.limits)]}
    results |= demotion.measure(sizes.demotion)
    results["turns"] = turns.measure(sizes.turns)
    results["recorded"] = recorded.measure(trace, sizes.recorded) if trace is not None else []
    results["trace"] = trace.name if trace is not None else "none: give one with --trace"
    results["idle"] = idle.measure(sizes.idle)
    results["memory"] = memory.measure(sizes.memory)
    results["dominates"] = _dominating(results)
    results["aims"] = _aims(results)
    results["sizes"] = asdict(sizes)
    return results


def _dominating(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a request, dearest first, of each row; `limit_us`: what of it is the bare work itself."""
    limit = results["limits"][0]
    bare = {"commit": limit["new_keys_us"]}
    rows: list[dict[str, Any]] = []
    for ours in results["turns"]:
        if ours["manager"] != turns.RUN_TREE:
            continue
        of = {"shape": ours["shape"], "memory": ours["memory"]}
        bare["match"] = limit[f"compare_{ours['memory']}_us"]
        for cost, part in sorted(((float(ours[part]), part) for part in turns.PARTS), reverse=True):
            share = round(cost / ours["mean"], 2)
            rows.append({**of, "part": part, "us": cost, "share": share, "limit_us": bare.get(part, "")})
    return rows


def _aims(results: dict[str, Any]) -> list[dict[str, Any]]:
    aims: list[dict[str, Any]] = []

    def aim(figure: str, measured: float, most: float, *, at_least: bool = False) -> None:
        met = measured >= most if at_least else measured <= most
        aims.append(
            {"figure": figure, "measured": measured, "aim": f"{'>=' if at_least else '<='} {most:g}", "met": met}
        )

    for row in results["turns"]:
        about = f"{row['shape']}, {row['memory']}"
        if row["manager"] == turns.RUN_TREE:
            aim(f"{about}: µs per request", row["mean"], REQUEST_US)
        else:
            aim(f"{about}: {row['manager']}: µs per request", row["mean"], REFERENCE_US)
            aim(f"{about}: {row['manager']}: ratio", row["ratio"], RATIO, at_least=True)
    for name, figure in (("by_blocks", "us"), ("idle", "decode_us"), ("idle", "empty_us")):
        costs = [float(row[figure]) for row in results[name]]
        aim(f"{name}, {figure}: dearest to cheapest", round(max(costs) / min(costs), 2), FLAT)
    for name, figure in (("by_runs", "us_per_run"), ("falling", "ns_per_page")):
        costs = [float(row[figure]) for row in results[name]]
        aim(f"{name}, {figure}: of most to of fewest", round(costs[-1] / costs[0], 2), FLAT)
    aim("bytes per block", results["memory"][0]["traced_bytes"], BLOCK_BYTES)
    aim("bytes per block, resident", results["memory"][0]["resident_bytes"], BLOCK_BYTES)
    return aims
