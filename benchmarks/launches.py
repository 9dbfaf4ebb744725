"""What a launch costs the host: time, PyTorch's calls and copies to the device, of each stage and kind of step.

    python benchmarks/launches.py --out launches.json                  # on the "meta" device: Triton is needed and no GPU, nothing is computed
    python benchmarks/launches.py --out launches.json --device cuda

The stages of a deploy file (the tiny ones by default: the host does the same for large ones) are assembled as on a GPU, with
CUDA graphs, and driven through their runners, one sequence at a time. Everybody who waits for a first id, a first word or a first
sound waits for these times, too: the device has nothing to do meanwhile. `begun_us` is from the call of `ArRunner.launch` to the
first graph that is launched, `decoder_us` to that of the decoder, `all_us` to the end of the last; medians of many.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from machine import machine
from torch.utils._python_dispatch import TorchDispatchMode
from true_size import Report

from aura_omni import assembly
from aura_omni.compiling import compiled_ahead
from aura_omni.config import Options, load
from aura_omni.engine import lane
from aura_omni.engine.graphs import Graphed
from aura_omni.engine.runner import ArRunner
from aura_omni.engine.sequence import Batch, Sequence
from aura_omni.engine.steps import Steps
from aura_omni.flow import Audio, Message, StageName, Text, Video, Voice

ROUNDS, TOKENS = 300, 6  # sequences of a stage, and the ids that each says


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("meta", "cuda"), default="meta")
    parser.add_argument("--deploy-config", default="tiny.yaml")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        parser.error("a stage on a GPU is made of Triton kernels, and Triton is not installed: pip install triton")
    report = Report(arguments.out)
    report.add("machine", machine())
    config = load(Options(deploy_config=arguments.deploy_config), environ={}, platform="cuda")
    with nothing_computed() if arguments.device == "meta" else compiled_ahead(config, environ=os.environ):
        parts = assembly.assemble(config, device=torch.device("meta") if arguments.device == "meta" else None)
        for stage, what, make in ways(parts):
            runner = parts.ar_runners[stage]
            runner._compute.drawable = frozenset(range(runner._compute.vocabulary))  # which "meta" cannot tell
            with torch.inference_mode():
                measured(runner, make, rounds=20)
                times = measured(runner, make, rounds=arguments.rounds)
                with _Calls() as calls:
                    counted = measured(runner, make, rounds=1, calls=calls)
            for kind, found in times.items():
                middle = {key: round(statistics.median(row[key] for row in found)) for key in found[0]}
                last = counted[kind][-1]
                report.add(f"{stage}{what}, {kind}", {**middle, **{key: last[key] for key in ("calls", "copies")}})


def ways(parts: assembly.Stages) -> list[tuple[StageName, str, Callable[[], Sequence]]]:
    """A stage, what is special about a sequence, and what makes a new one."""
    asr, aura, speech, random = parts.asr, parts.aura, parts.speech, np.random.default_rng(0)
    assert asr is not None
    assert aura is not None
    assert speech is not None
    talker = speech.talker

    def heard() -> Sequence:
        sound = Audio((random.standard_normal(80_000) * 0.1).astype(np.float32), 16_000, random.bytes(16))
        sampling = replace(parts.defaults["asr"], max_tokens=TOKENS, ignore_eos=True)
        return asr.sequence(asr.prompt(sound), sampling, on_output=_ignore, on_end=_ignore)

    def asked(*, pictures: int) -> Sequence:
        sampling = replace(parts.defaults["aura"], max_tokens=TOKENS, ignore_eos=True)
        frames = random.integers(0, 256, (2 * pictures, 360, 640, 3), dtype=np.uint8)
        times = tuple(number / 2 for number in range(2 * pictures))
        shown = [Video(frames, times, 2.0, random.bytes(16))] if pictures else []
        messages = (Message("user", (*shown, Text("What is this?"))),)
        return aura.sequence(aura.prompt(messages), sampling, on_output=_ignore, on_end=_ignore)

    def spoken() -> Sequence:
        speaking = talker.voices.resolve(Voice(speaker=next(iter(talker.voices.speakers)), non_streaming=False))
        prompt = talker.prompt(speaking, talker.writer.body("One"))
        sampling = replace(talker.sampling, max_tokens=TOKENS, min_tokens=TOKENS)
        return talker.sequence(prompt, sampling, on_output=_ignore, on_end=_ignore)

    return [
        ("asr", "", heard),
        ("aura", "", partial(asked, pictures=0)),
        ("aura", " with a pair of frames", partial(asked, pictures=1)),
        ("talker", "", spoken),
    ]


def measured(
    runner: Any, make: Callable[[], Sequence], *, rounds: int, calls: _Calls | None = None
) -> dict[str, list[dict[str, float]]]:
    """What each launch took, by what it was."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    begun: list[float] = []
    decoder: list[float] = []
    called: list[float] = []
    replay, launch_all = Graphed.__call__, ArRunner.launch

    def watched(graphed: Graphed, *tensors: Any, **options: Any) -> Any:
        out = replay(graphed, *tensors, **options)
        begun.append(time.perf_counter())
        if graphed in (runner._compute._prefill_graph, runner._compute._decode_graph):
            decoder.append(begun[-1])
        return out

    def launching(one: ArRunner) -> bool:
        called.append(time.perf_counter())
        if calls is not None:
            calls.calls = calls.copies = 0
        return launch_all(one)

    def timed(step: Callable[..., Any], name: str) -> Callable[..., Any]:
        def launch(steps: Steps, batch: Batch, **options: Any) -> Any:
            kind = "a step launched ahead" if options.get("ahead") else name
            begun.clear()
            decoder.clear()
            start = called[-1]
            out = step(steps, batch, **options)
            end = time.perf_counter()
            taken = {"begun_us": begun[0] - start, "decoder_us": decoder[0] - start, "all_us": end - start}
            taken = {key: 1e6 * seconds for key, seconds in taken.items()}
            if calls is not None:
                taken |= {"calls": calls.calls, "copies": calls.copies}
                calls.calls = calls.copies = 0
            found[kind].append(taken)
            called.append(time.perf_counter())
            return out

        return launch

    with (
        patch.object(Graphed, "__call__", watched),
        patch.object(ArRunner, "launch", launching),
        patch.object(Steps, "prefill", timed(Steps.prefill, "a prompt")),
        patch.object(Steps, "decode", timed(Steps.decode, "a step")),
    ):
        for _ in range(rounds):
            sequence = make()
            runner.add(sequence)
            while sequence.finished is None:
                runner.step()
            while runner.busy:
                runner.step()
    return found


class _Calls(TorchDispatchMode):
    """Counts operations, and those of them that copy from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        given = [value for value in args if isinstance(value, torch.Tensor)]
        if isinstance(out, torch.Tensor) and not out.is_cpu and any(value.is_cpu and value.dim() for value in given):
            self.copies += 1
        return out


@contextmanager
def nothing_computed() -> Iterator[None]:
    """On "meta": no kernel is compiled, and what comes home is zeros."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from aura_omni.rehearsal import Gpu, _Nothing

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        compiled, *_ = fn.jit_function.device_caches[compile["device"]]
        compiled[compile["key"]] = _Nothing()
        return True

    driver.set_active(Gpu(GPUTarget("cuda", 90, 32), max_shared_mem=232_448))
    knobs.runtime.jit_cache_hook = hook
    arrived = SimpleNamespace(numpy=lambda self: np.zeros(self._values.shape, np.int64))
    with patch.object(lane._Here, "numpy", arrived.numpy):
        yield


def _ignore(*_: object) -> None:
    pass


if __name__ == "__main__":
    main()
