"""Long prompts: what the next turn of a 600 KB conversation costs the edge, and what others notice meanwhile.

All in one process and one run: the same conversation tokenized whole and as a next turn; a ticker on the event loop
stands for the other streams while four clients send fresh prompts of that size.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edge.tokenizing.model import TextModel
from kinroute.model_cache import embedded_model
from kinroute.progress import Steps

TURNS = 43
PROMPT_CHARS = 600_000
NEXT_TURNS = 25
CLIENTS = 4
PROMPTS_EACH = 6
TICK_S = 0.010

Messages = list[dict[str, Any]]


def run(folder: Path | None = None, *, prompt_chars: int = PROMPT_CHARS) -> dict[str, Any]:
    """CPU milliseconds and token gaps. `folder`: a model folder; None: the embedded model."""
    if folder is None:
        with Steps() as steps:
            folder = embedded_model(steps)
    text = prose(2 * prompt_chars)
    results: dict[str, Any] = {"turns": TURNS, "prompt_bytes": prompt_chars}
    results |= _next_turns(folder, text)
    results |= asyncio.run(_gaps(folder, text))
    return results


def _next_turns(folder: Path, text: str) -> dict[str, Any]:
    model = TextModel.load(folder)
    messages = conversation(text[: len(text) // 2], TURNS)
    whole_ms, ids = _cpu_ms(lambda: model.tokenize_chat(messages, scope=b"bench"))
    next_ms = []
    for turn in range(NEXT_TURNS):
        messages = [
            *messages,
            {"role": "assistant", "content": f"Turn {turn}: " + text[-400 * turn - 900 : -400 * turn - 500]},
            {"role": "user", "content": text[-700 * turn - 1200 : -700 * turn - 500]},
        ]
        cost_ms, ids = _cpu_ms(lambda messages=messages: model.tokenize_chat(messages, scope=b"bench"))  # type: ignore[misc]
        next_ms.append(cost_ms)
    same = ids == model.tokenize_chat(messages, scope=b"another")
    model.close()
    assert same, "incremental and whole tokenizing differ"
    typical_ms = statistics.median(next_ms)
    return {
        "prompt_tokens": len(ids) // 4,
        "whole_cpu_ms": round(whole_ms, 2),
        "next_turn_cpu_ms": round(typical_ms, 2),
        "next_turn_cpu_ms_max": round(max(next_ms), 2),
        "next_turn_to_whole": round(typical_ms / whole_ms, 4),
    }


async def _gaps(folder: Path, text: str) -> dict[str, Any]:
    """Gaps between ticks of another stream: alone, and beside clients with prompts of many messages or of one."""
    model = TextModel.load(folder)
    results = {"tick_ms": TICK_S * 1e3, "gap_ms_p99_alone": _p99_ms(await _tick_while(asyncio.sleep(1.0)))}
    fresh = itertools.count(1)
    for name, turns in (("many_messages", TURNS), ("one_message", 1)):

        async def client(turns: int = turns) -> None:
            for _ in range(PROMPTS_EACH):
                offset = next(fresh) * 7919 % (len(text) // 2)
                prompt = text[offset : offset + len(text) // 2]
                await model.tokenize_chat_async(conversation(prompt, turns), scope=b"bench")

        async def clients(client: Callable[[], Any] = client) -> None:
            await asyncio.gather(*(client() for _ in range(CLIENTS)))

        gaps = await _tick_while(clients())
        results[f"gap_ms_p99_{name}"] = _p99_ms(gaps)
        results[f"gap_ms_max_{name}"] = round(max(gaps) * 1e3, 2)
    model.close()
    return results


async def _tick_while(work: Any) -> list[float]:
    """Seconds between ticks, from beginning to end of `work`."""
    task = asyncio.ensure_future(work)
    gaps = []
    last = time.perf_counter()
    while not task.done():
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    await task
    return gaps


def conversation(text: str, turns: int) -> Messages:
    size = math.ceil(len(text) / turns)
    contents = [text[at : at + size] for at in range(0, len(text), size)]
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def prose(num_chars: int) -> str:
    """Python's own standard library, ASCII part."""
    return "".join(itertools.islice(itertools.chain.from_iterable(_sources()), num_chars))


def _sources() -> Iterator[str]:
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield file.read_text(encoding="ascii", errors="ignore")


def _cpu_ms(work: Callable[[], bytes]) -> tuple[float, bytes]:
    began_s = time.process_time()
    ids = work()
    return (time.process_time() - began_s) * 1e3, ids


def _p99_ms(gaps: list[float]) -> float:
    return round(statistics.quantiles(gaps, n=100)[98] * 1e3, 2)


if __name__ == "__main__":
    json.dump(run(Path(sys.argv[1]) if len(sys.argv) > 1 else None), sys.stdout, indent=1)
    sys.stdout.write("\n")
