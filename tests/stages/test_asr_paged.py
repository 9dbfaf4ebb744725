"""The ASR stage in the paged engine writes what it writes with a plain cache, whoever shares the pages."""

from __future__ import annotations

import pytest
import torch

from aura_omni.engine.runner import ArRunner
from aura_omni.engine.sequence import Batch, Sequence
from aura_omni.flow import Audio, Sampling
from aura_omni.stages.asr import AsrPrompt, AsrStage
from aura_omni.stages.tokenizer import TextTokenizer
from tests.asr_tiny import IDS, byte_tokenizer, clip, dense, network_of, reference
from tests.replayed import without_cuda

GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def stage() -> AsrStage:
    return AsrStage(network_of(reference()), TextTokenizer(byte_tokenizer(IDS), "tiny"))


def hear(stage: AsrStage, seconds: float, seed: int = 0, **options: str) -> AsrPrompt:
    samples = clip(seconds, seed=seed)
    return stage.prompt(Audio(samples, 16_000, samples.tobytes()), **options)


def runner(stage: AsrStage, *, pages: int = 200, batched: int = 512, graphs: bool = False) -> ArRunner:
    return ArRunner(
        stage,
        pages=pages,
        page_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=batched,
        max_model_len=2048,
        max_waiting=8,
        prefix_caching=True,
        graphs=graphs,
    )


def run(engine: ArRunner, stage: AsrStage, prompts: list[AsrPrompt]) -> tuple[list[list[int]], list[Sequence]]:
    heard: list[list[int]] = [[] for _ in prompts]
    ends: list[str] = []
    sequences = [
        stage.sequence(prompt, GREEDY, on_output=out.append, on_end=lambda reason, _: ends.append(reason))
        for prompt, out in zip(prompts, heard, strict=True)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while engine.busy:
        engine.step()
        engine.check_integrity()
    assert ends == ["length"] * len(prompts)
    return heard, sequences


@torch.no_grad()
def plainly(stage: AsrStage, prompt: AsrPrompt) -> list[int]:
    sequence = stage.sequence(prompt, GREEDY, on_output=lambda _: None, on_end=lambda *_: None)
    kv = dense(stage.decoder_config, sequence.length + GREEDY.max_tokens)
    for _ in range(GREEDY.max_tokens):
        hidden = stage.forward(Batch((sequence,), (kv.length,), (sequence.length - kv.length,)), kv)
        kv.advance()
        sequence.tokens.append(int(stage.logits(hidden[-1:]).argmax()))
    return sequence.outputs


def prompts(stage: AsrStage) -> list[AsrPrompt]:
    return [
        hear(stage, 5.3),
        hear(stage, 0.6, 1, language="en"),
        hear(stage, 9, 2, context="Aura"),
        hear(stage, 5.3, 3),
    ]


@pytest.mark.parametrize("batched", [512, 33, 9], ids=lambda rows: f"{rows} rows a step")
def test_paged_equals_plain(stage, batched):
    asked = prompts(stage)
    heard, _ = run(runner(stage, batched=batched), stage, asked)
    assert heard == [plainly(stage, prompt) for prompt in asked]
    assert len({tuple(ids) for ids in heard}) == len(asked)


def test_padded_clips_and_steps_are_the_same(stage, monkeypatch):
    without_cuda(monkeypatch)
    monkeypatch.setattr(stage, "_hearing", None)  # put back afterwards
    asked = prompts(stage)
    expected = [plainly(stage, prompt) for prompt in asked]
    engine = runner(stage, graphs=True)
    for which in ([0], [2], [1, 3], [0, 2, 3]):
        heard, _ = run(engine, stage, [asked[number] for number in which])
        assert heard == [expected[number] for number in which]


def test_pages_taken_away_change_nothing(stage):
    asked = prompts(stage)
    engine = runner(stage, pages=23)
    heard, _ = run(engine, stage, asked)
    assert engine.counters.preemptions
    assert heard == [plainly(stage, prompt) for prompt in asked]


def test_the_same_clip_is_found_again_and_another_of_the_same_length_is_not(stage):
    engine, one, other = runner(stage), hear(stage, 5), hear(stage, 5, 1)
    assert one.tokens == other.tokens
    (first,), _ = run(engine, stage, [one])
    (second,), (again,) = run(engine, stage, [one])
    (third,), (different,) = run(engine, stage, [other])
    assert first == second == plainly(stage, one)
    assert third == plainly(stage, other) != first
    assert again.cached == (len(one.tokens) - 1) // 16 * 16
    assert different.cached == one.audio.start // 16 * 16  # the system turn and no more
