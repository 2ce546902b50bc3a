from __future__ import annotations

from bench import handoff


def test_the_bench_pulls_each_way_and_compares_with_memcpy() -> None:
    results = handoff.run(num_pages=8, repeats=1, lone_pulls=1)

    assert [(row["way"], row["pages"]) for row in results["rows"]] == [
        ("memcpy", "one array"),
        ("shared memory", "whole, near"),
        ("shared memory", "whole, far"),
        ("tcp", "whole, near"),
        ("tcp", "whole, far"),
        ("tls", "whole, near"),
        ("tls", "whole, far"),
        ("shared memory", "half, near"),
        ("shared memory", "half, far"),
        ("tcp", "half, near"),
        ("tcp", "half, far"),
        ("tls", "half, near"),
        ("tls", "half, far"),
    ]
    assert results["page_bytes"] == 65536
    assert all(row["gb_per_s"] > 0 for row in results["rows"])
    assert len(handoff.table(results).splitlines()) == 14
