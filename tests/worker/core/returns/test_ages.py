from __future__ import annotations

import itertools
import math

from worker.core.returns.ages import EDGES_MS, FIRST_MS, NUM_BUCKETS, PER_OCTAVE, bucket_of


def test_each_bucket_begins_at_its_edge_and_ends_before_the_next() -> None:
    assert [bucket_of(edge) for edge in EDGES_MS] == list(range(NUM_BUCKETS))
    assert [bucket_of(edge - 1) for edge in EDGES_MS[1:]] == list(range(NUM_BUCKETS - 1))
    assert bucket_of(10**9) == NUM_BUCKETS - 1


def test_four_buckets_double_the_age() -> None:
    for low, high in itertools.pairwise(EDGES_MS[1::PER_OCTAVE]):
        assert high == 2 * low


def test_edges_are_far_enough_from_halves_that_every_machine_rounds_them_alike() -> None:
    for step in range(NUM_BUCKETS - 1):
        exact = FIRST_MS * 2 ** (step / PER_OCTAVE)
        assert abs(exact - math.floor(exact) - 0.5) > 1e-6
