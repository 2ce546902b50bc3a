from __future__ import annotations

from kinroute.replay.figures import by_windows, gaps_closed, hit_ratios
from kinroute.replay.rows import Row, rows_of
from kinroute.replay.windows import Window
from tests.kinroute.replay.test_table import arm, outcome


def rows() -> list[Row]:
    arms = {"lru": arm("lru", 9_400_000), "return_index": arm("return_index", 9_550_000)}
    return [row for seed in (1, 2) for row in rows_of(outcome(seed, **arms))]


def test_every_policy_has_a_line_and_the_ceiling_one_across() -> None:
    figure = hit_ratios(rows())

    lines = {one["name"]: one["y"] for one in figure.data if "lines" in one["mode"]}
    assert {name: round(y[0], 2) for name, y in lines.items()} == {
        "lru": 94.0, "return_index": 95.5, "optimum (upper bound)": 96.5, "ceiling (a cache without end)": 97.0,
    }  # fmt: skip


def test_the_gap_closed_has_bars_for_policies_between_lru_and_the_optimum() -> None:
    (bars,) = gaps_closed(rows()).data

    assert (bars["name"], bars["x"], [round(share) for share in bars["y"]]) == ("return_index", ["2.5"], [60])


def test_windows_show_lru_below_the_optimum() -> None:
    lru, best = by_windows([Window(0, 100, 1000, 900, 910), Window(100, 50, 1000, 800, 950)]).data

    assert (lru["x"], lru["y"], best["y"]) == ([0, 100], [90.0, 80.0], [91.0, 95.0])
