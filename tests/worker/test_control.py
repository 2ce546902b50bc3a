"""The control channel over real sockets: plans out, reports back, and a group that ends with a reason."""

from __future__ import annotations

import queue
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from worker.channel import Channel, ChannelError, Kind
from worker.control import Follower, Leader, Pulled, connect, gather
from worker.core.recording import Failure
from worker.core.tiers import CopyEnded

TOKEN = b"t" * 32
WAIT_S = 5.0
type_of_decisions = list[tuple[object, ...]]


@dataclass
class Heard:
    """What a leader told its rank."""

    news: queue.SimpleQueue[tuple[str, object]] = field(default_factory=queue.SimpleQueue)
    failure: Failure | None = None

    def agreed(self, number: int) -> None:
        self.news.put(("agreed", number))

    def pulled(self, rank: int, pulled: Pulled) -> None:
        self.news.put(("pulled", (rank, pulled)))

    def copied(self, rank: int, ended: CopyEnded) -> None:
        self.news.put(("copied", (rank, ended)))

    def checked(self, rank: int, answer: bytes) -> None:
        self.news.put(("checked", (rank, answer)))

    def failed(self, failure: Failure) -> None:
        self.failure = failure
        self.news.put(("failed", failure.why))

    def next(self) -> tuple[str, object]:
        return self.news.get(timeout=WAIT_S)


def join_two(token: bytes = TOKEN) -> tuple[Channel, Channel]:
    """The two ends of a channel between rank 0 and rank 1."""
    joined: list[Channel] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        thread = threading.Thread(target=lambda: joined.append(connect(address, token, 1, WAIT_S)[1]))
        thread.start()
        channels = gather(listener, TOKEN, secrets.token_bytes(32), 2, WAIT_S)
        thread.join()
    return channels[1], joined[0]


@contextmanager
def pair(
    *,
    leader_decisions: type_of_decisions | None = None,
    follower_decisions: type_of_decisions | None = None,
    report_timeout_s: float = 30.0,
    overdue: str | None = None,
) -> Iterator[tuple[Leader, Heard, Follower, queue.SimpleQueue[tuple[Kind, bytes]]]]:
    """A leader and a follower that listen; the queue is the follower's engine."""
    leader_end, follower_end = join_two()
    heard = Heard()
    leader = Leader(
        {1: leader_end},
        heard,
        decisions=lambda: leader_decisions or [],
        overdue=lambda: overdue,
        report_timeout_s=report_timeout_s,
    )
    follower = Follower(follower_end, lambda: follower_decisions or [])
    engine: queue.SimpleQueue[tuple[Kind, bytes]] = queue.SimpleQueue()
    reader = threading.Thread(target=follower.run, args=(engine,))
    reader.start()
    leader.start()
    try:
        yield leader, heard, follower, engine
    finally:
        leader.stop()
        reader.join(WAIT_S)
        follower_end.close()


def test_a_plan_reaches_the_follower_and_is_agreed_when_both_reported_it() -> None:
    with pair() as (leader, heard, follower, engine):
        leader.send_plan(1, b"plan")
        leader.applied(1, b"same")

        assert engine.get(timeout=WAIT_S) == (Kind.PLAN, b"plan")
        follower.report(1, b"same")
        assert heard.next() == ("agreed", 1)


def test_a_digest_that_differs_ends_the_group_and_names_the_first_decision_of_both() -> None:
    mine: type_of_decisions = [(6, "take", 1), (7, "take", 3), (7, "evict", 4)]
    theirs: type_of_decisions = [(6, "take", 1), (7, "take", 3), (7, "evict", 5)]
    with pair(leader_decisions=mine, follower_decisions=theirs) as (leader, heard, follower, _):
        leader.send_plan(7, b"plan")
        follower.report(7, b"other")
        leader.applied(7, b"own")

        what, why = heard.next()

    assert what == "failed"
    assert why == ("rank 1 decided otherwise than rank 0 in plan 7: rank 0 [7, 'evict', 4], rank 1 [7, 'evict', 5]")
    assert heard.failure == Failure(
        why, plan=7, rank=1, ours=[[7, "take", 3], [7, "evict", 4]], theirs=[[7, "take", 3], [7, "evict", 5]]
    )


def test_a_follower_that_does_not_report_in_time_ends_the_group() -> None:
    with pair(report_timeout_s=0.2) as (leader, heard, _, _):
        leader.send_plan(1, b"plan")

        assert heard.next() == ("failed", "rank 1 has not reported plan 1 in 0 s")


def test_a_follower_that_is_gone_ends_the_group() -> None:
    leader_end, follower_end = join_two()
    heard = Heard()
    leader = Leader({1: leader_end}, heard, decisions=list, overdue=lambda: None, report_timeout_s=30.0)
    leader.start()

    follower_end.close()

    assert heard.next() == ("failed", "rank 1 is gone")
    leader.stop()


def test_a_stuck_engine_of_rank_0_ends_the_group() -> None:
    with pair(overdue="step 3 is overdue") as (_, heard, _, _):
        assert heard.next() == ("failed", "step 3 is overdue")


def test_pulls_and_checks_come_back_with_their_rank() -> None:
    with pair() as (leader, heard, follower, engine):
        leader.ask_check()
        assert engine.get(timeout=WAIT_S) == (Kind.CHECK, b"")
        follower.checked(b"nothing held")
        follower.pulled(Pulled(5, "no such session"))

        assert heard.next() == ("checked", (1, b"nothing held"))
        assert heard.next() == ("pulled", (1, Pulled(5, "no such session")))


def test_a_follower_that_failed_says_why() -> None:
    with pair() as (_, heard, follower, _):
        follower.failed("out of memory")

        assert heard.next() == ("failed", "rank 1 failed: out of memory")


def test_a_stranger_without_the_groups_token_is_not_joined() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        problems: list[BaseException] = []

        def join_as_stranger() -> None:
            try:
                connect(listener.getsockname(), b"w" * 32, 1, 0.5)
            except (ChannelError, TimeoutError, OSError) as error:
                problems.append(error)

        stranger = threading.Thread(target=join_as_stranger)
        stranger.start()
        with pytest.raises(TimeoutError, match=r"ranks \[1\] did not join"):
            gather(listener, TOKEN, bytes(32), 2, 1.0)
        stranger.join(WAIT_S)

    assert problems
