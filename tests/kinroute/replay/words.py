"""Small loads, written by hand or drawn: prompts as words, one letter a block, where a letter in front fixes its id."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

BLOCK_TOKENS = 4
STEP_S = 0.03


@dataclass(frozen=True)
class Asked:
    """What the bounds need of a played request."""

    t_s: float
    duration_s: float
    prompt_blocks: tuple[tuple[int, int], ...]
    answer_blocks: tuple[tuple[int, int], ...]
    output_tokens: int
    block_tokens: int = BLOCK_TOKENS
    conversation: str = ""
    parent: str | None = None


@dataclass(frozen=True)
class Words:
    """A request that comes in plan `plan` and is over `plans` later; `answer` follows the prompt."""

    plan: int
    plans: int
    prompt: str
    answer: str = ""


def load(*requests: Words) -> list[Asked]:
    """Words that begin alike share blocks; ids are given as they come, so that some follow each other."""
    ids: dict[str, int] = {}

    def runs(word: str, start: int) -> tuple[tuple[int, int], ...]:
        numbers = [ids.setdefault(word[: at + 1], len(ids)) for at in range(start, len(word))]
        joined: list[tuple[int, int]] = []
        for number in numbers:
            if joined and sum(joined[-1]) == number:
                joined[-1] = (joined[-1][0], joined[-1][1] + 1)
            else:
                joined.append((number, 1))
        return tuple(joined)

    return [
        Asked(
            t_s=one.plan * STEP_S,
            duration_s=one.plans * STEP_S,
            prompt_blocks=runs(one.prompt, 0),
            answer_blocks=runs(one.prompt + one.answer, len(one.prompt)),
            output_tokens=len(one.answer) * BLOCK_TOKENS + 1,
        )
        for one in requests
    ]


@st.composite
def words(draw: st.DrawFn, most: int = 12, longest: int = 6, letters: str = "ab", longest_s: int = 6) -> list[Words]:
    """Requests by arrival, whose prompts share beginnings and whose answers some later prompts go on with."""
    requests: list[Words] = []
    plan = 0
    for _ in range(draw(st.integers(1, most))):
        plan += draw(st.integers(0, 4))
        known = [one.prompt + one.answer for one in requests]
        begin = draw(st.sampled_from(["", *known]))[:longest]
        more = draw(st.text(letters, max_size=max(1, longest - len(begin))))
        prompt = (begin + more)[:longest] or "a"
        answer = draw(st.text(letters, max_size=2))
        requests.append(Words(plan, draw(st.integers(0, longest_s)), prompt, answer))
    return requests
