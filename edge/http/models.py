"""The models that are served, by name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from edge.core.errors import Code, EdgeError
from edge.http.params import Defaults
from edge.tokenizing.model import TextModel


class ServedModel:
    """`name` is what answers say; `aliases` are accepted for it."""

    def __init__(self, name: str, aliases: Sequence[str], text: TextModel) -> None:
        self.name = name
        self.names = (name, *aliases)
        self.text = text
        self.defaults = Defaults.of(text.generation_defaults)
        self.created_s = int(time.time())


class Catalogue:
    """Look-ups raise EdgeError (MODEL_NOT_FOUND)."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._by_name = {name: model for model in models for name in model.names}

    @property
    def names(self) -> list[str]:
        """Aliases too, in the order of the configuration."""
        return list(self._by_name)

    def has(self, name: str) -> bool:
        return name in self._by_name

    def find(self, name: str, *, param: str | None = "model") -> ServedModel:
        model = self._by_name.get(name)
        if model is None:
            raise EdgeError(
                Code.MODEL_NOT_FOUND, f"The model '{name[:200]}' does not exist or is not served here.", param=param
            )
        return model

    def listing(self, *, max_context_length: int) -> list[dict[str, Any]]:
        return [self.entry(name, max_context_length=max_context_length) for name in self._by_name]

    def entry(self, name: str, *, max_context_length: int) -> dict[str, Any]:
        """OpenAI's model object. `max_model_len`, which agents read, is 0 until a worker told it."""
        model = self.find(name, param=None)
        return {
            "id": name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "kinroute",
            "root": model.name,
            "max_model_len": max_context_length,
        }
