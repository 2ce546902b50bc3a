"""What is believed of a claim: nobody is anybody's child by writing so."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.core.errors import Code, EdgeError
from edge.core.headers import Claim, HeaderFamilies, fold
from edge.core.lineage import Believed, Lineages, Proof
from edge.core.lineage_token import Stated
from edge.core.types import Lineage, Principal, Scope, TenantLimits
from tests.edge.core.agents import AGENTS, SIDE
from tests.edge.core.lineages import make_lineages

NOW_S = 1_000_000.0
CONTENT = b"tools, system prompt, first message"


def caller(*, tenant: str = "acme", subject: str = "alice", affinity: bool = True) -> Principal:
    return Principal(tenant, subject, frozenset({Scope.AFFINITY} if affinity else ()))


def believed(
    claim: Claim,
    principal: Principal | None = None,
    content: bytes = CONTENT,
    *,
    by: Lineages | None = None,
    now_s: float = NOW_S,
) -> Believed:
    by, principal = by or make_lineages(), principal or caller()
    return by.believe(claim, by.stated(claim, principal, now_s), principal, content, now_s)


def lineage(claim: Claim, principal: Principal | None = None, content: bytes = CONTENT) -> Lineage:
    return believed(claim, principal, content).lineage


def refusal(
    claim: Claim, principal: Principal | None = None, *, by: Lineages | None = None, now_s: float = NOW_S
) -> tuple[Code, str]:
    """Its code and its reason."""
    with pytest.raises(EdgeError) as caught:
        believed(claim, principal, by=by, now_s=now_s)
    return caught.value.code, caught.value.reason


def placed_by(lineage: Lineage) -> str:
    return lineage.family


def agents_tree(agent: str, principal: Principal | None = None) -> tuple[Lineage, ...]:
    families = HeaderFamilies()
    return tuple(lineage(families.read(fold(sent)), principal) for sent in AGENTS[agent].values())


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agents_tree_is_known_to_any_depth(agent: str) -> None:
    root, child, grandchild = agents_tree(agent)

    assert root.parent is None
    assert child.parent == root.conversation
    assert grandchild.parent == child.conversation
    assert placed_by(root) == placed_by(child) == root.conversation


@pytest.mark.parametrize("call", SIDE)
def test_a_call_beside_a_conversation_is_nobodys_child(call: str) -> None:
    agent, sent = SIDE[call]
    root, child, _ = agents_tree(agent)

    side = lineage(HeaderFamilies().read(fold(sent)))

    assert (side.parent, side.depth) == (None, 0)
    assert side.family in (root.family, child.conversation), "near whom it works for"


def test_a_grandchild_is_placed_by_its_root_where_its_headers_carry_it_else_by_its_parent() -> None:
    root, child, grandchild = agents_tree("claude-code")
    assert {child.family, grandchild.family} == {root.family}
    assert (root.depth, child.depth, grandchild.depth) == (0, 1, 2)

    for agent in ("codex", "opencode", "dynamo"):
        _, child, grandchild = agents_tree(agent)
        assert (placed_by(grandchild), grandchild.depth) == (child.conversation, 1)


@pytest.mark.parametrize("agent", AGENTS)
def test_without_the_scope_an_agents_parents_are_ignored_and_its_own_ids_stand(agent: str) -> None:
    with_scope, without = agents_tree(agent), agents_tree(agent, caller(affinity=False))

    assert [one.conversation for one in without] == [one.conversation for one in with_scope]
    assert [one.parent for one in without] == [None] * 3
    assert len({one.family for one in without}) == 3
    assert not any(one.final for one in without)


def test_what_is_ignored_is_told() -> None:
    assert believed(Claim("codex", "t-2", "t-1"), caller(affinity=False)).told == "codex: no scope affinity"
    assert believed(Claim("codex", "t-2", "t-1")).ignored == ""
    assert believed(Claim("codex", "t-1"), caller(affinity=False)).ignored == ""


@pytest.mark.parametrize("hint", [{"parent": "p"}, {"final": True}])
def test_an_explicit_hint_without_the_scope_is_forbidden(hint: dict[str, str | bool]) -> None:
    claim = Claim("kinroute", "c", explicit=True, **hint)  # type: ignore[arg-type]

    with pytest.raises(EdgeError) as caught:
        believed(claim, caller(affinity=False))
    assert caught.value.code is Code.FORBIDDEN
    assert believed(claim).ignored == ""


def test_an_explicit_conversation_alone_needs_no_scope() -> None:
    assert lineage(Claim("kinroute", "c", explicit=True), caller(affinity=False)).parent is None


@pytest.mark.parametrize(
    "stranger", [caller(tenant="evil"), caller(subject="mallory"), caller(tenant="acm", subject="ealice")]
)
def test_a_stranger_can_name_neither_anothers_parent_nor_its_child(stranger: Principal) -> None:
    mine = lineage(Claim("kinroute", "child", "parent", explicit=True))
    theirs = lineage(Claim("kinroute", "child", "parent", explicit=True), stranger)

    assert {mine.conversation, mine.parent, mine.family}.isdisjoint({theirs.conversation, theirs.parent, theirs.family})


def test_nothing_that_leaves_the_edge_holds_what_the_caller_wrote() -> None:
    child = lineage(Claim("kinroute", "my-child", "my-parent", explicit=True))

    for value in (child.conversation, child.parent, child.family):
        assert value is not None
        assert len(value) == 32
        assert int(value, 16) >= 0


def test_a_conversation_that_names_itself_as_its_parent_has_none() -> None:
    itself = lineage(Claim("kinroute", "c", "c", explicit=True))

    assert (itself.parent, placed_by(itself), itself.depth) == (None, itself.conversation, 0)


def test_every_replica_with_the_key_agrees_and_none_without_it() -> None:
    claim = Claim("codex", "t-2", "t-1")

    assert believed(claim) == believed(claim)
    assert believed(claim, by=make_lineages(id_key=b"j" * 32)).lineage.parent != lineage(claim).parent


def test_without_an_id_every_turn_of_the_same_content_is_one_conversation() -> None:
    first = lineage(Claim())

    assert lineage(Claim()) == first
    assert placed_by(first) == first.conversation
    assert lineage(Claim(), content=b"other").conversation != first.conversation
    assert lineage(Claim(), caller(subject="bob")).conversation != first.conversation
    assert lineage(Claim("kinroute", None, "p", explicit=True)).conversation != first.conversation


def test_a_derived_child_has_the_parent_it_names() -> None:
    child = lineage(Claim("other", None, "p"))

    assert child.parent == placed_by(child) == lineage(Claim("other", "p")).conversation


def test_a_prompt_cache_key_gathers_conversations_without_relating_them() -> None:
    one, two = (lineage(Claim(placement="k"), content=content) for content in (b"one", b"two"))

    assert one.family == two.family
    assert one.conversation != two.conversation
    assert one.parent is two.parent is None


def test_a_side_task_is_placed_beside_its_parent() -> None:
    parent = lineage(Claim("codex", "t-1"))
    side = lineage(Claim("codex", "t-9", placement="t-1", side=True))

    assert (placed_by(side), side.parent, side.side) == (parent.conversation, None, True)


def test_a_final_mark_is_believed_from_the_scope() -> None:
    claim = Claim("dynamo", "d", final=True)

    assert lineage(claim).final
    assert not lineage(Claim("dynamo", "d")).final
    assert not lineage(claim, caller(affinity=False)).final


def test_a_conversation_that_has_a_name_is_given_a_token_that_says_who_it_is() -> None:
    replica, other = make_lineages(), make_lineages()

    root = believed(Claim("codex", "t-1"), by=replica)
    child = believed(Claim("codex", "t-2", "t-1"), by=replica)

    assert other.tokens.verify(root.token, "acme", NOW_S) == Stated(root.lineage.family, root.lineage.conversation, 0)
    assert other.tokens.verify(child.token, "acme", NOW_S) == Stated(root.lineage.family, child.lineage.conversation, 1)


def test_a_conversation_without_a_name_is_given_none_unless_it_has_a_parent() -> None:
    """Two that begin alike are one there: nobody may be the child of both."""
    assert believed(Claim()).token == ""
    assert believed(Claim("kinroute", None, "p", explicit=True)).token
    assert believed(Claim(token=believed(Claim("codex", "t-1")).token)).token


def test_without_keys_no_token_is_given_and_none_is_taken() -> None:
    token = believed(Claim("codex", "t-1")).token

    assert believed(Claim("codex", "t-1"), by=make_lineages(keys=())).token == ""
    assert refusal(Claim("kinroute", "c", token=token), by=make_lineages(keys=())) == (
        Code.INVALID,
        "unknown or retired key",
    )


def test_a_token_makes_a_stranger_a_child_of_exactly_the_conversation_it_was_given_to() -> None:
    parent = believed(Claim("kinroute", "p", explicit=True))
    bob = caller(subject="bob")

    child = believed(Claim("kinroute", "c", explicit=True, token=parent.token), bob)

    assert child.lineage.parent == parent.lineage.conversation
    assert child.lineage.family == parent.lineage.family
    assert child.lineage.depth == 1
    assert child.lineage.conversation == lineage(Claim("kinroute", "c", explicit=True), bob).conversation
    grandchild = lineage(Claim("kinroute", "g", explicit=True, token=child.token), caller(subject="eve"))
    assert (grandchild.parent, grandchild.family) == (child.lineage.conversation, parent.lineage.family)
    assert grandchild.depth == 2


def test_who_holds_a_token_can_never_speak_as_its_conversation() -> None:
    parent = believed(Claim("kinroute", "p", explicit=True))

    theirs = lineage(Claim("kinroute", "p", explicit=True, token=parent.token), caller(subject="mallory"))

    assert theirs.conversation != parent.lineage.conversation


def test_a_token_is_worth_nothing_in_another_tenant_without_the_scope_or_after_a_day() -> None:
    claim = Claim("codex", "t-2", token=believed(Claim("codex", "t-1")).token)

    assert refusal(claim, caller(tenant="evil")) == (Code.INVALID, "another tenant")
    assert refusal(claim, caller(affinity=False)) == (Code.FORBIDDEN, "no scope affinity")
    assert refusal(claim, now_s=NOW_S + 86_405.0) == (Code.INVALID, "expired")
    assert refusal(Claim("codex", "t-2", token="eyJ")) == (Code.INVALID, "not three parts")


@pytest.mark.parametrize("agent", AGENTS)
def test_a_token_beside_an_agents_headers_puts_its_whole_tree_below_the_tokens_conversation(agent: str) -> None:
    """A header that is set once for a process comes with each request, of its sub-agents too."""
    above, families = believed(Claim("kinroute", "above", explicit=True)), HeaderFamilies()
    alone = agents_tree(agent)

    root, child, grandchild = (
        lineage(families.read(fold([*sent, ("X-Kinroute-Lineage", above.token)]))) for sent in AGENTS[agent].values()
    )

    assert [one.conversation for one in (root, child, grandchild)] == [one.conversation for one in alone]
    assert root.parent == above.lineage.conversation
    assert child.parent == root.conversation
    assert grandchild.parent == child.conversation
    assert {one.family for one in (root, child, grandchild)} == {above.lineage.family}
    assert (root.depth, child.depth) == (1, 2)


def test_a_parents_name_and_its_token_must_agree() -> None:
    parent, other = (believed(Claim("kinroute", name, explicit=True)) for name in ("p", "q"))
    child = Claim("kinroute", "c", "p", explicit=True)

    assert lineage(dataclasses.replace(child, token=parent.token)) == lineage(child)
    assert refusal(dataclasses.replace(child, token=other.token)) == (Code.INVALID, "another parent than the token's")
    assert refusal(dataclasses.replace(child, token=parent.token), caller(subject="bob")) == (
        Code.INVALID,
        "another parent than the token's",
    )


def test_a_conversation_that_shows_its_own_token_stays_who_it_is_and_has_no_parent() -> None:
    child = believed(Claim("kinroute", "c", "p", explicit=True))

    itself = lineage(Claim("kinroute", "c", explicit=True, token=child.token))

    assert itself == dataclasses.replace(child.lineage, parent=None)


def test_an_unnamed_child_is_one_conversation_whether_a_name_or_a_token_says_whose() -> None:
    parent = believed(Claim("kinroute", "p", explicit=True))

    assert lineage(Claim(token=parent.token)) == lineage(Claim("kinroute", None, "p", explicit=True))


def test_a_side_task_with_a_token_is_placed_by_it_and_nobodys_child() -> None:
    above = believed(Claim("kinroute", "above", explicit=True))

    side = lineage(Claim("codex", "t-9", placement="t-1", side=True, token=above.token))

    assert (side.parent, side.family, side.depth) == (None, above.lineage.family, 0)


def test_where_only_tokens_prove_an_explicit_name_is_refused_and_an_agents_is_ignored() -> None:
    strict = make_lineages(proof="token")

    for hint in ({"parent": "p"}, {"final": True}):
        explicit, agents = (Claim("x", "c", explicit=one, **hint) for one in (True, False))
        assert refusal(explicit, by=strict) == (Code.INVALID, "no lineage token")
        told = believed(agents, by=strict)
        assert (told.lineage.parent, told.lineage.final, told.ignored) == (None, False, "no lineage token")
        assert told.lineage.conversation == lineage(Claim("x", "c")).conversation


def test_where_only_tokens_prove_a_token_is_enough() -> None:
    strict = make_lineages(proof="token")
    parent = believed(Claim("kinroute", "p", explicit=True), by=strict)

    named = believed(Claim("kinroute", "c", "p", final=True, explicit=True, token=parent.token), by=strict)
    agents = believed(Claim("codex", "c", "other", final=True, token=parent.token), by=strict)
    own = believed(Claim("kinroute", "p", final=True, explicit=True, token=parent.token), by=strict)

    assert (named.lineage.parent, named.lineage.final, named.ignored) == (parent.lineage.conversation, True, "")
    assert (agents.lineage.parent, agents.lineage.final) == (parent.lineage.conversation, True)
    assert agents.told == "codex: another parent than the token's"
    assert (own.lineage.parent, own.lineage.final) == (None, True)


def test_in_a_namespace_of_the_tenant_its_subjects_name_each_others_conversations_and_no_stranger_does() -> None:
    fleet = make_lineages(trust="tenant")
    parent = believed(Claim("kinroute", "p", explicit=True), caller(subject="ann"), by=fleet).lineage

    child = believed(Claim("kinroute", "c", "p", explicit=True), caller(subject="bob"), by=fleet).lineage
    stranger = believed(Claim("kinroute", "c", "p", explicit=True), caller(tenant="evil"), by=fleet).lineage

    assert child.parent == parent.conversation
    assert stranger.parent != parent.conversation


def test_an_end_that_names_no_conversation_is_refused() -> None:
    assert refusal(Claim("kinroute", final=True, explicit=True)) == (Code.INVALID, "no conversation")


def test_beyond_its_limits_an_explicit_hint_is_refused_and_an_agents_is_served_without_lineage() -> None:
    small = make_lineages(limits=TenantLimits(children=1))
    assert believed(Claim("codex", "c1", "p"), by=small).lineage.parent

    told = believed(Claim("codex", "c2", "p", final=True), by=small)

    assert refusal(Claim("kinroute", "c2", "p", explicit=True), by=small) == (Code.RATE_LIMITED, "too many children")
    parent = believed(Claim("codex", "p"), by=small)
    assert refusal(Claim("codex", "c2", token=parent.token), by=small) == (Code.RATE_LIMITED, "too many children")
    assert told.told == "codex: too many children"
    assert told.lineage == lineage(Claim("codex", "c2"))


def test_nobody_nests_deeper_than_is_allowed() -> None:
    shallow = make_lineages(depth=2)
    token = believed(Claim("kinroute", "c0", explicit=True), by=shallow).token
    for n in (1, 2):
        token = believed(Claim("kinroute", f"c{n}", explicit=True, token=token), by=make_lineages(depth=2)).token

    assert refusal(Claim("kinroute", "c3", explicit=True, token=token), by=shallow) == (
        Code.INVALID,
        "nested too deep",
    )


def test_a_child_that_becomes_its_parents_parent_is_refused() -> None:
    replica = make_lineages()
    assert believed(Claim("kinroute", "c", "p", explicit=True), by=replica).lineage.parent

    assert refusal(Claim("kinroute", "p", "c", explicit=True), by=replica) == (Code.INVALID, "a cycle")
    assert believed(Claim("codex", "p", "c"), by=replica).told == "codex: a cycle"


ids = st.none() | st.sampled_from("abc")
claims = st.builds(
    Claim,
    family=st.sampled_from(["kinroute", "codex"]),
    conversation=ids,
    parent=ids,
    root=ids,
    final=st.booleans(),
    side=st.booleans(),
    explicit=st.booleans(),
    placement=ids,
    token=st.none() | st.sampled_from("abc") | st.just("forged"),
)
proofs = st.sampled_from(["namespace", "token"])


@settings(max_examples=200)
@given(st.lists(st.tuples(claims, st.sampled_from(["alice", "bob"]), st.booleans()), max_size=8), proofs)
def test_whatever_is_claimed_a_parent_is_one_that_was_named_or_proven(
    asked: list[tuple[Claim, str, bool]], proof: Proof
) -> None:
    replica = make_lineages(proof=proof, limits=TenantLimits(conversations=5, children=2), depth=3)
    shown = {name: believed(Claim("kinroute", name, explicit=True), by=replica) for name in "abc"}

    refused: list[tuple[Code, Claim]] = []
    for claim, subject, affinity in asked:
        token = shown[claim.token].token if claim.token in shown else claim.token
        principal = caller(subject=subject, affinity=affinity)
        try:
            told = believed(dataclasses.replace(claim, token=token), principal, by=replica).lineage
        except EdgeError as error:
            refused.append((error.code, claim))
            continue
        named = (
            lineage(Claim("kinroute", claim.parent, explicit=True), principal).conversation if claim.parent else None
        )
        proven = shown[claim.token].lineage.conversation if claim.token in shown else None
        assert told.parent in (None, named if proof == "namespace" else None, proven)
        assert told.parent != told.conversation
        assert told.depth <= 3
        assert affinity or (told.parent is None and not told.final)

    assert {code for code, _ in refused} <= {Code.INVALID, Code.FORBIDDEN, Code.RATE_LIMITED}
    assert all(claim.explicit or claim.token for _, claim in refused), "an agent's own hints are ignored instead"
