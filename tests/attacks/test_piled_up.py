"""One tenant picks the ids of its families so that all of them belong on one worker of two."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.attacks.beside import Beside
from tests.attacks.callers import EVE
from tests.attacks.doors import Doors, open_doors

FAMILIES = 24


@pytest.fixture
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with open_doors(tmp_path_factory.mktemp("two"), workers=2) as doors:
        yield doors


def worker_of(doors: Doors, conversation: str, tokens: int = 1) -> str:
    headers = {"X-Kinroute-Conversation-ID": conversation}
    answer = doors.ask(EVE, headers, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
    assert answer.status_code == 200
    return str(json.loads(answer.headers["x-kinroute-receipt"])["generation_worker"])


def test_families_picked_to_pile_up_on_one_worker_are_spread(doors: Doors) -> None:
    by_worker: dict[str, list[str]] = {}
    for number in range(70):
        name = f"family-{number}"
        by_worker.setdefault(worker_of(doors, name), []).append(name)
    favourite, picked = max(by_worker.items(), key=lambda item: len(item[1]))
    assert len(picked) > FAMILIES, "an idle worker's families stay with it"

    with Beside(doors), ThreadPoolExecutor(FAMILIES) as pool:
        workers = Counter(pool.map(lambda name: worker_of(doors, name, 300), picked[:FAMILIES]))

    assert FAMILIES // 4 < workers[favourite] < FAMILIES * 3 // 4, workers
