"""What callers try instead of a good token, for every protocol alike."""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping

import jwt

from edge.trust_settings import Jwt
from tests.edge.issuer import AUDIENCE, FAMILIES, ISSUER, algorithm_of, jwk, pem, private_key, raw_token, token

ASYMMETRIC = tuple(sorted({algorithm_of(kind) for kind in FAMILIES}))


def by_url(url: str, **more: object) -> Jwt:
    """An issuer of every asymmetric family."""
    given: dict[str, object] = {"jwks_url": url, "algorithms": ASYMMETRIC, "issuer": ISSUER, "audience": AUDIENCE}
    return Jwt.model_validate(given | more)


def signed_by_issuer(header: Mapping[str, object], claims: Mapping[str, object]) -> str:
    """With the issuer's own RSA key, whatever the header says."""
    unsigned = raw_token(header, claims).rpartition(".")[0]
    signature = jwt.get_algorithm_by_name("RS256").sign(unsigned.encode(), private_key("RS256"))
    return raw_token(header, claims, signature)


def forgeries() -> dict[str, tuple[str, str]]:
    """What is wrong with each, the token, and the reason that the audit gives."""
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "exp": time.time() + 600}
    public = pem("RS256")
    confused = raw_token({"alg": "HS256", "kid": "RS256"}, claims)
    signed = confused.rpartition(".")[0]
    mac = hmac.digest(public, signed.encode(), "sha256")
    own = jwk("RS256", number=7)
    traversal, injection = "../../../../etc/passwd", "x' UNION SELECT 'key' -- "
    good = token("RS256", kid="RS256")
    head, body, signature = good.split(".")
    other_body = token("RS256", kid="RS256", sub="mallory").split(".")[1]
    return {
        "no algorithm": (raw_token({"alg": "none", "kid": "RS256"}, claims), "algorithm"),
        "no algorithm, in other case": (raw_token({"alg": "nOnE", "kid": "RS256"}, claims), "algorithm"),
        "no algorithm at all": (raw_token({"kid": "RS256"}, claims), "algorithm"),
        "the public key as a secret": (
            raw_token({"alg": "HS256", "kid": "RS256"}, claims, mac),
            "algorithm",
        ),
        "a key for another algorithm": (token("ES256", kid="RS256"), "algorithm"),
        "an algorithm of the same key, other signature": (
            token("ES256", kid="ES384", headers={"alg": "ES256"}),
            "algorithm",
        ),
        "another key": (token("RS256", kid="RS256", number=7), "bad signature"),
        "a key in its own header": (token("RS256", kid="RS256", number=7, headers={"jwk": own}), "bad signature"),
        "other claims": (f"{head}.{other_body}.{signature}", "bad signature"),
        "no signature": (f"{head}.{body}.", "bad signature"),
        "something critical": (token("RS256", kid="RS256", headers={"crit": ["exp"], "exp": 1}), "malformed"),
        "something critical that is known to the library": (
            signed_by_issuer({"alg": "RS256", "kid": "RS256", "crit": ["b64"], "b64": True}, claims),
            "malformed",
        ),
        "detached": (raw_token({"alg": "RS256", "kid": "RS256", "b64": False, "crit": ["b64"]}, {}), "malformed"),
        "a path as key id": (token("RS256", kid=traversal, number=7), "unknown key id"),
        "SQL as key id": (token("RS256", kid=injection, number=7), "unknown key id"),
        "a key id beyond all bounds": (token("RS256", kid="k" * 4_000), "malformed"),
        "expired": (token("RS256", kid="RS256", exp=time.time() - 6), "expired"),
        "not valid yet": (token("RS256", kid="RS256", nbf=time.time() + 60), "not yet valid"),
        "another issuer": (token("RS256", kid="RS256", iss="https://else.test"), "issuer"),
        "no issuer": (token("RS256", kid="RS256", iss=None), "issuer"),
        "another audience": (token("RS256", kid="RS256", aud="shop"), "audience"),
        "no audience": (token("RS256", kid="RS256", aud=None), "audience"),
        "no expiry": (token("RS256", kid="RS256", exp=None), "claims"),
        "no subject": (token("RS256", kid="RS256", sub=None), "claims"),
        "a tenant of another type": (token("RS256", kid="RS256", tenant=["acme"]), "claims"),
        "scopes of another type": (token("RS256", kid="RS256", scope={"affinity": True}), "claims"),
        "nothing of a token": ("a.b.c", "malformed"),
        "no token": ("kr-unknown", "unknown key"),
    }
