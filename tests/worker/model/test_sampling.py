from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from worker.core.types import Phase, Request, RequestKey, Sampling, Stopping
from worker.model.drawing import LIKELIEST, uniform
from worker.model.sampling import Sampler

CPU = torch.device("cpu")
DRAWS = 4000


def make_request(key: int = 0, prompt: tuple[int, ...] = (0,), **fields: Any) -> Request:
    stopping = Stopping(
        max_tokens=99, min_tokens=fields.pop("min_tokens", 0), stop_token_ids=fields.pop("ends", frozenset())
    )
    first_token, resumed_tokens = fields.pop("first_token", None), fields.pop("resumed_tokens", 0)
    return Request(
        RequestKey(key),
        Phase.AGGREGATED,
        np.array(prompt, np.int32),
        Sampling(**fields),
        stopping,
        first_token=first_token,
        resumed_tokens=resumed_tokens,
    )


def sample(sampler: Sampler, *rows: tuple[int, list[float]]) -> tuple[int, ...]:
    """One step: (request, its logits) each."""
    logits = torch.tensor([logits for _, logits in rows])
    return sampler.sample(tuple(RequestKey(key) for key, _ in rows), logits).token_ids


def shares(logits: list[float], **sampling: Any) -> dict[int, float]:
    """How often each token is drawn, by as many requests as there are draws, all in one batch."""
    sampler = Sampler(len(logits), CPU)
    for key in range(DRAWS):
        sampler.add(make_request(key, **({"seed": key} | sampling)))
    tokens = sample(sampler, *((key, logits) for key in range(DRAWS)))
    return {token: count / DRAWS for token, count in Counter(tokens).items()}


def expected_shares(logits: list[float], *warpers: Any) -> dict[int, float]:
    warped = LogitsProcessorList(warpers)(torch.tensor([[0]]), torch.tensor([logits]))[0]
    return {token: float(share) for token, share in enumerate(torch.softmax(warped, -1)) if share > 0}


LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, 1.9, -3.0, 0.2]


@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        ({}, []),
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"top_k": 3}, [TopKLogitsWarper(3)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        (
            {"temperature": 1.4, "top_k": 6, "top_p": 0.8, "min_p": 0.25},
            [TemperatureLogitsWarper(1.4), TopKLogitsWarper(6), TopPLogitsWarper(0.8), MinPLogitsWarper(0.25)],
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_tokens_are_drawn_as_often_as_transformers_would_draw_them(
    sampling: dict[str, Any], warpers: list[Any]
) -> None:
    got, expected = shares(LOGITS, **sampling), expected_shares(LOGITS, *warpers)

    assert set(got) <= set(expected)
    for token, share in expected.items():
        # Four standard deviations: seeds are fixed, so this passes always or never.
        assert abs(got.get(token, 0.0) - share) < 4 * math.sqrt(share * (1 - share) / DRAWS)


def test_temperature_zero_takes_the_likeliest_beside_others_that_draw() -> None:
    sampler = Sampler(4, CPU)
    sampler.add(make_request(1, temperature=0.0))
    sampler.add(make_request(2, temperature=1.0, top_k=1))
    sampler.add(make_request(3, temperature=1e-9, top_p=0.5))

    assert sample(sampler, *((key, [0.0, 3.0, 1.0, 2.9]) for key in (1, 2, 3))) == (1, 1, 1)


def test_a_flat_distribution_wider_than_the_first_candidates_is_drawn_from_whole() -> None:
    size = 4 * LIKELIEST
    sampler = Sampler(size, CPU)
    for key in range(400):
        sampler.add(make_request(key, seed=key, top_p=0.9))

    tokens = sample(sampler, *((key, [-token / size for token in range(size)]) for key in range(400)))

    # exp(-x) over [0, 1]: nine tenths of the weight end at x = 0.84.
    assert 0.8 * size < max(tokens) < 0.85 * size
    assert min(tokens) < 0.05 * size


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**64),
    steps=st.lists(st.permutations([1, 2, 3]).flatmap(lambda keys: st.sampled_from([keys, keys[:2], keys[:1]]))),
    top_k=st.sampled_from([0, 3]),
)
def test_a_seed_gives_the_same_tokens_whatever_shares_the_batch(seed: int, steps: list[list[int]], top_k: int) -> None:
    rng = np.random.default_rng(3)
    own = {key: rng.normal(size=(len(steps) + 1, 9)).tolist() for key in (1, 2, 3)}
    together = Sampler(9, CPU)
    alone = {key: Sampler(9, CPU) for key in (1, 2, 3)}
    for key in (1, 2, 3):
        request = make_request(key, seed=seed + key, top_k=top_k, top_p=0.9 if key == 2 else 1.0)
        together.add(request)
        alone[key].add(request)
    done = dict.fromkeys((1, 2, 3), 0)

    for keys in steps:
        rows = [(key, own[key][done[key]]) for key in keys]
        expected = tuple(sample(alone[key], (key, logits))[0] for key, logits in rows)
        assert sample(together, *rows) == expected
        for key in keys:
            done[key] += 1


def test_a_generation_leg_and_a_resumed_one_draw_on_where_the_first_leg_stopped() -> None:
    whole = Sampler(8, CPU)
    whole.add(make_request(1, seed=11))
    first, second, third = (sample(whole, (1, LOGITS))[0] for _ in range(3))

    generation = Sampler(8, CPU)
    generation.add(make_request(1, seed=11, first_token=first))
    assert sample(generation, (1, LOGITS)) == (second,)

    resumed = Sampler(8, CPU)
    resumed.add(make_request(1, seed=11, prompt=(0, first, second), resumed_tokens=2))
    assert sample(resumed, (1, LOGITS)) == (third,)


def test_without_a_seed_two_requests_differ() -> None:
    sampler = Sampler(2, CPU)
    sampler.add(make_request(1))
    sampler.add(make_request(2))
    tokens = [sample(sampler, (1, [0.0, 0.0]), (2, [0.0, 0.0])) for _ in range(128)]

    assert [one for one, _ in tokens] != [other for _, other in tokens]


def test_random_numbers_are_spread_evenly_over_seeds_and_indices() -> None:
    by_seed = Counter(int(uniform(seed, 0) * 10) for seed in range(5000))
    by_index = Counter(int(uniform(7, index) * 10) for index in range(5000))

    for counts in (by_seed, by_index):
        assert sorted(counts) == list(range(10))
        assert all(400 < count < 600 for count in counts.values())


def greedy_after(
    penalties: dict[str, float], logits: list[float], generated: list[int], prompt: tuple[int, ...]
) -> int:
    """The token chosen after `generated` were, one by one."""
    sampler = Sampler(len(logits), CPU)
    sampler.add(make_request(1, prompt=prompt, temperature=0.0, **penalties))
    for token in generated:
        sample(sampler, (1, [100.0 if other == token else 0.0 for other in range(len(logits))]))
    return sample(sampler, (1, logits))[0]


def test_frequency_counts_each_output_token_and_presence_only_once() -> None:
    logits = [1.0, 0.55, 0.0]

    assert greedy_after({"frequency_penalty": 0.2}, logits, [0, 0], ()) == 0
    assert greedy_after({"frequency_penalty": 0.2}, logits, [0, 0, 0], ()) == 1
    assert greedy_after({"presence_penalty": 0.4}, logits, [0, 0, 0], ()) == 0
    assert greedy_after({"presence_penalty": 0.5}, logits, [0], ()) == 1


def test_frequency_and_presence_ignore_the_prompt_but_repetition_counts_it() -> None:
    logits = [1.0, 0.9, 0.0]

    assert greedy_after({"frequency_penalty": 2.0, "presence_penalty": 2.0}, logits, [], (0, 0)) == 0
    assert greedy_after({"repetition_penalty": 1.2}, logits, [], (0, 0)) == 1


def test_tokens_of_an_earlier_leg_count_as_output() -> None:
    resumed, handed_over = Sampler(3, CPU), Sampler(3, CPU)
    resumed.add(make_request(1, prompt=(2, 0), resumed_tokens=1, temperature=0.0, presence_penalty=1.0))
    handed_over.add(make_request(1, prompt=(2,), first_token=0, temperature=0.0, presence_penalty=1.0))

    for sampler in (resumed, handed_over):
        assert sample(sampler, (1, [1.0, 0.5, 0.9])) == (2,)


def test_repetition_is_penalised_as_in_transformers() -> None:
    torch.manual_seed(0)
    for _ in range(20):
        logits, prompt = torch.randn(12), torch.randint(0, 12, (5,)).tolist()
        expected = int(RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt]), logits[None].clone()).argmax())

        assert greedy_after({"repetition_penalty": 1.7}, logits.tolist(), [], tuple(prompt)) == expected


def test_end_tokens_wait_for_min_tokens() -> None:
    sampler = Sampler(3, CPU)
    sampler.add(make_request(1, temperature=0.0, min_tokens=2, ends=frozenset({1, 50}), first_token=0))

    assert sample(sampler, (1, [0.0, 9.0, 1.0])) == (2,)
    assert sample(sampler, (1, [0.0, 9.0, 1.0])) == (1,)


def test_log_probabilities_are_the_models_own_before_temperature_and_penalties() -> None:
    sampler = Sampler(4, CPU)
    sampler.add(make_request(1, prompt=(3,), temperature=0.0, repetition_penalty=9.0, logprobs=2))
    sampler.add(make_request(2, temperature=0.0))
    sampler.add(make_request(3, temperature=0.0, logprobs=0))
    row = [1.0, 0.0, -1.0, 1.5]
    exact = torch.log_softmax(torch.tensor(row), -1).tolist()

    logits = torch.tensor([row, row, row])
    sampled = sampler.sample((RequestKey(1), RequestKey(2), RequestKey(3)), logits)

    assert sampled.token_ids == (0, 3, 3)
    assert set(sampled.logprobs) == {1, 3}
    mine = sampled.logprobs[RequestKey(1)]
    assert mine.rank == 2
    assert mine.logprob == pytest.approx(exact[0])
    assert [token for token, _ in mine.top] == [3, 0]
    assert [value for _, value in mine.top] == pytest.approx([exact[3], exact[0]])
    assert sampled.logprobs[RequestKey(3)].top == ()
    assert sampled.logprobs[RequestKey(3)].rank == 1


def test_a_removed_request_leaves_nothing_behind() -> None:
    sampler = Sampler(3, CPU)
    sampler.add(make_request(1))
    sampler.remove(RequestKey(1))
    sampler.remove(RequestKey(1))

    assert len(sampler) == 0
