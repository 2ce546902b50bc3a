"""From claims to a principal, as the identity providers in use write them."""

from __future__ import annotations

from typing import Any

import pytest

from edge.core.claims import ClaimError, ClaimRules
from edge.core.types import Principal, Scope, TenantLimits

OURS = {"sub": "ann", "tenant": "acme"}


@pytest.mark.parametrize(
    ("claims", "rules"),
    [
        # Auth0, Keycloak: `scope`, a text.
        ({"scope": "openid affinity"}, ClaimRules()),
        # Okta: `scp`, a list. Entra, delegated: `scp`, a text.
        ({"scp": ["affinity"]}, ClaimRules(scopes=("scp",))),
        ({"scp": "User.Read affinity"}, ClaimRules(scopes=("scp", "roles"))),
        # Entra, applications: `roles`; Auth0 with role-based access: `permissions`.
        ({"roles": ["Agents.Run"]}, ClaimRules(scopes=("scp", "roles"), scope_map={"Agents.Run": Scope.AFFINITY})),
        (
            {"permissions": ["run:agents"]},
            ClaimRules(scopes=("permissions",), scope_map={"run:agents": Scope.AFFINITY}),
        ),
        # Keycloak: roles of the realm and of a client, whose name may have dots.
        ({"realm_access": {"roles": ["affinity", "x"]}}, ClaimRules(scopes=("realm_access.roles",))),
        (
            {"resource_access": {"kinroute.example.com": {"roles": ["affinity"]}}},
            ClaimRules(scopes=("resource_access.kinroute.example.com.roles",)),
        ),
        # A claim's own name may be a URL.
        ({"https://example.com/scopes": "affinity"}, ClaimRules(scopes=("https://example.com/scopes",))),
    ],
)
def test_scopes_are_found_where_identity_providers_put_them(claims: dict[str, Any], rules: ClaimRules) -> None:
    assert rules.principal(OURS | claims, "jwt") == Principal("acme", "ann", frozenset({"affinity"}), "jwt")


def test_with_a_map_a_name_that_happens_to_be_ours_grants_nothing() -> None:
    rules = ClaimRules(scope_map={"agents": Scope.AFFINITY})

    assert rules.principal(OURS | {"scope": "operator affinity"}, "").scopes == frozenset()
    assert rules.principal(OURS | {"scope": "agents operator"}, "").scopes == frozenset({"affinity"})


def test_a_token_without_a_tenant_is_of_the_default_one_or_refused() -> None:
    assert ClaimRules().principal({"sub": "ann"}, "").tenant == "default"
    with pytest.raises(ClaimError):
        ClaimRules(default_tenant=None).principal({"sub": "ann"}, "")


@pytest.mark.parametrize("value", [None, "", 7, True, ["ann"], {"a": 1}, " ", "a ", "a\nb", "x" * 257, "é" * 129])
def test_a_name_that_is_no_plain_text_is_refused(value: object) -> None:
    for claim in ("sub", "tenant"):
        with pytest.raises(ClaimError, match=claim):
            ClaimRules().principal(OURS | {claim: value}, "")


@pytest.mark.parametrize("value", [None, 7, True, {"affinity": True}, ["affinity", 7], [["affinity"]]])
def test_scopes_of_another_form_are_refused(value: object) -> None:
    with pytest.raises(ClaimError, match="scope"):
        ClaimRules().principal(OURS | {"scope": value}, "")


def test_limits_are_taken_from_the_claim_that_is_named_and_only_there() -> None:
    claims = OURS | {"kinroute": {"limits": {"requests": 2, "tokens_per_minute": 100}}, "limits": {"requests": 9}}
    rules = ClaimRules(limits="kinroute.limits")

    assert rules.principal(claims, "").limits == TenantLimits(requests=2, tokens_per_minute=100)
    assert ClaimRules().principal(claims, "").limits == TenantLimits()
    assert rules.principal(OURS, "").limits == TenantLimits()


@pytest.mark.parametrize(
    "value", [7, [], None, {"requests": 0}, {"requests": -1}, {"requests": True}, {"requests": 1.5}, {"nothing": 1}]
)
def test_limits_of_another_form_are_refused(value: object) -> None:
    with pytest.raises(ClaimError, match="limits"):
        ClaimRules(limits="limits").principal(OURS | {"limits": value}, "")
