from __future__ import annotations

import os
from pathlib import Path

import psutil

from kinroute.replay.arms import Advanced, Arms, Began, Ended, Failed
from tests.kinroute.replay.tasks import Killed, Raising, Sleeper, Square


def test_each_task_has_a_process_of_its_own_and_hands_back_what_it_found() -> None:
    with Arms[Square](2) as arms:
        for number in (2, 3, 4):
            arms.add(Square(number))
        news = list(arms.news())

    found = {one.task.number: one.found for one in news if isinstance(one, Ended)}
    pids = {number: value[1] for number, value in found.items() if isinstance(value, tuple)}
    assert found == {2: (4, pids[2]), 3: (9, pids[3]), 4: (16, pids[4])}
    assert len({os.getpid(), *pids.values()}) == 4
    assert {one.task.number: one.share for one in news if isinstance(one, Advanced)} == {2: 0.5, 3: 0.5, 4: 0.5}


def test_no_more_run_at_a_time_than_jobs() -> None:
    running, most = 0, 0
    with Arms[Square](2) as arms:
        for number in range(4):
            arms.add(Square(number))
        for news in arms.news():
            running += isinstance(news, Began) - isinstance(news, Ended)
            most = max(most, running)

    assert (running, most) == (0, 2)


def test_a_task_may_be_added_when_another_has_ended() -> None:
    numbers: list[int] = []
    with Arms[Square](1) as arms:
        arms.add(Square(3))
        for news in arms.news():
            if isinstance(news, Ended):
                numbers.append(news.task.number)
                if news.task.number == 3:
                    arms.add(Square(9))

    assert numbers == [3, 9]


def test_one_that_fails_says_why_and_the_others_go_on() -> None:
    with Arms[Raising | Killed | Square](1) as arms:
        for task in (Raising(), Killed(), Square(5)):
            arms.add(task)
        news = list(arms.news())

    raising, killed = (one for one in news if isinstance(one, Failed))
    assert (raising.task.name, raising.why) == ("the raising one", "ValueError: no room")
    assert "in run" in raising.story
    assert (killed.task.name, killed.story) == ("the killed one", "")
    assert killed.why == "its process was ended by SIGKILL; is there enough memory for so many --jobs?"
    assert [one.task for one in news if isinstance(one, Ended)] == [Square(5)]


def test_leaving_ends_what_still_runs(tmp_path: Path) -> None:
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    with Arms[Sleeper | Square](2) as arms:
        arms.add(Sleeper(tmp_path))
        arms.add(Square(1))
        for news in arms.news():
            if isinstance(news, Ended):
                break
        pids = {child.pid for child in psutil.Process().children(recursive=True)} - others
        assert pids

    assert not any(map(psutil.pid_exists, pids))
