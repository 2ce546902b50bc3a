"""What a hot route asks of a request, once it is parsed: the same for chat and plain completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from edge.http.answer import AnswerText
from edge.http.delivery import Format
from edge.http.models import ServedModel
from edge.http.params import AnswerOptions, Bounds


class Asked(Protocol):
    """One parsed request."""

    @property
    def options(self) -> AnswerOptions: ...

    def identifying_content(self) -> bytes:
        """What is the same at every turn of a conversation: its tools, system prompt and first user message."""
        ...

    async def tokenize(self, scope: bytes, tenant: bytes) -> list[bytes]:
        """The packed ids of each prompt, once it is the turn of `tenant`, a tag. Raises EdgeError."""
        ...

    def answer_text(self) -> AnswerText:
        """Where one choice's tokens become text."""
        ...

    def make_format(self, answer_id: str, created_s: int, choices: int, prompt_tokens: Sequence[int]) -> Format: ...


class Kind(Protocol):
    """One hot route. `prefix` begins its answers' ids; `content_param` names what an overlong prompt stands in."""

    path: str
    prefix: str
    content_param: str

    def read(self, body: Mapping[str, Any], model: ServedModel, bounds: Bounds) -> Asked:
        """Raises EdgeError naming the field."""
        ...
