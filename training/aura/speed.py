"""What the time of a training step is made of, on the device that is there.

    python -m training.aura.speed --words FOLDER --photos FILE [--rows 20480] [--steps 6] [--run-s 6 --workers 4]

One line: milliseconds to make a batch (one worker), to draw it, for a step as it is and for one that is replayed (`replay.py`); how full
batches are; and steps a second when all of it goes on at once. Before it, on CUDA, how far attention is from one piece at a time, and what
the two kinds of step make of the same batch. --compile: with torch.compile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from ctypes import c_double
from multiprocessing import Value
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from torch.utils.data import DataLoader

from aura_omni.nano.published import NANO, Sizes
from training.aura import photos
from training.aura.ahead import ahead
from training.aura.data import Batch, Maker, Room
from training.aura.draw import Painter
from training.aura.model import Feeder, Inputs
from training.aura.packed import Pieces
from training.aura.replay import FIRST, Replayed
from training.aura.train import Batches, Trainer

Made = TypeVar("Made")


class Clock:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ms: list[float] = []

    def timed(self, work: Callable[[], Made]) -> Made:
        self._wait()
        start_s = time.perf_counter()
        made = work()
        self._wait()
        self.ms.append(1000 * (time.perf_counter() - start_s))
        return made

    def __str__(self) -> str:
        return f"{median(self.ms[1:] or self.ms):.1f}"

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def attention_errors(device: torch.device) -> str:
    """Relative errors of output and gradients of packed attention in bfloat16, empty pieces included; plain bfloat16 has some 0.003."""
    found = []
    starts = torch.tensor([0, 300, 300, 301, 1400, 2000, 2000], dtype=torch.int32, device=device)
    for causal, dim in ((True, 64), (False, 32)):
        made = torch.randn(3, 2000, 4, dim, device=device).requires_grad_()
        weight = torch.randn(2000, 4, dim, device=device)
        results = []
        for attend in (Pieces(starts, 4096).attention, Pieces(starts, 4096).one_by_one):
            out = attend(*made.unbind(), causal=causal)
            (gradient,) = torch.autograd.grad((out.float() * weight).sum(), made)
            results.append((out.float(), gradient))
        found += [float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
    return " ".join(f"{error:.4f}" for error in found)


def kernels(title: str, work: Callable[[], object], count: int) -> str:
    """What the device does in one call of work: the kernels that take longest, how often each runs and for how many ms."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in seen.events():
        kept = spent.setdefault(event.name, [0, 0.0])
        kept[0] += 1
        kept[1] += event.device_time_total / 1000
    total = [sum(column) for column in zip(*spent.values(), strict=True)]
    longest = sorted(spent.items(), key=lambda item: -item[1][1])[:count]
    lines = [f"{ms:7.2f} ms {times:5.0f} x  {name[:100]}" for name, (times, ms) in longest]
    return "\n".join([f"{title}: {total[0]:.0f} kernels, {total[1]:.1f} ms", *lines])


def measure(trainer: Trainer, feeder: Feeder, maker: Maker, room: Room, *, steps: int) -> str:
    """Medians of all but the first."""
    make, draw, plain, again = (Clock(trainer.device) for _ in range(4))
    batches: list[Batch] = [make.timed(lambda: maker.mixed(room, 0.5)) for _ in range(steps)]
    with torch.no_grad():
        drawn: list[Inputs] = [draw.timed(lambda batch=batch: feeder.inputs(batch, room)) for batch in batches]  # type: ignore[misc]
    work = trainer.work
    trainer.work = trainer._work
    for inputs in drawn:
        plain.timed(lambda inputs=inputs: trainer.step(inputs, 0.5))  # type: ignore[misc]
    trainer.work = work
    for inputs in (drawn * (FIRST + 1))[: FIRST + 1]:
        trainer.step(inputs, 0.5)
    for inputs in drawn:
        expected = trainer.losses(inputs)["words"].item()
        print(f"words {expected:.5f}, replayed {trainer.step(inputs, 0.5)['words'].item():.5f}", flush=True)
    for inputs in drawn:
        again.timed(lambda inputs=inputs: trainer.step(inputs, 0.5))  # type: ignore[misc]
    full = [
        sum(len(batch.tokens) for batch in batches) / room.rows,
        sum(4 * len(sight.pads) for batch in batches for sight in batch.sights) / room.patches,
        sum(int((batch.weights > 0).sum()) for batch in batches) / room.said,
    ]
    how = "replayed" if isinstance(work, Replayed) and work.recorded else "as it is"
    return (
        f"{room.rows:6} rows  make {make}  draw {draw}  step {plain}, {how} {again} ms  "
        f"{sum(len(batch.kinds) for batch in batches) / steps:.0f} decisions  "
        f"full {' '.join(f'{100 * share / steps:.0f}' for share in full)} %"
    )


def main(words: list[str] | None = None, *, sizes: Sizes = NANO) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--words", type=Path, required=True)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=20_480)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kernels", type=int, default=0, help="shows so many of the longest in a step and in drawing")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--run-s", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pictures, album = photos.read(arguments.photos, "train")
    trainer = Trainer(device, sizes, seed=1, rate=1e-3)
    feeder, room = Feeder(Painter(pictures, device)), Room.of(arguments.rows)
    maker = Maker(arguments.words, album, seed=1, lesson=True)
    if device.type == "cuda":
        print("attention is off by", attention_errors(device), flush=True)
    if arguments.compile:
        trainer.compile()
    print(measure(trainer, feeder, maker, room, steps=arguments.steps), flush=True)
    if device.type == "cuda":
        print(f"{torch.cuda.max_memory_reserved() / 2**30:.1f} GiB", flush=True)
    if arguments.kernels and device.type == "cuda":
        batch = maker.mixed(room, 0.5)
        with torch.no_grad():
            inputs = feeder.inputs(batch, room)
            print(kernels("drawing", lambda: feeder.inputs(batch, room), arguments.kernels), flush=True)
        print(kernels("step", lambda: trainer.step(inputs, 0.5), arguments.kernels), flush=True)
    if arguments.run_s:
        progress = Value(c_double, 0.5)
        data = Batches(arguments.words, album, seed=1, room=room, progress=progress)
        ahead_of = 4 if arguments.workers else None
        loader = DataLoader(data, batch_size=None, num_workers=arguments.workers, prefetch_factor=ahead_of)
        steps, start_s = 0, 0.0
        for inputs in ahead(loader, feeder, room, trainer.quiet):
            trainer.step(inputs, 0.5)
            steps += 1
            if steps == 5:  # the workers have started
                start_s = time.perf_counter()
            if start_s and time.perf_counter() - start_s > arguments.run_s:
                break
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"{(steps - 5) / (time.perf_counter() - start_s):.1f} steps a second", flush=True)


if __name__ == "__main__":
    main()
