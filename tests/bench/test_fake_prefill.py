"""A fake worker's prompts wait for their turn, as at rank 0."""

from __future__ import annotations

from bench.fake_prefill import Prefill, PrefillQueue


def steps_until_done(queue: PrefillQueue, prefill: Prefill) -> int:
    steps = 0
    while prefill.left:
        queue.step()
        steps += 1
    return steps


def test_one_tenants_prompts_do_not_hold_up_anothers() -> None:
    queue = PrefillQueue(10)
    for _ in range(50):
        queue.add(Prefill(b"flooder", 30))
    queue.step()
    quiet = Prefill(b"quiet", 10)
    queue.add(quiet)

    assert steps_until_done(queue, quiet) == 2


def test_what_nobody_wants_any_more_takes_no_step() -> None:
    queue = PrefillQueue(10)
    running, waiting, stays = Prefill(b"a", 100), Prefill(b"a", 100), Prefill(b"a", 10)
    for one in (running, waiting, stays):
        queue.add(one)
    queue.step()
    queue.drop(running)
    queue.drop(waiting)

    assert steps_until_done(queue, stays) == 1
    queue.drop(stays)
