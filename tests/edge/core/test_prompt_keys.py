"""Keys of a prompt's blocks: the same as computed at once, whatever of them was known before."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.core.prompt_keys import Prompt, PromptKeys
from edge.core.resident import Prints, prints_of
from edge.core.types import ConversationKey, FamilyKey, Lineage
from enginelink.block_keys import BlockScope, block_keys, scope_key

BLOCK = 2


def packed(*tokens: int) -> bytes:
    return np.array(tokens, "<u4").tobytes()


def lineage(name: str, parent: str | None = None) -> Lineage:
    return Lineage(ConversationKey(name), FamilyKey("f"), None if parent is None else ConversationKey(parent))


def at_once(token_ids: bytes, salt: bytes = b"s") -> Prints:
    return prints_of(b"".join(block_keys(scope_key(BlockScope(salt)), token_ids, BLOCK)))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["a", None]), st.lists(st.integers(0, 1), max_size=9)),
        max_size=12,
    )
)
def test_whatever_was_asked_before_the_keys_are_those_of_the_prompt(
    asked: list[tuple[str, str | None, list[int]]],
) -> None:
    keys = PromptKeys()
    for name, parent, tokens in asked:
        prints = keys.prints(lineage(name, parent), Prompt(packed(*tokens), b"s"), BLOCK)
        assert prints.tolist() == at_once(packed(*tokens)).tolist()


def test_salts_and_block_sizes_are_kept_apart() -> None:
    keys, tokens = PromptKeys(), packed(1, 2, 3, 4)
    first = keys.prints(lineage("a"), Prompt(tokens, b"s"), BLOCK)
    other_salt = keys.prints(lineage("a"), Prompt(tokens, b"t"), BLOCK)
    longer_blocks = keys.prints(lineage("a"), Prompt(tokens, b"s"), 2 * BLOCK)

    assert other_salt.tolist() == at_once(tokens, b"t").tolist()
    assert not set(first.tolist()) & {*other_salt.tolist(), *longer_blocks.tolist()}


def test_what_was_asked_for_longest_ago_is_forgotten_first() -> None:
    keys, prompt = PromptKeys(max_bytes=2_000), Prompt(packed(*range(100)), b"s")
    for name in ("a", "b", "a", "c"):
        keys.prints(lineage(name), prompt, 100)

    assert [name for name, _, _ in keys._known] == ["a", "c"]
    assert keys._bytes <= 2_000
