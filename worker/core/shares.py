"""Who gets how many of a step's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Want(NamedTuple):
    """`left`: what a request has still to compute."""

    tenant: bytes
    left: int


def share_out(budget: int, running: Sequence[Want], waiting: Mapping[bytes, int]) -> tuple[list[int], dict[bytes, int]]:
    """Of `budget` tokens: what each of `running` gets, and what is left for those of each tenant that may begin.

    Those that decode have theirs first. The rest goes to tenants alike, none more than it wants, which is what its
    `running` have left and its `waiting` tokens; within a tenant in the order of `running`.
    """
    counts = [0] * len(running)
    wants: dict[bytes, int] = {}
    for index, (tenant, left) in enumerate(running):
        if left > 1:
            wants[tenant] = wants.get(tenant, 0) + left
        else:
            counts[index] = min(left, budget)
            budget -= counts[index]
    for tenant, tokens in waiting.items():
        wants[tenant] = wants.get(tenant, 0) + tokens
    allowed = level(budget, wants)
    for index, (tenant, left) in enumerate(running):
        if left > 1:
            counts[index] = min(left, allowed[tenant])
            allowed[tenant] -= counts[index]
    return counts, allowed


def level(budget: int, wants: Mapping[bytes, int]) -> dict[bytes, int]:
    """`budget` shared so that whoever gets less than another gets all that it wants. What cannot be divided goes to
    those that come first."""
    given = dict.fromkeys(wants, 0)
    open_ones = sorted(wants, key=lambda tenant: wants[tenant])
    for at, tenant in enumerate(open_ones):
        given[tenant] = min(wants[tenant], budget // (len(open_ones) - at))
        budget -= given[tenant]
        if given[tenant] < wants[tenant]:
            # From here on nobody gets all: each the same, and the rest by order.
            each = given[tenant]
            rest = set(open_ones[at:])
            over = budget + each - each * len(rest)
            for other in (one for one in wants if one in rest):
                given[other] = each + (over > 0)
                over -= 1
            break
    return given
