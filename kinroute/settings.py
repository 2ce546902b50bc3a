"""The configuration of `kinroute up`: one edge and the workers of one machine.

`edge` and each of `workers` hold what `kinroute edge --config` and `kinroute worker --config` read; here they may leave
out addresses, keys and the model, which `up` fills in.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from kinroute.problem import Problem

EMBEDDED = "embedded"
CONTEXT_CACHE: dict[str, Any] = {
    "host_cache_size": "256MiB",
    "block_reuse_config": {"policy": "per_conversation", "finished_subagent_priority": 1},
}
"""Finished sub-agents are demoted where prompts are prefilled; generation workers evict by age alone."""
GENERATION_CACHE: dict[str, Any] = {"block_reuse_config": {"policy": "per_conversation"}}
DEFAULT: dict[str, Any] = {
    "model": EMBEDDED,
    "edge": {},
    "workers": [
        {"role": "context", "tensor_parallel_size": 2, "threads_per_rank": 1, "kv_cache_config": CONTEXT_CACHE},
        {"role": "generation", "tensor_parallel_size": 1, "threads_per_rank": 1, "kv_cache_config": GENERATION_CACHE},
    ],
}


def read(file: Path | None) -> dict[str, Any]:
    """The configuration in `file` over the default. Raises Problem, naming the file and the key."""
    if file is None:
        return DEFAULT
    try:
        found = yaml.safe_load(file.read_text())
    except OSError as error:
        raise Problem(f"The configuration {file} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise Problem(f"The configuration {file} is not YAML: {' '.join(str(error).split())}.") from error
    if found is None:
        return DEFAULT
    if not isinstance(found, dict):
        raise Problem(f"The configuration {file} must be a mapping with the keys {', '.join(DEFAULT)}.")
    for key in found:
        if key not in DEFAULT:
            near = difflib.get_close_matches(str(key), DEFAULT, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known keys are {', '.join(DEFAULT)}."
            raise Problem(f"The configuration {file} has the unknown key {key}{hint}")
    config = DEFAULT | found
    workers = config["workers"]
    if not isinstance(config["edge"], dict):
        raise Problem(f"In {file}, edge must be a mapping, as `kinroute edge --config` reads it.")
    if not isinstance(workers, list) or not workers or not all(isinstance(worker, dict) for worker in workers):
        raise Problem(
            f"In {file}, workers must be a list of at least one mapping, as `kinroute worker --config` reads it."
        )
    roles = {worker.get("role", "aggregated") for worker in workers}
    if "aggregated" not in roles and not {"context", "generation"} <= roles:
        raise Problem(f"In {file}, workers need a context and a generation worker, or an aggregated one.")
    return config
