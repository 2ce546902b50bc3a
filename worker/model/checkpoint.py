"""The weights of a Hugging Face folder, read part by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from worker.model.sharding import UnsupportedModel


class Checkpoint:
    """Safetensors files, mapped into memory: one, or several behind an index. Raises UnsupportedModel, OSError."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            files = sorted(set(weight_map.values()))
        else:
            files = ["model.safetensors"]
        self._file_of: dict[str, Any] = {}
        for name in files:
            if not (folder / name).is_file():
                raise UnsupportedModel(f"{folder} has no {name}")
            file: Any = safe_open(folder / name, "pt")
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Contiguous, and a copy of its own."""
        tensor: Tensor = self._slice(name)[part]
        return tensor.contiguous()

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise UnsupportedModel(f"the model's files lack the weight {name}")
        return self._file_of[name].get_slice(name)
