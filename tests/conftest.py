from __future__ import annotations

import gc
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from configuration.locks import held
from kinroute import model_cache
from kinroute.progress import Steps


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """All that is imported here stays; to search it for garbage, now and in every test, would take much of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests, files with slow ones go first, so that all end together."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


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
def cache_home(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A user's cache folder (XDG_CACHE_HOME) in which the embedded model was converted, once for all tests.

    It was made where an earlier conversion had been ended half-way; the file `said` has what the user read of that.
    """
    own = tmp_path_factory.getbasetemp()
    home = (own if worker_id == "master" else own.parent) / "cache-home"
    models = home / "kinroute" / "models"
    models.mkdir(parents=True, exist_ok=True)
    with held(home / "lock", wait=True), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        if not (home / "said").exists():
            half = models / model_cache.NAME
            half.mkdir()
            (half / "model.safetensors").touch()
            (half / model_cache.MANIFEST).write_text(json.dumps({"model.safetensors": 4}))
            (models / f".{model_cache.NAME}-killed").mkdir()
            said = io.StringIO()
            with Steps(Console(file=said, force_terminal=False, width=400)) as steps:
                model_cache.embedded_model(steps)
            (home / "said").write_text(said.getvalue())
    return home


@pytest.fixture(scope="session")
def smollm2(cache_home: Path) -> Path:
    """The embedded model's folder."""
    return cache_home / "kinroute" / "models" / model_cache.NAME
