"""Everything that is not an answer: models, probes, errors, the admin listener."""

from __future__ import annotations

import json
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from edge.core.admission import AdmissionLimits
from edge.core.types import TenantLimits
from tests.edge.http.harness import KEY, MODEL, Served, served

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "a secret"}]}


def test_models_are_listed_and_found(edge: Served) -> None:
    client = edge.openai()

    assert [model.id for model in client.models.list()] == [MODEL, "small"]
    assert client.models.retrieve("small").owned_by == "kinroute"
    with pytest.raises(openai.NotFoundError, match="'a/b' does not exist"):
        client.models.retrieve("a/b")


def test_the_version_is_told_to_those_with_a_key(edge: Served) -> None:
    with edge.client() as client:
        assert client.get("/version").json() == {"version": "1.2.3"}


@pytest.mark.parametrize("path", ["/live", "/health", "/ready"])
def test_probes_ask_for_no_key(edge: Served, path: str) -> None:
    assert httpx.get(edge.url + path).status_code == 200
    assert httpx.head(edge.url + path).status_code == 200


def test_an_edge_without_workers_is_live_and_not_ready(text_folder: Path) -> None:
    with served(text_folder, ready=False) as edge, edge.client() as client:
        assert httpx.get(f"{edge.url}/live").status_code == 200
        assert httpx.get(f"{edge.url}/ready").status_code == 503
        assert edge.admin("/ready").status_code == 503
        response = client.post(CHAT, json=BODY)

    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}, {"x-api-key": "wrong"}],
    ids=["none", "wrong", "basic", "wrong x-api-key"],
)
def test_nothing_is_answered_without_a_key(edge: Served, path: str, headers: dict[str, str]) -> None:
    response = httpx.post(edge.url + path, json=BODY, headers=headers)

    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{edge.url}/v1/models", headers=headers).status_code == 401
    assert edge.worker.orders == []


def test_an_explicit_parent_without_the_scope_is_forbidden(edge: Served) -> None:
    with pytest.raises(openai.PermissionDeniedError):
        edge.openai("kr-other").chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], extra_headers={"X-Kinroute-Parent-ID": "p"}
        )


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/live", 405),
        ("POST", "/v1/responses", 501),
        ("GET", "/metrics", 404),
        ("GET", "/kinroute/v1/requests", 404),
    ],
)
def test_every_refusal_has_openais_shape(edge: Served, method: str, path: str, status: int) -> None:
    response = httpx.request(method, edge.url + path, headers={"X-Request-ID": "r-1"})

    assert response.status_code == status
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"] == "r-1"
    if status == 405:
        assert response.headers["allow"]


def test_messages_are_refused_in_anthropics_shape(edge: Served) -> None:
    with pytest.raises(anthropic.InternalServerError, match="Messages API is not served yet") as refused:
        edge.anthropic().messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "hi"}])

    assert refused.value.status_code == 501
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["type"] == "error"


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"", {}, 400),
        (b"[]", {}, 400),
        (b'{"model": NaN}', {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {"content-encoding": "gzip"}, 415),
    ],
    ids=["cut off", "empty", "array", "NaN", "not UTF-8", "text", "compressed"],
)
def test_a_body_that_is_no_json_object_is_refused(
    edge: Served, body: bytes, headers: dict[str, str], status: int
) -> None:
    with edge.client() as client:
        response = client.post(CHAT, content=body, headers={"content-type": "application/json", **headers})

    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "<script>"])
def test_a_request_id_that_is_not_plain_is_replaced(edge: Served, given: str) -> None:
    with edge.client() as client:
        response = client.post(CHAT, json=BODY, headers={"X-Request-ID": given})

    assert response.headers["x-request-id"].startswith("req_")


def test_a_tenant_at_its_limit_is_told_when_to_come_again(text_folder: Path) -> None:
    limits = AdmissionLimits(tenant=TenantLimits(requests_per_minute=1))
    with served(text_folder, admission=limits) as edge, edge.client() as ann, edge.client("kr-other") as bob:
        assert ann.post(CHAT, json=BODY).status_code == 200
        refused = ann.post(CHAT, json=BODY)
        assert bob.post(CHAT, json=BODY).status_code == 200, "another tenant has its own limit"

    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"


def test_the_openapi_page_shows_hot_routes_too(edge: Served) -> None:
    paths = httpx.get(f"{edge.url}/openapi.json").json()["paths"]

    assert {CHAT, "/v1/completions", "/v1/models", "/live"} <= paths.keys()
    assert httpx.get(f"{edge.url}/docs").status_code == 200


def test_the_admin_listener_tells_routes_and_never_prompts(edge: Served) -> None:
    with edge.client() as client:
        client.post(CHAT, json=BODY, headers={"X-Request-ID": "told-1"})

    reply = edge.admin("/kinroute/v1/requests")
    record = next(one for one in reply.json()["requests"] if one["request_id"] == "told-1")
    assert (record["status"], record["tenant"], record["model"]) == (200, "acme", MODEL)
    assert (record["completion_tokens"], record["finish_reasons"]) == (len("Hello!"), ["stop"])
    assert record["receipts"][0]["generation_worker"] == "127.0.0.1:1"
    assert "secret" not in reply.text
    assert "Hello" not in reply.text
    (worker,) = edge.admin("/kinroute/v1/workers").json()["workers"]
    assert (worker["worker_id"], worker["ready"], worker["in_flight"]) == ("127.0.0.1:1", True, 0)
    assert worker["can"]["phases"] == ["aggregated", "context", "generation"]


def test_metrics_count_requests_by_route_and_status(text_folder: Path) -> None:
    with served(text_folder) as edge, edge.client() as client:
        client.post(CHAT, json=BODY)
        client.post(CHAT, json={})
        text = edge.admin("/metrics").text

    assert f'kinroute_edge_requests_total{{route="{CHAT}",status="200"}} 1.0' in text
    assert f'kinroute_edge_requests_total{{route="{CHAT}",status="400"}} 1.0' in text
    assert f"kinroute_edge_completion_tokens_total {len('Hello!')}.0" in text
    assert "kinroute_edge_active_requests 0.0" in text
    assert "kinroute_edge_first_token_seconds_count 1.0" in text


def test_admin_answers_get_alone(edge: Served) -> None:
    assert httpx.post(f"{edge.admin_url}/metrics").status_code == 405
    assert edge.admin("/nothing").status_code == 404
    assert json.loads(edge.admin("/nothing").text) == {"error": "no /nothing here"}
