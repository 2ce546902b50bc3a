"""What is believed of a claim: nobody is anybody's child by writing so."""

from __future__ import annotations

import pytest

from edge.core.errors import Code, EdgeError
from edge.core.headers import Claim, HeaderFamilies, fold
from edge.core.lineage import Believed, Lineages
from edge.core.types import Lineage, Principal, Scope
from tests.edge.core.agents import AGENTS
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
