"""The bench's own claim, in simulated time: it is the same on every machine."""

from __future__ import annotations

from bench import fairness


def test_a_flooder_makes_others_wait_at_most_a_fifth_longer_than_well_behaved_tenants_of_the_same_load_do() -> None:
    measured = fairness.simulated(seeds=(1, 2), duration_ms=3_000)

    assert [row["flooder"] for row in measured["rows"]] == [
        "the same load, in bursts",
        "the same load, in prompts of 60000 tokens",
        "as much as the queue takes, all the time",
        "the same in tiny prompts, with answers of 512 tokens",
    ]
    assert measured["worst_ratio"] == max(row["ratio"] for row in measured["rows"])
    assert measured["worst_ratio"] <= 1.2
    for row in measured["rows"][:2]:
        assert row["ttft_p99_ms"] < row["without_turns"], "it would wait longer if nobody took turns"
