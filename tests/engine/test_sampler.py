from __future__ import annotations

from typing import Any

import pytest
import torch

from aura_omni.engine.sampler import Constraints, Draw, constrain, pick
from aura_omni.flow import Sampling

CPU = torch.device("cpu")


def draws(logits: torch.Tensor, sampling: Sampling, count: int, *, seed: int = 0, stream: int = 0) -> torch.Tensor:
    """count draws of one row of logits [V], at steps 0 to count - 1."""
    draw = Draw.of([sampling] * count, [seed] * count, range(count), CPU)
    return pick(logits.expand(count, -1), draw, stream=stream)


def constraints(
    sampling: Sampling, prompt: list[int], outputs: list[int], stop_ids: tuple[int, ...] = ()
) -> Constraints:
    made = Constraints(sampling, prompt=prompt, stop_ids=stop_ids)
    for token in outputs:
        made.add(token)
    return made


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


# ---------------------------------------------------------------- bias, bans, penalties


def test_penalties_equal_values_worked_out_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 4.0, -1.0, 0.5]])
    sampling = Sampling(
        logit_bias={0: 1.0, 5: -3.0},
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        min_tokens=4,
    )
    row = constraints(sampling, prompt=[0, 1], outputs=[3, 3, 4], stop_ids=(2,))
    # 0: (2 + 1) / 2   1: -2 * 2   2: banned   3: 4 / 2 - 0.5 - 2 * 0.25   4: -1 * 2 - 0.5 - 0.25   5: 0.5 - 3
    expected = torch.tensor([[1.5, -4.0, -torch.inf, 1.0, -2.75, -2.5]])
    torch.testing.assert_close(constrain(logits, [row]), expected)


def test_the_input_is_not_changed_and_rows_without_constraints_stay() -> None:
    logits = torch.randn(3, 10)
    before = logits.clone()
    row = constraints(Sampling(presence_penalty=1.0), [], [4])
    out = constrain(logits, [None, row, None])
    assert torch.equal(logits, before)
    assert torch.equal(out[[0, 2]], before[[0, 2]])
    assert torch.equal((out != before).nonzero(), torch.tensor([[1, 4]]))


def test_without_constraints_nothing_is_copied() -> None:
    logits = torch.randn(2, 10)
    assert constrain(logits, [None, None]) is logits


def test_each_row_has_its_own_constraints() -> None:
    logits = torch.ones(3, 5)
    rows = [
        constraints(Sampling(logit_bias={1: 2.0}), [], []),
        constraints(Sampling(frequency_penalty=0.5), [], [1, 1, 2]),
        constraints(Sampling(repetition_penalty=4.0), [0], [3]),
    ]
    expected = torch.tensor([[1, 3, 1, 1, 1], [1, 0, 0.5, 1, 1], [0.25, 1, 1, 0.25, 1]])
    torch.testing.assert_close(constrain(logits, rows), expected)


def test_stop_ids_are_banned_until_min_tokens_are_out() -> None:
    row = constraints(Sampling(min_tokens=2), [], [], stop_ids=(1, 3))
    for expected in ([1, 3], [1, 3], []):
        banned = constrain(torch.zeros(1, 5), [row])[0].isinf().nonzero().flatten().tolist()
        assert banned == expected
        row.add(0)


def test_ids_of_a_prompt_that_the_head_does_not_have_are_no_matter() -> None:
    row = constraints(Sampling(repetition_penalty=2.0), [2, 151_655, -1], [])
    assert constrain(torch.ones(1, 4), [row]).tolist() == [[1.0, 1.0, 0.5, 1.0]]


def test_what_is_banned_already_stays_banned() -> None:
    sampling = Sampling(logit_bias={0: 100.0}, repetition_penalty=0.5, frequency_penalty=-2.0)
    row = constraints(sampling, [0], [0])
    assert constrain(torch.tensor([[-torch.inf, 0.0]]), [row])[0, 0] == -torch.inf


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_k": 3, "seed": 1, "stop_token_ids": (5,)}, False),
        ({"logit_bias": {1: 1.0}}, True),
        ({"min_tokens": 1}, True),
        ({"repetition_penalty": 1.05}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_only_requests_that_ask_for_constraints_pay_for_them(changes: dict[str, Any], needed: bool) -> None:
    assert Constraints.needed(Sampling(**changes)) is needed


@pytest.mark.reference
@pytest.mark.parametrize("penalty", [0.7, 1.05, 2.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 50)
    tokens = [3, 3, 7, 49, 0]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits.clone())
    sampling = Sampling(repetition_penalty=penalty)
    for split in (0, 2, 5):
        ours = constrain(logits, [constraints(sampling, tokens[:split], tokens[split:])])
        torch.testing.assert_close(ours, expected, atol=0, rtol=1e-6)


@pytest.mark.reference
def test_bias_and_bans_equal_transformers() -> None:
    from transformers import MinNewTokensLengthLogitsProcessor, SequenceBiasLogitsProcessor

    logits = torch.randn(1, 50)
    ids = torch.tensor([[5, 6, 7, 8]])  # two of the prompt, two said
    expected = SequenceBiasLogitsProcessor([[[4], 2.5], [[9], -1.5]])(ids, logits.clone())
    expected = MinNewTokensLengthLogitsProcessor(2, 3, [11, 12], device="cpu")(ids, expected)
    row = constraints(Sampling(logit_bias={4: 2.5, 9: -1.5}, min_tokens=3), [5, 6], [7, 8], stop_ids=(11, 12))
    torch.testing.assert_close(constrain(logits, [row]), expected)


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
