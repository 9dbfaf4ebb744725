"""What each stage takes alone, at published dimensions with random weights: one step of decoding, one chunk of frames, one clip.

    python benchmarks/steps.py --folder /scratch/true --out steps.json [--profile]
    python benchmarks/steps.py --folder /tmp/described --out steps.json --in-memory --stages talker --without fused-draw

The stages are loaded as `serve` loads them and driven through their runners, on the engine's thread, one stage at a time. A
step is wall time from one output of every sequence to the next, host work included; `gpu_ms` is the time that kernels ran in
it, of a second pass under the profiler. The JSON is rewritten after every part.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from features import FEATURES, without
from true_size import Report, machine, memory, true_config

from aura_omni import assembly
from aura_omni.engine.engine import Engine
from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.runner import ArRunner
from aura_omni.engine.sequence import Sequence
from aura_omni.flow import CODEBOOKS, Audio, Message, Text, Video, Voice
from aura_omni.models.weights import Layout
from aura_omni.nano.published import TRUE
from aura_omni.nano.random_family import fill, write_family

WARM, STEPS = 12, 40  # outputs of every sequence
STAGES = ("talker", "code2wav", "aura", "asr")
SPEECH = {"talker", "code2wav"}  # are loaded together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="only these; others are not loaded")
    parser.add_argument("--in-memory", action="store_true", help="weights are made up on the GPU, not written and read")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--without", nargs="+", choices=FEATURES, default=(), help="plainer, as features.py says")
    parser.add_argument("--profile", action="store_true", help="with the time of kernels, and which they are")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")  # what loading takes, stage by stage
    report = Report(arguments.out)
    report.add("machine", {**machine(), "without": arguments.without})
    with without(arguments.without):
        measure(arguments, report)


def measure(arguments: argparse.Namespace, report: Report) -> None:
    start = time.monotonic()
    wanted = set(arguments.stages)
    if wanted & SPEECH:
        wanted |= SPEECH
    if arguments.in_memory:
        write_family(arguments.folder, sizes=TRUE, kinds=("custom_voice",), weights=False)
    config = true_config(arguments.folder, eager=arguments.eager)
    config = replace(config, stages=tuple(stage for stage in config.stages if stage.name in wanted))
    parts = assemble_in_memory(config) if arguments.in_memory else assembly.assemble(config)
    report.add("load_s", time.monotonic() - start)
    with Engine(parts.runners()) as engine:
        for name, value in Bench(parts, engine, profile=arguments.profile).measured(arguments.stages):
            report.add(name, value)
            engine.check_integrity()
    report.add("memory_gib", memory())


def assemble_in_memory(config: assembly.Config) -> assembly.Stages:
    def load(
        checkpoint: Checkpoint,
        network: torch.nn.Module,
        layout: Layout,
        *,
        device: torch.device,
        dtype: torch.dtype,
        own: str = "",
    ) -> None:
        fill(network, layout, device=device, dtype=dtype)

    with patch.object(Checkpoint, "load", load):
        return assembly.assemble(config)


class Bench:
    def __init__(self, parts: assembly.Stages, engine: Engine, *, profile: bool) -> None:
        self._parts, self._engine, self._profile = parts, engine, profile
        self._random = np.random.default_rng(0)

    def measured(self, stages: Iterable[str]) -> Iterator[tuple[str, Any]]:
        parts = {"talker": self._talker, "code2wav": self._code2wav, "aura": self._aura, "asr": self._asr}
        for stage in STAGES:
            if stage in stages:
                yield from parts[stage]()

    def _talker(self) -> Iterator[tuple[str, Any]]:
        for batch in (1, 8, 32):
            yield f"talker_frame_{batch}", self._decoding("talker", [self._speaking() for _ in range(batch)])

    def _code2wav(self) -> Iterator[tuple[str, Any]]:
        for batch in (1, 8, 32):
            for frames in (1, 8):
                yield f"code2wav_{batch}x{frames}", self._vocoding(batch, frames)

    def _aura(self) -> Iterator[tuple[str, Any]]:
        for tokens in (1_000, 8_000):
            yield f"aura_chunk_after_{tokens}", self._on_engine(lambda tokens=tokens: self._chunks(tokens))
        for batch in (1, 8):
            for tokens in (1_000, 8_000):
                yield f"aura_token_{batch}_of_{tokens}", self._decoding("aura", self._answers(batch, tokens))

    def _asr(self) -> Iterator[tuple[str, Any]]:
        yield "asr_clip_24_tokens", self._on_engine(lambda: self._clips(24))
        yield "asr_clip_1_token", self._on_engine(lambda: self._clips(1))
        for batch in (1, 8):
            yield f"asr_token_{batch}", self._decoding("asr", [self._hearing(64) for _ in range(batch)])

    # ------------------------------------------------------------ what is asked

    def _speaking(self) -> Sequence:
        assert self._parts.speech is not None
        talker = self._parts.speech.talker
        prompt = talker.prompt(
            talker.voices.resolve(Voice(speaker=next(iter(talker.voices.speakers)))),
            talker.writer.body("One sentence."),
        )
        sampling = replace(talker.sampling, max_tokens=1_000, min_tokens=1_000)
        return talker.sequence(prompt, sampling, on_output=_ignore, on_end=_ignore)

    def _answers(self, batch: int, tokens: int) -> list[Sequence]:
        return [self._answer((Message("user", (Text(self._text(tokens)),)),)) for _ in range(batch)]

    def _answer(self, messages: tuple[Message, ...]) -> Sequence:
        aura = self._parts.aura
        assert aura is not None
        sampling = replace(self._parts.defaults["aura"], max_tokens=1_000, ignore_eos=True)
        return aura.sequence(aura.prompt(messages), sampling, on_output=_ignore, on_end=_ignore)

    def _text(self, tokens: int) -> str:
        """Random words of so many tokens, to within a word."""
        assert self._parts.aura is not None
        words = self._random.choice(["up", "down", "left", "right", "red", "blue"], tokens)
        ends = np.cumsum([len(self._parts.aura.tokenizer.encode(" " + word)) for word in words])
        return " ".join(words[: int(np.searchsorted(ends, tokens))])

    def _hearing(self, tokens: int) -> Sequence:
        asr = self._parts.asr
        assert asr is not None
        sound = (self._random.standard_normal(80_000) * 0.1).astype(np.float32)
        prompt = asr.prompt(Audio(sound, 16_000, self._random.bytes(16)))
        sampling = replace(self._parts.defaults["asr"], max_tokens=tokens, ignore_eos=True)
        return asr.sequence(prompt, sampling, on_output=_ignore, on_end=_ignore)

    # ------------------------------------------------------------ how it is measured

    def _on_engine(self, measure: Callable[[], Any]) -> Any:
        with torch.inference_mode():
            return self._engine.call(measure)

    def _decoding(self, stage: str, sequences: list[Sequence]) -> dict[str, Any]:
        return self._on_engine(lambda: self._steps(self._parts.ar_runners[stage], sequences))

    def _steps(self, runner: ArRunner, sequences: list[Sequence]) -> dict[str, Any]:
        for sequence in sequences:
            runner.add(sequence)

        def until(outputs: int) -> None:
            while min(sequence.generated for sequence in sequences) < outputs:
                runner.step()

        try:
            until(WARM)
            times = []
            for output in range(WARM, WARM + STEPS):
                begin = time.perf_counter()
                until(output + 1)
                times.append(1000 * (time.perf_counter() - begin))
            return {**_spread(times), **self._kernels(lambda: until(WARM + STEPS + 10), 10)}
        finally:
            for sequence in sequences:
                runner.abort(sequence)

    def _vocoding(self, batch: int, frames: int) -> dict[str, Any]:
        assert self._parts.speech is not None
        vocoder = self._parts.speech.vocoder
        heard = 0

        def on_audio(samples: np.ndarray) -> None:
            nonlocal heard
            heard += 1

        def rounds(count: int) -> list[float]:
            nonlocal heard
            times = []
            for _ in range(count):
                codes = self._random.integers(0, vocoder.decoder.config.codebook_size, (batch, frames, CODEBOOKS))
                heard, begin = 0, time.perf_counter()
                for stream, rows in zip(streams, codes, strict=True):
                    vocoder.push(stream, rows)
                while heard < batch:
                    vocoder.step()
                times.append(1000 * (time.perf_counter() - begin))
            return times

        def measure() -> dict[str, Any]:
            rounds(WARM)
            found = {**_spread(rounds(STEPS)), **self._kernels(lambda: rounds(10), 10)}
            for stream in streams:
                vocoder.abort(stream)
            return found

        streams = [vocoder.open(on_audio, _ignore) for _ in range(batch)]
        return self._on_engine(measure)

    def _chunks(self, tokens: int) -> dict[str, Any]:
        """A new pair of frames after a history that is in the prefix cache: until the first token, prompt writing included."""
        history = Message("user", (Text(self._text(tokens)),))
        runner = self._parts.ar_runners["aura"]

        def chunk() -> float:
            frames = self._random.integers(0, 256, (2, 360, 640, 3), dtype=np.uint8)
            begin = time.perf_counter()
            video = Message("user", (Video(frames, (0.0, 0.5), 2.0, self._random.bytes(16)),))
            sequence = self._answer((history, video))
            runner.add(sequence)
            while not sequence.generated:
                runner.step()
            taken = time.perf_counter() - begin
            runner.abort(sequence)
            return 1000 * taken

        return self._repeated(chunk)

    def _clips(self, tokens: int) -> dict[str, Any]:
        """5 s of sound until so many tokens."""
        runner = self._parts.ar_runners["asr"]

        def clip() -> float:
            begin = time.perf_counter()
            sequence = self._hearing(tokens)
            runner.add(sequence)
            while sequence.finished is None:
                runner.step()
            return 1000 * (time.perf_counter() - begin)

        return self._repeated(clip)

    def _repeated(self, once: Callable[[], float]) -> dict[str, Any]:
        times = [once() for _ in range(WARM)][2:]
        return {**_spread(times), **self._kernels(lambda: [once() for _ in range(5)], 5)}

    def _kernels(self, work: Callable[[], object], steps: int) -> dict[str, Any]:
        if not self._profile:
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            work()
            torch.cuda.synchronize()
        found = sorted(profiler.key_averages(), key=lambda entry: -entry.self_device_time_total)
        return {
            "gpu_ms": round(sum(entry.self_device_time_total for entry in found) / 1000 / steps, 3),
            "launches": round(sum(entry.count for entry in found) / steps),
            "kernels": {
                entry.key[:70]: [round(entry.self_device_time_total / 1000 / steps, 3), round(entry.count / steps)]
                for entry in found[:10]
            },
        }


def _spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median_ms": round(statistics.median(times), 3),
        "p95_ms": round(ordered[int(0.95 * (len(times) - 1))], 3),
    }


def _ignore(*_: object) -> None:
    pass


if __name__ == "__main__":
    main()
