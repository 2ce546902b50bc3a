from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.edge.http.harness import Script, Served, make_text_folder, served


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def shared_edge(text_folder: Path) -> Iterator[Served]:
    with served(text_folder, aliases=("small",)) as running:
        yield running


@pytest.fixture
def edge(shared_edge: Served) -> Iterator[Served]:
    """An edge whose worker says Hello!, until the test tells it otherwise; nothing may be left of a test."""
    worker = shared_edge.worker
    worker.answer = lambda order: Script()
    worker.orders.clear()
    worker.cancelled.clear()
    yield shared_edge
    assert shared_edge.settled_leaks() == {"requests": 0, "turns": 0, "legs": 0}
