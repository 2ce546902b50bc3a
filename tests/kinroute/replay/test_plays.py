from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from kinroute.replay.plays import PlayedRequest, replay
from kinroute.replay.traces import read
from tests.kinroute.replay.recorded import request, session, write


class _Draws(random.Random):
    """Every session begins at the same point of its life, and sessions come in the order of the file."""

    def __init__(self, lived: float) -> None:
        super().__init__(0)
        self._lived = lived

    def random(self) -> float:
        return self._lived

    def sample(self, population: Any, k: int, **_: Any) -> list[Any]:
        return list(population)[:k]


def play(
    tmp_path: Path, count: int, *sessions: dict[str, Any], alive: int = 1, lived: float = 0.0, gap_s: float = 10.0
) -> list[PlayedRequest]:
    recorded = read(write(tmp_path / "trace.jsonl", *sessions))
    return list(itertools.islice(replay(recorded, alive=alive, longest_gap_s=gap_s, draws=_Draws(lived)), count))


def test_a_finished_session_is_followed_by_another_when_its_last_answer_has_ended(tmp_path: Path) -> None:
    one = session(request(0.0, (0, 1)), request(5.0, (0, 2), dur=3.0))
    other = session(request(0.0, (0, 1)), request(2.0, (0, 2)), name="s2")

    requests = play(tmp_path, 5, one, other)

    assert [each.t_s for each in requests] == [0.0, 5.0, 8.0, 10.0, 11.0]
    assert [each.play for each in requests] == [0, 0, 1, 1, 2]
    assert [each.is_last for each in requests] == [False, True, False, True, False]


def test_sessions_alive_together_take_turns_by_arrival(tmp_path: Path) -> None:
    one = session(request(0.0, (0, 1)), request(5.0, (0, 1)))
    other = session(request(1.0, (0, 1)), request(2.0, (0, 1)), request(9.0, (0, 1)), name="s2")

    requests = play(tmp_path, 5, one, other, alive=2)

    assert [(each.t_s, each.play) for each in requests] == [(0.0, 0), (1.0, 1), (2.0, 1), (5.0, 0), (6.0, 2)]


def test_a_session_that_began_before_the_load_goes_on_from_there(tmp_path: Path) -> None:
    requests = play(tmp_path, 3, session(*(request(t, (0, 1)) for t in (0.0, 4.0, 6.0, 9.0))), lived=0.5)

    assert [(each.t_s, each.play) for each in requests] == [(1.0, 0), (4.0, 0), (5.0, 1)]


def test_idle_gaps_are_cut(tmp_path: Path) -> None:
    requests = play(tmp_path, 2, session(request(0.0, (0, 1)), request(900.0, (0, 1))), gap_s=3.0)

    assert requests[1].t_s == 4.0


def test_two_plays_of_one_session_share_no_token(tmp_path: Path) -> None:
    requests = play(tmp_path, 4, session(request(0.0, (0, 2)), request(2.0, (0, 3), output=9)), alive=2)
    tokens: dict[int, set[int]] = {0: set(), 1: set()}
    for each in requests:
        tokens[each.play] |= {*each.prompt.tolist(), *each.answer.tolist()}

    assert not tokens[0] & tokens[1]


def test_conversations_and_parents_are_named_by_their_play(tmp_path: Path) -> None:
    child = request(1.0, (0, 1), conversation="a", parent="root", kind="sub")

    requests = play(tmp_path, 4, session(request(0.0, (0, 1)), child))

    assert [(each.conversation, each.parent) for each in requests] == [
        ("0/root", None),
        ("0/a", "0/root"),
        ("1/root", None),
        ("1/a", "1/root"),
    ]


def test_an_answer_is_what_the_next_prompt_goes_on_with(tmp_path: Path) -> None:
    first, second = play(tmp_path, 2, session(request(0.0, (0, 2), output=6), request(2.0, (0, 2), (5, 3), output=2)))

    assert first.answer.tolist() == second.prompt[8:14].tolist()
    assert (first.output_tokens, second.output_tokens) == (6, 2)


def test_an_answer_that_outlasts_the_next_prompt_is_new_from_there(tmp_path: Path) -> None:
    first, second = play(tmp_path, 2, session(request(0.0, (0, 2), output=11), request(2.0, (0, 3), output=4)))

    assert first.answer[:4].tolist() == second.prompt[8:].tolist()
    unseen = first.answer[4:].tolist()
    assert len(unseen) == 7
    assert not set(unseen) & {*first.prompt.tolist(), *second.prompt.tolist(), *second.answer.tolist()}


def test_an_answer_that_the_next_prompt_does_not_contain_is_new(tmp_path: Path) -> None:
    first, second = play(tmp_path, 2, session(request(0.0, (0, 2)), request(2.0, (0, 1), (5, 3))))

    assert len(first.answer) == 4
    assert not set(first.answer.tolist()) & {*first.prompt.tolist(), *second.prompt.tolist()}


def test_a_side_call_between_two_turns_does_not_hide_the_next_turn(tmp_path: Path) -> None:
    side = request(1.0, (0, 1), (9, 1), conversation="title", kind="side")

    first, _, second = play(tmp_path, 3, session(request(0.0, (0, 2)), side, request(2.0, (0, 4))))

    assert first.answer.tolist() == second.prompt[8:12].tolist()


def test_the_same_draws_give_the_same_load(tmp_path: Path) -> None:
    recorded = read(
        write(tmp_path / "t.jsonl", *(session(request(0.0, (0, n)), request(3.0, (0, n))) for n in range(1, 9)))
    )

    def load(seed: int) -> list[tuple[float, int, int]]:
        requests = replay(recorded, alive=3, longest_gap_s=10.0, draws=random.Random(seed))
        return [(each.t_s, each.play, len(each.prompt)) for each in itertools.islice(requests, 40)]

    assert load(1) == load(1)
    assert load(1) != load(2)


def test_nothing_to_play_is_refused() -> None:
    with pytest.raises(ValueError, match="no session"):
        next(replay([], alive=1, longest_gap_s=10.0, draws=random.Random(0)))
