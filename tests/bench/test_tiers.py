"""`kinroute bench tiers` moves real pages, and says how fast beside plain copies."""

from __future__ import annotations

from pathlib import Path

from bench.tiers import MIB, PAIRS, TiersSize, run


def test_every_pair_of_tiers_is_measured_beside_what_the_machine_does_plainly(tmp_path: Path) -> None:
    size = TiersSize(batches=(1, 4), copied_bytes=4 * MIB, repeats=1, matmul=64, matmuls=2)

    measured = run(size, tmp_path)

    rows = measured["rows"]
    assert {(row["from"], row["to"]) for row in rows} == {(a.name.lower(), b.name.lower()) for a, b in PAIRS}
    assert {row["pages_per_copy"] for row in rows} == {1, 4}
    assert all(min(row["of_plain"], row["mib_per_s"], row["plain_mib_per_s"]) > 0 for row in rows)
    assert measured["compute_slowed_by_copies"] > 0
    assert list(tmp_path.iterdir()) == []
