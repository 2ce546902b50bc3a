"""What the edge knows of its workers."""

from __future__ import annotations

import pytest

from edge.core.fleet import Fleet, Role
from edge.core.types import WorkerId

A, B, C = WorkerId("a:1"), WorkerId("b:1"), WorkerId("c:1")


def names(fleet: Fleet, role: Role) -> list[str]:
    return [worker.worker_id for worker in fleet.usable(role)]


def make_fleet() -> Fleet:
    """B does both phases. All are ready."""
    fleet = Fleet([B, A], [C, B])
    for length, worker in ((4096, A), (2048, B), (8192, C)):
        fleet.joined(worker, f"{worker}-1", length)
    return fleet


def test_a_worker_that_stands_in_both_lists_is_one_worker_for_both_phases() -> None:
    fleet = make_fleet()

    assert names(fleet, Role.CONTEXT) == [A, B]
    assert names(fleet, Role.GENERATION) == [B, C]
    assert fleet.workers[B].role is Role.BOTH


def test_only_workers_that_are_linked_and_do_not_drain_are_usable() -> None:
    fleet = make_fleet()
    fleet.lost(A)
    fleet.reported(B, 0, draining=True)

    assert names(fleet, Role.CONTEXT) == []
    assert names(fleet, Role.GENERATION) == [C]
    assert not fleet.can_serve

    fleet.joined(A, "a-2", 4096)
    assert fleet.can_serve


def test_nobody_is_usable_or_loaded_before_it_is_linked() -> None:
    fleet = Fleet([A], [C])

    assert names(fleet, Role.CONTEXT) == names(fleet, Role.GENERATION) == []
    assert fleet.workers[A].load == 0
    fleet.joined(A, "a-1", 4096)
    assert names(fleet, Role.CONTEXT) == [A]
    assert not fleet.can_serve, "nobody generates"
    fleet.joined(C, "c-1", 4096)
    assert fleet.can_serve


def test_what_a_lost_worker_did_for_others_is_forgotten_and_our_legs_are_not() -> None:
    fleet = make_fleet()
    fleet.began(A)
    fleet.reported(A, 5, draining=False)
    fleet.lost(A)
    assert fleet.workers[A].load == 1

    fleet.reported(A, 5, draining=False)
    fleet.joined(A, "a-2", 4096)
    assert fleet.workers[A].load == 1


def test_a_leg_that_ends_must_have_begun() -> None:
    with pytest.raises(AssertionError, match="a:1 ended a leg that never began"):
        make_fleet().ended(A)


def test_a_worker_that_comes_back_does_not_drain_any_more() -> None:
    fleet = make_fleet()
    fleet.reported(B, 0, draining=True)
    fleet.joined(B, "b-2", 2048)

    assert names(fleet, Role.CONTEXT) == [A, B]


def test_load_is_our_legs_and_what_the_worker_does_for_others() -> None:
    fleet = make_fleet()
    fleet.began(A)
    fleet.reported(A, 5, draining=False)
    fleet.began(A)
    assert fleet.workers[A].load == 6, "four of others, two of ours"

    fleet.ended(A)
    fleet.reported(A, 0, draining=False)
    assert fleet.workers[A].load == 1, "the report is older than our leg"


def test_the_longest_prompt_is_what_every_ready_worker_can_hold() -> None:
    fleet = make_fleet()
    assert fleet.max_context_length == 2048

    fleet.lost(B)
    assert fleet.max_context_length == 4096
    assert Fleet([A], [C]).max_context_length == 0
