from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.worker.core.engines import ANSWER, TestEngine, make_engine
from worker.core.config import ReusePolicy
from worker.core.outputs import Failed, Finished, HandoffReady, KvArrived, Rejection, Started, TokenOut
from worker.core.types import FinishReason, Phase, RequestKey, Sampled

ONE, TWO, THREE, FOUR = RequestKey(1), RequestKey(2), RequestKey(3), RequestKey(4)
STOP = 4


def started(outputs: Sequence[object], key: RequestKey) -> int:
    """Cached tokens of this request."""
    return next(one.cached_tokens for one in outputs if isinstance(one, Started) and one.key == key)


def run_with_copies(engine: TestEngine) -> list[object]:
    """Some steps in which every copy between tiers takes one."""
    told: list[object] = []
    for _ in range(30):
        engine.end_copies()
        told += engine.step() or []
    return told


def test_a_prompt_is_answered_until_its_tokens_are_spent() -> None:
    engine = make_engine()
    engine.submit(1, [1, 2, 3], max_tokens=2)

    assert engine.step() == [Started(ONE, 0), TokenOut(ONE, ANSWER)]
    assert engine.step() == [TokenOut(ONE, ANSWER), Finished(ONE, FinishReason.LENGTH)]
    assert engine.run() == []
    assert engine.replica.cache.num_in_use == 0


def test_a_stop_token_ends_the_answer_and_is_named() -> None:
    engine = make_engine()
    engine.submit(1, [1, 2, 3], max_tokens=5, stop=frozenset({STOP}))

    assert engine.step(STOP) == [Started(ONE, 0), TokenOut(ONE, STOP), Finished(ONE, FinishReason.STOP, STOP)]


def test_a_stop_token_before_the_least_number_of_tokens_ends_nothing() -> None:
    engine = make_engine()
    engine.submit(1, [1, 2, 3], max_tokens=5, min_tokens=2, stop=frozenset({STOP}))

    told = engine.run(STOP)

    assert told == [Started(ONE, 0), *[TokenOut(ONE, STOP)] * 3, Finished(ONE, FinishReason.STOP, STOP)]


def test_tokens_that_come_together_are_told_one_by_one() -> None:
    engine = make_engine()
    engine.submit(1, [1, 2, 3], max_tokens=5)
    engine.submit(2, [1, 2, 3, 4], max_tokens=5, stop=frozenset({STOP}))
    made = engine.scheduler.plan(0)
    assert made is not None

    told = engine.scheduler.complete(made[0], Sampled((ONE, ONE, TWO, TWO, TWO), (5, 6, 7, STOP, 8)))

    assert [one for one in told if not isinstance(one, Started)] == [
        *(TokenOut(ONE, 5), TokenOut(ONE, 6), TokenOut(TWO, 7), TokenOut(TWO, STOP)),
        Finished(TWO, FinishReason.STOP, STOP),
    ]
    assert engine.scheduler.plan(0) is not None
    assert engine.replica.sequences[ONE].token_slice(3, 9).tolist() == [5, 6]


@pytest.mark.parametrize(("tokens", "said"), [((5, 5), 2), ((5, 5, 5), 3), ((5, 5, 5, 5), 3), ((STOP, STOP, 5), 2)])
def test_of_tokens_that_come_together_only_those_of_the_answer_count(tokens: tuple[int, ...], said: int) -> None:
    engine = make_engine()
    engine.submit(1, [1, 2, 3], max_tokens=3, min_tokens=1, stop=frozenset({STOP}))
    made = engine.scheduler.plan(0)
    assert made is not None

    told = engine.scheduler.complete(made[0], Sampled((ONE,) * len(tokens), tokens))

    assert [one.token_id for one in told if isinstance(one, TokenOut)] == list(tokens[:said])
    assert isinstance(told[-1], Finished) is (STOP in tokens or said == 3)


def test_a_long_prompt_is_prefilled_in_chunks_and_sampled_after_the_last() -> None:
    engine = make_engine(max_num_tokens=3)
    engine.submit(1, [1, 2, 3, 4, 5, 6, 7])

    engine.step()
    assert engine.computed() == [[1, 2, 3]]
    engine.step()
    assert engine.computed() == [[4, 5, 6]]
    assert engine.batch_keys() == []
    engine.step()
    assert engine.computed() == [[7]]
    assert engine.batch_keys() == [1]


def test_decode_is_never_starved_by_prefill() -> None:
    engine = make_engine(num_pages=32, max_num_tokens=3)
    engine.submit(1, [1], max_tokens=8)
    engine.submit(2, [2], max_tokens=8)
    engine.step()
    engine.submit(3, list(range(10, 30)))

    for _ in range(6):
        engine.step()
        assert set(engine.batch_keys()) >= {1, 2}
        assert engine.work.batch is not None
        assert len(engine.work.batch.token_ids) == 3


def test_every_request_of_a_full_batch_gets_on_in_every_step_even_if_the_batch_is_wider_than_a_step() -> None:
    engine = make_engine(max_batch_size=8, max_num_tokens=2, num_pages=32)
    for key in (1, 2, 3):
        engine.submit(key, [key], max_tokens=3)

    told = engine.run()

    assert [one.key for one in told if isinstance(one, Finished)] == [1, 2, 3]
    assert max(len(work.batch.query_starts) - 1 for work in engine.works if work.batch is not None) == 2


def test_a_second_turn_reports_the_shared_whole_blocks_as_cached() -> None:
    engine = make_engine(num_pages=16)
    engine.submit(1, [1, 2, 3, 4, 5], max_tokens=1)
    engine.run()
    engine.submit(2, [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1)

    assert started(engine.run(), TWO) == 4
    assert engine.computed() == []


def test_of_a_prompt_that_is_cached_whole_the_last_block_is_computed_for_its_logits_on_a_page_of_its_own() -> None:
    engine = make_engine()
    engine.submit(1, [1, 2, 3, 4])
    engine.run()
    committed = {int(page) for run in engine.replica.cache.tree.runs() for page in run.pages.view}
    engine.submit(2, [1, 2, 3, 4])

    outputs = engine.step()

    assert outputs is not None
    assert started(outputs, TWO) == 2
    assert engine.computed() == [[3, 4]]
    assert engine.work.batch is not None
    assert {int(slot) // 2 for slot in engine.work.batch.slots}.isdisjoint(committed)
    engine.run()
    assert engine.replica.cache.tree.num_blocks == 2


def test_a_match_that_ends_inside_a_block_copies_the_page_and_does_not_count_as_cached() -> None:
    engine = make_engine(tokens_per_block=4, enable_partial_reuse=True)
    engine.submit(1, [1, 2, 3, 4, 5, 6, 7, 8])
    engine.run()
    engine.submit(2, [1, 2, 3, 4, 5, 6, 7, 9])

    outputs = engine.step()

    assert outputs is not None
    assert started(outputs, TWO) == 4
    assert engine.computed() == [[9]]
    batch = engine.work.batch
    assert batch is not None
    ((source, target),) = batch.page_copies
    assert batch.page_table[0].tolist()[1] == target != source
    assert batch.positions.tolist() == [7]


def test_a_page_is_copied_once_however_many_chunks_follow() -> None:
    engine = make_engine(tokens_per_block=4, enable_partial_reuse=True, max_num_tokens=4)
    engine.submit(1, [1, 2, 3, 4])
    engine.run()
    engine.submit(2, [1, 2, 3, 9, 10, 11, 12, 13, 14, 15])

    engine.run()

    copies = [len(work.batch.page_copies) for work in engine.works if work.batch is not None]
    assert copies == [0, 1, 0]


def test_a_page_to_copy_is_not_evicted_by_the_very_plan_that_copies_it() -> None:
    engine = make_engine(num_pages=2, tokens_per_block=4, enable_partial_reuse=True)
    engine.submit(1, [1, 2, 3, 4])
    engine.run()
    engine.submit(2, [1, 2, 3, 9, 5])

    engine.step()

    assert engine.work.batch is not None
    assert engine.work.batch.page_copies == ()
    assert engine.computed() == [[1, 2, 3, 9, 5]]


@pytest.mark.parametrize(("policy", "cached"), [(ReusePolicy.ALL_REUSABLE, 6), (ReusePolicy.PER_REQUEST, 4)])
def test_blocks_of_a_reply_are_reusable_unless_the_policy_commits_prompts_alone(
    policy: ReusePolicy, cached: int
) -> None:
    engine = make_engine(num_pages=16, policy=policy)
    engine.submit(1, [1, 2, 3, 4], max_tokens=4)
    engine.run()
    engine.submit(2, [1, 2, 3, 4, ANSWER, ANSWER, ANSWER, 5])

    assert started(engine.run(), TWO) == cached


def test_without_block_reuse_nothing_is_found_again() -> None:
    engine = make_engine(enable_block_reuse=False)
    for key in (1, 2):
        engine.submit(key, [1, 2, 3, 4, 5])

    told = engine.run()

    assert (started(told, ONE), started(told, TWO)) == (0, 0)
    assert engine.replica.cache.num_available == len(engine.replica.cache.pools.free[0]) == 8


def test_a_request_that_bypasses_the_cache_computes_everything() -> None:
    engine = make_engine()
    engine.submit(1, [1, 2, 3, 4, 5])
    engine.run()
    engine.submit(2, [1, 2, 3, 4, 5], bypass_prefix_cache=True)

    engine.step()

    assert engine.computed() == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize("max_num_tokens", [3, 64])
def test_siblings_admitted_together_prefill_their_common_prompt_once(max_num_tokens: int) -> None:
    engine = make_engine(num_pages=32, max_num_tokens=max_num_tokens)
    common = [1, 2, 3, 4, 5, 6]
    for key in range(1, 5):
        engine.submit(key, [*common, 10 + key, 20 + key])

    told = engine.run()

    assert [started(told, RequestKey(key)) for key in range(1, 5)] == [0, 6, 6, 6]
    assert sum(len(work.batch.token_ids) for work in engine.works if work.batch is not None) == 8 + 3 * 2


def test_a_sibling_goes_on_alone_when_the_one_it_waited_for_is_cancelled() -> None:
    engine = make_engine(num_pages=32, max_num_tokens=2)
    for key in (1, 2):
        engine.submit(key, [1, 2, 3, 4, 5, 6, key])
    engine.step()
    engine.scheduler.cancel(ONE)

    told = engine.run()

    assert Finished(ONE, FinishReason.CANCELLED) in told
    assert started(told, TWO) == 2
    assert Finished(TWO, FinishReason.LENGTH) in told


def test_when_pages_run_out_the_youngest_is_suspended_and_later_goes_on_where_it_was() -> None:
    engine = make_engine(num_pages=8)
    engine.submit(1, [1, 1], max_tokens=8)
    engine.submit(2, [2, 2], max_tokens=8)
    engine.submit(3, [3, 3], max_tokens=8)

    told = engine.run()

    assert [one.key for one in told if isinstance(one, Finished)] == [1, 2, 3]
    assert any(decision.act == "release" for decision in engine.replica.decisions)
    for key in (ONE, TWO, THREE):
        assert sum(isinstance(one, TokenOut) and one.key == key for one in told) == 8
        assert sum(isinstance(one, Started) and one.key == key for one in told) == 1


def test_the_load_counts_the_suspended_among_those_that_wait() -> None:
    engine = make_engine(num_pages=8)
    for number in (1, 2, 3):
        engine.submit(number, [number, number], max_tokens=8)

    loads = []
    while engine.step() is not None:
        loads.append(engine.scheduler.load)

    assert loads[0].suspended == 0
    assert any(load.suspended for load in loads)
    assert all(load.suspended <= load.queued for load in loads)
    assert loads[-1].suspended == 0


def test_the_oldest_request_is_never_suspended() -> None:
    engine = make_engine(num_pages=4)
    engine.submit(1, [1, 1], max_tokens=7)
    engine.submit(2, [2, 2], max_tokens=7)

    told: list[object] = []
    while Finished(ONE, FinishReason.LENGTH) not in told:
        outputs = engine.step()
        assert outputs is not None
        told += outputs
        assert engine.batch_keys()[0] == 1

    engine.run()


def test_a_request_is_not_admitted_into_pages_that_a_running_prefill_is_going_to_need() -> None:
    engine = make_engine(num_pages=8, max_num_tokens=4)
    engine.submit(1, list(range(10, 22)))
    engine.submit(2, [1, 2, 3, 4, 5])

    told = engine.run()

    assert [one.key for one in told if isinstance(one, Finished)] == [1, 2]
    assert [decision.subject for decision in engine.replica.decisions if decision.act == "admit"] == [1, 2]


def test_cached_blocks_that_a_request_would_keep_do_not_count_as_room_for_it() -> None:
    engine = make_engine(num_pages=6)
    engine.submit(1, [1, 2, 3, 4])
    engine.run()
    engine.submit(2, [5, 5], max_tokens=4)
    engine.submit(3, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])

    told = engine.run()

    assert told.index(Finished(TWO, FinishReason.LENGTH)) < told.index(Started(THREE, 4))


def test_a_pool_with_one_page_serves_what_fits_and_refuses_the_rest() -> None:
    engine = make_engine(num_pages=1, tokens_per_block=4)
    rejection = engine.submit(1, [1, 2, 3, 4, 5])
    assert rejection == Rejection(
        "INVALID_ARGUMENT", "the prompt has 5 tokens, and this worker's cache holds 4", retryable=False
    )
    engine.submit(2, [1, 2, 3], max_tokens=100)
    engine.submit(3, [1, 2, 3, 4], max_tokens=100)

    told = engine.run()

    assert [one.key for one in told if isinstance(one, TokenOut)] == [2, 2, 3]
    assert [one for one in told if isinstance(one, Finished)] == [
        Finished(TWO, FinishReason.LENGTH),
        Finished(THREE, FinishReason.LENGTH),
    ]


def test_a_full_queue_is_a_value_that_says_try_again() -> None:
    engine = make_engine(max_queued_requests=1)
    assert engine.submit(1, [1]) is None

    rejection = engine.submit(2, [1])

    assert rejection is not None
    assert (rejection.code, rejection.retryable) == ("OVERLOADED", True)


def test_a_context_leg_pins_its_pages_until_the_generation_side_has_them() -> None:
    engine = make_engine()
    engine.submit(1, [1, 2, 3], phase=Phase.CONTEXT, max_tokens=5)

    assert engine.step() == [Started(ONE, 0), HandoffReady(ONE, ANSWER, None, 0, 3)]
    (pin,) = engine.work.pins
    assert (pin.request, len(pin.pages), pin.num_tokens) == (1, 2, 3)

    engine.scheduler.released(ONE)
    engine.step()
    assert engine.work.unpins == [1]
    assert engine.replica.cache.num_in_use == 0


def test_a_context_leg_whose_first_token_ends_the_answer_pins_nothing() -> None:
    engine = make_engine()
    engine.submit(1, [1, 2, 3], phase=Phase.CONTEXT, max_tokens=1)

    assert engine.step() == [Started(ONE, 0), TokenOut(ONE, ANSWER), Finished(ONE, FinishReason.LENGTH)]
    engine.step()
    assert engine.work.unpins == [1]
    assert engine.replica.cache.num_in_use == 0


def test_a_handoff_that_nobody_fetches_expires() -> None:
    engine = make_engine(handoff_timeout_ms=100)
    engine.submit(1, [1, 2, 3], phase=Phase.CONTEXT, max_tokens=5)
    engine.run()
    engine.now_ms = 99
    assert engine.step() is None
    assert engine.scheduler.next_wake_ms == 100

    engine.now_ms = 100
    engine.step()

    assert engine.work.unpins == [1]
    assert engine.replica.cache.num_in_use == 0


def test_pages_promised_to_a_handoff_are_not_taken_under_pressure() -> None:
    engine = make_engine(num_pages=4)
    engine.submit(1, [1, 2, 3, 4], phase=Phase.CONTEXT, max_tokens=5)
    engine.step()
    pinned = engine.work.pins[0].pages.tolist()
    engine.submit(2, [5, 6, 7, 8, 9, 10])

    engine.run()
    assert not any(decision.subject == 2 for decision in engine.replica.decisions)

    engine.now_ms = 100
    told = engine.run()
    assert Finished(TWO, FinishReason.LENGTH) in told
    assert pinned == [0, 1]


def test_a_page_that_a_commit_replaces_stays_while_another_worker_may_read_it() -> None:
    engine = make_engine(num_pages=8)
    for key in (1, 2):
        engine.submit(key, [1, 2, 3], phase=Phase.CONTEXT, max_tokens=5, bypass_prefix_cache=key == 2)
    engine.step()
    pinned = {pin.request: set(pin.pages.tolist()) for pin in engine.work.pins}
    engine.submit(3, [7, 7, 7, 7, 7, 7])

    engine.step()

    batch = engine.work.batch
    assert batch is not None
    assert {int(slot) // 2 for slot in batch.slots}.isdisjoint(pinned[ONE] | pinned[TWO])


def generation(engine: TestEngine, key: int, prompt: list[int], *, first_token: int = 7, max_tokens: int = 3) -> None:
    engine.submit(key, prompt, phase=Phase.GENERATION, first_token=first_token, max_tokens=max_tokens)


def test_a_generation_leg_pulls_the_blocks_it_lacks_and_decodes_from_the_first_token() -> None:
    engine = make_engine()
    generation(engine, 1, [1, 2, 3])

    assert engine.step() == [Started(ONE, 0)]
    (pull,) = engine.work.pulls
    assert (pull.request, pull.source, pull.first_block, len(pull.pages)) == (1, b"session 1", 0, 2)
    assert engine.step() is None

    engine.scheduler.pulled(ONE)
    assert engine.step() == [KvArrived(ONE), TokenOut(ONE, ANSWER)]
    assert engine.computed() == [[7]]
    assert engine.work.batch is not None
    assert engine.work.batch.positions.tolist() == [3]
    assert engine.run() == [TokenOut(ONE, ANSWER), Finished(ONE, FinishReason.LENGTH)]


def test_a_generation_leg_pulls_only_what_its_own_tree_lacks() -> None:
    engine = make_engine()
    generation(engine, 1, [1, 2, 3, 4, 5])
    engine.step()
    engine.scheduler.pulled(ONE)
    engine.run()
    generation(engine, 2, [1, 2, 3, 4, 6, 7, 8])

    outputs = engine.step()

    assert outputs == [Started(TWO, 4)]
    (pull,) = engine.work.pulls
    assert (pull.first_block, len(pull.pages)) == (2, 2)


@pytest.mark.parametrize(("max_batch_size", "max_num_tokens"), [(2, 64), (8, 2)])
def test_legs_that_wait_for_their_pages_have_their_places_in_the_batch(
    max_batch_size: int, max_num_tokens: int
) -> None:
    engine = make_engine(num_pages=32, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens)
    for key in (1, 2, 3):
        generation(engine, key, [key, key])

    engine.step()

    assert [pull.request for pull in engine.work.pulls] == [1, 2]


def test_a_generation_leg_that_has_every_block_pulls_nothing_and_lets_the_source_go() -> None:
    engine = make_engine(num_pages=16)
    generation(engine, 1, [1, 2, 3, 4])
    engine.step()
    engine.scheduler.pulled(ONE)
    engine.run()
    generation(engine, 2, [1, 2, 3, 4], max_tokens=2)

    told = engine.run()

    assert told == [Started(TWO, 4), KvArrived(TWO), TokenOut(TWO, ANSWER), Finished(TWO, FinishReason.LENGTH)]
    assert not any(work.pulls for work in engine.works[-3:])


def test_a_generation_leg_whose_first_token_is_its_last_is_over_at_once() -> None:
    engine = make_engine()
    generation(engine, 1, [1, 2, 3], max_tokens=1)

    assert engine.run() == [Started(ONE, 0), KvArrived(ONE), Finished(ONE, FinishReason.LENGTH)]
    assert not engine.replica.decisions


def test_a_failed_pull_fails_the_request_as_retryable_and_frees_its_pages() -> None:
    engine = make_engine()
    generation(engine, 1, [1, 2, 3])
    engine.step()

    engine.scheduler.pull_failed(ONE, "the source is gone")

    assert engine.step() == [Failed(ONE, "KV_TRANSFER_FAILED", "the source is gone", retryable=True)]
    assert engine.replica.cache.num_in_use == 0


@pytest.mark.parametrize("arrives", [True, False])
def test_pages_that_a_pull_still_writes_are_given_back_only_when_it_has_ended(arrives: bool) -> None:
    engine = make_engine()
    generation(engine, 1, [1, 2, 3])
    engine.step()
    engine.scheduler.cancel(ONE)

    assert engine.step() == [Finished(ONE, FinishReason.CANCELLED)]
    assert engine.replica.cache.num_in_use == 2

    if arrives:
        engine.scheduler.pulled(ONE)
    else:
        engine.scheduler.pull_failed(ONE, "too late")
    assert engine.run() == []
    assert engine.replica.cache.num_in_use == 0
    assert engine.replica.cache.tree.num_blocks == 0


def test_a_cancel_ends_a_queued_a_running_and_a_pinned_request_with_the_next_plan() -> None:
    engine = make_engine(max_batch_size=1)
    engine.submit(1, [1, 2, 3], phase=Phase.CONTEXT, max_tokens=5)
    engine.step()
    engine.submit(2, [4, 5, 6], max_tokens=5)
    engine.step()
    engine.submit(3, [7, 8, 9], max_tokens=5)
    for key in (ONE, TWO, THREE):
        engine.scheduler.cancel(key)

    assert engine.step() == [Finished(TWO, FinishReason.CANCELLED), Finished(THREE, FinishReason.CANCELLED)]
    assert engine.work.unpins == [1]
    assert engine.step() is None
    assert engine.replica.cache.num_in_use == 0


def test_what_is_said_of_an_unknown_request_is_ignored() -> None:
    engine = make_engine()
    for late in (engine.scheduler.cancel, engine.scheduler.pulled, engine.scheduler.released):
        late(RequestKey(99))
    engine.scheduler.pull_failed(RequestKey(99), "too late")

    assert engine.step() is None


def test_clearing_drops_what_nobody_holds_and_spares_what_runs() -> None:
    engine = make_engine(num_pages=16)
    engine.submit(1, [1, 2, 3, 4, 5])
    engine.run()
    engine.submit(2, [6, 7, 8, 9, 10], max_tokens=9)
    engine.step()
    engine.scheduler.clear()
    engine.step()
    engine.submit(3, [6, 7, 8, 9, 11])
    engine.submit(4, [1, 2, 3, 4, 5])

    told = engine.run()

    assert started(told, THREE) == 4
    assert started(told, RequestKey(4)) == 0


def test_the_load_counts_what_runs_what_waits_and_the_pages_in_use() -> None:
    engine = make_engine(max_batch_size=1)
    engine.submit(1, [1, 2, 3], max_tokens=5)
    engine.submit(2, [4, 5, 6, 7], max_tokens=5)
    engine.step()

    load = engine.scheduler.load

    assert (load.running, load.queued, load.queued_tokens, load.used_pages, load.total_pages) == (1, 1, 4, 2, 8)


def test_a_commit_never_evicts_what_it_commits() -> None:
    engine = make_engine(num_pages=4)
    engine.submit(1, [1, 2, 3, 4])
    engine.run()
    engine.submit(2, [5, 6, 7, 8], max_tokens=5)

    told = engine.run()

    assert Finished(TWO, FinishReason.LENGTH) in told
    engine.submit(3, [5, 6, 7, 8, ANSWER, ANSWER, ANSWER, 1])
    assert started(engine.run(), THREE) == 6


def test_a_request_makes_way_only_before_its_tokens_are_in_the_step() -> None:
    """One whose blocks come back from the host, page by page, and a younger one whose answer takes the last page."""
    engine = make_engine(num_pages=8, num_host_pages=16, max_onboard_pages_per_plan=1)
    prompt = list(range(1, 13))
    engine.submit(1, [*prompt, 13])
    engine.run()
    engine.submit(2, list(range(21, 36)))
    engine.run()
    engine.submit(3, [*prompt, 14])
    engine.submit(4, [41], max_tokens=12)

    steps_of_both = 0
    for _ in range(12):
        engine.step()
        held = engine.replica.sequences.keys()
        assert set(engine.batch_keys()) <= held
        steps_of_both += {THREE, FOUR} <= held

    assert steps_of_both > 2
    assert FOUR not in engine.replica.sequences
    told = run_with_copies(engine)
    assert Finished(THREE, FinishReason.LENGTH) in told
    assert Finished(FOUR, FinishReason.LENGTH) in told


def test_a_generation_leg_that_found_all_of_its_pages_may_make_way_in_the_plan_in_which_they_are_back() -> None:
    engine = make_engine(num_pages=4, num_host_pages=8)
    engine.submit(1, [1, 2, 3, 4, 5])
    engine.run()
    engine.submit(2, [21, 22, 23, 24, 25, 26, 27])
    engine.run()
    engine.end_copies()
    engine.run()
    engine.submit(3, [31], max_tokens=6)
    engine.submit(4, [1, 2, 3, 4], phase=Phase.GENERATION, first_token=5, max_tokens=3)
    for _ in range(4):
        engine.step()
    assert len(engine.replica.sequences) == 2
    engine.end_copies()

    told = engine.step()

    assert told is not None
    assert KvArrived(FOUR) in told
    assert FOUR not in engine.replica.sequences
    assert Finished(FOUR, FinishReason.LENGTH) in run_with_copies(engine)
