from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kinroute.replay.arm import Arm
from kinroute.replay.loads import Load
from kinroute.replay.optimum import Bound
from kinroute.replay.results import RunResult, Service
from kinroute.replay.rows import Outcome, Place, Row, rows_of, summaries_of
from kinroute.replay.simulation import simulate
from kinroute.replay.table import by_windows, more, short, show
from kinroute.replay.windows import Window
from tests.kinroute.replay.plain import asked


def arm(policy: str, hits: int, service: Service | None = None) -> RunResult:
    """An arm of many requests, of which so many blocks are hits."""
    result = simulate([asked(0.0, (0, 3))], Arm("lru", 20, warmup=0.0), lambda ended: None)
    members = {name: getattr(result, name) for name in result.__slots__}
    return RunResult(
        **members
        | {
            "policy": policy, "prompt_blocks": 10_000_000, "hit_blocks": hits, "block_hit_ratio": hits / 10_000_000,
            "uncached_tokens": 64 * (10_000_000 - hits), "demoted_blocks": 912_345, "regretted_blocks": 45_678,
            "refused": 17, "suspensions": 1234, "service": service,
        }
    )  # fmt: skip


def outcome(seed: int, **arms: RunResult) -> Outcome:
    return Outcome(
        load=Load((Path("t"),), None, 10, 3600.0, 160, seed),
        place=Place(1_234_567, 2.5),
        role="aggregated",
        hints="parent,stop",
        tiers={"device": 1_234_567, "host": 0, "disk": 0},
        ceiling=Bound(10_000_000, 9_700_000),
        block_tokens=64,
        arms=arms,
        optimum=Bound(10_000_000, 9_650_000),
        windows=(),
        lru_needs={"return_index": 12_222_213, "optimum": None},
        order=None if arms["lru"].service is None else "lru first",
    )


def shown(*rows: Row, columns: int = 80, seeds: bool = False) -> str:
    out = io.StringIO()
    show(Console(file=out, width=columns), rows, summaries_of(rows) if seeds else [], 64)
    return out.getvalue()


@pytest.mark.parametrize("seeds", [False, True], ids=["one seed", "several seeds"])
def test_wide_numbers_are_whole_at_80_columns(seeds: bool) -> None:
    arms = {"lru": arm("lru", 9_400_000), "return_index": arm("return_index", 9_130_000)}
    rows = [row for seed in (1, 2) for row in rows_of(outcome(seed, **arms))]

    text = shown(*rows, seeds=seeds)

    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    (ours, *_) = (line for line in text.splitlines() if line.strip().startswith("return_index"))
    assert " ".join(ours.split()) == "return_index 91.30 % 5.70 55.7 M +45.0 % -108.0 % 912k/45.7k ×9.9"
    assert "LRU is 3.00 points under the ceiling" in text


def test_a_crowded_cache_says_so() -> None:
    rows = list(rows_of(outcome(1, lru=arm("lru", 9_400_000))))

    assert "crowded (larger than the device/made way for others): lru 17/1234" in shown(*rows, columns=120)


def test_the_closed_loop_stands_against_lru() -> None:
    slow, fast = (Service(4 * x, 40 * x, 5 * x, 10_000 * x, 100_000, 10 / x, 1 / x, 0.9) for x in (1.0, 0.5))
    arms = {"lru": arm("lru", 9_400_000, slow), "subagent": arm("subagent", 9_500_000, fast)}

    text = shown(*rows_of(outcome(1, **arms)))

    assert "…" not in text
    ours = [" ".join(line.split()) for line in text.splitlines() if line.strip().startswith("subagent")][-1]
    assert ours == "subagent 2.0 s -50.0 % 20.0 s -50.0 % 5,000 s 20 +100.0 %"


def test_numbers_are_short_and_keep_three_digits() -> None:
    assert [short(count) for count in (None, 9_999, 12_345, 123_456, 2_500_000, 12.3e9)] == [
        "–", "9,999", "12.3 k", "123 k", "2.50 M", "12.3 G",
    ]  # fmt: skip
    assert [more(share) for share in (None, 0.5, -0.1, 9.5)] == ["–", "+50.0 %", "-10.0 %", "×10.5"]


def test_windows_say_what_there_was_to_gain_and_when() -> None:
    windows = [Window(0, 100, 1000, 900, 910), Window(100, 50, 1000, 800, 950)]

    assert by_windows(Place(64, None), windows) == (
        "64 blocks, windows of 100 requests, each from LRU's cache: LRU 85.00 %, optimum 93.00 %; most to gain from "
        "request 100 on: 15.00 %."
    )
