"""`kinroute token`: test tokens made, and tokens looked into. What is made is as good as its key: keep that safe."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from configuration.reading import SettingsError, read_secret
from edge.core.claims import ClaimRules
from edge.core.jwt_keys import (
    ALGORITHMS,
    ANY_OF_KIND,
    EC_ALGORITHMS,
    RSA_ALGORITHMS,
    SECRET_BYTES,
    KeysError,
    KeySet,
    jwks_keys,
    pem_keys,
    secret_keys,
)
from edge.core.jwt_rules import JwtRules, TokenRefused
from edge.settings import load_settings
from edge.token_keys import jwt_rules, read_key_file
from kinroute.durations import at
from kinroute.problem import Problem

TIMES = ("iat", "nbf", "exp", "auth_time")


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where a key stands; one of them, or none."""

    secret_file: Path | None = None
    pem_file: Path | None = None
    jwks_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a token is to say. `claims`: further ones, which win."""

    tenant: str | None
    subject: str
    scopes: list[str]
    life_s: float
    claims: dict[str, Any]


def mint(source: KeySource, wanted: Wanted, *, algorithm: str | None, kid: str | None) -> int:
    """Print a token. Raises Problem."""
    key, fitting, kid = _signing_key(source, kid)
    chosen = algorithm or fitting[0]
    if chosen not in fitting:
        raise Problem(f"This key cannot sign {chosen}: choose one of {', '.join(fitting)} with --alg.")
    now_s = int(time.time())
    claims: dict[str, Any] = {"sub": wanted.subject, "iat": now_s, "exp": now_s + int(wanted.life_s)}
    if wanted.tenant is not None:
        claims["tenant"] = wanted.tenant
    if wanted.scopes:
        claims["scope"] = " ".join(wanted.scopes)
    claims |= wanted.claims
    try:
        token = jwt.encode(claims, key, chosen, headers=None if kid is None else {"kid": kid})
    except (jwt.PyJWTError, TypeError, ValueError) as error:
        raise Problem(f"No token can be made of this: {error}.") from error
    sys.stdout.write(f"{token}\n")
    return 0


def inspect(token: str, source: KeySource, *, config: Path | None, issuer: str | None, audience: str | None) -> int:
    """Print what a token says, and whether it would be believed. Returns 1 where it would not. Raises Problem."""
    now_s = time.time()
    try:
        read = jwt.decode_complete(token, options={"verify_signature": False})
    except (jwt.InvalidTokenError, ValueError, RecursionError) as error:
        raise Problem(f"This is no token: {error}.") from error
    header, claims = read["header"], read["payload"]
    sys.stdout.write(f"header {json.dumps(header, indent=2)}\nclaims {json.dumps(claims, indent=2)}\n")
    for name in TIMES:
        if isinstance(claims.get(name), (int, float)) and not isinstance(claims[name], bool):
            sys.stdout.write(f"{name} {at(claims[name], now_s)}\n")
    judged = _judges(source, config, issuer, audience)
    if judged is None:
        sys.stdout.write("not verified: no key was given\n")
        return 0
    rules, keys = judged
    try:
        principal = rules.believe(token, keys, now_s).principal
    except TokenRefused as refused:
        sys.stdout.write(f"refused: {refused.reason}\n")
        return 1
    scopes = ", ".join(sorted(principal.scopes)) or "none"
    sys.stdout.write(f"believed: tenant {principal.tenant}, subject {principal.subject}, scopes {scopes}\n")
    return 0


def claim(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`, where VALUE is JSON or else a text, for argparse."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ValueError
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _signing_key(source: KeySource, kid: str | None) -> tuple[Any, tuple[str, ...], str | None]:
    """A key, the algorithms that it fits, and its name. Raises Problem."""
    try:
        if source.secret_file is not None:
            secret = read_secret(source.secret_file, "--secret-file")
            fitting = tuple(name for name, least in SECRET_BYTES.items() if len(secret) >= least)
            secret_keys(secret, fitting or ("HS256",))
            return secret, fitting, kid
        if source.pem_file is not None:
            key = load_pem_private_key(read_secret(source.pem_file, "--key-file"), None)
            return key, _fitting(key), kid
        if source.jwks_file is not None:
            return _private_jwk(json.loads(read_secret(source.jwks_file, "--jwks-file")), kid)
    except SettingsError as error:
        raise Problem(str(error)) from error
    except KeysError as error:
        raise Problem(f"The key cannot be used: {error}.") from error
    except (ValueError, TypeError, KeyError, AttributeError, jwt.PyJWTError, UnsupportedAlgorithm) as error:
        raise Problem("The file holds no private key that can be read: PEM without a password, or a JWKS.") from error
    raise Problem("A token needs a key: --secret-file, --key-file or --jwks-file.")


def _private_jwk(document: Any, kid: str | None) -> tuple[Any, tuple[str, ...], str | None]:
    """The first key with private members, or the one that is named."""
    for jwk in document["keys"]:
        if kid is not None and jwk.get("kid") != kid:
            continue
        if jwk.get("kty") == "oct":
            secret = jwt.get_algorithm_by_name("HS256").from_jwk(jwk)
            return secret, tuple(name for name, least in SECRET_BYTES.items() if len(secret) >= least), jwk.get("kid")
        if "d" in jwk:
            key = jwt.get_algorithm_by_name(ANY_OF_KIND[jwk["kty"]]).from_jwk(jwk)
            fitting = _fitting(key)
            return key, (jwk["alg"],) if jwk.get("alg") in fitting else fitting, jwk.get("kid")
    raise Problem("The JWKS holds no such private key.")


def _fitting(key: object) -> tuple[str, ...]:
    match key:
        case rsa.RSAPrivateKey():
            return RSA_ALGORITHMS
        case ec.EllipticCurvePrivateKey():
            return (EC_ALGORITHMS[key.curve.name],) if key.curve.name in EC_ALGORITHMS else ()
        case ed25519.Ed25519PrivateKey() | ed448.Ed448PrivateKey():
            return ("EdDSA",)
    raise Problem("This key is neither RSA, EC nor EdDSA.")


def _judges(
    source: KeySource, config: Path | None, issuer: str | None, audience: str | None
) -> tuple[JwtRules, KeySet] | None:
    """As an edge with this configuration would, or by the key alone. Raises Problem."""
    try:
        if config is not None:
            settings = load_settings(config).auth.jwt
            if settings is None or settings.jwks_url is not None:
                raise Problem("This configuration has no auth.jwt with keys in a file: give the issuer's --jwks-file.")
            return jwt_rules(settings), read_key_file(settings)
        keys = _verify_keys(source)
    except SettingsError as error:
        raise Problem(str(error)) from error
    except KeysError as error:
        raise Problem(f"The key cannot be used: {error}.") from error
    if keys is None:
        return None
    fitting = tuple(name for name in ALGORITHMS if any(name in key.algorithms for key in keys.keys))
    return JwtRules(fitting, issuer, audience, ClaimRules()), keys


def _verify_keys(source: KeySource) -> KeySet | None:
    if source.secret_file is not None:
        secret = read_secret(source.secret_file, "--secret-file")
        return secret_keys(secret, [name for name, least in SECRET_BYTES.items() if len(secret) >= least] or ["HS256"])
    if source.pem_file is not None:
        return pem_keys(read_secret(source.pem_file, "--public-key-file"))
    if source.jwks_file is not None:
        return jwks_keys(read_secret(source.jwks_file, "--jwks-file"), secrets_allowed=True)
    return None
