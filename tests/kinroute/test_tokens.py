"""`kinroute token`: what is minted is what an edge believes, and inspecting says why it does not."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
import yaml
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from edge.core.lineage_token import LineageTokens
from edge.core.namespace import Namespace
from edge.core.types import Principal
from edge.keyring import Keyring
from kinroute.__main__ import main
from tests.edge.issuer import FAMILIES, SECRET, algorithm_of, jwk, jwks, pem, private_key, token


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["token", *arguments])
    said = capsys.readouterr()
    return code, said.out + said.err


def private_jwks(kind: str, kid: str) -> dict[str, Any]:
    algorithm = jwt.get_algorithm_by_name(algorithm_of(kind))
    return {"keys": [jwk("RS256", "public"), algorithm.to_jwk(private_key(kind), as_dict=True) | {"kid": kid}]}


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    return file


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if not kind.startswith(("RS3", "RS5", "PS3", "PS5"))])
def test_a_token_of_every_kind_of_key_verifies(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    private, public, both = tmp_path / "private.pem", tmp_path / "public.pem", tmp_path / "jwks.json"
    private.write_bytes(private_key(kind).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(pem(kind))
    both.write_text(json.dumps(private_jwks(kind, "mine")))
    for source in (("--key-file", str(private), "--kid", "mine"), ("--jwks-file", str(both), "--kid", "mine")):
        code, minted = run(capsys, "mint", *source, "--alg", algorithm_of(kind), "--subject", "ann", "--tenant", "acme")
        assert code == 0, minted
        claims = jwt.decode(minted.strip(), private_key(kind).public_key(), [algorithm_of(kind)])
        assert (claims["sub"], claims["tenant"]) == ("ann", "acme")
        code, said = run(capsys, "inspect", minted.strip(), "--public-key-file", str(public))
        assert (code, said.splitlines()[-1]) == (0, "believed: tenant acme, subject ann, scopes none")


def test_what_is_asked_for_is_in_the_token(capsys: pytest.CaptureFixture[str], secret_file: Path) -> None:
    now_s = time.time()
    _, minted = run(
        capsys,
        "mint",
        *("--secret-file", str(secret_file), "--subject", "ann", "--scope", "affinity", "--scope", "operator"),
        *("--expires", "2h", "--issuer", "https://us", "--audience", "edge", "--alg", "HS512", "--kid", "k"),
        *("--claim", 'realm_access={"roles": ["x"]}', "--claim", "note=plain text"),
    )

    assert jwt.get_unverified_header(minted.strip()) == {"alg": "HS512", "kid": "k", "typ": "JWT"}
    claims = jwt.decode(minted.strip(), SECRET, ["HS512"], audience="edge")
    assert now_s + 7_199 <= claims.pop("exp") <= now_s + 7_202
    claims.pop("iat")
    assert claims == {
        "sub": "ann",
        "scope": "affinity operator",
        "iss": "https://us",
        "aud": "edge",
        "realm_access": {"roles": ["x"]},
        "note": "plain text",
    }


def test_times_are_told_in_words_and_without_a_key_nothing_is_judged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"Bearer {token(exp=time.time() + 7_300, nbf=0)}\n"))
    code, said = run(capsys, "inspect")

    assert code == 0
    assert "UTC, in 2 hours" in said
    assert "nbf 1970-01-01 00:00:00 UTC" in said
    assert said.endswith("not verified: no key was given\n")


@pytest.mark.parametrize(
    ("algorithm", "claims", "arguments", "reason"),
    [
        ("HS256", {"exp": 1}, (), "expired"),
        ("RS256", {}, (), "algorithm"),
        ("HS256", {}, ("--audience", "other"), "audience"),
        ("HS256", {}, ("--issuer", "https://other"), "issuer"),
        ("HS256", {"sub": None}, (), "claims"),
    ],
)
def test_why_a_token_is_refused_is_told_to_whoever_has_the_key(
    capsys: pytest.CaptureFixture[str],
    secret_file: Path,
    algorithm: str,
    claims: dict[str, Any],
    arguments: tuple[str, ...],
    reason: str,
) -> None:
    made = token(algorithm, **claims)
    audience = () if "--audience" in arguments else ("--audience", "kinroute")
    code, said = run(capsys, "inspect", made, "--secret-file", str(secret_file), *arguments, *audience)

    assert (code, said.splitlines()[-1]) == (1, f"refused: {reason}")


def test_an_edges_own_configuration_judges_as_it_would(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "jwks.json").write_bytes(jwks(jwk("ES256", "k")))
    auth = {"jwt": {"jwks_file": str(tmp_path / "jwks.json"), "algorithms": ["ES256"], "claims": {"scopes": "roles"}}}
    config = tmp_path / "edge.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "model": {"name": "m", "path": "/m"},
                "generation_servers": ["127.0.0.1:1"],
                "keys_file": "/k",
                "auth": auth,
            }
        )
    )
    made = token("ES256", kid="k", roles=["operator"], aud=None)
    code, said = run(capsys, "inspect", made, "--config", str(config))

    assert (code, said.splitlines()[-1]) == (0, "believed: tenant acme, subject ann, scopes operator")
    code, said = run(capsys, "inspect", token("ES256", kid="other"), "--config", str(config))
    assert (code, said.splitlines()[-1]) == (1, "refused: unknown key id")


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (b"short", ("--secret-file",), "the secret has 5 bytes: HS256 needs at least 32"),
        (pem("RS256"), ("--secret-file",), "not a shared secret"),
        (pem("RS256"), ("--key-file",), "no private key"),
        (jwks(jwk("RS256", "k")), ("--jwks-file",), "no such private key"),
        (b"[]", ("--jwks-file",), "no private key"),
        (SECRET, ("--alg", "RS256", "--secret-file"), "cannot sign RS256"),
    ],
)
def test_what_makes_no_token_says_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, arguments: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    code, shown = run(capsys, "mint", "--subject", "ann", *arguments, str(file))

    assert code == 1
    assert said in shown


def test_a_lineage_token_is_what_edges_give_and_take(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keyring = Keyring.create(file)
    common = ("--keys-file", str(file))
    _, minted = run(capsys, "lineage", "mint", "--tenant", "acme", "--subject", "ann", "--conversation", "c", *common)

    stated = LineageTokens(keyring.lineage_keys).verify(minted.strip(), "acme", time.time())
    assert stated.conversation == Namespace(keyring.id_key).conversation(Principal("acme", "ann", frozenset()), "c")
    code, said = run(capsys, "lineage", "inspect", minted.strip(), *common)
    assert (code, said.splitlines()[-1]) == (0, f"believed from tenant acme: a child of {stated.conversation}")
    code, said = run(capsys, "lineage", "inspect", minted.strip(), "--tenant", "other", *common)
    assert (code, said.splitlines()[-1]) == (1, "refused: another tenant")
    for broken in ("x", "a.b.c", "W10.W10.x"):
        code, said = run(capsys, "lineage", "inspect", broken, *common)
        assert (code, said) == (1, "This is no token.\n")
