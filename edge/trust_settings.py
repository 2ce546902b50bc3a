"""The sections of an edge's settings that say who is believed: credentials, and hints of who is whose sub-agent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from configuration.addresses import is_loopback
from configuration.reading import Section, SettingsError
from edge.core.headers import HeaderNames, fold_name, may_carry_ids
from edge.core.jwt_keys import ALGORITHMS, ASYMMETRIC, SECRET_BYTES
from edge.core.lineage_token import MAX_LIFE_S
from edge.core.types import Scope


def _header_name(text: str) -> str:
    folded = fold_name(text)
    if folded and not re.fullmatch(r"[a-z0-9-]{1,64}", folded):
        raise ValueError("must be a header's name of letters, digits and dashes, such as x-session-id")
    if not may_carry_ids(folded):
        raise ValueError(
            "must be a header that can carry an id: this one is a credential, the protocol's own, or dropped"
        )
    return folded


_NAMES = HeaderNames()
HeaderName = Annotated[str, AfterValidator(_header_name)]
Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "HS256", "HS384", "HS512"
]
ClaimPath = Annotated[str, Field(min_length=1)]


class Claims(Section):
    """Where a token says what: names of claims, or of nested ones with dots between, such as `realm_access.roles`.

    `scopes`: claims that are a text of names or a list of them. `limits`: an object with what the bearer may have of
    `requests`, `requests_per_minute`, `tokens_per_minute`, `conversations`, `children`.
    """

    tenant: ClaimPath = "tenant"
    subject: ClaimPath = "sub"
    scopes: ClaimPath | tuple[ClaimPath, ...] = "scope"
    limits: ClaimPath | None = None


class Jwt(Section):
    """Bearer tokens, verified with the keys of exactly one source, by `algorithms` and no others.

    `jwks_url`: https, unless it is a loopback address; fetched every `refresh_s`, and when a token names a new key.
    `keep_stale_s`: how long its keys are believed after the last fetch that succeeded. `ca_file`: PEM, who vouches for
    that server instead of the public authorities. `public_key_file`: PEM, public keys or certificates.
    `default_tenant`: of tokens without the tenant claim; null refuses them. `scope_map`: from a name in the scopes
    claims to our scope; without it, names that are our scopes count.
    """

    jwks_url: str | None = None
    jwks_file: Path | None = None
    public_key_file: Path | None = None
    secret_file: Path | None = None
    ca_file: Path | None = None
    algorithms: tuple[Algorithm, ...] = ()
    issuer: Annotated[str, Field(min_length=1)] | None = None
    audience: Annotated[str, Field(min_length=1)] | None = None
    claims: Claims = Claims()
    default_tenant: Annotated[str, Field(min_length=1)] | None = "default"
    scope_map: dict[str, Scope] | None = None
    refresh_s: Annotated[float, Field(ge=10.0)] = 300.0
    keep_stale_s: Annotated[float, Field(ge=0.0)] = 86_400.0


class Auth(Section):
    jwt: Jwt | None = None


class AffinityHeaders(Section):
    """The names that are read, family by family; an empty one is never read. `lineage` also names what answers carry.

    `others`: of callers that belong to no family, all of one meaning.
    """

    conversation: HeaderName = _NAMES.conversation
    parent: HeaderName = _NAMES.parent
    final: HeaderName = _NAMES.final
    lineage: HeaderName = _NAMES.lineage
    dynamo_session: HeaderName = _NAMES.dynamo_session
    dynamo_parent: HeaderName = _NAMES.dynamo_parent
    dynamo_final: HeaderName = _NAMES.dynamo_final
    claude_code_session: HeaderName = _NAMES.claude_code_session
    claude_code_agent: HeaderName = _NAMES.claude_code_agent
    claude_code_parent_agent: HeaderName = _NAMES.claude_code_parent_agent
    codex_thread: HeaderName = _NAMES.codex_thread
    codex_session: HeaderName = _NAMES.codex_session
    codex_parent: HeaderName = _NAMES.codex_parent
    codex_kind: HeaderName = _NAMES.codex_kind
    opencode_session: HeaderName = _NAMES.opencode_session
    opencode_id: HeaderName = _NAMES.opencode_id
    opencode_affinity: HeaderName = _NAMES.opencode_affinity
    opencode_parent: HeaderName = _NAMES.opencode_parent
    others: tuple[HeaderName, ...] = _NAMES.others


class Affinity(Section):
    """Who may say whose child a conversation is. It always takes the scope `affinity`.

    `namespace`: whose conversations a caller can name, its subject's or its whole tenant's. `proof`: what proves a
    parent or an end, a name inside that namespace or only a lineage token. `token_life_s`: of those that answers carry.
    `trtllm_key_files`: for each tenant whose orchestrators sign hints as TensorRT-LLM does, the file with their key.
    """

    namespace: Literal["subject", "tenant"] = "subject"
    proof: Literal["namespace", "token"] = "namespace"
    token_life_s: Annotated[int, Field(ge=60, le=MAX_LIFE_S)] = MAX_LIFE_S
    headers: AffinityHeaders = AffinityHeaders()
    trtllm_key_files: Mapping[str, Path] = Field(default_factory=dict)


def require_distinct(names: AffinityHeaders) -> None:
    """Raises SettingsError where two roles of one family have one name."""
    for family in (
        ("conversation", "parent", "final", "lineage"),
        ("dynamo_session", "dynamo_parent", "dynamo_final"),
        ("claude_code_session", "claude_code_agent", "claude_code_parent_agent"),
        ("codex_thread", "codex_session", "codex_parent", "codex_kind"),
        ("opencode_session", "opencode_id", "opencode_affinity", "opencode_parent"),
    ):
        roles: dict[str, str] = {}
        for role in family:
            name = getattr(names, role)
            if name in roles:
                raise SettingsError(
                    f"affinity.headers.{roles[name]} and affinity.headers.{role} are both {name!r}: one header cannot "
                    "say two things."
                )
            if name:
                roles[name] = role


def require_sense_of_jwt(jwt: Jwt) -> None:
    """Raises SettingsError: what one key alone cannot show."""
    sources = ("jwks_url", "jwks_file", "public_key_file", "secret_file")
    given = [name for name in sources if getattr(jwt, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise SettingsError(f"auth.jwt needs exactly one of {', '.join(sources)}; it has {found}.")
    allowed = {"secret_file": tuple(SECRET_BYTES), "jwks_file": ALGORITHMS}.get(given[0], ASYMMETRIC)
    wrong = [name for name in jwt.algorithms if name not in allowed]
    if wrong:
        raise SettingsError(
            f"auth.jwt.algorithms holds {wrong[0]!r}, which no key of auth.jwt.{given[0]} can be for: "
            f"{', '.join(allowed)}."
        )
    if not jwt.algorithms and given[0] != "secret_file":
        raise SettingsError(
            f"auth.jwt.algorithms is missing: name those that the issuer uses, of {', '.join(allowed)}."
        )
    if jwt.jwks_url is not None:
        _require_safe_url(jwt.jwks_url)
        for name in ("issuer", "audience"):
            if name not in jwt.model_fields_set:
                raise SettingsError(
                    f"auth.jwt.{name} is missing: whoever gets tokens from the same issuer for another purpose would "
                    "be let in. Set it, or null to allow that."
                )
    elif jwt.ca_file is not None:
        raise SettingsError("auth.jwt.ca_file is set, but auth.jwt.jwks_url is not: there is no server to check.")


def _require_safe_url(text: str) -> None:
    try:
        url = urlsplit(text)
        host, _ = url.hostname, url.port
    except ValueError as error:
        raise SettingsError(f"auth.jwt.jwks_url is {text!r}, which is no URL: {error}.") from error
    if url.username is not None or url.password is not None:
        raise SettingsError("auth.jwt.jwks_url holds a user name or a password: settings are no place for secrets.")
    if not host or url.scheme not in ("https", "http") or url.fragment:
        raise SettingsError(f"auth.jwt.jwks_url is {text!r}: it must be https://HOST/PATH.")
    if url.scheme == "http" and not is_loopback(host):
        raise SettingsError(
            f"auth.jwt.jwks_url is {text!r}: over http anybody on the way could put keys of their own there; use https."
        )
