"""Which keys are taken from what an issuer or an operator gives, and for which algorithms."""

from __future__ import annotations

import contextlib
import datetime
import json
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from edge.core.jwt_keys import RSA_ALGORITHMS, KeysError, jwks_keys, pem_keys, secret_keys
from tests.edge.issuer import FAMILIES, SECRET, jwk, jwks, pem, private_key


def fits(kind: str) -> frozenset[str]:
    if kind.startswith(("RS", "PS")):
        return frozenset(RSA_ALGORITHMS)
    return frozenset({"EdDSA" if kind == "Ed448" else kind})


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_key_is_for_the_algorithms_of_its_kind_and_no_others(kind: str) -> None:
    [published] = jwks_keys(jwks(jwk(kind, "k")), secrets_allowed=False).keys
    [filed] = pem_keys(pem(kind)).keys

    assert published.algorithms == filed.algorithms == fits(kind)
    assert (published.kid, filed.kid) == ("k", "")
    assert published.key == filed.key == private_key(kind).public_key()


def test_what_a_key_says_it_is_for_binds() -> None:
    found = jwks_keys(
        jwks(
            jwk("RS256", "a", alg="PS256"),
            jwk("RS256", "b", use="sig", key_ops=["verify"]),
            jwk("RS256", "c", use="enc"),
            jwk("RS256", "d", key_ops=["encrypt"]),
            jwk("RS256", "e", key_ops="verify"),
            jwk("RS256", "f", alg="HS256"),
            jwk("RS256", "g", alg="RSA-OAEP"),
            jwk("ES256", "h", alg="ES384"),
        ),
        secrets_allowed=False,
    )

    assert [(key.kid, key.algorithms) for key in found.keys] == [
        ("a", frozenset({"PS256"})),
        ("b", frozenset(RSA_ALGORITHMS)),
    ]
    assert len(found.skipped) == 6


@pytest.mark.parametrize(
    "bad",
    [
        jwk("weak"),
        jwk("RS256") | {"d": "AA"},
        jwk("RS256") | {"n": 7},
        jwk("RS256") | {"n": ""},
        jwk("RS256") | {"e": "AA"},
        jwk("ES256") | {"crv": "secp256k1"},
        jwk("ES256") | {"crv": "P-384"},
        jwk("ES256") | {"x": "AAAA"},
        jwk("EdDSA") | {"crv": "X25519"},
        jwk("HS256"),
        {"kty": "none"},
        {"kty": ["RSA"]},
        {},
        7,
        None,
        jwk("RS256", kid="k" * 257),
        jwk("RS256") | {"kid": 7},
    ],
)
def test_a_key_that_is_weak_private_secret_or_broken_is_left_out(bad: Any) -> None:
    good = jwk("ES256", "good")

    assert [key.kid for key in jwks_keys(jwks(bad, good), secrets_allowed=False).keys] == ["good"]
    with pytest.raises(KeysError, match="no key that can be used"):
        jwks_keys(jwks(bad), secrets_allowed=False)


def test_secrets_count_in_a_file_where_they_are_long_enough() -> None:
    short = {"kty": "oct", "k": "c2hvcnQ", "kid": "short"}
    found = jwks_keys(jwks(jwk("HS256", "s"), short), secrets_allowed=True)

    assert [(key.kid, key.key, sorted(key.algorithms)) for key in found.keys] == [
        ("s", SECRET, ["HS256", "HS384", "HS512"])
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": {}}', '{"keys": []}', "[" * 100_000])
def test_what_is_no_key_set_is_refused(text: str) -> None:
    with pytest.raises(KeysError):
        jwks_keys(text.encode(), secrets_allowed=True)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["RSA", "EC", "OKP", "oct"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*"nexyk", "kty", "crv", "kid", "alg", "use", "keys"]), inner, max_size=5)
        ),
        max_leaves=12,
    ),
    st.sampled_from(["ES256", "RS256", "EdDSA", "HS256"]),
    st.sampled_from([*"nexyk", "kty", "crv"]),
)
def test_no_document_makes_anything_but_keys_or_a_refusal(value: Any, kind: str, member: str) -> None:
    for document in (value, {"keys": [value]}, {"keys": [jwk(kind) | {member: value}]}):
        with contextlib.suppress(KeysError):
            assert jwks_keys(json.dumps(document).encode(), secrets_allowed=True).keys


def test_a_pem_file_may_hold_several_keys_and_certificates_and_nothing_private() -> None:
    key = private_key("ES256")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "issuer")])
    now = datetime.datetime.now(datetime.UTC)
    unsigned = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    unsigned = unsigned.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(hours=1))
    certificate = unsigned.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)

    assert [key.key for key in pem_keys(pem("RS256") + b"text\n" + pem("ES256")).keys] == [
        private_key("RS256").public_key(),
        private_key("ES256").public_key(),
    ]
    assert pem_keys(certificate).keys[0].key == key.public_key()
    private = private_key("ES256").private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for data, why in (
        (private, "a private key"),
        (pem("weak"), "1024 bits"),
        (b"", "0 public keys"),
        (pem("ES256") * 9, "9 public keys"),
        (b"-----BEGIN PUBLIC KEY-----\nAA\n-----END PUBLIC KEY-----", "cannot be read"),
    ):
        with pytest.raises(KeysError, match=why):
            pem_keys(data)


def test_a_secret_is_long_enough_and_no_key_of_another_kind() -> None:
    for algorithm, length in (("HS256", 32), ("HS384", 48), ("HS512", 64)):
        assert secret_keys(b"s" * length, (algorithm,)).keys
        with pytest.raises(KeysError, match=f"{algorithm} needs at least {length}"):
            secret_keys(b"s" * (length - 1), (algorithm,))
    with pytest.raises(KeysError, match="no algorithm of a shared secret"):
        secret_keys(SECRET, ("RS256",))
    der = private_key("RS256").public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    for secret in (pem("RS256"), pem("ES256").strip(), der, json.dumps(jwk("RS256")).encode()):
        with pytest.raises(KeysError, match="not a shared secret"):
            secret_keys(secret, ("HS256",))


def test_an_algorithm_without_a_key_is_a_mistake_of_the_settings() -> None:
    keys = pem_keys(pem("ES256"))
    keys.require_fit(("ES256",))

    with pytest.raises(KeysError, match="no key there is for RS256; its keys are for ES256"):
        keys.require_fit(("ES256", "RS256"))


def test_keys_of_the_same_source_are_the_same_and_show_no_secret() -> None:
    assert jwks_keys(jwks(jwk("RS256", "k")), secrets_allowed=True) == jwks_keys(
        jwks(jwk("RS256", "k"), 7),  # type: ignore[arg-type]  # what is left out does not count
        secrets_allowed=True,
    )
    assert "ssss" not in repr(secret_keys(SECRET, ("HS256",)))
