"""What trust costs a request: CPU of each part, on one core, and of all that an edge and a worker do for it.

Per request at the edge: authentication by a token that was seen before, the hashes of its ids and of its cache salt,
one envelope, the conversation's own lineage token; for a child its parent's token is verified too. On the worker the
envelope is verified, beside the hash of the prompt. Beside our tokens the same claims signed and verified by PyJWT.
Medians of many rounds, in microseconds.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import jwt
import msgspec
from prometheus_client import CollectorRegistry

from edge.audit import Audit
from edge.core.auth import Authenticator
from edge.core.headers import HeaderFamilies
from edge.core.jwt_keys import secret_keys
from edge.core.jwt_rules import JwtRules
from edge.core.kinship import Kinship
from edge.core.life_events import Phase
from edge.core.lineage import Lineages
from edge.core.lineage_token import LineageTokens
from edge.core.namespace import Namespace
from edge.core.prompt_hashes import PromptHashes
from edge.core.types import ConversationKey, Principal, SamplingOptions, Scope, StopOptions, TenantLimits, TurnId
from edge.identity import Identified, Identities
from edge.keyring import Keyring
from edge.legs import LegOrder
from edge.signing import EnvelopeSigner
from enginelink.envelope import Claims, ReplayGuard, Signer, Verifier, prompt_sha256

ROUNDS = 40
CALLS = 500
LONG_TOKENS = 142_000
TURN_TOKENS = 500
INSTANCE = "instance-1"
HEADERS = [
    ("host", "127.0.0.1:8000"),
    ("user-agent", "claude-cli/2.1"),
    ("accept", "application/json"),
    ("content-type", "application/json"),
    ("x-claude-code-session-id", "0b6f7c1e-2f8e-4f5d-9a3b-6d1f0c9e8a77"),
    ("x-claude-code-agent-id", "explore-1"),
]


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        keyring = Keyring.open(Path(folder) / "keys.json")
    return {"what": "trust", "rounds": ROUNDS, **_request(keyring), "long_prompt": _hashing(), "pyjwt": _pyjwt(keyring)}


def _request(keyring: Keyring) -> dict[str, Any]:
    """Every part of one request of a child, what they add up to, and the whole as the edge does it."""
    stored = keyring.api_keys[0]
    principal, now_s = Principal("acme", "alice", frozenset({Scope.AFFINITY}), stored.id), time.time()
    secret = secrets.token_bytes(32)
    authenticator = Authenticator({stored.sha256: principal}, JwtRules(("HS256",)), secret_keys(secret, ("HS256",)))
    claims = {"sub": "alice", "tenant": "acme", "scope": "affinity", "exp": int(now_s) + 3_600}
    bearer, api_key = f"Bearer {jwt.encode(claims, secret, 'HS256')}", f"Bearer {keyring.local_key}"
    namespace, tokens = Namespace(keyring.id_key), LineageTokens(keyring.lineage_keys)
    limits = TenantLimits(conversations=16_384, children=1_024)
    lineages, families = Lineages(namespace, tokens, Kinship(limits, 16)), HeaderFamilies()
    identities = Identities(authenticator, families, lineages, Audit(CollectorRegistry()))
    raw = [*HEADERS, ("authorization", bearer)]
    caller = _now(identities.identify(raw))

    def believed() -> Any:
        return identities.lineage(caller, body_conversation=None, cache_key=None, content=bytes)

    child = believed()
    signer = EnvelopeSigner("edge-1", keyring.envelope_keys)
    order = LegOrder(
        request_id=secrets.token_hex(16) + "-1",
        turn_id=TurnId(secrets.token_hex(16)),
        phase=Phase.CONTEXT,
        model="m",
        token_ids=bytes(4 * TURN_TOKENS),
        sampling=SamplingOptions(),
        stops=StopOptions(max_tokens=1),
        lineage=child.lineage,
        tenant="acme",
        cache_salt="s",
    )
    session = "0b6f7c1e-2f8e-4f5d-9a3b-6d1f0c9e8a77"

    def hash_ids() -> None:
        for one in (session, f"{session}\0explore-1", session):
            namespace.conversation(principal, one)
        namespace.salt(principal)

    edge_us = {
        "authentication": _us(lambda: authenticator.authenticate(bearer, None, now_s)),
        "id_hashes": _us(hash_ids),
        "envelope": _us(lambda: signer.leg(order, INSTANCE)),
        "lineage_token": _us(lambda: tokens.issue("acme", child.lineage, now_s)),
    }

    def whole() -> None:
        mine = _now(identities.identify(raw))
        identities.lineage(mine, body_conversation=None, cache_key=None, content=bytes)
        identities.cache_salt(mine, "")
        signer.leg(order, INSTANCE)

    return {
        **{f"{name}_us": value for name, value in edge_us.items()},
        "sum_us": sum(edge_us.values()),
        "authentication_by_api_key_us": _us(lambda: authenticator.authenticate(api_key, None, now_s)),
        "with_headers_claims_and_limits_us": _us(whole),
        "verified_lineage_token_us": _us(lambda: tokens.verify(child.token, "acme", now_s)),
        "worker_verification_us": _worker_us(keyring),
    }


def _worker_us(keyring: Keyring) -> float:
    """Of an envelope that is new each time, with its prompt's hash at hand."""
    [key] = keyring.envelope_keys
    claims, signer = _claims(), Signer(key)
    verifier = Verifier([key], INSTANCE, ReplayGuard())
    envelopes = iter([signer.sign(msgspec.structs.replace(claims, jti=str(n))) for n in range(ROUNDS * CALLS + CALLS)])
    expected = {
        "purpose": "submit",
        "request_id": claims.request_id,
        "request_type": claims.request_type,
        "model": claims.model,
        "conversation": claims.conversation,
        "prompt_sha256": claims.prompt_sha256,
    }
    return _us(lambda: verifier.verify(next(envelopes), claims.issued_s, **expected))


def _claims() -> Claims:
    now = int(time.time())
    return Claims(
        purpose="submit",
        iss="edge-" + secrets.token_hex(8),
        aud=INSTANCE,
        issued_s=now,
        expires_s=now + 60,
        jti=secrets.token_hex(8),
        request_id=secrets.token_hex(16) + "-1",
        request_type="context_only",
        model="m",
        turn=secrets.token_hex(16),
        tenant="acme",
        family=secrets.token_hex(16),
        conversation=secrets.token_hex(16),
        parent=secrets.token_hex(16),
        depth=1,
        prompt_sha256=prompt_sha256(b""),
    )


def _hashing() -> list[dict[str, Any]]:
    """The hash of a long prompt: whole, and where the conversation's last one was a turn shorter."""
    last = secrets.token_bytes(4 * LONG_TOKENS)
    turns = [last]
    for _ in range(ROUNDS + 1):
        turns.append(turns[-1] + secrets.token_bytes(4 * TURN_TOKENS))
    hashes, conversation = PromptHashes(), ConversationKey(secrets.token_hex(16))
    coming = iter(turns[1:])
    hashes.sha256(conversation, last)
    extended_us = _us(lambda: hashes.sha256(conversation, next(coming)), calls=1, warm=1)
    return [
        {
            "tokens": LONG_TOKENS,
            "whole_us": _us(lambda: hashlib.sha256(last).hexdigest(), calls=1),
            "extended_by": TURN_TOKENS,
            "extended_us": extended_us,
            "again_us": _us(lambda: hashes.sha256(conversation, turns[-1]), calls=1),
        }
    ]


def _pyjwt(keyring: Keyring) -> list[dict[str, Any]]:
    """The same claims, signed and verified by ours and by PyJWT."""
    [key] = keyring.lineage_keys
    now_s = time.time()
    principal = Principal("acme", "alice", frozenset({Scope.AFFINITY}))
    lineages = Lineages(Namespace(keyring.id_key), LineageTokens([key]), Kinship(TenantLimits(), 16))
    claim = HeaderFamilies().read(dict(HEADERS))
    believed = lineages.believe(claim, None, principal, b"", now_s)
    tokens = lineages.tokens
    claims = jwt.decode(believed.token, key.secret, ["HS256"])
    envelope, signer = _claims(), Signer(key)
    members = msgspec.to_builtins(envelope)
    sign = functools.partial(jwt.encode, key=key.secret, algorithm="HS256", headers={"kid": key.key_id})
    signed = sign(members)
    return [
        {
            "what": "lineage token",
            "sign_us": _us(lambda: tokens.issue("acme", believed.lineage, now_s)),
            "pyjwt_sign_us": _us(lambda: sign(claims)),
            "verify_us": _us(lambda: tokens.verify(believed.token, "acme", now_s)),
            "pyjwt_verify_us": _us(lambda: jwt.decode(believed.token, key.secret, ["HS256"])),
        },
        {
            "what": "envelope",
            "sign_us": _us(lambda: signer.sign(envelope)),
            "pyjwt_sign_us": _us(lambda: sign(members)),
            "verify_us": _worker_us(keyring),
            "pyjwt_verify_us": _us(lambda: jwt.decode(signed, key.secret, ["HS256"], audience=INSTANCE)),
        },
    ]


def _now(ready: Coroutine[Any, Any, Identified]) -> Identified:
    """What it returns, without a loop: a credential that is known waits for nothing."""
    try:
        ready.send(None)
    except StopIteration as end:
        identified: Identified = end.value
        return identified
    raise AssertionError("it waits")


def _us(call: Callable[[], object], calls: int = CALLS, warm: int = CALLS) -> float:
    """Median over the rounds of the CPU time of one call."""
    for _ in range(min(warm, calls)):
        call()
    gc.collect()
    gc.disable()
    try:
        rounds = []
        for _ in range(ROUNDS):
            begun_s = time.thread_time()
            for _ in range(calls):
                call()
            rounds.append((time.thread_time() - begun_s) / calls)
    finally:
        gc.enable()
    return 1e6 * statistics.median(rounds)
