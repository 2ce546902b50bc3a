from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from bench.block_manager import SEED, Block, BlockManager, KeysOf, byte_keys, pickled_keys


def keys(manager: BlockManager, *tokens: int) -> list[bytes]:
    return manager.keys(np.array(tokens, np.int32))


def serve(manager: BlockManager, *tokens: int) -> tuple[int, list[Block]]:
    """A whole request; how many blocks were cached, and all of its blocks."""
    its_keys = keys(manager, *tokens)
    found = manager.match(its_keys)
    manager.hold(found)
    taken = manager.take(len(its_keys) - len(found))
    assert taken is not None
    manager.commit(taken, its_keys[len(found) :])
    blocks = [*found, *taken]
    manager.release(blocks)
    manager.check()
    return len(found), blocks


def pages(blocks: Sequence[Block]) -> list[int]:
    return [block.page for block in blocks]


def test_a_prompt_that_goes_on_finds_all_that_was_there() -> None:
    manager = BlockManager(num_pages=8, tokens_per_block=2)

    _, first = serve(manager, 1, 2, 3, 4)
    found, second = serve(manager, 1, 2, 3, 4, 5, 6)

    assert found == 2
    assert pages(second[:2]) == pages(first)


def test_the_same_block_behind_another_one_is_another_block() -> None:
    manager = BlockManager(num_pages=8, tokens_per_block=2)
    serve(manager, 1, 2, 3, 4)

    assert serve(manager, 9, 9, 3, 4)[0] == 0
    assert manager.num_committed == 4


@pytest.mark.parametrize("keys_of", [pickled_keys, byte_keys])
def test_a_key_names_all_that_is_in_front_and_a_half_filled_block_has_none(keys_of: KeysOf) -> None:
    one, same, other = (
        keys_of(np.array(tokens, np.int32), 2, SEED) for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4], [9, 2, 3, 4])
    )

    assert len(set(one)) == 2
    assert one == same
    assert not set(one) & set(other)
    assert keys_of(np.array([3, 4], np.int32), 2, one[0]) == one[1:]


def test_what_was_let_go_first_is_evicted_first_and_from_its_end() -> None:
    manager = BlockManager(num_pages=4, tokens_per_block=2)
    serve(manager, 1, 2, 3, 4)
    serve(manager, 5, 6)

    serve(manager, 7, 8, 9, 10)

    assert len(manager.match(keys(manager, 1, 2, 3, 4))) == 1
    assert len(manager.match(keys(manager, 5, 6))) == 1


def test_a_held_block_is_not_evicted_and_too_many_wanted_change_nothing() -> None:
    manager = BlockManager(num_pages=3, tokens_per_block=2)
    serve(manager, 1, 2)
    found = manager.match(keys(manager, 1, 2))
    manager.hold(found)

    assert manager.take(3) is None
    assert len(manager.take(2) or ()) == 2

    assert pages(manager.match(keys(manager, 1, 2))) == pages(found)
    manager.check()


def test_a_block_held_twice_is_free_after_the_second_release() -> None:
    manager = BlockManager(num_pages=1, tokens_per_block=2)
    serve(manager, 1, 2)
    found = manager.match(keys(manager, 1, 2))
    manager.hold(found)
    manager.hold(found)

    manager.release(found)
    assert manager.num_unheld == 0
    manager.release(found)
    assert manager.num_unheld == 1


def test_of_two_that_computed_the_same_block_the_first_keeps_it() -> None:
    manager = BlockManager(num_pages=2, tokens_per_block=2)
    key = keys(manager, 1, 2)
    one, other = manager.take(1), manager.take(1)
    assert one is not None
    assert other is not None

    manager.commit(one, key)
    manager.commit(other, key)
    manager.release(other)
    manager.release(one)
    manager.check()

    assert manager.match(key) == one
    assert manager.take(1) == other
