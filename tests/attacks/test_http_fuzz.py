"""Dice against the HTTP listener of a real edge: headers, credentials, lineage tokens, bodies. Never a 500."""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from edge.core.headers import HeaderNames
from edge.core.lineage_token import TYP
from enginelink.compact_jwt import CompactSigner
from tests.attacks.callers import ANN, BOB, CALLERS, EVE, ISSUER, MARK, PLAIN, PROMPT
from tests.attacks.doors import BODY, MODEL, Doors, Reply

EXAMPLES = 100
JSON = (b"content-type", b"application/json")
RAW = json.dumps(BODY).encode()
REFUSALS = {400, 401, 403, 404, 408, 413, 415, 429, 431}

bounded = hypothesis.settings(
    max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def require_fair(reply: Reply) -> None:
    """An answer, or a refusal in OpenAI's shape that does not quote a key."""
    assert reply.status == 200 or reply.status in REFUSALS, (reply.status, reply.body[:500])
    if reply.status != 200:
        assert reply.error.keys() == {"message", "type", "param", "code"}
        assert MARK.encode() not in reply.body, "a refusal quotes a key"


# Names in every spelling, values that are right, long, wrong and no text.
NAMES = [
    name
    for value in dataclasses.astuple(HeaderNames())
    for name in (value if isinstance(value, tuple) else (value,))
    if name
]
INTERNAL = ["x-trtllm-subagent-affinity-id", "openengine-priority", "kinroute-lineage", "x-kinroute-internal-tenant"]
OTHERS = ["x-api-key", "authorization", "x-request-id", "traceparent", "tracestate", "cookie", "expect", "range"]


@st.composite
def header_names(draw: st.DrawFn) -> bytes:
    name = draw(st.sampled_from(NAMES * 2 + INTERNAL + OTHERS))
    spell = draw(st.sampled_from((str.lower, str.upper, str.title)))
    dash = draw(st.sampled_from("-_"))
    return spell(name).replace("-", dash).encode()


VALUES = st.one_of(
    st.sampled_from((b"a", b"b", b"root", b"true", b"false", b"", b" a ", b"compact", b"a" * 257, b"a" * 3000)),
    st.sampled_from([f"Bearer {caller.key}".encode() for caller in CALLERS]),
    st.binary(max_size=40).filter(lambda value: b"\r" not in value and b"\n" not in value),
    st.text(max_size=20).map(lambda text: text.encode(errors="replace").replace(b"\r", b"").replace(b"\n", b"")),
)


@bounded
@hypothesis.given(st.lists(st.tuples(header_names(), VALUES), max_size=6), st.sampled_from((ANN, EVE, PLAIN)))
def fuzz_headers(doors: Doors, headers: list[tuple[bytes, bytes]], caller: Any) -> None:
    own = (b"authorization", f"Bearer {caller.key}".encode())
    require_fair(doors.send([JSON, own, *headers], RAW))


def test_any_headers_are_served_or_refused(doors: Doors) -> None:
    fuzz_headers(doors)


@st.composite
def mangled(draw: st.DrawFn, token: str) -> str:
    """A token of which something is not as it was."""
    parts = token.split(".")
    match draw(st.integers(0, 5)):
        case 0:
            at = draw(st.integers(0, len(token) - 1))
            return token[:at] + draw(st.sampled_from("Aa0_-.=")) + token[at + 1 :]
        case 1:
            return token[: draw(st.integers(0, len(token)))]
        case 2:
            return ".".join(draw(st.permutations(parts)))
        case 3:
            header = draw(st.sampled_from(({"alg": "none"}, {"alg": "None", "typ": "JWT"}, {"alg": "HS512"}, [], 1)))
            return ".".join((_encoded(header), parts[1], draw(st.sampled_from(("", parts[2])))))
        case 4:
            return token + draw(st.sampled_from((".", "..", ".e30", "=", token)))
        case _:
            return ".".join((parts[0], _encoded(draw(CLAIMS)), parts[2]))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CLAIM_NAMES = ("sub", "tenant", "scope", "exp", "nbf", "iat", "iss", "aud", "family", "conversation", "depth", "limits")
CLAIMS = st.dictionaries(st.sampled_from(CLAIM_NAMES), ANYTHING, max_size=8)


def _read(token: str) -> list[bytes]:
    """What a lenient reader takes it for: bits beyond the last byte say nothing."""
    return [base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in token.split(".")]


def _same(token: str, right: str) -> bool:
    try:
        return "=" not in token and _read(token) == _read(right)
    except ValueError:
        return False


def _encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def _believable(claims: dict[str, Any]) -> dict[str, Any]:
    now_s = int(time.time())
    return {"sub": "sue", "tenant": "acme", "iss": ISSUER, "iat": now_s, "exp": now_s + 60} | claims


def test_a_token_with_something_changed_is_never_believed(doors: Doors) -> None:
    right = doors.issuer.sign(_believable({}))

    @bounded
    @hypothesis.given(mangled(right), st.booleans())
    def fuzz(token: str, as_bearer: bool) -> None:
        hypothesis.assume(not _same(token, right))
        name, value = (b"authorization", f"Bearer {token}") if as_bearer else (b"x-api-key", token)
        reply = doors.send([JSON, (name, value.encode())], RAW)
        assert reply.status == 401, "something changed, and it is still believed"

    assert doors.send([JSON, (b"authorization", f"Bearer {right}".encode())], RAW).status == 200
    fuzz()


def test_a_token_that_is_signed_may_claim_anything(doors: Doors) -> None:
    @bounded
    @hypothesis.given(CLAIMS)
    def fuzz(claims: dict[str, Any]) -> None:
        token = doors.issuer.sign(_believable(claims))
        require_fair(doors.send([JSON, (b"authorization", f"Bearer {token}".encode())], RAW))

    fuzz()


def test_a_lineage_token_with_something_changed_is_never_believed(doors: Doors) -> None:
    parent = doors.ask(ANN, {"X-Kinroute-Conversation-ID": "root"})
    right = parent.headers["x-kinroute-lineage"]
    child = doors.ask(BOB, {"X-Kinroute-Lineage": right})
    assert json.loads(child.headers["x-kinroute-receipt"])["conversation"]

    @bounded
    @hypothesis.given(mangled(right))
    def fuzz(token: str) -> None:
        hypothesis.assume(token not in (right, ""))
        reply = doors.send(
            [JSON, (b"authorization", f"Bearer {BOB.key}".encode()), (b"x-kinroute-lineage", token.encode())], RAW
        )
        assert reply.status == 400, "something changed, and it is still believed"
        assert reply.error["param"] == "x-kinroute-lineage"

    fuzz()


def test_a_lineage_token_that_is_signed_may_state_anything(doors: Doors) -> None:
    signer = CompactSigner(doors.system.keyring.lineage_keys[0], TYP)

    @bounded
    @hypothesis.given(CLAIMS)
    def fuzz(claims: dict[str, Any]) -> None:
        whole = {"family": "f", "conversation": "c", "depth": 0} | _believable(claims)
        token = signer.sign(json.dumps(whole).encode())
        headers = [JSON, (b"authorization", f"Bearer {BOB.key}".encode()), (b"x-kinroute-lineage", token.encode())]
        require_fair(doors.send(headers, RAW))

    fuzz()


FIELDS = (
    "messages", "prompt", "tools", "tool_choice", "n", "stop", "max_tokens", "min_tokens", "temperature", "top_p",
    "seed", "logprobs", "top_logprobs", "stream", "stream_options", "stop_token_ids", "cache_salt", "prompt_cache_key",
    "conversation_params", "kv_cache_retention_config", "response_format", "chat_template", "logit_bias", "best_of",
    "suffix", "echo", "user", "modalities", "functions", "parallel_tool_calls", "top_k", "repetition_penalty",
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("user", "assistant", "system", "tool", "developer"))},
        optional={"content": ANYTHING, "tool_calls": ANYTHING, "name": ANYTHING},
    ),
    min_size=1,
    max_size=3,
)
BODIES = st.builds(
    lambda odd, messages: BODY | {"messages": messages} | odd,
    st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4),
    MESSAGES,
)


@bounded
@hypothesis.given(
    st.one_of(
        BODIES.map(lambda body: json.dumps(body).encode()),
        st.binary(max_size=60),
        ANYTHING.map(json.dumps).map(str.encode),
    ),
    st.sampled_from(("/v1/chat/completions", "/v1/completions")),
)
def fuzz_bodies(doors: Doors, body: bytes, path: str) -> None:
    require_fair(doors.send([JSON, (b"authorization", f"Bearer {ANN.key}".encode())], body, path))


def test_any_body_is_served_or_refused(doors: Doors) -> None:
    fuzz_bodies(doors)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": PROMPT},
        {"stop": [PROMPT * 100]},
        {"messages": [{"role": PROMPT, "content": "x"}]},
        {"tools": [{"type": PROMPT}]},
        {"conversation_params": {"conversation_id": PROMPT + "\0"}},
        {"kv_cache_retention_config": {PROMPT: 1}},
        {"tool_choice": PROMPT},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_a_refused_request_says_is_not_logged(doors: Doors, changes: dict[str, Any]) -> None:
    assert doors.ask(ANN, **changes).status_code in (400, 404)


def test_a_key_in_the_wrong_place_is_not_logged(doors: Doors) -> None:
    path = f"/v1/models/{ANN.key}"
    with doors.client(ANN) as client:
        assert client.get(path).status_code == 404
        assert client.get(f"/{ANN.key}?key={ANN.key}").status_code == 404
    assert doors.ask(ANN, model=ANN.key).status_code == 404
    assert doors.ask(ANN, {"x-request-id": "fine"}, model=MODEL).status_code == 200
