"""Skips by name what needs helm, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.helm import MISSING, helm
from tests.deploy.rendering import SETS, Release


@pytest.fixture(scope="session")
def executable() -> Path:
    found = helm()
    if found is None:
        pytest.skip(MISSING)
    return found


@pytest.fixture(scope="session")
def releases(executable: Path) -> dict[str, Release]:
    """What each set of values renders to."""
    return {name: Release.render(executable, values) for name, values in SETS.items()}


@pytest.fixture(params=list(SETS))
def release(releases: dict[str, Release], request: pytest.FixtureRequest) -> Release:
    return releases[request.param]
