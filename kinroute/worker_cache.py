"""What a context worker's admin listener tells of a family's blocks: before its parent returns, and after."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx

from kinroute.problem import Problem

CALL_TIMEOUT_S = 30.0
FINISHED_DEADLINE_S = 60.0
ASK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks [position, position + blocks) of one conversation's prompt, alike in all that is said here.

    `owner`: the conversation that computed them first. `old`, `new`: their priority before the parent's return and
    after it; `new` None: they left the cache. `why`: what keeps them.
    """

    position: int
    blocks: int
    owner: str
    old: int
    new: int | None
    why: str
    first_key: str

    @property
    def is_demoted(self) -> bool:
        return self.new is not None and self.new < self.old


class WorkerCache:
    """Asks one worker. Every method raises Problem where it does not answer."""

    def __init__(self, client: httpx.Client) -> None:
        """`client`: its base URL is the worker's admin listener."""
        self._client = client

    def when_finished(self, parent: str, child: str) -> dict[str, Any] | None:
        """What a return of `parent` would do to `child`, once it would demote it. None: this worker demotes nothing.

        Raises Problem, saying why not, where the child is not finished in time.
        """
        end_s = time.monotonic() + FINISHED_DEADLINE_S
        while True:
            told = self._call("POST", "/kinroute/v1/demotions/dry-run", {"parent": parent})
            if not told["enabled"]:
                return None
            found = next((one for one in told["children"] if one["conversation"] == child), None)
            if found is not None and found["finished"]:
                group: list[dict[str, Any]] = found["group"]
                return group[-1]
            if time.monotonic() > end_s:
                why = "the worker does not know it" if found is None else found["why_not"]
                raise Problem(f"A sub-agent was not finished within {FINISHED_DEADLINE_S:.0f} s: {why}.")
            time.sleep(ASK_EVERY_S)

    def parts(self, child: str, dry_run: dict[str, Any]) -> list[Part]:
        """What the dry run told of this child's prompt, block by block, beside what is true now."""
        parts = [
            self._part(told, owner=str(told.get("owner") or ""), why="a prefix that it only reused")
            for told in dry_run["reused"]["stretches"]
        ]
        parts += [self._part(told, owner=child, why=told["why"]) for told in dry_run["stays"]["stretches"]]
        parts += [self._part(told, owner=child, why="") for told in dry_run["would_demote"]["stretches"]]
        return sorted(parts, key=lambda part: part.position)

    def _part(self, told: dict[str, Any], *, owner: str, why: str) -> Part:
        key = told["first_key"]
        return Part(told["position"], told["blocks"], owner, told["priority"], self.priority(key), why, key)

    def priority(self, key: str) -> int | None:
        """Of the block with this key; None: it left the cache."""
        block = self._call("GET", f"/kinroute/v1/blocks/{key}")
        return int(block["priority"]) if block["state"] == "resident" else None

    def state(self, conversation: str) -> str:
        found = self._call("GET", f"/kinroute/v1/families?family={conversation}&limit=1")["conversations"]
        return str(found[0]["state"]) if found else "unknown"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            response = self._client.request(method, path, json=body, timeout=CALL_TIMEOUT_S)
            response.raise_for_status()
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Problem(f"The worker's admin listener at {self._client.base_url} does not answer: {error}") from error
