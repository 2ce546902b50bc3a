"""From a request on the wire to a `Request` of the core, or a refusal that names the field."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from enginelink import generate_rules as rules
from enginelink.envelope import prompt_sha256
from enginelink.trtllm_affinity import Presented
from enginelink.v1 import link_pb2
from openengine.v1 import error_pb2, generation_pb2
from worker.affinity import AffinityHints
from worker.core.handoff import HandoffError, KvShape, SessionRef
from worker.core.networks import AllowedNetworks
from worker.core.types import Phase, Request, RequestKey, Retention, TokenIds
from worker.keys import WorkerKeys
from worker.lineage import NO_LINEAGE, Envelopes, Lineage
from worker.metadata import Metadata
from worker.options import retention_from, retention_from_extra, sampling_from, stopping_from
from worker.refusal import Refused, invalid, refusing, unproven, unsupported
from worker.session_proofs import SessionProofs

PHASES: Mapping[str, frozenset[Phase]] = {
    "context": frozenset({Phase.CONTEXT}),
    "generation": frozenset({Phase.GENERATION, Phase.AGGREGATED}),
    "aggregated": frozenset(Phase),
}
REQUEST_TYPES = {
    "context_only": Phase.CONTEXT,
    "generation_only": Phase.GENERATION,
    "context_and_generation": Phase.AGGREGATED,
}
TAG_BYTES, MAX_TAG_BYTES = 8, 32


@dataclass(frozen=True, slots=True)
class Served:
    """What this worker serves."""

    model_name: str
    role: str
    vocab_size: int
    max_context_length: int
    eos_token_ids: frozenset[int]
    shape: KvShape
    allowed_networks: AllowedNetworks


@dataclass(frozen=True, slots=True)
class _Leg:
    """What both protocols say of a leg, in the core's words. `owner`: its conversation as this worker knows it."""

    phase: Phase
    token_ids: TokenIds
    session: bytes
    salt: bytes
    conversation: str
    owner: str
    bypass_prefix_cache: bool
    envelope: str
    retention: Retention | None
    resumed_tokens: int = 0
    affinity: Presented | None = None
    tenant: bytes = b""


class Intake:
    """Checks requests against what this worker serves. Every method raises Refused."""

    def __init__(
        self,
        served: Served,
        envelopes: Envelopes,
        affinity: AffinityHints | None = None,
        proofs: SessionProofs | None = None,
    ) -> None:
        self._served = served
        self._envelopes = envelopes
        self._affinity = affinity or AffinityHints()
        self._proofs = proofs or SessionProofs(WorkerKeys(None), 0.0)
        self.eos_token_ids = served.eos_token_ids

    def from_submit(self, key: RequestKey, submit: link_pb2.Submit) -> Request:
        """The prompt's bytes become its array without a copy."""
        self._require_model(submit.model)
        if submit.phase not in map(int, Phase):
            raise invalid(f"phase is {submit.phase}: context, generation or aggregated")
        if len(submit.token_ids) % 4:
            raise invalid(f"token_ids has {len(submit.token_ids)} bytes: 4 for each token")
        if rules.stop_texts(submit.stopping):
            raise unsupported("stopping.conditions has a stop_text: on EngineLink the edge applies them")
        if len(submit.tenant_tag) > MAX_TAG_BYTES:
            raise invalid(f"tenant_tag has {len(submit.tenant_tag)} bytes: at most {MAX_TAG_BYTES}")
        leg = _Leg(
            phase=Phase(submit.phase),
            token_ids=np.frombuffer(submit.token_ids, dtype="<i4"),
            session=submit.kv_session,
            salt=submit.cache_salt,
            conversation=submit.conversation_id,
            owner=submit.conversation_id,
            bypass_prefix_cache=submit.bypass_prefix_cache,
            envelope=submit.lineage,
            retention=retention_from(submit.retention) if submit.HasField("retention") else None,
            resumed_tokens=submit.resumed_tokens,
            tenant=submit.tenant_tag,
        )
        return self._request(key, submit.request_id, submit, leg)

    def from_generate(
        self, key: RequestKey, message: generation_pb2.GenerateRequest, token_ids: TokenIds, metadata: Metadata
    ) -> Request:
        """`token_ids`: the prompt, tokenized where it came as text."""
        self._require_model(message.model)
        self.require_supported(message)
        session = message.kv.session.SerializeToString() if message.kv.HasField("session") else b""
        with refusing():
            conversation = rules.text_of(message.extra, "conversation_id")
            request_type = rules.request_type_of(message.extra, has_session=bool(session))
        leg = _Leg(
            phase=self._phase_of(request_type),
            token_ids=token_ids,
            session=session,
            salt=message.kv.cache_salt.encode(),
            conversation=conversation,
            owner=conversation if metadata.lineage else self._affinity.conversation(conversation),
            bypass_prefix_cache=message.kv.bypass_prefix_cache,
            envelope=metadata.lineage,
            affinity=metadata.affinity,
            retention=retention_from_extra(message.extra),
        )
        return self._request(key, message.request_id, message, leg)

    @staticmethod
    def require_supported(message: generation_pb2.GenerateRequest) -> None:
        """Refuses what no request of this worker can have."""
        with refusing():
            rules.require_request(message)

    def _request(
        self,
        key: RequestKey,
        request_id: str,
        message: link_pb2.Submit | generation_pb2.GenerateRequest,
        leg: _Leg,
    ) -> Request:
        served = self._served
        if leg.phase not in PHASES[served.role]:
            allowed = ", ".join(sorted(phase.name.lower() for phase in PHASES[served.role]))
            raise Refused(
                error_pb2.ERROR_CODE_ROLE_MISMATCH,
                f"this worker's role is {served.role}: it serves the phases {allowed}, not {leg.phase.name.lower()}",
            )
        if bool(leg.session) != (leg.phase is Phase.GENERATION):
            raise invalid(
                f"kv.session goes with the phase generation, and only with it; this is {leg.phase.name.lower()}"
            )
        prompt_tokens = len(leg.token_ids)
        if not prompt_tokens:
            raise invalid("token_ids is empty: a prompt has at least one token")
        if prompt_tokens >= served.max_context_length:
            raise invalid(
                f"token_ids has {prompt_tokens} tokens, and the model's context {served.max_context_length}: "
                "the prompt must be shorter"
            )
        if leg.token_ids.min() < 0 or leg.token_ids.max() >= served.vocab_size:
            raise invalid(f"token_ids has an id outside of the vocabulary of {served.vocab_size}")
        if leg.resumed_tokens >= prompt_tokens:
            raise invalid(f"resumed_tokens is {leg.resumed_tokens}, of {prompt_tokens} tokens in all")
        prompt_hash = _prompt_hash(leg)
        lineage = self._lineage(request_id, leg, prompt_hash)
        room = served.max_context_length - prompt_tokens + leg.resumed_tokens
        return Request(
            key=key,
            phase=leg.phase,
            token_ids=leg.token_ids,
            sampling=sampling_from(message.sampling, message.response),
            stopping=stopping_from(message.stopping, room=room, eos_token_ids=served.eos_token_ids),
            salt=leg.salt,
            conversation=leg.owner,
            parent=lineage.parent,
            family=lineage.family,
            turn=lineage.turn,
            prompt_hash=prompt_hash,
            bypass_prefix_cache=leg.bypass_prefix_cache,
            resumed_tokens=leg.resumed_tokens,
            first_token=self._first_token(leg) if leg.session else None,
            kv_session=leg.session or None,
            retention=leg.retention,
            tenant=leg.tenant or _tag(lineage.tenant),
        )

    def _first_token(self, leg: _Leg) -> int:
        """The token that the context leg sampled, once its session is one that can be pulled here."""
        served = self._served
        try:
            session = SessionRef.parse(leg.session)
        except HandoffError as error:
            raise invalid(f"kv.session: {error}") from error
        self._proofs.require(session, time.time())
        if session.prompt_tokens != len(leg.token_ids):
            raise invalid(f"kv.session holds {session.prompt_tokens} tokens, and the prompt has {len(leg.token_ids)}")
        difference = session.shape.differs_from(served.shape)
        if difference is not None:
            raise invalid(f"kv.session: {difference}")
        for source in session.sources:
            if served.allowed_networks.address(source.host) is None:
                raise invalid(f"kv.session: {source.host} is not in kv_transfer.allowed_networks")
        if session.first_token >= served.vocab_size:
            raise invalid("kv.session: first_gen_tokens holds an id outside of the vocabulary")
        return session.first_token

    def _lineage(self, request_id: str, leg: _Leg, prompt_hash: bytes) -> Lineage:
        if leg.affinity is not None:
            return self._affinity.lineage_of(
                leg.affinity,
                request_id=request_id,
                phase=leg.phase,
                model=self._served.model_name,
                conversation=leg.conversation,
            )
        if not leg.envelope:
            return NO_LINEAGE
        if leg.phase is Phase.GENERATION:
            raise unproven("lineage goes with a context leg, not with the phase generation")
        return self._envelopes.lineage_of(
            leg.envelope,
            request_id=request_id,
            phase=leg.phase,
            model=self._served.model_name,
            conversation=leg.conversation,
            prompt_hash=prompt_hash,
        )

    def _require_model(self, model: str) -> None:
        if model != self._served.model_name:
            raise Refused(
                error_pb2.ERROR_CODE_MODEL_NOT_FOUND,
                f"model is {model!r}: this worker serves {self._served.model_name!r}",
            )

    def _phase_of(self, request_type: str) -> Phase:
        """What the request leaves open, the worker's role says."""
        if request_type:
            return REQUEST_TYPES[request_type]
        return Phase.CONTEXT if self._served.role == "context" else Phase.AGGREGATED


def _tag(tenant: str) -> bytes:
    """Of the tenant that an envelope names: OpenEngine has no other word for it."""
    return hashlib.sha256(tenant.encode()).digest()[:TAG_BYTES] if tenant else b""


def _prompt_hash(leg: _Leg) -> bytes:
    """SHA-256, by which an envelope names the prompt, and a conversation's retry is known even without one."""
    if leg.phase is Phase.GENERATION or not (leg.conversation or leg.envelope):
        return b""
    return bytes.fromhex(prompt_sha256(leg.token_ids.astype("<u4", copy=False).tobytes()))
