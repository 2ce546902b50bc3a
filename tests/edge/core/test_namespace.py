"""Keyed hashes: what may collide and what may not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.core.namespace import Namespace
from edge.core.types import Principal

KEY = b"k" * 32
ALICE = Principal("acme", "alice", frozenset())
BOB = Principal("acme", "bob", frozenset())
EVE = Principal("evil", "alice", frozenset())


def test_a_tenants_subjects_share_prefixes_by_default_and_no_other_tenant_does() -> None:
    space = Namespace(KEY)

    assert space.salt(ALICE) == space.salt(BOB)
    assert space.salt(ALICE) != space.salt(EVE)


def test_subjects_share_nothing_where_isolation_is_by_subject() -> None:
    space = Namespace(KEY, "subject")

    assert len({space.salt(ALICE), space.salt(BOB), space.salt(EVE)}) == 3


def test_a_callers_own_salt_narrows_and_never_reaches_another_tenant() -> None:
    space = Namespace(KEY)

    assert space.salt(ALICE, "mine") != space.salt(ALICE)
    assert space.salt(ALICE, "mine") == space.salt(BOB, "mine")
    assert space.salt(ALICE, "mine") != space.salt(EVE, "mine")


def test_salts_and_ids_of_another_key_are_others() -> None:
    one, other = Namespace(KEY), Namespace(b"j" * 32)

    assert one.salt(ALICE) != other.salt(ALICE)
    assert one.conversation(ALICE, "c") != other.conversation(ALICE, "c")


@pytest.mark.parametrize("text", ["", "\ud800", "é", "\0", "a" * 10_000])
def test_any_text_has_a_hash(text: str) -> None:
    space = Namespace(KEY)

    assert len(space.salt(ALICE, text)) == 16
    assert len(space.conversation(ALICE, text)) == 32


parts = st.text("ab\0", max_size=3)


@given(st.tuples(parts, parts, parts), st.tuples(parts, parts, parts))
def test_ids_are_equal_only_where_tenant_subject_and_id_are(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    space = Namespace(KEY)
    hashes = [space.conversation(Principal(tenant, subject, frozenset()), own) for tenant, subject, own in (one, other)]

    assert (hashes[0] == hashes[1]) == (one == other)


def test_a_tenants_tag_is_the_same_for_all_its_subjects_and_on_every_replica_and_names_nobody() -> None:
    replicas = Namespace(b"k" * 32), Namespace(b"k" * 32, "subject", "tenant")

    assert replicas[0].tenant_tag("acme") == replicas[1].tenant_tag("acme") != replicas[0].tenant_tag("other")
    assert Namespace(b"l" * 32).tenant_tag("acme") != replicas[0].tenant_tag("acme")
    assert len(replicas[0].tenant_tag("acme")) == 8


def test_a_derived_id_is_never_a_named_one() -> None:
    space = Namespace(KEY)

    assert space.derived(ALICE, "", b"") != space.conversation(ALICE, "")
