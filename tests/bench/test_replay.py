from __future__ import annotations

from bench.replay import run


def test_every_arm_is_measured_on_one_load() -> None:
    measured = run(requests=40)

    assert [(row["policy"], row["role"]) for row in measured["rows"]] == [
        ("lru", "aggregated"),
        ("subagent", "aggregated"),
        ("subagent", "context"),
        ("return_index", "aggregated"),
    ]
    assert all(min(row["cpu_s"], row["requests_per_s"], row["peak_mib"]) > 0 for row in measured["rows"])
