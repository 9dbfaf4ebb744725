"""Steps that are padded to few sizes and read tensors that stay equal steps as they are written."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from tiny_stage import GREEDY, SAMPLINGS, Request, TinyStage, make_runner, prompt, requests_of, run

from aura_omni.engine.graphs import sizes_up_to
from aura_omni.engine.steps import PREFILL_SIZES, graph_bytes, prefill_sizes
from tests.replayed import without_cuda


def test_sizes_are_few_and_waste_at_most_half() -> None:
    assert sizes_up_to(1) == (1,)
    assert sizes_up_to(6) == (1, 2, 4, 6)
    assert sizes_up_to(32) == (1, 2, 4, 8, 16, 24, 32)
    for most in range(1, 70):
        sizes = sizes_up_to(most)
        assert sizes == tuple(sorted(set(sizes)))
        assert sizes[-1] == most
        assert all(size <= 2 * (before + 1) for before, size in pairwise(sizes))


@pytest.mark.parametrize(
    ("batched", "mrope", "alone"),
    [(24, False, False), (600, True, False), (24, True, False), (600, False, False), (600, False, True)],
)
def test_padded_steps_equal_steps_as_they_are(
    batched: int, mrope: bool, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of prompts, but for one that is longer than the largest graph."""
    options = {"max_num_seqs": 5, "pages": 220, "max_num_batched_tokens": batched, "max_model_len": 600}
    plain, padded = ([Request(prompt(550)), *requests_of(10)] for _ in range(2))
    run(make_runner(TinyStage(mrope=mrope), **options), *plain)
    recorded = without_cuda(monkeypatch)
    stage = TinyStage(mrope=mrope)
    runner = make_runner(stage, graphs=True, usual=(SAMPLINGS[1], GREEDY), alone=alone, **options)
    usual = sorted(recorded)
    # Decode, draw and prefills, before any request
    assert usual == sorted(2 * sizes_up_to(5) + prefill_sizes(long=alone))
    runner.add(padded[0].sequence)
    runner.step()  # a prompt that is alone is read in the longest steps
    run(runner, *padded[1:])
    assert [request.heard for request in padded] == [request.heard for request in plain]
    assert any(batch.rows > PREFILL_SIZES[-1] for batch in stage.batches) == (batched == 600)


def test_requests_that_sample_as_usual_or_less_need_no_graph_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = without_cuda(monkeypatch)
    usual = replace(SAMPLINGS[2], temperature=0.9)
    runner = make_runner(TinyStage(), graphs=True, usual=(usual, GREEDY), max_num_seqs=4)
    before = len(recorded)
    run(runner, Request(prompt(9), usual), Request(prompt(9), GREEDY), Request(prompt(9), replace(usual, top_k=40)))
    assert len(recorded) == before
    run(runner, Request(prompt(9, seed=1), replace(usual, top_p=0.9)))
    assert len(recorded) == before + 2


@pytest.mark.parametrize("alone", [False, True])
def test_what_graphs_of_prefills_hold_is_counted(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)
    stage = TinyStage()
    graphed = make_runner(stage, graphs=True, alone=alone)._compute._prefill_graph
    assert graphed is not None
    held = sum((capture.inputs[0].nbytes + capture.output.nbytes) for capture in graphed._captures.values())
    assert held == graph_bytes(stage.decoder_config.hidden, stage.adds, stage.dtype, long=alone)
