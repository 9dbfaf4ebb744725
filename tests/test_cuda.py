"""On a GPU: the stages of the tiny family in lanes of their own and replayed from graphs, against the same as written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from aura_omni.config import Config, Options, load
from aura_omni.engine.lane import Lane
from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.runner import ArRunner
from aura_omni.flow import Sampling, Text, TurnRequest, Voice
from aura_omni.models.vision_input import Framing, PixelRules
from aura_omni.pipeline import Pipeline
from aura_omni.stages import vocoder
from aura_omni.stages.asr import AsrStage
from aura_omni.stages.aura import AuraStage
from aura_omni.stages.encoder_graphs import HearingGraphs, TowerGraphs, features_of
from aura_omni.stages.talker import TalkerStage
from aura_omni.stages.vocoder import VocoderRunner
from tests.aura_tiny import VIDEO_PIXELS
from tests.family import Listener, ask, clip, family, recording, running, spoken

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def config(*, eager: bool) -> Config:
    """tiny.yaml over the tiny family in float32, on the GPU."""
    folders = ("asr", "aura", "tts_custom_voice", "tts_custom_voice")
    overrides = {
        str(number): {"model": str(family() / folder), "dtype": "float32", "gpu_memory_utilization": 0.03}
        for number, folder in enumerate(folders)
    }
    options = Options(deploy_config="tiny.yaml", stage_overrides=json.dumps(overrides), enforce_eager=eager or None)
    return load(options, environ={}, platform="cuda")


def request(number: int) -> TurnRequest:
    sampling = {
        "aura": {"max_tokens": 6 + number, "temperature": 0.8, "seed": number},
        "talker": {"seed": number, "max_tokens": 4 + number},
    }
    if number % 3 == 2:
        sampling["aura"] |= {"repetition_penalty": 1.1, "top_p": 0.9}
    parts = (recording(), clip()) if number % 2 else (recording(),)
    return spoken(*parts, Text(f"question {number}"), sampling=sampling)


@pytest.fixture(scope="module", autouse=True)
def whole_float32() -> Iterator[None]:
    """Float32 is what is compared, also of stages that no pipeline loads, which would have seen to it."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module")
def graphs() -> Iterator[Pipeline]:
    with running(config(eager=False)) as pipeline:
        yield pipeline


def test_turns_from_graphs_equal_turns_as_written(graphs):
    with running(config(eager=True)) as written:
        for number in range(8):
            ours, theirs = ask(graphs, request(number)), ask(written, request(number))
            assert ours.text == theirs.text
            assert ours.heard == theirs.heard
            np.testing.assert_allclose(ours.samples, theirs.samples, atol=1e-4)


def test_turns_together_equal_turns_alone(graphs):
    alone = [ask(graphs, request(number)) for number in range(10)]
    together = [Listener() for _ in range(10)]
    for number, listener in enumerate(together):
        graphs.submit(request(number), listener)
    for one, other in zip(alone, together, strict=True):
        assert other.wait().text == one.text
        np.testing.assert_allclose(other.samples, one.samples, atol=1e-4)


def test_a_hundred_turns_that_are_cancelled_leave_nothing_behind(graphs):
    listeners = []
    for number in range(100):
        listener = Listener()
        turn = graphs.submit(request(number % 10), listener)
        listeners.append(listener)
        if number % 7 == 0:
            listeners[number // 2].wait()
        turn.cancel()
    assert {listener.wait().end.reason for listener in listeners} <= {"cancelled", "stop", "length", "silent"}
    graphs.engine.check_integrity()


@pytest.mark.parametrize("text_is_late", [False, True])
def test_frames_from_graphs_equal_frames_as_written(text_is_late):
    checkpoint = Checkpoint.find(str(family() / "tts_custom_voice"))
    stage = TalkerStage.load(checkpoint, device=CUDA, dtype=torch.float32)
    speaking = replace(stage.voices.resolve(Voice()), non_streaming=False)
    predictor = Sampling(temperature=0.9, top_k=50)
    usual = stage.bounded(Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05)), predictor

    def frames(*, graphs: bool) -> list[np.ndarray]:
        runner = ArRunner(
            stage,
            pages=60,
            page_size=16,
            max_num_seqs=4,
            max_num_batched_tokens=40,
            max_model_len=128,
            max_waiting=8,
            prefix_caching=False,
            graphs=graphs,
            usual=usual,
        )
        heard: list[list[np.ndarray]] = [[] for _ in range(6)]
        rests = {}
        for number, mine in enumerate(heard):
            body = stage.writer.body("hello the world " * (number + 1))
            start = body[:2] if text_is_late else body
            sequence = stage.sequence(
                stage.prompt(speaking, start),
                replace(usual[0], max_tokens=9 + 2 * number, temperature=0.9 * (number != 3), seed=number),
                predictor=replace(predictor, temperature=0.9 * (number != 4)),
                on_output=mine.append,
                on_end=lambda *_: None,
                open_ended=text_is_late,
            )
            if text_is_late:
                rests[sequence] = list(body[2:])
            runner.add(sequence)
        passes = 0
        while runner.busy or rests:
            runner.step()
            passes += 1
            for sequence, rest in list(rests.items()):
                if rest and passes % 3 == 0:
                    stage.feed(sequence, [rest.pop(0)])
                elif not rest:
                    stage.close(sequence)
                    del rests[sequence]
        runner.check_integrity()
        return [np.stack(mine) for mine in heard]

    for ours, theirs in zip(frames(graphs=True), frames(graphs=False), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _sound(dtype: torch.dtype, *, graphs: bool) -> np.ndarray:
    """Samples [5, 33 * 1920] of five streams, three at once, pushed in pieces of many sizes."""
    checkpoint = Checkpoint.find(str(family() / "tts_custom_voice")).sub("speech_tokenizer")
    decoder, _ = vocoder.load(checkpoint, device=CUDA, dtype=dtype)
    codes = np.random.default_rng(0).integers(0, decoder.config.codebook_size, (5, 33, 16))
    runner = VocoderRunner(decoder, max_num_seqs=3, graphs=graphs)
    heard: list[list[np.ndarray]] = [[] for _ in codes]
    ends: list[str] = []
    streams = [runner.open(mine.append, lambda reason, _: ends.append(reason)) for mine in heard]
    for first, stop in ((0, 1), (1, 3), (3, 7), (7, 15), (15, 32), (32, 33)):
        for stream, frames in zip(streams, codes, strict=True):
            runner.push(stream, frames[first:stop])
        # All that can be: frames are cut alike with graphs and without, so that rounding is, too.
        while runner.step() or runner.flying:
            pass
    for stream in streams:
        runner.close(stream)
    while len(ends) < len(codes):
        runner.step()
    runner.check_integrity()
    return np.stack([np.concatenate(mine) for mine in heard])


def test_sound_from_graphs_equals_sound_as_written():
    ours, theirs = _sound(torch.float32, graphs=True), _sound(torch.float32, graphs=False)
    assert ours.shape == (5, 33 * 1920)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_sound_from_graphs_is_as_exact_as_sound_as_written():
    """In bfloat16 both round, and not alike: neither is farther from float32 than the other."""
    exact = _sound(torch.float32, graphs=False)

    def error(*, graphs: bool) -> float:
        return float(np.sqrt(np.mean((_sound(torch.bfloat16, graphs=graphs) - exact) ** 2)))

    assert error(graphs=True) < 1.2 * error(graphs=False)


# Both run the same kernels but for attention, which is masked or of another width where it is padded.
ENCODER_PRECISION = pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])


@ENCODER_PRECISION
def test_frames_from_graphs_are_seen_as_written(dtype, limit):
    stage = AuraStage.load(Checkpoint.find(str(family() / "aura")), device=CUDA, dtype=dtype)
    tower, rules = stage.network.visual, PixelRules.from_json(VIDEO_PIXELS)
    framing = Framing(rules, (360, 640), (352, 640))
    with Lane(CUDA).active(), torch.inference_mode():
        graphs = TowerGraphs(tower)
        graphs.prepare(framing)
        given = [
            torch.randint(0, 256, (groups, 2, 360, 640, 3), dtype=torch.uint8).pin_memory()
            for groups in (3, 1, 8, 2, 11)
        ]
        found = [graphs(frames, framing) for frames in given]
        for frames, features in zip(given, found, strict=True):
            plain = features_of(tower, frames, framing)
            torch.testing.assert_close(features.float(), plain.float(), atol=limit, rtol=limit)


@ENCODER_PRECISION
def test_sound_from_graphs_is_heard_as_written(dtype, limit):
    network = AsrStage.load(Checkpoint.find(str(family() / "asr")), device=CUDA, dtype=dtype).network
    with Lane(CUDA).active(), torch.inference_mode():
        graphs = HearingGraphs(network)
        graphs.prepare()
        given = [
            [torch.randn(int(16_000 * seconds)) for seconds in together]
            for together in ([5.0], [8.0, 0.7], [1.0, 20.3, 3.33], [8.01], [9.0] * 5, [2.0] * 19)
        ]
        found = [graphs.encode([clip.numpy() for clip in clips]) for clips in given]
        for clips, rows in zip(given, found, strict=True):
            for one, other in zip(rows, network.encode(clips), strict=True):
                torch.testing.assert_close(one.float(), other.float(), atol=limit, rtol=limit)
