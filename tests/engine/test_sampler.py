from __future__ import annotations

import pytest
import torch

from aura_omni.engine.sampler import Draw, Filters, pick
from aura_omni.flow import Sampling

CPU = torch.device("cpu")


def draws(logits: torch.Tensor, sampling: Sampling, count: int, *, seed: int = 0, stream: int = 0) -> torch.Tensor:
    """count draws of one row of logits [V], at steps 0 to count - 1."""
    draw = Draw.of([sampling] * count, [seed] * count, range(count), CPU)
    return pick(logits.expand(count, -1), draw, stream=stream)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=3.0),
        Sampling(top_k=4),
        Sampling(top_p=0.7),
        Sampling(min_p=0.1),
        Sampling(temperature=1.3, top_k=6, top_p=0.8, min_p=0.05),
    ],
)
def test_draws_are_distributed_as_the_probabilities_say(sampling: Sampling) -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.0, 2.5, -3.0, 1.0])
    weights = (logits / sampling.temperature).softmax(-1)
    # The definition, one filter after another on plain probabilities.
    if sampling.min_p:
        weights = torch.where(weights >= sampling.min_p * weights.max(), weights, 0.0)
    if sampling.top_k:
        weights = torch.where(weights >= weights.sort(descending=True).values[sampling.top_k - 1], weights, 0.0)
    weights /= weights.sum()
    kept, total = torch.zeros(8), 0.0
    for token in weights.argsort(descending=True).tolist():
        if total < sampling.top_p:
            kept[token] = weights[token]
        total += float(weights[token])
    expected = kept / kept.sum()
    count = 20_000
    seen = torch.bincount(draws(logits, sampling, count), minlength=8)
    assert not seen[expected == 0].any()
    inside = expected > 0
    chi_square = ((seen - expected * count)[inside] ** 2 / (expected * count)[inside]).sum()
    # 7 degrees of freedom at most: beyond 24.3 once in 1000; the seeds are fixed.
    assert chi_square < 24.3


def test_draws_of_neighbouring_steps_and_seeds_are_independent() -> None:
    logits = torch.zeros(2)
    by_step = draws(logits, Sampling(), 20_000)
    by_seed = pick(torch.zeros(20_000, 2), Draw.of([Sampling()] * 20_000, range(20_000), [0] * 20_000, CPU))
    for tokens in (by_step, by_seed):
        pairs = torch.bincount(tokens[:-1] * 2 + tokens[1:], minlength=4) / 19_999
        torch.testing.assert_close(pairs, torch.full((4,), 0.25), atol=0.012, rtol=0)


def test_ties_at_the_top_k_threshold_stay() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    assert set(draws(logits, Sampling(top_k=2), 400).tolist()) == {1, 2, 3}


def test_top_k_of_each_row_is_its_own() -> None:
    logits = torch.tensor([0.0, 0.1, 0.2, 0.3])
    rows = [Sampling(top_k=1), Sampling(top_k=0), Sampling(top_k=-1), Sampling(top_k=2), Sampling(top_k=1000)]
    seen: list[set[int]] = [set() for _ in rows]
    for step in range(200):
        draw = Draw.of(rows, [1, 2, 3, 4, 5], [step] * 5, CPU)
        for row, token in enumerate(pick(logits.expand(5, -1), draw).tolist()):
            seen[row].add(token)
    assert seen == [{3}, {0, 1, 2, 3}, {0, 1, 2, 3}, {2, 3}, {0, 1, 2, 3}]


@pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.4])
def test_top_p_always_keeps_the_best(top_p: float) -> None:
    assert set(draws(torch.tensor([0.0, 1.0, 0.5]), Sampling(top_p=top_p), 100).tolist()) == {1}


def test_min_p_of_one_keeps_only_the_best() -> None:
    assert set(draws(torch.tensor([0.0, 1.0, 0.9]), Sampling(min_p=1.0), 100).tolist()) == {1}


def test_greedy_rows_take_the_first_maximum_whoever_their_neighbours_are() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [0.0, 0.0, 0.0, 0.0], [9.0, 1.0, 2.0, 9.0]])
    greedy = Sampling(temperature=0.0, top_k=3, top_p=0.1, min_p=0.5)
    for step in range(50):
        ids = pick(logits, Draw.of([greedy, Sampling(top_k=2), greedy], [1, 2, 3], [step] * 3, CPU))
        assert ids[0] == 1
        assert ids[2] == 0


def test_filters_that_only_others_use_change_nothing() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    rows = [Sampling(), Sampling(temperature=0.0), Sampling(top_k=7), Sampling(temperature=0.3)]
    alone = Draw.of(rows, [1, 2, 3, 4], [5, 6, 7, 8], CPU)
    wider = Filters.of([Sampling(top_k=40, top_p=0.3, min_p=0.2)])
    for step in range(40):
        alone.integers[:, 2] = step
        among_others = Draw(alone.floats, alone.integers, alone.filters | wider)
        assert pick(logits, among_others).tolist() == pick(logits, alone).tolist()


def test_what_is_banned_is_never_drawn() -> None:
    logits = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf])
    assert set(draws(logits, Sampling(temperature=100.0), 300).tolist()) == {0, 2}


def test_the_same_seed_and_step_give_the_same_token_alone_and_in_any_batch() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    rows = [
        Sampling(),
        Sampling(temperature=0.0),
        Sampling(top_k=5),
        Sampling(top_p=0.5),
        Sampling(min_p=0.2),
        Sampling(temperature=2.0, top_k=50, top_p=0.9),
    ]
    seeds, steps = [7, 7, 2**40 + 1, -3, 5, 123456789], [0, 9, 3, 3, 100_000, 1]
    together = pick(logits, Draw.of(rows, seeds, steps, CPU))
    order = [4, 2, 0, 5, 1, 3]
    shuffled = pick(logits[order], Draw.of(*([column[i] for i in order] for column in (rows, seeds, steps)), CPU))
    assert shuffled.tolist() == together[order].tolist()
    for row in range(6):
        alone = pick(logits[row : row + 1], Draw.of([rows[row]], [seeds[row]], [steps[row]], CPU))
        assert alone.tolist() == [int(together[row])]


def test_other_seeds_steps_and_streams_give_other_tokens() -> None:
    logits = torch.zeros(10_000)
    base = draws(logits, Sampling(), 50)
    assert len(set(base.tolist())) > 45
    for other in (draws(logits, Sampling(), 50, seed=1), draws(logits, Sampling(), 50, stream=1)):
        assert (base != other).sum() >= 48


def test_streams_of_one_step_are_not_the_draws_of_another_step() -> None:
    logits = torch.zeros(8, 100_000)
    draw = Draw.of([Sampling()] * 8, [0] * 8, range(8), CPU)
    ids = [token for stream in range(16) for token in pick(logits, draw, stream=stream).tolist()]
    assert len(set(ids)) > 120


@pytest.mark.reference
@pytest.mark.parametrize(
    "sampling", [Sampling(top_k=7), Sampling(top_p=0.6), Sampling(min_p=0.3), Sampling(temperature=0.4)]
)
def test_the_ids_that_can_be_drawn_equal_those_of_transformers(sampling: Sampling) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(30, generator=torch.Generator().manual_seed(1)) * 2
    scores = TemperatureLogitsWarper(sampling.temperature)(torch.empty(0), logits[None])
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(torch.empty(0), scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(torch.empty(0), scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(torch.empty(0), scores)
    weights = scores[0].softmax(-1)
    seen = torch.bincount(draws(logits, sampling, 20_000), minlength=30)
    assert not seen[weights == 0].any()
    torch.testing.assert_close(seen / 20_000, weights, atol=0.015, rtol=0)
