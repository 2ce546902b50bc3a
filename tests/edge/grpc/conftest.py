from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.edge.grpc.harness import Client, FrontEnd, front_end
from tests.edge.http.harness import OTHER_KEY, Script, make_text_folder


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def shared(text_folder: Path) -> Iterator[FrontEnd]:
    with front_end(text_folder) as running:
        yield running


@pytest.fixture
def edge(shared: FrontEnd) -> Iterator[FrontEnd]:
    """As new; whatever a test leaves running is a leak."""
    worker = shared.worker
    worker.answer = lambda order: Script()
    for heard in (worker.orders, worker.cancelled, worker.told, worker.returns):
        heard.clear()
    yield shared
    shared.settle()


@pytest.fixture
def client(edge: FrontEnd) -> Iterator[Client]:
    with edge.client() as connected:
        yield connected


@pytest.fixture
def other(edge: FrontEnd) -> Iterator[Client]:
    """Of another tenant."""
    with edge.client(OTHER_KEY) as connected:
        yield connected
