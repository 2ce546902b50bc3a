"""Both managers are driven through the same requests: what the bench compares must be the same work."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from bench.block_manager import byte_keys, pickled_keys
from bench.kv.laps import Laps, Part, Turn
from bench.kv.per_block import PerBlock
from bench.kv.run_tree import RunTree
from bench.kv.turns import Manager

MANAGERS: list[Callable[[int], Manager]] = [
    lambda pages: RunTree(pages, 2, num_host_pages=4, num_disk_pages=4),
    lambda pages: PerBlock(pages, 2, pickled_keys),
    lambda pages: PerBlock(pages, 2, byte_keys),
]
made = pytest.mark.parametrize("make", MANAGERS, ids=["run tree", "pickled keys", "keys of bytes"])


def turn(*tokens: int, answer: tuple[int, ...] = (), conversation: str = "a") -> Turn:
    return Turn(np.array(tokens, np.int32), conversation, answer=np.array(answer, np.int32))


def serve(manager: Manager, one: Turn) -> int:
    cached = manager.serve(one, Laps())
    if isinstance(manager, RunTree):
        manager.replica.check()
    if isinstance(manager, PerBlock):
        manager.manager.check()
    return cached


@made
def test_a_conversation_finds_its_last_prompt_and_its_answer_but_for_the_last_token(
    make: Callable[[int], Manager],
) -> None:
    manager = make(64)

    assert serve(manager, turn(1, 2, 3, 4, 5, answer=(6, 7, 8))) == 0
    assert serve(manager, turn(1, 2, 3, 4, 5, 6, 7, 8, 9)) == 6


@made
def test_the_last_token_of_a_prompt_is_computed_even_if_all_of_it_is_cached(make: Callable[[int], Manager]) -> None:
    manager = make(64)
    serve(manager, turn(1, 2, 3, 4))

    assert serve(manager, turn(1, 2, 3, 4)) < 4


@made
def test_long_prompts_are_computed_in_chunks_and_found_again(make: Callable[[int], Manager]) -> None:
    manager = make(4096)
    prompt = tuple(range(5_001))

    assert serve(manager, turn(*prompt)) == 0
    assert serve(manager, turn(*prompt)) == 5_000


@made
def test_room_that_was_made_is_taken_from_nobody(make: Callable[[int], Manager]) -> None:
    manager = make(8)
    serve(manager, turn(1, 2, 3, 4, 5, 6))
    serve(manager, turn(1, 2, 3, 4, 5, 7, conversation="b"))

    manager.make_room(6)

    assert serve(manager, turn(1, 2, 8, 9, 10, 11, conversation="c")) == 2
    assert serve(manager, turn(1, 2, 3, 4, 9)) == 4


@made
def test_a_full_pool_goes_on(make: Callable[[int], Manager]) -> None:
    manager = make(8)

    for first in range(0, 400, 10):
        serve(manager, turn(*range(first, first + 10), conversation=str(first)))


def test_what_went_down_a_tier_comes_back_before_it_is_used() -> None:
    tree = RunTree(8, 2, num_host_pages=32)
    for first in range(0, 30, 10):
        serve(tree, turn(*range(first, first + 10), conversation=str(first)))
    laps = Laps()

    assert tree.serve(turn(*range(11)), laps) == 10
    assert laps.ns[Part.ONBOARD] > 0
    tree.replica.check()


def test_a_part_that_is_taken_off_counts_for_none() -> None:
    laps = Laps()
    laps.start()
    laps.lap(Part.MATCH)
    twice = laps.ns[Part.MATCH]
    sum(range(20_000))
    laps.lap(Part.MATCH)
    once = laps.ns[Part.MATCH] - twice
    sum(range(20_000))
    laps.take_off(Part.MATCH)

    assert once > 10_000
    assert laps.total_ns == laps.ns[Part.MATCH] < once


def test_a_garbage_collection_is_told_apart_from_the_part_that_it_falls_into() -> None:
    garbage = [[number] for number in range(200_000)]
    laps = Laps()
    laps.start()
    gc.collect()
    laps.lap(Part.MATCH)

    assert laps.ns[Part.COLLECT] > 10 * laps.ns[Part.MATCH]
    assert len(garbage) == 200_000
