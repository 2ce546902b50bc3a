"""What steps cost, from a file: the costs themselves, or scrapes of a worker's metrics from which they follow.

Costs are an object of JSON or YAML whose keys are those of `CostModel`; what it does not name stays as it is. Scrapes
are the answers of a worker's `GET /metrics`, one behind the other in a file, as `curl -s …/metrics >> FILE` every now
and then under load leaves them.

Between two scrapes the worker made some steps and computed some tokens, which together took so long: the costs are
those that explain the times best (least squares, none below 0).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from kinroute.replay.service import CostModel

SECONDS = "kinroute_worker_forward_seconds_sum"
SERIES = {
    "step_s": "kinroute_worker_forward_seconds_count",
    "prefill_token_s": 'kinroute_worker_computed_tokens_total{kind="prefill"}',
    "prefill_context_s": 'kinroute_worker_attended_tokens_total{kind="prefill"}',
    "decode_token_s": 'kinroute_worker_computed_tokens_total{kind="decode"}',
    "decode_context_s": 'kinroute_worker_attended_tokens_total{kind="decode"}',
}
"""Which series a cost is multiplied with."""
FEWEST_SCRAPES = len(SERIES) + 1
LIMITS = ("max_num_tokens", "max_batch_size")
LINE = re.compile(r"^(kinroute_worker_\w+(?:\{[^}]*\})?) (\S+)", re.MULTILINE)


def read_costs(path: Path) -> CostModel:
    """Raises OSError, or ValueError that says in one line what of the file is wrong and what is due."""
    try:
        text = path.read_text()
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path}: {_due()}, not bytes") from problem
    found = LINE.findall(text)
    return _from_scrapes(found, path) if found else _from_members(text, path)


def _due() -> str:
    known = ", ".join(field.name for field in dataclasses.fields(CostModel))
    return f"an object of JSON or YAML is due with some of {known}, or scrapes of a worker's metrics"


def _from_members(text: str, path: Path) -> CostModel:
    try:
        members = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ValueError(f"{path}: {_due()}") from problem
    if not isinstance(members, dict) or not members:
        raise ValueError(f"{path}: {_due()}")
    known = [field.name for field in dataclasses.fields(CostModel)]
    for name, value in members.items():
        if name not in known:
            raise ValueError(f"{path}: {name!r} is no cost: {', '.join(known)} are")
        wanted, fits = _wanted(name, value)
        if not fits:
            raise ValueError(f"{path}: {name} is {value!r}: {wanted} is due")
    return CostModel(**members)


def _wanted(name: str, value: Any) -> tuple[str, bool]:
    if name in LIMITS:
        return "a whole number from 1 on", type(value) is int and value >= 1
    return "seconds, a number from 0 to below 3600", type(value) in (int, float) and 0 <= value < 3600


def _from_scrapes(found: Sequence[tuple[str, str]], path: Path) -> CostModel:
    values: dict[str, list[float]] = {name: [] for name in (SECONDS, *SERIES.values())}
    for name, value in found:
        if name in values:
            values[name].append(_number(value, name, path))
    missing = next((name for name, of_it in values.items() if len(of_it) < len(values[SECONDS])), None)
    if missing is not None or not values[SECONDS]:
        raise ValueError(f"{path}: {missing or SECONDS} is due in every scrape: is this a worker's /metrics?")
    totals = np.array([values[name] for name in (SECONDS, *SERIES.values())]).T
    parts = np.diff(totals, axis=0)
    # Where a total falls, the worker was started anew.
    parts = parts[(parts >= 0).all(axis=1) & (parts[:, 1] > 0)]
    if len(parts) < FEWEST_SCRAPES - 1:
        raise ValueError(
            f"{path}: {len(parts) + 1} scrapes with steps between them: at least {FEWEST_SCRAPES} are due, under loads "
            f"that differ"
        )
    costs = fitted(parts[:, 1:], parts[:, 0])
    known: dict[str, Any] = {name: cost for name, cost in costs.items() if cost is not None}
    return CostModel(**known)


def _number(text: str, name: str, path: Path) -> float:
    try:
        return float(text)
    except ValueError as problem:
        raise ValueError(f"{path}: {name} is {text!r}: a number is due") from problem


def fitted(counts: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> Mapping[str, float | None]:
    """By the name of the cost; `counts`: [N, 5], in the order of `SERIES`. None: that never happened.

    A cost that would come out below 0 is 0, and the others are found without it, the lowest first.
    """
    names = list(SERIES)
    left = [at for at in range(len(names)) if counts[:, at].any()]
    costs: dict[str, float | None] = {name: 0.0 if at in left else None for at, name in enumerate(names)}
    while left:
        scales = counts[:, left].max(axis=0)
        # Each interval by its own length: else the long ones alone would say what things cost.
        weights = 1 / np.maximum(seconds, 1e-9)
        solved = np.linalg.lstsq(counts[:, left] / scales * weights[:, None], seconds * weights, rcond=None)[0]
        lowest = int(solved.argmin())
        if solved[lowest] >= 0:
            for at, cost in zip(left, (solved / scales).tolist(), strict=True):
                costs[names[at]] = cost
            break
        del left[lowest]
    return costs
