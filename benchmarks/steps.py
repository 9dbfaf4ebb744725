"""What each stage takes alone, at published dimensions with random weights: one step of decoding, one chunk of frames, one clip.

    python benchmarks/steps.py --folder /scratch/true --out steps.json [--profile]     # checkpoints that true_size.py has written
    python benchmarks/steps.py --folder /tmp/described --out steps.json --dummy --stages talker --without fused-draw

The stages are loaded as `serve` loads them and driven through their runners, on the engine's thread, one stage at a time. A
step is wall time from one output of every sequence to the next, host work included; `gpu_ms` is the time that kernels ran in
it, of a second pass under the profiler, and `--trace` keeps one step of every part to be looked at in a browser
(chrome://tracing): there it shows when the device waited for the host. The JSON is rewritten after every part.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from features import FEATURES, without
from machine import machine
from true_size import Report, add_eight_bits, memory, true_config, write

from aura_omni import assembly
from aura_omni.compiling import compiled_ahead
from aura_omni.engine.engine import Engine
from aura_omni.engine.sequence import Sequence
from aura_omni.flow import CODEBOOKS, SILENT_TEXT, Audio, Message, StageName, Text, Video, Voice

T = TypeVar("T")

WARM, STEPS = 12, 40  # outputs of every sequence
PROFILED = 3  # steps; the profiler takes far longer to add them up than they take
STAGES = ("talker", "code2wav", "aura", "asr")
SPEECH = {"talker", "code2wav"}  # are loaded together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="only these; others are not loaded")
    parser.add_argument("--dummy", action="store_true", help="weights are made up on the GPU, not written and read")
    add_eight_bits(parser)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--without", nargs="+", choices=FEATURES, default=(), help="plainer, as features.py says")
    parser.add_argument("--profile", action="store_true", help="with the time of kernels, and which they are")
    parser.add_argument(
        "--trace", type=Path, help="folder that gets a Chrome trace of one step of every part, host and device"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")  # what loading takes, stage by stage
    report = Report(arguments.out)
    report.add("machine", {**machine(), "without": arguments.without, "fp8": arguments.fp8, "kv_fp8": arguments.kv_fp8})
    with without(arguments.without):
        measure(arguments, report)


def measure(arguments: argparse.Namespace, report: Report) -> None:
    start = time.monotonic()
    wanted = set(arguments.stages)
    if wanted & SPEECH:
        wanted |= SPEECH
    config = true_config(
        arguments.folder, eager=arguments.eager, fp8=arguments.fp8, kv_fp8=arguments.kv_fp8, dummy=arguments.dummy
    )
    # A stage that is only there because another one needs it gets no graphs.
    stages = [stage for stage in config.stages if stage.name in wanted]
    stages = [stage if stage.name in arguments.stages else replace(stage, enforce_eager=True) for stage in stages]
    config = replace(config, stages=tuple(stages))
    if arguments.dummy:
        write(arguments.folder, dummy=True)
    with compiled_ahead(config, environ=os.environ):
        parts = assembly.assemble(config)
    report.add("load_s", time.monotonic() - start)
    with Engine(parts.runners()) as engine:
        for name, value in Bench(parts, engine, profile=arguments.profile, trace=arguments.trace).measured(
            arguments.stages
        ):
            report.add(name, {**value, "at_s": round(time.monotonic() - start, 1)})
            engine.check_integrity()
    report.add("memory_gib", memory())


# A name, and what measures it on the engine's thread.
Part = tuple[str, Callable[[], dict[str, Any]]]


class Bench:
    def __init__(self, parts: assembly.Stages, engine: Engine, *, profile: bool, trace: Path | None) -> None:
        self._parts, self._engine, self._profile, self._trace = parts, engine, profile, trace
        self._name = ""  # of the part
        self._random = np.random.default_rng(0)

    def measured(self, stages: Iterable[str]) -> Iterator[tuple[str, Any]]:
        parts = {"talker": self._talker, "code2wav": self._code2wav, "aura": self._aura, "asr": self._asr}
        for stage in STAGES:
            if stage in stages:
                for name, measure in parts[stage]():
                    self._name = name
                    with torch.inference_mode():
                        yield name, self._engine.call(measure)

    def _talker(self) -> Iterator[Part]:
        for batch in (1, 8, 32):
            yield f"talker_frame_{batch}", partial(self._steps, "talker", partial(self._speaking, batch))

    def _code2wav(self) -> Iterator[Part]:
        for batch in (1, 8, 32):
            for frames in (1, 8):
                yield f"code2wav_{batch}x{frames}", partial(self._vocoding, batch, frames)

    def _aura(self) -> Iterator[Part]:
        for tokens in (1_000, 8_000):
            # Silence or not is known with the first token, which the prefill draws; two more are two steps of decoding.
            yield f"aura_decision_after_{tokens}", partial(self._chunks, tokens, 1)
            yield f"aura_3_tokens_after_{tokens}", partial(self._chunks, tokens, 3)
        for batch in (1, 8):
            for tokens in (1_000, 8_000):
                yield (
                    f"aura_token_{batch}_of_{tokens}",
                    partial(self._steps, "aura", partial(self._answers, batch, tokens)),
                )

    def _asr(self) -> Iterator[Part]:
        yield "asr_clip_24_tokens", partial(self._clips, 24)
        yield "asr_clip_1_token", partial(self._clips, 1)
        for batch in (1, 8):
            yield f"asr_token_{batch}", partial(self._steps, "asr", partial(self._hearing, batch))

    # ------------------------------------------------------------ what is asked

    def _speaking(self, batch: int) -> list[Sequence]:
        assert self._parts.speech is not None
        talker = self._parts.speech.talker
        prompt = talker.prompt(
            talker.voices.resolve(Voice(speaker=next(iter(talker.voices.speakers)))),
            talker.writer.body("One sentence."),
        )
        sampling = replace(talker.sampling, max_tokens=1_000, min_tokens=1_000)
        return [talker.sequence(prompt, sampling, on_output=_ignore, on_end=_ignore) for _ in range(batch)]

    def _answers(self, batch: int, tokens: int) -> list[Sequence]:
        return [self._answer((Message("user", (Text(self._text(tokens)),)),), 1_000) for _ in range(batch)]

    def _answer(self, messages: tuple[Message, ...], tokens: int) -> Sequence:
        aura = self._parts.aura
        assert aura is not None
        sampling = replace(self._parts.defaults["aura"], max_tokens=tokens, ignore_eos=True)
        return aura.sequence(aura.prompt(messages), sampling, on_output=_ignore, on_end=_ignore)

    def _text(self, tokens: int) -> str:
        """Random words of so many tokens, to within a word."""
        assert self._parts.aura is not None
        words = self._random.choice(["up", "down", "left", "right", "red", "blue"], tokens)
        ends = np.cumsum([len(self._parts.aura.tokenizer.encode(" " + word)) for word in words])
        return " ".join(words[: int(np.searchsorted(ends, tokens))])

    def _hearing(self, batch: int) -> list[Sequence]:
        return [self._heard(self._sound(), 64) for _ in range(batch)]

    def _sound(self) -> Audio:
        return Audio((self._random.standard_normal(80_000) * 0.1).astype(np.float32), 16_000, self._random.bytes(16))

    def _heard(self, sound: Audio, tokens: int) -> Sequence:
        asr = self._parts.asr
        assert asr is not None
        sampling = replace(self._parts.defaults["asr"], max_tokens=tokens, ignore_eos=True)
        return asr.sequence(asr.prompt(sound), sampling, on_output=_ignore, on_end=_ignore)

    # ------------------------------------------------------------ how it is measured

    def _steps(self, stage: StageName, make: Callable[[], list[Sequence]]) -> dict[str, Any]:
        runner, sequences = self._parts.ar_runners[stage], make()
        for sequence in sequences:
            runner.add(sequence)

        def until(outputs: int) -> None:
            while min(sequence.generated for sequence in sequences) < outputs:
                runner.step()

        def further(steps: int) -> None:
            until(min(sequence.generated for sequence in sequences) + steps)

        try:
            until(WARM)
            times = []
            for output in range(WARM, WARM + STEPS):
                begin = time.perf_counter()
                until(output + 1)
                times.append(1000 * (time.perf_counter() - begin))
            return {**_spread(times), **self._kernels(further)}
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

        streams = [vocoder.open(on_audio, _ignore) for _ in range(batch)]
        rounds(WARM)
        found = {**_spread(rounds(STEPS)), **self._kernels(rounds)}
        for stream in streams:
            vocoder.abort(stream)
        return found

    def _chunks(self, history: int, tokens: int) -> dict[str, Any]:
        """A new pair of frames after a live session's history, until so many tokens; prompt writing included.

        A round of the history is a pair of frames and silence, and all its rounds are in the prefix cache; `history` is their
        tokens, to within half a round, the system turn not counted.
        """
        silent = Message("assistant", (Text(SILENT_TEXT),))

        def new() -> Video:
            frames = self._random.integers(0, 256, (2, 360, 640, 3), dtype=np.uint8)
            return Video(frames, (0.0, 0.5), 2.0, self._random.bytes(16))

        def rounds(count: int) -> tuple[Message, ...]:
            return tuple(message for _ in range(count) for message in (Message("user", (new(),)), silent))

        assert self._parts.aura is not None
        one, two = (len(self._parts.aura.prompt(rounds(count)).tokens) for count in (1, 2))
        past = rounds(round(history / (two - one)))
        return self._ended("aura", new, lambda video: self._answer((*past, Message("user", (video,))), tokens))

    def _clips(self, tokens: int) -> dict[str, Any]:
        """5 s of sound until so many tokens."""
        return self._ended("asr", self._sound, lambda sound: self._heard(sound, tokens))

    def _ended(self, stage: StageName, new: Callable[[], T], ask: Callable[[T], Sequence]) -> dict[str, Any]:
        """From something new that comes in to the end of what is asked about it; `prompt_ms` of that are before the engine."""
        runner, prompts = self._parts.ar_runners[stage], list[float]()

        def once() -> float:
            given, begin = new(), time.perf_counter()
            sequence = ask(given)
            prompts.append(1000 * (time.perf_counter() - begin))
            runner.add(sequence)
            while sequence.finished is None:
                runner.step()
            return 1000 * (time.perf_counter() - begin)

        def often(times: int) -> list[float]:
            return [once() for _ in range(times)]

        often(3)  # the second of a frame size may record graphs
        found = {**_spread(often(WARM)), "prompt_ms": round(statistics.median(prompts), 3)}
        return {**found, **self._kernels(often)}

    def _kernels(self, work: Callable[[int], object]) -> dict[str, Any]:
        """Of work(n), which does n steps."""
        if self._trace is not None:
            self._trace.mkdir(parents=True, exist_ok=True)
            with torch.profiler.profile() as profiler:
                work(1)
                torch.cuda.synchronize()
            profiler.export_chrome_trace(str(self._trace / f"{self._name}.json.gz"))
        if not self._profile:
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            work(PROFILED)
            torch.cuda.synchronize()
        # What ran on the device; the host's calls are among the entries too.
        kernels = [entry for entry in profiler.key_averages() if entry.self_device_time_total > 0]
        kernels.sort(key=lambda entry: -entry.self_device_time_total)
        return {
            "gpu_ms": round(sum(entry.self_device_time_total for entry in kernels) / 1000 / PROFILED, 3),
            "kernels_run": round(sum(entry.count for entry in kernels) / PROFILED),
            "kernels": {
                entry.key[:70]: [
                    round(entry.self_device_time_total / 1000 / PROFILED, 3),
                    round(entry.count / PROFILED),
                ]
                for entry in kernels[:10]
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
