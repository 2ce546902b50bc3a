"""What became of the last requests, for the admin listener: never what was asked or answered."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edge.core.errors import Code, EdgeError
from edge.core.types import Receipt

KEPT = 512
CLIENT_GONE = 499
SERVER_FAULT = 500


@dataclass(slots=True)
class RequestRecord:
    """One request. `arrived_s` is Unix time; the other times are seconds since then.

    `status` is 0 while nothing was answered; 499 means that the caller went away. `error` is also set where an answer
    failed after its status line. It is read in logs too: of a caller's mistake it holds the code and the field, for the
    message, and names within a field, may quote the caller.
    """

    request_id: str
    path: str
    arrived_s: float = field(default_factory=time.time)
    began_s: float = field(default_factory=time.monotonic)
    tenant: str = ""
    model: str = ""
    status: int = 0
    error: str = ""
    first_token_s: float | None = None
    duration_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    ignored_lineage: str = ""
    receipts: Sequence[Receipt] = ()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began_s

    def failed(self, error: EdgeError) -> None:
        self.status = self.status or error.status
        ours = error.status >= SERVER_FAULT or error.code is Code.RATE_LIMITED
        field_name = (error.param or error.reason).partition(".")[0]
        self.error = f"{error.code}: {error.message if ours else field_name}"

    def gone(self) -> None:
        self.error = "the caller went away"
        self.status = CLIENT_GONE


class RecentRequests:
    """The last KEPT requests, those that still run among them."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=KEPT)

    def add(self, record: RequestRecord) -> None:
        self._records.append(record)

    def listing(self) -> list[dict[str, Any]]:
        """Newest first."""
        listed = [dataclasses.asdict(record) for record in reversed(self._records)]
        for record in listed:
            del record["began_s"]
        return listed
