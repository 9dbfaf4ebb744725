"""A stage whose keys and values are in eight bits says the same however its rows are computed, as one of all bits does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_stage import GREEDY, Request, TinyStage, make_runner, prompt, run

from aura_omni.engine.sequence import MediaSpan
from tests.replayed import without_cuda

SEEDED = replace(GREEDY, max_tokens=24, seed=11, temperature=0.9, top_k=20)
CLIP = MediaSpan(5, 6, b"clip")


def crowd() -> list[Request]:
    """With answers long enough to meet each other's prompts."""
    return [
        Request(prompt(9 + 5 * seed, seed=seed), replace(SEEDED, seed=seed), media=(CLIP,) if seed % 2 else ())
        for seed in range(5)
    ]


def heard_alone() -> list[list[int]]:
    requests = crowd()
    for request in requests:
        run(make_runner(TinyStage(), kv_eight_bits=True), request)
    return [request.heard for request in requests]


def heard_in_all_bits() -> list[list[int]]:
    requests = crowd()
    run(make_runner(TinyStage()), *requests)
    return [request.heard for request in requests]


def test_a_cached_prefix_equals_a_fresh_one() -> None:
    stage = TinyStage(mrope=True)
    runner = make_runner(stage, kv_eight_bits=True)
    fresh, cached = (Request(prompt(21), replace(GREEDY, max_tokens=1), media=(CLIP,)) for _ in range(2))
    run(runner, fresh)
    fresh_logits = stage.last_logits
    run(runner, cached)
    assert cached.sequence.cached == 20
    torch.testing.assert_close(stage.last_logits, fresh_logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("budget", [6, 64])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_sequences_and_those_beside_others_say_the_same_as_alone(budget: int, prefix_caching: bool) -> None:
    crowded = crowd()
    runner = make_runner(
        TinyStage(), pages=26, max_num_seqs=5, max_num_batched_tokens=budget, prefix_caching=prefix_caching, kv_eight_bits=True
    )  # fmt: skip
    run(runner, *crowded)
    assert runner.counters.preemptions > 0
    alone = heard_alone()
    assert [request.heard for request in crowded] == alone
    assert alone != heard_in_all_bits()  # or nothing would have been rounded


def test_padded_and_joined_steps_equal_steps_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, padded = heard_alone(), crowd()
    without_cuda(monkeypatch)
    runner = make_runner(TinyStage(), max_num_seqs=5, graphs=True, usual=(SEEDED, GREEDY), kv_eight_bits=True)
    for request in padded:  # who comes while others decode goes along with them
        runner.add(request.sequence)
        runner.step()
    run(runner)
    assert [request.heard for request in padded] == alone
