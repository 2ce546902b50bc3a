"""A prompt's hash is that of the prompt, whatever was hashed before, and a turn costs what it adds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge.core.prompt_hashes import ENTRY_BYTES, PromptHashes
from edge.core.types import ConversationKey
from enginelink.envelope import prompt_sha256

asked = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.sampled_from([b"1234", b"5678"]), max_size=4)))


@given(asked, st.sampled_from([0, ENTRY_BYTES + 8, 10_000]))
def test_whatever_was_asked_before_the_hash_is_that_of_the_prompt(
    prompts: list[tuple[str, list[bytes]]], max_bytes: int
) -> None:
    hashes = PromptHashes(max_bytes)

    for conversation, tokens in prompts:
        token_ids = b"".join(tokens)
        assert hashes.sha256(ConversationKey(conversation), token_ids) == prompt_sha256(token_ids)


def test_a_turn_goes_on_from_the_last_one_and_not_from_another_conversations() -> None:
    hashes, first, turn = PromptHashes(), b"1234", b"12345678"
    hashes.sha256(ConversationKey("a"), first)
    before = hashes._known[ConversationKey("a")].state

    assert hashes.sha256(ConversationKey("a"), first) == prompt_sha256(first)
    assert hashes.sha256(ConversationKey("a"), turn) == prompt_sha256(turn)
    assert before.hexdigest() == prompt_sha256(first), "what was given out stays what it was"
    assert hashes.sha256(ConversationKey("b"), b"5678") == prompt_sha256(b"5678")


def test_who_asked_longest_ago_is_forgotten_first_and_the_bound_holds() -> None:
    hashes = PromptHashes(max_bytes=2 * (ENTRY_BYTES + 4))
    for conversation in ("a", "b", "a", "c"):
        hashes.sha256(ConversationKey(conversation), b"1234")

    assert list(hashes._known) == ["a", "c"]
    hashes.sha256(ConversationKey("a"), b"1234" * ENTRY_BYTES)
    assert list(hashes._known) == []
