"""Steps that are padded to few sizes and read tensors that stay equal steps as they are written."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from tiny_stage import GREEDY, SAMPLINGS, Request, TinyStage, make_runner, prompt, requests_of, run
from torch import Tensor

from aura_omni.engine.attention import PagedKV
from aura_omni.engine.graphs import sizes_up_to
from aura_omni.engine.seats import TAKERS
from aura_omni.engine.sequence import Batch, MediaSpan
from aura_omni.engine.steps import JOINED_ROWS, JOINED_SIZES, PREFILL_SIZES, Steps, graph_bytes, prefill_sizes
from aura_omni.errors import EngineError
from aura_omni.models.layers import KeyValues
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
    joined = tuple(5 + size for size in JOINED_SIZES)  # five may decode
    # Seats, decode, draw, short prefills, and those with rows of decoding, before any request.
    assert usual == sorted(TAKERS + 2 * sizes_up_to(5) + prefill_sizes(long=alone) + joined)
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
    steps = make_runner(stage, graphs=True, max_num_seqs=JOINED_ROWS, alone=alone)._compute
    held = 0
    for graphed in (steps._prefill_graph, steps._joined_graph):
        assert graphed is not None
        held += sum((capture.inputs[1].nbytes + capture.output.nbytes) for capture in graphed._captures.values())
    assert held == graph_bytes(stage.decoder_config.hidden, stage.adds, stage.dtype, long=alone)


@pytest.mark.parametrize("mrope", [False, True])
def test_rows_of_decoding_go_along_with_those_of_prompts(mrope: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_num_seqs": 6, "pages": 300, "max_model_len": 600, "max_num_batched_tokens": 600}
    media = (MediaSpan(3, 20, b"clip"),)

    def requests() -> list[Request]:
        sampled = [replace(sampling, max_tokens=12, seed=7) for sampling in SAMPLINGS]
        return [Request(prompt(40, seed=n), one, media=media if n % 2 else ()) for n, one in enumerate(sampled)]

    plain, joined = requests(), requests()
    run(make_runner(TinyStage(mrope=mrope), **options), *plain)
    without_cuda(monkeypatch)
    counts: list[tuple[int, int]] = []
    join = Steps.joined

    def counted(self: Steps, single: Batch, prompts: Batch) -> Tensor:
        counts.append((len(single.sequences), prompts.rows))
        return join(self, single, prompts)

    monkeypatch.setattr(Steps, "joined", counted)
    runner = make_runner(TinyStage(mrope=mrope), graphs=True, **options)
    for request in joined:
        runner.add(request.sequence)
        for _ in range(2):
            runner.step()
            runner.check_integrity()
    background = Request(prompt(50, seed=99))
    background.sequence.open = background.sequence.only_read = True
    run(runner, background)
    assert [request.heard for request in joined] == [request.heard for request in plain]
    assert background.reason == "stop"
    assert {rows for _, rows in counts} >= {40, 50}
    assert max(singles for singles, _ in counts) > 1


def test_a_failure_of_rows_that_go_along_is_that_of_whoever_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)
    stage = TinyStage()
    runner = make_runner(stage, graphs=True)
    writes, broken = Request(prompt(9)), Request([*prompt(9, seed=1)[:-1], 5])
    run(make_runner(TinyStage()), want := Request(prompt(9)))
    runner.add(writes.sequence)
    runner.step()
    stage.poison = 5
    run(runner, broken)
    assert writes.heard == want.heard
    assert isinstance(broken.error, EngineError)


def test_attention_is_recorded_for_contexts_as_long_as_the_stage_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen by what the table of pages has room for: one page more, and a stage of 8,192 rows would be one of long contexts."""
    places: set[int] = set()
    real = PagedKV.chunk_step, PagedKV.decode_step

    def chunk_step(kv: PagedKV, slot: Tensor, chunks: Tensor, *, most_rows: int) -> KeyValues:
        places.add((chunks.shape[1] - 3) * kv.page_size)
        return real[0](kv, slot, chunks, most_rows=most_rows)

    def decode_step(kv: PagedKV, slot: Tensor, length: Tensor, table: Tensor) -> KeyValues:
        places.add(table.shape[1] * kv.page_size)
        return real[1](kv, slot, length, table)

    monkeypatch.setattr(PagedKV, "chunk_step", chunk_step)
    monkeypatch.setattr(PagedKV, "decode_step", decode_step)
    without_cuda(monkeypatch)
    run(make_runner(TinyStage(), graphs=True, max_model_len=128), *requests_of(4))
    assert places == {128}
