"""Requests made from the OpenAPI page itself: what is answered is what the page says, with a key and without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.edge.http.harness import KEY, MODEL, Script, Served

EXAMPLES = 60
"""Of each route and key: about a second each."""
HOT = ("/v1/chat/completions", "/v1/completions")
PATHS = (*HOT, "/v1/models", "/v1/models/{name}", "/version", "/live", "/ready")
OPEN = ("/live", "/ready")
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@dataclass
class Asking:
    """`served`: how many answers were no refusals, that the checks do not look at refusals alone."""

    edge: Served
    page: Any
    session: requests.Session
    served: int = 0

    def check(self, case: Any, headers: dict[str, str]) -> requests.Response:
        answer = case.call(base_url=self.edge.url, session=self.session, headers=headers, timeout=10.0)
        self.served += answer.status_code == 200
        case.validate_response(answer, checks=CHECKS)
        return answer  # type: ignore[no-any-return]


@pytest.fixture
def asking(edge: Served) -> Iterator[Asking]:
    edge.worker.answer = lambda order: Script(step_s=0.0)
    config = SchemathesisConfig.from_dict({"generation": {"with-security-parameters": False}})
    with requests.Session() as session:
        yield Asking(edge, schemathesis.openapi.from_url(f"{edge.url}/openapi.json", config=config), session)


def cases(page: Any, path: str) -> st.SearchStrategy[Any]:
    """Right requests and wrong ones; half of them name the model that there is."""
    operation = page[path]["POST" if path in HOT else "GET"]
    made = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode))

    def name_model(case: Any, known: bool) -> Any:
        if known and isinstance(case.body, dict):
            case.body["model"] = MODEL
        if known and case.path_parameters:
            case.path_parameters["name"] = MODEL
        return case

    return st.builds(name_model, made, st.booleans())


def bounded(examples: int = EXAMPLES) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.parametrize("path", PATHS)
def test_with_a_key_what_is_answered_is_what_the_page_says(asking: Asking, path: str) -> None:
    @bounded()
    @hypothesis.given(cases(asking.page, path))
    def ask(case: Any) -> None:
        asking.check(case, {"authorization": f"Bearer {KEY}"})

    ask()

    assert asking.served, "nothing but refusals was looked at"


@pytest.mark.parametrize("path", [path for path in PATHS if path not in OPEN])
def test_without_a_key_every_request_is_refused_as_the_page_says(asking: Asking, path: str) -> None:
    @bounded(10)
    @hypothesis.given(
        cases(asking.page, path), st.sampled_from(({}, {"authorization": "Bearer no"}, {"x-api-key": "no"}))
    )
    def ask(case: Any, headers: dict[str, str]) -> None:
        assert asking.check(case, headers).status_code == 401

    ask()

    assert asking.edge.worker.orders == []


def test_the_page_says_how_a_caller_proves_who_it_is(edge: Served) -> None:
    page = requests.get(f"{edge.url}/openapi.json", timeout=10.0).json()

    assert {scheme["type"] for scheme in page["components"]["securitySchemes"].values()} == {"http", "apiKey"}
    for path in HOT:
        assert page["paths"][path]["post"]["security"], path
        assert {"401", "403", "429", "503"} <= page["paths"][path]["post"]["responses"].keys(), path
