"""Where Kinroute keeps what outlives a run, by the XDG base directories.

config: keys (0600); cache: converted models, safe to delete; state: logs and the note of the running system.
"""

from __future__ import annotations

import os
from pathlib import Path


def _base(variable: str, default: str) -> Path:
    value = os.environ.get(variable, "")
    root = Path(value) if value.startswith("/") else Path.home() / default
    return root / "kinroute"


def config_folder() -> Path:
    return _private(_base("XDG_CONFIG_HOME", ".config"))


def cache_folder() -> Path:
    return _private(_base("XDG_CACHE_HOME", ".cache"))


def state_folder() -> Path:
    return _private(_base("XDG_STATE_HOME", ".local/state"))


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
