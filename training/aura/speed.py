"""What the time of a training step is made of, on the device that is there.

    python -m training.aura.speed --words FOLDER --photos FILE [--rows 40960] [--steps 6]

For each plan: milliseconds to make a batch (one worker), to draw it, for the step without drawing, and the decisions in it. The
device is waited for around each part, so the parts add up to more than a step of a run, where they overlap.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch

from aura_omni.nano.published import NANO, Sizes
from training.aura import photos
from training.aura.data import Maker, Plan
from training.aura.draw import Painter
from training.aura.model import Feeder
from training.aura.train import Trainer

PLANS = (
    Plan(256, 144, rounds=3), Plan(256, 144, rounds=10), Plan(640, 480, rounds=6), Plan(256, 144, chunks=8),
    Plan(256, 144, chunks=40),
)  # fmt: skip


def measure(trainer: Trainer, feeder: Feeder, maker: Maker, plan: Plan, *, rows: int, steps: int) -> str:
    """The line of one plan; medians, after one step that is not counted."""

    def now_s() -> float:
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    parts: list[tuple[float, float, float]] = []
    decisions = 0
    for _ in range(steps + 1):
        start_s = now_s()
        batch = maker.batch(plan, rows=rows)
        made_s = now_s()
        with torch.no_grad():
            inputs = feeder.inputs(batch)
        drawn_s = now_s()
        trainer.step(inputs, 0.5)
        parts.append((made_s - start_s, drawn_s - made_s, now_s() - drawn_s))
        decisions = len(batch.kinds)
    make, draw, step = (1000 * median(column) for column in zip(*parts[1:], strict=True))
    shape = f"{plan.width}x{plan.height} {'look' if plan.chunks is None else f'{plan.chunks} chunks'}"
    return f"{shape:20} make {make:6.1f}  draw {draw:6.1f}  step {step:6.1f} ms  {decisions} decisions"


def main(words: list[str] | None = None, *, sizes: Sizes = NANO, plans: tuple[Plan, ...] = PLANS) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--words", type=Path, required=True)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=40_960)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pictures, album = photos.read(arguments.photos, "train")
    trainer = Trainer(device, sizes, seed=1, rate=1e-3)
    feeder = Feeder(Painter(pictures, device))
    maker = Maker(arguments.words, album, seed=1, lesson=True)
    for plan in plans:
        print(measure(trainer, feeder, maker, plan, rows=arguments.rows, steps=arguments.steps), flush=True)


if __name__ == "__main__":
    main()
