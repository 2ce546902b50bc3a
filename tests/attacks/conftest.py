from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.doors import Doors, open_doors


@pytest.fixture(scope="package")
def edge_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with open_doors(tmp_path_factory.mktemp("doors")) as doors:
        yield doors


@pytest.fixture
def doors(edge_process: Doors) -> Iterator[Doors]:
    """Whatever a test does to it, others are served after it and the log holds no secret."""
    yield edge_process
    edge_process.require_others_served()
    edge_process.require_clean_log()
