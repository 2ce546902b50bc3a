"""What a tenant may have, of one edge among several."""

from __future__ import annotations

import pytest

from edge.core.types import TenantLimits


@pytest.mark.parametrize(("limit", "replicas", "part"), [(10, 1, 10), (10, 4, 3), (9, 4, 2), (1, 5, 1), (0, 3, 0)])
def test_a_replica_gives_its_part_rounded_and_never_nothing_of_something(limit: int, replicas: int, part: int) -> None:
    assert TenantLimits(requests=limit).share(replicas) == TenantLimits(requests=part)


def test_every_limit_is_shared_and_no_limit_stays_none() -> None:
    limits = TenantLimits(10, 20, 30, 40, None)

    assert limits.share(10) == TenantLimits(1, 2, 3, 4, None)


def test_all_parts_together_are_about_the_limit() -> None:
    for limit in range(1, 2000, 7):
        for replicas in range(1, 12):
            part = TenantLimits(requests=limit).share(replicas).requests
            assert part is not None
            assert abs(part * replicas - limit) <= replicas


def test_a_principals_own_limits_come_before_the_configured_ones() -> None:
    own, configured = TenantLimits(requests=5, children=0), TenantLimits(requests=7, requests_per_minute=9, children=3)

    assert own.over(configured) == TenantLimits(requests=5, requests_per_minute=9, children=0)
