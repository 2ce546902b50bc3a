"""What a token says of its bearer: claims to a principal, by rules that the operator writes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from edge.core.types import Principal, Scope, TenantLimits

MAX_NAME_BYTES = 256
MAX_LIMIT = 1 << 53
LIMIT_NAMES = tuple(one.name for one in fields(TenantLimits))


class ClaimError(Exception):
    """Raised when a claim has another form than its rule asks for; names the claim, never its value."""


@dataclass(frozen=True, slots=True)
class ClaimRules:
    """Where each thing stands. A path is a claim's name, or names of nested claims with dots between.

    `default_tenant`: of tokens without `tenant`; None refuses them. `scopes`: each a text of names with spaces between,
    or a list; all count that are there. `scope_map`: from such a name to our scope. `limits`: an object with members of
    TenantLimits.
    """

    tenant: str = "tenant"
    subject: str = "sub"
    scopes: tuple[str, ...] = ("scope",)
    limits: str | None = None
    default_tenant: str | None = "default"
    scope_map: Mapping[str, Scope] = field(default_factory=lambda: {scope.value: scope for scope in Scope})

    def principal(self, claims: Mapping[str, Any], key_id: str) -> Principal:
        """Raises ClaimError."""
        tenant = _at(claims, self.tenant)
        limits = _ABSENT if self.limits is None else _at(claims, self.limits)
        return Principal(
            _name(self.default_tenant if tenant is _ABSENT else tenant, self.tenant),
            _name(_at(claims, self.subject), self.subject),
            frozenset(self._scopes(claims)),
            key_id,
            TenantLimits() if limits is _ABSENT else _limits(limits, str(self.limits)),
        )

    def _scopes(self, claims: Mapping[str, Any]) -> Iterator[str]:
        for path in self.scopes:
            for name in _names(_at(claims, path), path):
                scope = self.scope_map.get(name)
                if scope is not None:
                    yield scope.value


_ABSENT = object()


def _at(claims: Mapping[str, Any], path: str) -> object:
    """The claim at `path`; a name that has dots itself is found before nested ones."""
    if path in claims:
        return claims[path]
    head, dot, rest = path.partition(".")
    while dot:
        below = claims.get(head)
        if isinstance(below, dict) and (found := _at(below, rest)) is not _ABSENT:
            return found
        more, dot, rest = rest.partition(".")
        head = f"{head}.{more}"
    return _ABSENT


def _name(value: object, path: str) -> str:
    if not isinstance(value, str) or not value or value != value.strip() or not value.isprintable():
        raise ClaimError(path)
    if len(value.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        raise ClaimError(path)
    return value


def _names(value: object, path: str) -> list[str]:
    if value is _ABSENT:
        return []
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return value
    raise ClaimError(path)


def _limits(value: object, path: str) -> TenantLimits:
    if not isinstance(value, dict):
        raise ClaimError(path)
    for name, limit in value.items():
        if name not in LIMIT_NAMES or type(limit) is not int or not 1 <= limit <= MAX_LIMIT:
            raise ClaimError(f"{path}.{name}" if name in LIMIT_NAMES else path)
    return TenantLimits(**value)
