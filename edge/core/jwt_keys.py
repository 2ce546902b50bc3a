"""The keys that tokens are verified with: of a JWKS, of PEM, or one shared secret. Pure.

A key is bound to the algorithms of its own kind as it is read, so that no header of a token can make an HMAC secret of
a public key, or choose anything but one of our keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jwt
import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

RSA_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
EC_ALGORITHMS = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
SECRET_BYTES = {"HS256": 32, "HS384": 48, "HS512": 64}
"""The least length of a secret: that of the hash (RFC 7518, section 3.2)."""
ASYMMETRIC = (*RSA_ALGORITHMS, *EC_ALGORITHMS.values(), "EdDSA")
ALGORITHMS = (*ASYMMETRIC, *SECRET_BYTES)
ANY_OF_KIND = {"RSA": "RS256", "EC": "ES256", "OKP": "EdDSA", "oct": "HS256"}
"""By the kind of a JWK an algorithm of it: how its members are read is the same for all of a kind."""
MIN_RSA_BITS, MAX_RSA_BITS = 2048, 8192
MAX_KEYS = 100
MAX_KID_CHARS = 256
MAX_TRIED = 8

PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | ed448.Ed448PublicKey
_PUBLIC_MEMBERS = ("kty", "crv", "n", "e", "x", "y")
_PEM = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.+?-----END \1-----", re.DOTALL)


class KeysError(ValueError):
    """Raised when a source of keys cannot be used; says what is wrong with it, never what a secret is."""


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """`kid`: empty where the source gives it no name. `key`: an HMAC secret if it is bytes."""

    kid: str
    algorithms: frozenset[str]
    key: PublicKey | bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeySet:
    """`skipped`: why keys of the source are not used, for the log."""

    keys: tuple[VerifyKey, ...] = ()
    skipped: tuple[str, ...] = field(default=(), compare=False)

    def candidates(self, kid: str, algorithm: str) -> Iterator[VerifyKey]:
        """Those that may have signed: by its name, where both the token and the key have one; 8 at most."""
        fitting = (
            key for key in self.keys if algorithm in key.algorithms and (not kid or not key.kid or key.kid == kid)
        )
        return (key for key, _ in zip(fitting, range(MAX_TRIED), strict=False))

    def names(self, kid: str) -> bool:
        return any(key.kid == kid for key in self.keys)

    def require_fit(self, algorithms: Iterable[str]) -> None:
        """Raises KeysError unless some key can be used with each of `algorithms`."""
        for algorithm in algorithms:
            if not any(algorithm in key.algorithms for key in self.keys):
                have = sorted({one for key in self.keys for one in key.algorithms})
                raise KeysError(f"no key there is for {algorithm}; its keys are for {', '.join(have) or 'nothing'}")


def secret_keys(secret: bytes, algorithms: Sequence[str]) -> KeySet:
    """One shared secret. Raises KeysError where it is too short for one of `algorithms`, or a key of another kind."""
    _require_secret(secret)
    for algorithm in algorithms:
        least = SECRET_BYTES.get(algorithm)
        if least is None:
            raise KeysError(f"{algorithm} is no algorithm of a shared secret: {', '.join(SECRET_BYTES)}")
        if len(secret) < least:
            raise KeysError(f"the secret has {len(secret)} bytes: {algorithm} needs at least {least}")
    return KeySet((VerifyKey("", frozenset(algorithms), secret),))


def pem_keys(data: bytes) -> KeySet:
    """Public keys or certificates, one after the other; of a certificate the key alone. Raises KeysError."""
    keys = []
    for block in _PEM.finditer(data):
        kind = block[1].decode()
        if "PRIVATE" in kind:
            raise KeysError("it holds a private key: only its public key belongs here")
        try:
            if kind == "CERTIFICATE":
                public: object = x509.load_pem_x509_certificate(block[0]).public_key()
            else:
                public = load_pem_public_key(block[0])
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise KeysError(f"its {kind.lower()} cannot be read") from error
        keys.append(_bound("", public))
    if not 0 < len(keys) <= MAX_TRIED:
        raise KeysError(f"it holds {len(keys)} public keys in PEM: 1 to {MAX_TRIED}")
    return KeySet(tuple(keys))


def jwks_keys(data: bytes, *, secrets_allowed: bool) -> KeySet:
    """A JSON Web Key Set (RFC 7517); what is not for verifying signatures, weak or private is skipped.

    `secrets_allowed`: whether `oct` keys count: in a file they may, published they are no secrets. Raises KeysError
    where nothing is left.
    """
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise KeysError("it is no JSON") from error
    found = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(found, list):
        raise KeysError('it is no JWKS: {"keys": [...]}')
    if len(found) > MAX_KEYS:
        raise KeysError(f"it holds {len(found)} keys: at most {MAX_KEYS}")
    keys, skipped = [], []
    for number, jwk in enumerate(found):
        try:
            keys.append(_of_jwk(jwk, secrets_allowed=secrets_allowed))
        except KeysError as error:
            skipped.append(f"key {number}: {error}")
    if not keys:
        raise KeysError(f"it holds no key that can be used ({'; '.join(skipped[:5]) or 'it is empty'})")
    return KeySet(tuple(keys), tuple(skipped))


def _of_jwk(jwk: object, *, secrets_allowed: bool) -> VerifyKey:
    if not isinstance(jwk, dict):
        raise KeysError("no JSON object")
    kid, kind = jwk.get("kid", ""), jwk.get("kty")
    if not isinstance(kid, str) or len(kid) > MAX_KID_CHARS:
        raise KeysError(f"kid is no text of at most {MAX_KID_CHARS} characters")
    if not isinstance(kind, str) or kind not in ANY_OF_KIND:
        raise KeysError(f"kty is none of {', '.join(ANY_OF_KIND)}")
    _require_for_verifying(jwk)
    if kind == "oct":
        if not secrets_allowed:
            raise KeysError("a published secret is none")
        key = _of_secret(kid, _material(kind, {"kty": kind, "k": jwk.get("k")}))
    else:
        if "d" in jwk:
            raise KeysError("a private key")
        key = _bound(kid, _material(kind, {name: jwk[name] for name in _PUBLIC_MEMBERS if name in jwk}))
    if "alg" not in jwk:
        return key
    algorithm = jwk["alg"]
    if not isinstance(algorithm, str) or algorithm not in key.algorithms:
        raise KeysError(f"alg does not fit a key of kind {kind}")
    return VerifyKey(key.kid, frozenset({algorithm}), key.key)


def _require_for_verifying(jwk: Mapping[str, Any]) -> None:
    if jwk.get("use", "sig") != "sig":
        raise KeysError("use is not sig")
    operations = jwk.get("key_ops", ["verify"])
    if not isinstance(operations, list) or "verify" not in operations:
        raise KeysError("key_ops does not hold verify")


def _material(kind: str, members: dict[str, Any]) -> Any:
    try:
        return jwt.get_algorithm_by_name(ANY_OF_KIND[kind]).from_jwk(members)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, UnsupportedAlgorithm) as error:
        raise KeysError("its members make no key") from error


def _of_secret(kid: str, secret: bytes) -> VerifyKey:
    _require_secret(secret)
    algorithms = frozenset(name for name, least in SECRET_BYTES.items() if len(secret) >= least)
    if not algorithms:
        raise KeysError(f"a secret of {len(secret)} bytes: at least {min(SECRET_BYTES.values())}")
    return VerifyKey(kid, algorithms, secret)


def _bound(kid: str, key: object) -> VerifyKey:
    """`key` for the algorithms of its own kind. Raises KeysError for a weak one, or one of another kind."""
    match key:
        case rsa.RSAPublicKey():
            if not MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS:
                raise KeysError(f"an RSA key of {key.key_size} bits: {MIN_RSA_BITS} to {MAX_RSA_BITS}")
            return VerifyKey(kid, frozenset(RSA_ALGORITHMS), key)
        case ec.EllipticCurvePublicKey():
            algorithm = EC_ALGORITHMS.get(key.curve.name)
            if algorithm is None:
                raise KeysError(f"a key on the curve {key.curve.name}: {', '.join(EC_ALGORITHMS)}")
            return VerifyKey(kid, frozenset({algorithm}), key)
        case ed25519.Ed25519PublicKey() | ed448.Ed448PublicKey():
            return VerifyKey(kid, frozenset({"EdDSA"}), key)
    raise KeysError("a key that is neither RSA, EC nor EdDSA")


def _require_secret(secret: bytes) -> None:
    """Raises KeysError where `secret` is a key of another kind, which others may know."""
    try:
        jwt.get_algorithm_by_name("HS256").prepare_key(secret)
    except jwt.InvalidKeyError as error:
        raise KeysError("it is a public or private key, not a shared secret") from error
