"""When two blocks have one key."""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginelink.block_keys import BlockKey, BlockScope, block_keys, scope_key

KV_EVENTS = Path(__file__).parents[2] / "docs" / "kv_events.md"
ROOT = scope_key(BlockScope())


def packed(*token_ids: int) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def test_every_whole_block_has_a_key_and_a_rest_has_none() -> None:
    assert [len(block_keys(ROOT, packed(*range(count)), 2)) for count in range(6)] == [0, 0, 1, 1, 2, 2]


def test_a_key_is_the_hash_of_the_key_before_and_of_the_framed_tokens() -> None:
    first, second = block_keys(ROOT, packed(1, 2, 3, 4), 2)

    assert first == hashlib.sha256(ROOT + struct.pack("<Q", 8) + packed(1, 2)).digest()
    assert second == hashlib.sha256(first + struct.pack("<Q", 8) + packed(3, 4)).digest()


def test_the_documented_program_prints_what_it_says_and_what_the_rule_gives() -> None:
    text = KV_EVENTS.read_text()
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [printed] = re.findall(r"```text\n(.*?)```", text, re.DOTALL)

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    scope = scope_key(BlockScope(b"tenant-a"))
    keys = [scope, *block_keys(scope, packed(1, 2, 3, 4, 5, 6, 7, 8, 9), 4)]
    assert ran.stdout == printed
    assert [line.split()[1] for line in printed.splitlines()] == [key.hex() for key in keys]


def test_the_rule_is_the_same_in_every_release() -> None:
    scope = scope_key(BlockScope(b"salt", "adapter", (b"image",)))

    assert (
        block_keys(scope, packed(1, 2, 3, 4), 4)[0].hex()
        == "d0dae161697c618616e7c59b32c44a314249894b9f461baa9891f64fce4c5d9c"
    )


@given(st.lists(st.integers(0, 2**32 - 1), max_size=12), st.integers(1, 4), st.data())
def test_going_on_from_a_known_key_gives_what_the_whole_prompt_gives(
    token_ids: list[int], tokens_per_block: int, data: st.DataObject
) -> None:
    tokens = packed(*token_ids)
    whole = block_keys(ROOT, tokens, tokens_per_block)
    known = data.draw(st.integers(0, len(whole)))
    rest = memoryview(tokens)[known * tokens_per_block * 4 :]

    assert [*whole[:known], *block_keys(whole[known - 1] if known else ROOT, rest, tokens_per_block)] == whole


@given(st.lists(st.integers(0, 3), min_size=4, max_size=8), st.lists(st.integers(0, 3), min_size=4, max_size=8))
def test_keys_are_equal_exactly_as_far_as_prompts_are(one: list[int], other: list[int]) -> None:
    pairs = zip(block_keys(ROOT, packed(*one), 2), block_keys(ROOT, packed(*other), 2), strict=False)

    for number, (key, its) in enumerate(pairs, start=1):
        assert (key == its) == (one[: 2 * number] == other[: 2 * number])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BlockScope(b"a"), BlockScope(b"b")),
        (BlockScope(b"ab"), BlockScope(b"a", "b")),
        (BlockScope(b"a"), BlockScope(b"", "a")),
        (BlockScope(adapter="a"), BlockScope(multimodal=(b"a",))),
        (BlockScope(multimodal=(b"a", b"b")), BlockScope(multimodal=(b"ab",))),
        (BlockScope(multimodal=(b"a", b"b")), BlockScope(multimodal=(b"b", b"a"))),
        (BlockScope(multimodal=(b"",)), BlockScope()),
    ],
)
def test_no_field_of_a_scope_can_pass_for_another(one: BlockScope, other: BlockScope) -> None:
    assert scope_key(one) != scope_key(other)


def test_other_block_sizes_are_other_chains() -> None:
    assert block_keys(ROOT, packed(1, 2), 1)[0] != block_keys(ROOT, packed(1, 2), 2)[0]


def test_keys_are_bytes_whatever_the_tokens_are_held_in() -> None:
    tokens = packed(1, 2)

    assert block_keys(ROOT, memoryview(tokens).cast("I"), 2) == block_keys(ROOT, tokens, 2)
    assert block_keys(BlockKey(bytes(32)), tokens, 2) != block_keys(ROOT, tokens, 2)
