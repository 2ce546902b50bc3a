"""An envelope is believed for the request that it was signed for, by the worker that it was signed for, once."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from configuration.reading import SettingsError
from enginelink.envelope import LIFE_S, PURPOSE_LINK, PURPOSE_RETURN, PURPOSE_SUBMIT, Claims, Key, Signer
from worker.core.types import Phase
from worker.keys import WorkerKeys, read_keys
from worker.lineage import Envelopes, Lineage
from worker.refusal import Refused

INSTANCE = "this-start"
KEY, OTHER_KEY = Key("one", b"1" * 32), Key("two", b"2" * 32)
PROMPT = hashlib.sha256(b"the prompt").digest()
REQUEST: dict[str, Any] = {
    "request_id": "r",
    "phase": Phase.CONTEXT,
    "model": "m",
    "conversation": "child",
    "prompt_hash": PROMPT,
}


def write_keys(file: Path, *keys: Key) -> Path:
    entries = [{"id": key.key_id, "secret": base64.b64encode(key.secret).decode(), "sign_from": 0} for key in keys]
    file.write_text(json.dumps({"envelope_keys": entries}))
    return file


def sign(key: Key = KEY, **changes: Any) -> str:
    now_s = int(time.time())
    claims: dict[str, Any] = {
        "purpose": PURPOSE_SUBMIT,
        "iss": "edge",
        "aud": INSTANCE,
        "issued_s": now_s,
        "expires_s": now_s + LIFE_S,
        "jti": "1",
        "request_id": "r",
        "request_type": "context_only",
        "model": "m",
        "turn": "t",
        "family": "f",
        "conversation": "child",
        "parent": "p",
        "prompt_sha256": PROMPT.hex(),
    }
    return Signer(key).sign(Claims(**(claims | changes)))


@pytest.fixture
def envelopes(tmp_path: Path) -> Envelopes:
    return Envelopes(WorkerKeys(write_keys(tmp_path / "keys.json", KEY)), INSTANCE, required=True)


def test_a_signed_request_has_the_lineage_that_its_envelope_states(envelopes: Envelopes) -> None:
    assert envelopes.lineage_of(sign(), **REQUEST) == Lineage(parent="p", family="f", turn="t")


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": "another"},
        {"phase": Phase.AGGREGATED},
        {"model": "another"},
        {"conversation": "another"},
        {"prompt_hash": hashlib.sha256(b"another prompt").digest()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_it_is_worth_nothing_for_another_request(envelopes: Envelopes, changes: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="lineage"):
        envelopes.lineage_of(sign(), **(REQUEST | changes))


@pytest.mark.parametrize("changes", [{"aud": "an-earlier-start"}, {"purpose": PURPOSE_LINK}, {"expires_s": 1}])
def test_it_is_worth_nothing_elsewhere_later_or_for_another_purpose(
    envelopes: Envelopes, changes: dict[str, Any]
) -> None:
    with pytest.raises(Refused):
        envelopes.lineage_of(sign(**changes), **REQUEST)


def test_it_is_believed_once(envelopes: Envelopes) -> None:
    envelope = sign()
    envelopes.lineage_of(envelope, **REQUEST)

    with pytest.raises(Refused):
        envelopes.lineage_of(envelope, **REQUEST)


def returned(**changes: Any) -> str:
    return sign(**({"purpose": PURPOSE_RETURN, "conversation": "parent", "parent": "", "prompt_sha256": ""} | changes))


def test_a_signed_return_names_the_turn(envelopes: Envelopes) -> None:
    assert envelopes.returned_turn(returned(), "parent") == "t"


@pytest.mark.parametrize(
    "changes",
    [
        {"conversation": "another"},
        {"aud": "an-earlier-start"},
        {"expires_s": 1},
        {"purpose": PURPOSE_SUBMIT},
        {"key": OTHER_KEY},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_return_that_is_not_signed_for_this_is_refused(envelopes: Envelopes, changes: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        envelopes.returned_turn(returned(**changes), "parent")


def test_a_return_is_believed_once_and_never_unsigned(envelopes: Envelopes) -> None:
    envelope = returned()
    envelopes.returned_turn(envelope, "parent")

    for refused in (envelope, ""):
        with pytest.raises(Refused):
            envelopes.returned_turn(refused, "parent")


def test_a_link_needs_an_envelope_only_where_others_reach_the_listener(envelopes: Envelopes) -> None:
    with pytest.raises(Refused):
        envelopes.require_link("")

    envelopes.require_link(sign(purpose=PURPOSE_LINK))
    Envelopes(WorkerKeys(None), INSTANCE, required=False).require_link("")


def test_a_key_that_is_added_later_is_found(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys.json", KEY)
    envelopes = Envelopes(WorkerKeys(file, reread_s=0.0), INSTANCE, required=True)
    with pytest.raises(Refused):
        envelopes.lineage_of(sign(OTHER_KEY), **REQUEST)

    write_keys(file, KEY, OTHER_KEY)

    assert envelopes.lineage_of(sign(OTHER_KEY), **REQUEST).parent == "p"


def test_a_key_that_is_taken_out_of_the_file_is_worth_nothing_any_more(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys.json", KEY, OTHER_KEY)
    envelopes = Envelopes(WorkerKeys(file, reread_s=0.0), INSTANCE, required=True)
    envelopes.lineage_of(sign(), **REQUEST)

    write_keys(file, OTHER_KEY)

    with pytest.raises(Refused):
        envelopes.lineage_of(sign(jti="2"), **REQUEST)


def test_a_file_that_becomes_unusable_leaves_the_keys_as_they_were(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys.json", KEY)
    envelopes = Envelopes(WorkerKeys(file, reread_s=0.0), INSTANCE, required=True)

    file.write_text("half a file")

    assert envelopes.lineage_of(sign(), **REQUEST).parent == "p"


def test_a_file_without_usable_keys_is_named(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"envelope_keys": [{"id": "short", "secret": "AAAA"}]}')

    with pytest.raises(SettingsError, match=r"keys\.json', which holds no envelope keys: signing key short"):
        read_keys(file)
