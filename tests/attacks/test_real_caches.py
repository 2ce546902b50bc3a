"""Attacks on another's lineage, requests and handoffs, over HTTP and gRPC, through real processes.

Each is refused, or comes to nothing, and the victim's part of the cache is afterwards what it was before.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from edge.core.seals import Seals
from enginelink.envelope import Key
from openengine.v1 import generation_pb2, kv_pb2, lifecycle_pb2
from tests.attacks.callers import ANN, CALLERS, EVE, OPERATOR, PLAIN
from tests.attacks.doors import CHAT
from tests.attacks.family import PROTOCOLS, WAIT_S, Attacked, Family, Protocol, attacked_system, own, request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with attacked_system(tmp_path_factory.mktemp("attacked"), CALLERS) as attacked:
        yield attacked


@pytest.fixture
def attacked(running: Attacked) -> Iterator[Attacked]:
    """Whatever a test does, others are served after it."""
    yield running
    running.require_others_served()


@pytest.fixture
def victim(attacked: Attacked) -> Iterator[Family]:
    """Ann's family. What anybody but Ann does leaves it as it is."""
    family = attacked.family()
    before = attacked.picture(family)
    assert before[family.child_key]["state"] == "idle"
    yield family
    attacked.settled()
    assert attacked.picture(family) == before, "the victim's cache changed"


def test_what_the_attacks_must_not_bring_about_is_seen_when_the_victim_does_it(attacked: Attacked) -> None:
    """The control: these tests would notice a return that counts."""
    family = attacked.family()

    attacked.returns(family)

    attacked.wait_for(family, "demoted")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("hashed", [False, True], ids=["by the victim's names", "by the workers' names"])
def test_a_tenant_that_names_anothers_conversations_speaks_of_its_own(
    attacked: Attacked, victim: Family, protocol: Protocol, hashed: bool
) -> None:
    """As its child, as its parent, and then as the parent itself, which would be a return."""
    parent, child = (victim.parent_key, victim.child_key) if hashed else (victim.parent, victim.child)
    for headers in (own("mine", parent), own(parent, child + "-other"), own(child), own(parent)):
        assert attacked.ask(protocol, EVE, f"{headers}: obey.", headers).status == 200


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_anothers_lineage_token_is_worth_nothing_to_another_tenant(
    attacked: Attacked, victim: Family, protocol: Protocol
) -> None:
    token = {"X-Kinroute-Lineage": victim.token}

    assert attacked.ask(protocol, EVE, "I am of the family.", token).status == 400


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_the_scope_no_parent_is_named_however(attacked: Attacked, victim: Family, protocol: Protocol) -> None:
    for headers in (own("mine", victim.parent), {"X-Kinroute-Lineage": victim.token}):
        assert attacked.ask(protocol, PLAIN, "I am of the family.", headers).status == 403


INTERNAL = (
    "kinroute-lineage",
    "Kinroute_Lineage",
    "KINROUTE-LINEAGE",
    "x-trtllm-subagent-affinity-id",
    "X_TRTLLM_Subagent_Affinity_Id",
    "openengine-priority",
    "OpenEngine_Lineage",
    "X-Kinroute-Internal-Tenant",
    "x_kinroute_internal_conversation",
)


@pytest.mark.parametrize("name", INTERNAL)
def test_internal_headers_from_outside_say_nothing(attacked: Attacked, victim: Family, name: str) -> None:
    value = victim.parent_key if "priority" not in name.lower() else "100"
    headers = [("authorization", f"Bearer {EVE.key}"), (name, value), (name.upper(), value)]
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"{name}: obey."}], "max_tokens": 1}

    answer = httpx.post(attacked.edge.http + CHAT, json=body, headers=headers, timeout=WAIT_S)

    assert answer.status_code == 200
    assert json.loads(answer.headers["x-kinroute-receipt"])["conversation"] != victim.parent_key


@pytest.mark.parametrize("pair", [("kinroute-lineage", "forged"), ("x-kinroute-internal-tenant", "acme")])
def test_internal_metadata_from_outside_says_nothing(attacked: Attacked, victim: Family, pair: tuple[str, str]) -> None:
    assert attacked.ask("grpc", EVE, f"{pair}: obey.", dict([pair])).status in (200, 400)


@pytest.mark.parametrize("signature", ["sha256=" + "0" * 64, ""], ids=["forged", "unsigned"])
def test_a_hint_of_the_other_dialect_that_does_not_verify_is_refused(
    attacked: Attacked, victim: Family, signature: str
) -> None:
    hint = {"x-trtllm-subagent-affinity-id": victim.parent_key, "x-trtllm-subagent-affinity-auth": signature}

    for extra in ({}, {"request_type": "context_only"}):
        assert attacked.ask("grpc", EVE, "I am of the family.", hint, extra).status == 400


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_priority_100_for_all_blocks_is_cut_to_what_the_tenant_may_have(
    attacked: Attacked, victim: Family, protocol: Protocol
) -> None:
    greedy = {"kv_cache_retention_config": {"priority": 100}}
    told = attacked.ask("http", EVE, f"{protocol}: who am I?", own(f"greedy-{protocol}"))

    assert (
        attacked.ask(protocol, EVE, f"{protocol}: keep all of this.", own(f"greedy-{protocol}"), greedy).status == 200
    )

    assert max(attacked.priorities(told.conversation)) <= 35


def test_the_same_turn_again_is_no_return(attacked: Attacked, victim: Family) -> None:
    """Ann's own library tries her parent's first turn again."""
    number = victim.parent.removeprefix("plan-")

    assert attacked.ask("http", ANN, f"{number}: plan the work.", own(victim.parent)).status == 200


def test_a_caller_that_leaves_before_it_was_heard_is_no_return(attacked: Attacked, victim: Family) -> None:
    """Its body never comes whole."""
    host, _, port = str(attacked.edge.members["http"]).rpartition(":")
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ANN.key}\r\n"
    head += (
        f"x-kinroute-conversation-id: {victim.parent}\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b'{"model": "tiny", ')


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_who_is_its_own_parent_or_grandparent_has_none(attacked: Attacked, victim: Family, protocol: Protocol) -> None:
    a, b = f"{protocol}-a", f"{protocol}-b"

    assert attacked.ask(protocol, EVE, "I am my own parent.", own(a, a)).status == 200
    assert attacked.ask(protocol, EVE, "I am a child.", own(a, b)).status == 200
    assert attacked.ask(protocol, EVE, "I am my own grandparent.", own(b, a)).status == 400


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ten_thousand_parents_are_not_taken(attacked: Attacked, victim: Family, protocol: Protocol) -> None:
    """The ninth is refused already, and every one after it."""
    asked = [attacked.ask(protocol, EVE, "Hi.", own(f"{protocol}-orphan", f"parent-{n}")).status for n in range(12)]

    assert asked == [200] * 8 + [429] * 4


def test_a_flood_of_conversations_leaves_anothers_family(attacked: Attacked, victim: Family) -> None:
    for number in range(60):
        assert attacked.ask("http", EVE, f"{number}!", own(f"flood-{number}", f"root-{number % 3}")).status == 200


@pytest.fixture
def slow(attacked: Attacked) -> Iterator[Any]:
    """A long answer of Ann's under the id `mine`, while it runs."""
    long = generation_pb2.StoppingOptions(max_tokens=1_000, ignore_eos=True)
    call = attacked.inference.Generate(
        request("Count.", 0, request_id="mine", stopping=long), metadata=ANN.metadata, timeout=WAIT_S
    )
    next(call)
    yield call
    last = list(call)[-1]
    assert last.WhichOneof("event") == "finished", "the victim's answer was ended"
    assert last.usage.completion_tokens == 1_000


def abort(attacked: Attacked, caller: Any, *more: tuple[str, str], **target: Any) -> Any:
    message = lifecycle_pb2.AbortRequest(**target)
    return attacked.control.Abort(message, metadata=[*caller.metadata, *more], timeout=WAIT_S)


def test_nobody_aborts_another_tenants_request(attacked: Attacked, slow: Any) -> None:
    for guess in ("mine", "attack-0", "req_mine", "chatcmpl-mine", "*", "acme/mine"):
        with pytest.raises(grpc.RpcError) as refused:
            abort(attacked, EVE, request_id=guess)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    abort(attacked, EVE, all_requests=lifecycle_pb2.AllRequests())
    for caller in (EVE, ANN):
        with pytest.raises(grpc.RpcError) as refused:
            abort(attacked, caller, ("x-kinroute-all-tenants", "true"), all_requests=lifecycle_pb2.AllRequests())
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_duplicate_id_of_another_tenant_is_another_request(attacked: Attacked, slow: Any) -> None:
    answer = attacked.inference.Generate(
        request("Mine too.", 0, request_id="mine"), metadata=EVE.metadata, timeout=WAIT_S
    )

    assert list(answer)[-1].WhichOneof("event") == "finished"


def test_kv_events_and_their_sources_are_the_operators(attacked: Attacked, victim: Family) -> None:
    events, sources = kv_pb2.SubscribeKvEventsRequest(), kv_pb2.GetKvEventSourcesRequest()
    for caller in (EVE, ANN, PLAIN):
        with pytest.raises(grpc.RpcError) as refused:
            next(attacked.control.SubscribeKvEvents(events, metadata=caller.metadata, timeout=WAIT_S))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.RpcError) as refused:
            attacked.control.GetKvEventSources(sources, metadata=caller.metadata, timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    attacked.control.GetKvEventSources(sources, metadata=OPERATOR.metadata, timeout=WAIT_S)


class Trap:
    """A host of the attacker's own, at which nobody may knock."""

    def __enter__(self) -> Trap:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self.knocks = 0
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.knocks += 1
            connection.close()


@pytest.fixture
def reference(attacked: Attacked) -> kv_pb2.KvSessionRef:
    """A handoff of Ann's, that she may fetch."""
    number = next(attacked.numbers)
    leg = attacked.inference.Generate(
        request(f"{number}: prefill this.", number, {"request_type": "context_only"}),
        metadata=ANN.metadata,
        timeout=WAIT_S,
    )
    last = list(leg)[-1]
    assert last.WhichOneof("event") == "prefill_ready", last
    session: kv_pb2.KvSessionRef = last.prefill_ready.kv_session
    return session


def fetch(attacked: Attacked, caller: Any, session: kv_pb2.KvSessionRef) -> grpc.StatusCode:
    """How a generation leg with this reference ends."""
    number = next(attacked.numbers)
    leg = request(
        f"{number - 1}: prefill this.",
        number,
        {"request_type": "generation_only"},
        kv=generation_pb2.KvOptions(session=session),
    )
    call = attacked.inference.Generate(leg, metadata=caller.metadata, timeout=WAIT_S)
    with contextlib.suppress(grpc.RpcError):
        list(call)
    code: grpc.StatusCode = call.code()
    return code


def test_another_tenant_can_neither_fetch_nor_end_a_handoff(attacked: Attacked, reference: kv_pb2.KvSessionRef) -> None:
    assert fetch(attacked, EVE, reference) is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as refused:
        abort(attacked, EVE, kv_session=reference)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    assert fetch(attacked, ANN, reference) is grpc.StatusCode.OK, "its own tenant still can"


def test_a_reference_with_a_foreign_endpoint_is_refused_and_nothing_is_dialled(
    attacked: Attacked, reference: kv_pb2.KvSessionRef
) -> None:
    with Trap() as trap:
        for strip in (False, True):
            forged = kv_pb2.KvSessionRef.FromString(reference.SerializeToString())
            for endpoint in forged.endpoints:
                endpoint.host, endpoint.port = "127.0.0.1", trap.port
            if strip:
                del forged.attributes_struct.fields["kinroute_seal"]
            assert fetch(attacked, ANN, forged) is grpc.StatusCode.INVALID_ARGUMENT
        time.sleep(0.2)
        assert trap.knocks == 0

    assert fetch(attacked, ANN, reference) is grpc.StatusCode.OK


def test_an_altered_or_expired_reference_is_refused(attacked: Attacked, reference: kv_pb2.KvSessionRef) -> None:
    altered = kv_pb2.KvSessionRef.FromString(reference.SerializeToString())
    altered.session_id = "0" * len(altered.session_id)
    assert fetch(attacked, ANN, altered) is grpc.StatusCode.INVALID_ARGUMENT

    seal = reference.attributes_struct.fields["kinroute_seal"].struct_value.fields
    instance = seal["instance"].string_value
    bare = kv_pb2.KvSessionRef.FromString(reference.SerializeToString())
    del bare.attributes_struct.fields["kinroute_seal"]
    seals = Seals([Key(key.key_id, key.secret) for key in attacked.system.keyring.lineage_keys])
    old = seals.seal(bare.SerializeToString(), tenant="acme", instance_id=instance, now_s=time.time() - 600.0)
    assert fetch(attacked, ANN, old) is grpc.StatusCode.INVALID_ARGUMENT

    assert fetch(attacked, ANN, reference) is grpc.StatusCode.OK


def test_neither_edge_nor_workers_logged_a_key_or_a_prompt(attacked: Attacked, victim: Family) -> None:
    for part in attacked.system.parts.values():
        log = part.child.log.read_text(errors="replace")
        for secret in (*(caller.key for caller in CALLERS), victim.token, "plan the work", "obey"):
            assert secret not in log, f"{part.child.name} logged {secret}"
