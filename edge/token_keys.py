"""Where the keys of callers' tokens come from: a JWKS file, a PEM file or a shared secret, as the settings say."""

from __future__ import annotations

from pathlib import Path

from configuration.reading import SettingsError, read_secret
from edge.core.claims import ClaimRules
from edge.core.jwt_keys import KeysError, KeySet, jwks_keys, pem_keys, secret_keys
from edge.core.jwt_rules import JwtRules
from edge.core.types import Scope
from edge.trust_settings import Jwt

SECRET_ALGORITHMS = ("HS256",)


def jwt_rules(jwt: Jwt) -> JwtRules:
    scopes = jwt.claims.scopes
    return JwtRules(
        _algorithms(jwt),
        jwt.issuer,
        jwt.audience,
        ClaimRules(
            jwt.claims.tenant,
            jwt.claims.subject,
            (scopes,) if isinstance(scopes, str) else scopes,
            jwt.claims.limits,
            jwt.default_tenant,
            jwt.scope_map if jwt.scope_map is not None else {scope.value: scope for scope in Scope},
        ),
    )


def key_file(jwt: Jwt) -> Path | None:
    """The file that holds the keys; None where they come from a URL."""
    return jwt.secret_file or jwt.public_key_file or jwt.jwks_file


def read_key_file(jwt: Jwt) -> KeySet:
    """What that file holds now. Raises SettingsError, naming the key that names the file."""
    algorithms = _algorithms(jwt)
    try:
        if jwt.secret_file is not None:
            return secret_keys(read_secret(jwt.secret_file, "auth.jwt.secret_file"), algorithms)
        if jwt.public_key_file is not None:
            keys = pem_keys(read_secret(jwt.public_key_file, "auth.jwt.public_key_file"))
        else:
            assert jwt.jwks_file is not None, "the settings name one source"
            keys = jwks_keys(read_secret(jwt.jwks_file, "auth.jwt.jwks_file"), secrets_allowed=True)
        keys.require_fit(algorithms)
    except KeysError as error:
        name = next(name for name in ("secret_file", "public_key_file", "jwks_file") if getattr(jwt, name) is not None)
        raise SettingsError(f"auth.jwt.{name} is {str(key_file(jwt))!r}: {error}.") from error
    return keys


def _algorithms(jwt: Jwt) -> tuple[str, ...]:
    return jwt.algorithms or SECRET_ALGORITHMS
