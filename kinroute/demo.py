"""`kinroute demo`: a parent spawns two sub-agents, which finish, and returns; then one of them comes back.

Shows who served each request and what was cached, which blocks of which sub-agent were demoted when the parent
returned, which survived and why, and that those of the one that came back are worth keeping again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from kinroute import paths
from kinroute.agent import Agent, Answer, Message
from kinroute.problem import Problem
from kinroute.up import read_note
from kinroute.worker_cache import Part, WorkerCache

TIMEOUT_S = 120.0

PROJECT = (
    "You are a careful software agent. The project is a small web shop: a catalogue, a basket, a checkout, and a page "
    "for the people who pack the parcels. Its code is in Python, its pages are plain HTML, its data is in one SQLite "
    "file. Answer in one short sentence. Say only what you know, and say plainly where you are not sure."
)
HELPER = (
    f"{PROJECT} You were started by another agent for one question: answer it, then stop. Read what you are given "
    "before you answer, change nothing, and never ask back, since nobody would answer you."
)
QUESTIONS = (
    "What could make the basket slow? It is kept in the table lines (basket, article, count), without an index. Each "
    "page asks for all lines of its basket, then for each line's article, and adds up the prices in Python. Old "
    "baskets are deleted once a night, and the page that shows a basket asks for it three times.",
    "What could make the parcel page slow? It lists all orders of the last thirty days with their articles, sorted by "
    "street, and draws a label for each as a picture of its own. It is loaded again every ten seconds on each of the "
    "five screens in the packing room, whether or not an order has come in meanwhile.",
)


def demo(*, url: str | None, key: str | None) -> int:
    """Play the family against the edge at `url`. Raises Problem where it cannot be reached or refuses."""
    note = read_note()
    base = url or note.get("url")
    if base is None:
        raise Problem("Kinroute does not run here: start it with scripts/run, or name its address with --url.")
    headers = {"Authorization": f"Bearer {key or _local_key()}"}
    admins = note.get("workers", {}) if note.get("url") == base else {}
    console = Console()
    with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT_S) as client, ExitStack() as stack:
        caches = {
            worker: WorkerCache(stack.enter_context(httpx.Client(base_url=admin))) for worker, admin in admins.items()
        }
        with console.status("The family is at work ..."):
            shown = Family(Agent(client), caches).play()
    for one in shown:
        console.print(one)
    return 0


class Family:
    """A parent and its two sub-agents. `caches`: of the workers whose admin listeners are known, by gRPC address."""

    def __init__(self, agent: Agent, caches: Mapping[str, WorkerCache]) -> None:
        self._agent = agent
        self._caches = caches
        self._names: dict[str, str] = {}
        self._requests = Table("request", "context worker", "generation worker", "TTFT ms", "prompt", "cached")

    def play(self) -> list[Table | str]:
        """The whole story; returns what is to be shown of it."""
        parent = f"demo-{secrets.token_hex(4)}"
        turn = [_message("system", PROJECT), _message("user", "Plan how to speed up the checkout.")]
        first = self._show("parent", ", turn 1", self._agent.ask(turn, parent))
        ids = [f"{parent}-child-{number}" for number in (1, 2)]
        prompts = [[_message("system", HELPER), _message("user", question)] for question in QUESTIONS]
        with ThreadPoolExecutor(2) as pool:
            children = list(pool.map(self._agent.ask, prompts, ids, [parent, parent]))
        for number, child in enumerate(children, 1):
            self._show(f"sub-agent {number}", "", child)
        before = self._finished(first, children)
        report = "\n".join(child.text for child in children)
        turn += [_message("assistant", first.text), _message("user", f"They found:\n{report}\nWhat is next?")]
        self._show("parent", ", turn 2", self._agent.ask(turn, parent))
        parts = {child.conversation: self._parts(child, before) for child in children if before}
        tables = [self._fate(child, parts[child.conversation]) for child in children if before]
        prompts[0] += [_message("assistant", children[0].text), _message("user", "Are you sure?")]
        again = self._show("sub-agent 1", ", again", self._agent.ask(prompts[0], ids[0], parent))
        if not before:
            return [self._requests, _nothing_demoted(first, self._caches)]
        cache = self._caches[children[0].context_worker]
        return [self._requests, *tables, _came_back(again, parts[again.conversation], cache)]

    def _finished(self, parent: Answer, children: list[Answer]) -> dict[str, dict[str, Any]]:
        """What the parent's return would do to each child, once both are finished; empty where that is not known."""
        before: dict[str, dict[str, Any]] = {}
        for child in children:
            cache = self._caches.get(child.context_worker)
            told = None if cache is None else cache.when_finished(parent.conversation, child.conversation)
            if told is None:
                return {}
            before[child.conversation] = told
        return before

    def _parts(self, child: Answer, before: dict[str, dict[str, Any]]) -> list[Part]:
        return self._caches[child.context_worker].parts(child.conversation, before[child.conversation])

    def _show(self, name: str, which: str, answer: Answer) -> Answer:
        self._names[answer.conversation] = name
        self._requests.add_row(
            name + which,
            answer.context_worker,
            str(answer.receipt.get("generation_worker", "")),
            f"{answer.ttft_ms:.0f}",
            str(answer.prompt_tokens),
            str(answer.cached_tokens),
        )
        return answer

    def _fate(self, child: Answer, parts: list[Part]) -> Table:
        own = [part for part in parts if part.owner == child.conversation]
        demoted = sum(part.blocks for part in own if part.is_demoted)
        owned = sum(part.blocks for part in own)
        title = f"{self._names[child.conversation]}: owns {owned} blocks; the parent's return demoted {demoted}"
        table = Table("blocks", "owner", "priority", "what became of them", title=title, title_justify="left")
        for part in parts:
            table.add_row(
                _blocks(part),
                self._names.get(part.owner, "another conversation"),
                _change(part.old, part.new),
                "demoted" if part.is_demoted else f"survives: {part.why}" if part.new is not None else "evicted",
            )
        return table


def _came_back(again: Answer, parts: list[Part], cache: WorkerCache) -> str:
    changes = [
        f"{_blocks(part)}: priority {_change(part.new, cache.priority(part.first_key))}"
        for part in parts
        if part.is_demoted
    ]
    return (
        f"sub-agent 1 came back. {', '.join(changes) or 'None of its blocks had been demoted'}; {again.cached_tokens} "
        f"of the {again.prompt_tokens} tokens of its prompt were cached."
    )


def _blocks(part: Part) -> str:
    last = part.position + part.blocks - 1
    return f"block {last}" if part.blocks == 1 else f"blocks {part.position} to {last}"


def _change(old: int | None, new: int | None) -> str:
    return str(old) if old == new else f"{'gone' if old is None else old} → {'gone' if new is None else new}"


def _nothing_demoted(parent: Answer, caches: Mapping[str, WorkerCache]) -> str:
    if parent.context_worker not in caches:
        return "What became of the sub-agents' blocks is shown only of workers that `kinroute up` runs on this machine."
    return (
        "The context worker demotes no sub-agents: set finished_subagent_priority in its "
        "kv_cache_config.block_reuse_config."
    )


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _local_key() -> str:
    from edge.keyring import Keyring, KeyringError

    try:
        return Keyring.load(paths.config_folder() / "keys.json").local_key
    except KeyringError as error:
        raise Problem(f"{error} Or give a key with --key.") from error
