"""An engine without a model: fixed step times, answers that follow from the prompt, faults on demand."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.fake_prefill import Prefill, PrefillQueue
from enginelink.envelope import EnvelopeError, Key, ReplayGuard, Verifier
from enginelink.v1 import link_pb2
from openengine.v1 import error_pb2, generation_pb2, kv_pb2

FAULTS = (
    "none",
    "die-before-started",
    "die-after-started",
    "die-after-prefill",
    "die-in-pull",
    "die-after-first-token",
    "die-mid-decode",
    "refuse",
    "fail-retryable",
    "silent",
    "stall-mid-decode",
    "garble",
    "empty-reference",
)
FIRST_LETTER, LETTERS = 97, 26
MID_DECODE_TOKENS = 4
FAREWELL_S = 0.2
"""How long what was sent has to reach the edge before a death."""


def next_token(last: int, length: int) -> int:
    """What follows `length` tokens that end in `last`: a lower-case letter in a byte-level vocabulary.

    Like a model's, so that an answer that is taken up elsewhere goes on alike.
    """
    return FIRST_LETTER + (last + length) % LETTERS


def answer_token(prompt: bytes, number: int) -> int:
    """Token `number` of the answer to `prompt` (packed ids)."""
    token, length = _last(prompt), len(prompt) // 4
    for position in range(length, length + number + 1):
        token = next_token(token, position)
    return token


def _last(prompt: bytes) -> int:
    return int.from_bytes(prompt[-4:], "little")


@dataclass(slots=True)
class Options:
    """`fault_after`: requests that are served well before the fault. `cached_tokens`: said of every prefill.
    `keys_file`: as a worker's; without it no lineage is taken, and none is looked at. `tokens_per_step`: prompt tokens
    that a step computes, which tenants share in turns; 0: every prompt takes `prefill_steps`."""

    step_ms: float = 10.0
    prefill_steps: int = 1
    tokens_per_step: int = 0
    pull_steps: int = 1
    fault: str = "none"
    fault_after: int = 0
    cached_tokens: int = 0
    max_context_length: int = 262_144
    keys_file: str = ""


@dataclass(slots=True, eq=False)
class Link:
    """Whoever hears the steps of some requests: an edge's stream, or one OpenEngine call."""

    steps: asyncio.Queue[link_pb2.Step] = field(default_factory=asyncio.Queue)
    legs: dict[int, Leg] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Leg:
    """One accepted request. `last` and `length` are of all its tokens so far; `left` is how many may still come."""

    handle: int
    phase: int
    last: int
    length: int
    left: int
    waits: int
    produced: int = 0
    is_started: bool = False
    prefill: Prefill | None = None


class Proofs:
    """Envelopes, believed by the keys in a worker's key file as that is now."""

    def __init__(self, keys_file: str, instance_id: str) -> None:
        self._file = Path(keys_file)
        self._instance_id = instance_id
        self._guard = ReplayGuard()
        self.parents: list[str] = []
        self.refused = 0

    def believe(self, submit: link_pb2.Submit) -> bool:
        entries = json.loads(self._file.read_text())["envelope_keys"]
        keys = [Key(entry["id"], base64.b64decode(entry["secret"])) for entry in entries]
        verifier = Verifier(keys, self._instance_id, self._guard)
        try:
            claims = verifier.verify(submit.lineage, time.time(), request_id=submit.request_id)
        except EnvelopeError:
            self.refused += 1
            return False
        self.parents.append(claims.parent)
        return True


class FakeEngine:
    """Steps every `step_ms` while it has requests. A handoff's pages are pinned until they are cancelled or aborted."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.instance_id = secrets.token_hex(8)
        self.pins: dict[str, tuple[Link, int]] = {}
        self.proofs = Proofs(options.keys_file, self.instance_id) if options.keys_file else None
        self._prefills = PrefillQueue(options.tokens_per_step)
        self._links: set[Link] = set()
        self._number = 0
        self._seen = 0
        self._wake = asyncio.Event()

    @property
    def running(self) -> int:
        return sum(len(link.legs) for link in self._links)

    @property
    def load(self) -> link_pb2.Load:
        return link_pb2.Load(running_requests=self.running, used_pages=len(self.pins), total_pages=1 << 20)

    def attach(self) -> Link:
        link = Link()
        self._links.add(link)
        return link

    def detach(self, link: Link, *, keep_pins: bool = False) -> None:
        self._links.discard(link)
        for handle in list(link.legs):
            self._drop(link.legs.pop(handle))
        if not keep_pins:
            self.pins = {session: pin for session, pin in self.pins.items() if pin[0] is not link}

    def cancel(self, link: Link, handle: int) -> None:
        leg = link.legs.pop(handle, None)
        if leg is not None:
            self._drop(leg)
        self.pins = {session: pin for session, pin in self.pins.items() if pin != (link, handle)}

    def _drop(self, leg: Leg) -> None:
        if leg.prefill is not None:
            self._prefills.drop(leg.prefill)

    def submit(self, link: Link, submit: link_pb2.Submit) -> None:
        self._seen += 1
        if self.proofs is not None and submit.lineage and not self.proofs.believe(submit):
            self._refuse(link, submit.handle, error_pb2.ERROR_CODE_INVALID_ARGUMENT, retryable=False, is_lineage=True)
            return
        if self._faulty("refuse"):
            self._refuse(link, submit.handle, error_pb2.ERROR_CODE_INVALID_ARGUMENT, retryable=False)
            return
        if self._faulty("fail-retryable"):
            self._refuse(link, submit.handle, error_pb2.ERROR_CODE_OVERLOADED, retryable=True)
            return
        last, length = _last(submit.token_ids), len(submit.token_ids) // 4
        left = submit.stopping.max_tokens - submit.resumed_tokens
        leg = Leg(submit.handle, submit.phase, last, length, left, self.options.prefill_steps)
        if submit.phase == link_pb2.PHASE_GENERATION:
            leg.waits = self.options.pull_steps
            token = first_token(submit.kv_session)
            if token != next_token(last, length):
                self._refuse(link, submit.handle, error_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND, retryable=False)
                return
            self._append(leg, token)
            self._die_if("die-in-pull")
        else:
            self._die_if("die-before-started")
            if self.options.tokens_per_step:
                leg.prefill = Prefill(submit.tenant_tag, length)
                self._prefills.add(leg.prefill)
        link.legs[leg.handle] = leg
        self._wake.set()

    def _refuse(
        self, link: Link, handle: int, code: error_pb2.ErrorCode, *, retryable: bool, is_lineage: bool = False
    ) -> None:
        error = error_pb2.EngineError(code=code, message="refused by the fake worker", retryable=retryable)
        event = link_pb2.Event(handle=handle, error=error, lineage_refused=is_lineage)
        self._send(link, link_pb2.Step(events=[event]))

    def _faulty(self, fault: str) -> bool:
        return self.options.fault == fault and self._seen > self.options.fault_after

    def _die_if(self, fault: str) -> None:
        if self._faulty(fault):
            os._exit(9)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self.running:
                self._wake.clear()
                await self._wake.wait()
            began_s = loop.time()
            await asyncio.sleep(self.options.step_ms / 1000)
            if not self._faulty("silent"):
                self._number += 1
                if self.options.tokens_per_step:
                    self._prefills.step()
                for link in list(self._links):
                    self._step(link)
            await asyncio.sleep(max(0.0, began_s + self.options.step_ms / 1000 - loop.time()))

    def _step(self, link: Link) -> None:
        handles, token_ids = array("I"), array("I")
        step = link_pb2.Step()
        reached: set[str] = set()
        for leg in list(link.legs.values()):
            if self._faulty("stall-mid-decode") and leg.produced >= MID_DECODE_TOKENS:
                continue
            if leg.prefill is not None and leg.prefill.left:
                continue
            if not leg.is_started and leg.phase != link_pb2.PHASE_GENERATION:
                leg.is_started = True
                started = link_pb2.Started(cached_prompt_tokens=self.options.cached_tokens)
                step.events.append(link_pb2.Event(handle=leg.handle, started=started))
                reached.add("die-after-started")
            leg.waits -= 1
            if leg.waits > 0:
                continue
            comes_alone = leg.produced > 0  # what came before it in this step would stand behind it
            if not leg.is_started:
                leg.is_started = True
                step.events.append(link_pb2.Event(handle=leg.handle, kv_arrived=link_pb2.KvArrived()))
            if leg.left > 0:
                token = next_token(leg.last, leg.length)
                self._append(leg, token)
                leg.produced += 1
                if leg.phase == link_pb2.PHASE_CONTEXT and leg.left > 0:
                    step.events.append(self._pin(link, leg, token))
                    reached.add("die-after-prefill")
                    continue
                reached |= {"die-after-first-token"} if leg.produced == 1 else set()
                reached |= {"die-mid-decode"} if leg.produced == MID_DECODE_TOKENS else set()
                if comes_alone and leg.left > 0:
                    handles.append(leg.handle)
                    token_ids.append(token)
                    continue
                step.events.append(link_pb2.Event(handle=leg.handle, token=generation_pb2.TokenInfo(token_id=token)))
            if leg.left <= 0:
                step.events.append(self._finish(link, leg))
        if handles or step.events:
            step.handles, step.token_ids = handles.tobytes(), token_ids.tobytes()
            if handles and self._faulty("garble"):
                step.handles += b"\0"
            self._send(link, step)
        if any(self._faulty(fault) for fault in reached):
            asyncio.get_running_loop().call_later(FAREWELL_S, os._exit, 9)
            self.options.fault = "silent"

    def _append(self, leg: Leg, token: int) -> None:
        leg.last, leg.length, leg.left = token, leg.length + 1, leg.left - 1

    def _pin(self, link: Link, leg: Leg, token: int) -> link_pb2.Event:
        del link.legs[leg.handle]
        session = kv_pb2.KvSessionRef(session_id=secrets.token_hex(16), transfer_backend="fake")
        if not self._faulty("empty-reference"):
            session.attributes_struct.update({"first_gen_tokens": [token]})
        self.pins[session.session_id] = (link, leg.handle)
        ready = link_pb2.PrefillReady(
            kv_session=session.SerializeToString(), first_token=generation_pb2.TokenInfo(token_id=token)
        )
        return link_pb2.Event(handle=leg.handle, prefill_ready=ready)

    def _finish(self, link: Link, leg: Leg) -> link_pb2.Event:
        del link.legs[leg.handle]
        finished = link_pb2.Finished(reason=generation_pb2.FINISH_REASON_LENGTH)
        return link_pb2.Event(handle=leg.handle, finished=finished)

    def _send(self, link: Link, step: link_pb2.Step) -> None:
        step.number = self._number
        step.load.CopyFrom(self.load)
        link.steps.put_nowait(step)


def first_token(kv_session: bytes) -> int:
    """Of a fake worker's reference; -1 where it holds none."""
    session = kv_pb2.KvSessionRef.FromString(kv_session)
    values = session.attributes_struct.fields["first_gen_tokens"].list_value.values
    return int(values[0].number_value) if values else -1


def columns(step: link_pb2.Step) -> Iterator[tuple[int, int]]:
    """Handle and token of each request that got a token and nothing else."""
    return zip(array("I", step.handles), array("I", step.token_ids), strict=True)
