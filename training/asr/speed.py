"""What a training step costs here, launch by launch and replayed from a graph, for each form of batch and some sizes.

    python -m training.asr.speed OUT --data DATA --time-s 40

Milliseconds: `eager` and `graph` are whole steps, waited for; `deal` is the host's part, which overlaps; `mix` is a second of real
training, forms as they come. `differs` compares the loss of a step launch by launch with torch's own CTC and of the same step
replayed, from the same noise. Ends by itself; a part that fails leaves its traceback and the next one runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from training.asr.clips import FORMS, HELD_OUT_LINES, Clips, Deal, lines
from training.asr.ctc import native
from training.asr.shape import NANO, Recogniser
from training.asr.steps import Steps
from training.asr.train import Plan, Training, collected, device_here, evaluation

SIZES_S = (400.0, 750.0, 200.0)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], None], *, times: int) -> float:
    """Milliseconds of one."""
    work()
    wait()
    started = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return 1000 * (time.perf_counter() - started) / times


class Bench:
    def __init__(self, training: Training, clips: Clips, batch_s: float) -> None:
        self.training, self.clips, self.batch_s = training, clips, batch_s
        self.rng = np.random.default_rng(0)
        self.steps = Steps(training, clips.samples, graphs=training.device.type == "cuda")

    def dealt(self, number: int | None = None) -> Deal:
        return self.clips.deal(self.rng, batch_s=self.batch_s, form=None if number is None else FORMS[number])

    def row(self, number: int, *, eager: bool) -> str:
        training, samples, deal = self.training, self.clips.samples, self.dealt(number)
        table = deal.table.to(training.device)
        started = time.perf_counter()
        for _ in range(10):
            self.dealt(number)
        deal_ms = 100 * (time.perf_counter() - started)
        started = time.perf_counter()
        captured = self.steps.prepare(deal)
        prepare_s = time.perf_counter() - started
        graph_ms = timed(lambda: self.steps.take(deal), times=8) if captured else float("nan")
        eager_ms = differs = float("nan")
        if eager:
            eager_ms = timed(lambda: training.learn(samples, deal.form, table, ctc=native), times=3)
            differs = self.differs(deal) if captured else differs
        memory = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
        return (
            f"{self.batch_s:6.0f} s {deal.form.room_s:3d} s x {len(table):3d}: eager {eager_ms:7.1f}  graph {graph_ms:6.2f}"
            f"  deal {deal_ms:5.2f} ms  prepared {prepare_s:4.1f} s  differs {differs:.5f}  {memory:5.1f} GiB"
        )

    def differs(self, deal: Deal) -> float:
        training = self.training
        found = []
        training.rate.zero_()
        for launch in (
            lambda: training.learn(self.clips.samples, deal.form, deal.table.to(training.device), ctc=native),
            lambda: self.steps.take(deal),
        ):
            training.losses.zero_()
            training.noise.manual_seed(7)
            launch()
            found.append(training.losses.tolist())
        print(f"    losses launched {found[0]}, replayed {found[1]}", flush=True)
        return max(abs(a - b) for a, b in zip(*found, strict=True))

    def mix(self, seconds: float) -> str:
        wait()
        self.training.losses.zero_()
        started, count, dealing = time.perf_counter(), 0, 0.0
        while time.perf_counter() - started < seconds:
            before = time.perf_counter()
            deal = self.dealt()
            dealing += time.perf_counter() - before
            self.training.before_step(0.2)
            self.steps.take(deal)
            self.training.after_step()
            count += 1
        wait()
        spent = time.perf_counter() - started
        losses = [round(value / count, 3) for value in self.training.losses.tolist()]
        return (
            f"{self.batch_s:6.0f} s mix: {1000 * spent / count:.2f} ms a step, {1000 * dealing / count:.2f} of it dealing, "
            f"{count} steps, losses {losses}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--time-s", type=float, default=40.0)
    parser.add_argument("--sizes-s", type=float, nargs="*", default=SIZES_S)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.time_s + 5.0, exit=True)
    end = time.monotonic() + options.time_s
    options.out.mkdir(parents=True, exist_ok=True)
    english = lines(options.data / "english.txt")
    device = device_here()
    recogniser = Recogniser.written(options.out, english[HELD_OUT_LINES : HELD_OUT_LINES + 4_000], NANO)
    training = Training(options.out, recogniser, device, Plan(), 0)
    clips = Clips(device, training.writer, capacity_s=4 * 3_600)
    clips.take(collected(options.data, frozenset()))
    count = sum(value.numel() for value in training.model.net.parameters())
    print(f"torch {torch.__version__}, {count / 1e6:.2f} million weights, {clips.hours:.2f} h", flush=True)

    def tried(work: Callable[[], object]) -> None:
        if time.monotonic() > end - 1.0:
            return
        try:
            print(work(), flush=True)
        except RuntimeError:
            traceback.print_exc()

    for place, batch_s in enumerate(options.sizes_s):
        bench = Bench(training, clips, batch_s)
        for number in range(len(FORMS)):
            tried(partial(bench.row, number, eager=place == 0))
        tried(partial(bench.mix, min(4.0, end - time.monotonic())))
        if place == 0:

            def evaluated() -> str:
                heldout = evaluation(options.data / "heldout", 16)
                before = time.perf_counter()
                model = training.averaged()
                heard = sum(len(training.heard(model, said)) for name, said in heldout.items() if name != "people_long")
                return f"{heard} held-out clips heard in {time.perf_counter() - before:.1f} s"

            tried(evaluated)


if __name__ == "__main__":
    main()
