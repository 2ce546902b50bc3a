"""Requests whose lineage is signed, as an edge sends them to a worker."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from enginelink.envelope import LIFE_S, PURPOSE_SUBMIT, Claims, Key, Signer, prompt_sha256
from enginelink.v1 import link_pb2
from tests.worker.clients import Edge, kinds, link_tokens
from tests.worker.running import MODEL_NAME

KEY = Key("one", b"1" * 32)


def write_keys(file: Path) -> Path:
    key = {"id": KEY.key_id, "secret": base64.b64encode(KEY.secret).decode(), "sign_from": 0}
    file.write_text(json.dumps({"envelope_keys": [key]}))
    return file


def ask(edge: Edge, conversation: str, prompt: Sequence[int], parent: str = "", *, family: str = "parent") -> int:
    """One token of an answer; how many tokens of the prompt were cached."""
    _, cached = answered(edge, conversation, prompt, parent, family=family)
    return cached


def answered(
    edge: Edge, conversation: str, prompt: Sequence[int], parent: str = "", *, family: str = "parent", tokens: int = 1
) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were cached."""
    request_id = secrets.token_hex(8)
    now_s = int(time.time())
    claims = Claims(
        purpose=PURPOSE_SUBMIT,
        iss="edge",
        aud=edge.welcome.server.instance_id,
        issued_s=now_s,
        expires_s=now_s + LIFE_S,
        jti=secrets.token_hex(8),
        request_id=request_id,
        request_type="context_and_generation",
        model=MODEL_NAME,
        turn=request_id,
        family=family,
        conversation=conversation,
        parent=parent,
        prompt_sha256=prompt_sha256(np.array(prompt, "<u4").tobytes()),
    )
    handle = edge.submit(
        prompt,
        link_pb2.PHASE_AGGREGATED,
        tokens,
        request_id=request_id,
        conversation_id=conversation,
        lineage=Signer(KEY).sign(claims),
    )
    events = edge.events(handle)
    assert kinds(events)[-1] == "finished", events[-1]
    return link_tokens(events), int(events[-1].finished.usage.cached_prompt_tokens)
