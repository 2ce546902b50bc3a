from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kinroute import model_cache
from kinroute.progress import Steps


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder (XDG_STATE_HOME) of the tests' own: workers record into it what they are asked."""
    home = tmp_path_factory.mktemp("state-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(home))
        yield home


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's cache folder (XDG_CACHE_HOME) in which the embedded model was converted, once for all tests."""
    home = tmp_path_factory.mktemp("cache-home")
    with pytest.MonkeyPatch.context() as patch, Steps() as steps:
        patch.setenv("XDG_CACHE_HOME", str(home))
        model_cache.embedded_model(steps)
    return home


@pytest.fixture(scope="session")
def smollm2(cache_home: Path) -> Path:
    """The embedded model's folder."""
    return cache_home / "kinroute" / "models" / model_cache.NAME
