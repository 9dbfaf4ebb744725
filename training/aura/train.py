"""Trains nano AURA from nothing, or from where a run stopped.

    python -m training.aura.train OUT --words FOLDER --photos FILE --time-s 300 [--resume FOLDER] [--workers 12]
    python -m training.aura.train OUT --smoke          # a toy world and a toy network, seconds on a CPU

OUT gets checkpoint/ (the averaged weights, ready to be served), state files to resume from, and log.jsonl.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_double
from multiprocessing import Value
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from aura_omni.nano.published import NANO, Sizes
from training.aura import photos, vocabulary
from training.aura.ahead import ahead
from training.aura.data import Batch, Maker, Plan, Room
from training.aura.draw import Painter
from training.aura.evaluate import PLANS, TITLES, evaluate
from training.aura.export import export
from training.aura.looks import Album
from training.aura.model import SMOKE, Feeder, Inputs, Tutor, network, outcome, smooth_positions
from training.aura.replay import Replayed

WARM_UP = 150  # steps
COOLING = 0.65  # progress of a run from which the learning rate falls
DECAY = 0.05
SIGHT = 0.4  # weight of the tower's own loss at the start; a tenth of it at the end
AVERAGE = 0.998  # of the weights, per step
SHOWN = (
    "all answers", "silence decision", "silent at an event", "alert in the right chunk", "topic where", "topic at", "topic colour",
    "topic shape", "topic describe", "topic relation", "topic count", "topic changed", "topic size", "topic motion",
    "never shown: all answers", "never shown: topic shape",
)  # fmt: skip
TOY = Plan(160, 96, rounds=3, toy=True)
Losses = dict[str, Tensor]


class Batches(IterableDataset[Batch]):
    """Endless. progress is shared with the training, so that conversations grow longer as it goes on."""

    def __init__(
        self,
        words: Path,
        album: Album,
        *,
        seed: int,
        room: Room,
        progress: Synchronized[float],
        unseen: float | None = 0.0,
        toy: bool = False,
    ) -> None:
        self._words, self._album, self._seed, self._room, self._progress = words, album, seed, room, progress
        self._unseen, self._toy = unseen, toy

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        seed = self._seed * 1000 + (0 if worker is None else worker.id)
        maker = Maker(self._words, self._album, seed=seed, unseen=self._unseen, lesson=True)
        while True:
            if self._toy:
                yield maker.batch(TOY, rows=self._room.rows)
            else:
                yield maker.mixed(self._room, self._progress.value)


class Trainer:
    """quiet: held while a step is recorded, when nobody else may use the device."""

    def __init__(self, device: torch.device, sizes: Sizes, *, seed: int, rate: float) -> None:
        self.device, self.rate, self.steps, self.first = device, rate, 0, 0
        self.made = network(seed, sizes).to(device)
        self.tutor = Tutor(sizes.aura.hidden).to(device)
        self.average = network(seed, sizes).to(device).requires_grad_(False)
        self.knobs = torch.zeros(3, device=device)  # learning rate, weight of the tower's loss, what the average keeps
        matrices = [p for part in (self.made, self.tutor) for p in part.parameters() if p.dim() > 1]
        vectors = [p for part in (self.made, self.tutor) for p in part.parameters() if p.dim() < 2]
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.knobs[0] if cuda else rate,
            betas=(0.9, 0.98),
            fused=cuda,
            capturable=cuda,
        )
        self.quiet = threading.Lock()
        self.work: Callable[[Inputs], Losses] = Replayed(self._work, self.quiet) if cuda else self._work

    def compile(self) -> None:
        """Fuses the small kernels of a step; takes a minute at the first step."""
        self.losses = torch.compile(self.losses, dynamic=False)  # type: ignore[method-assign]

    def step(self, inputs: Inputs, progress: float) -> Losses:
        """One step; progress of the run sets the learning rate. Losses are overwritten by the next step.

        On CUDA all inputs must have one shape.
        """
        rate = self.rate * min(1.0, (self.steps - self.first + 1) / WARM_UP) * _cooled(progress)
        self.steps += 1
        keep = min(AVERAGE, self.steps / (self.steps + 10))
        self.knobs.copy_(torch.tensor((rate, SIGHT * max(0.1, 1 - progress), keep)))
        if self.device.type != "cuda":
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        return self.work(inputs)

    def _work(self, inputs: Inputs) -> Losses:
        """Everything of a step that runs on the device, without a word to it from here."""
        _, sight_weight, keep = self.knobs.unbind()
        losses = self.losses(inputs)
        self.optimizer.zero_grad(set_to_none=True)
        (losses["words"] + sight_weight * losses["sight"]).backward()
        nn.utils.clip_grad_norm_(self.made.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            average, made = list[Tensor](self.average.parameters()), list[Tensor](self.made.parameters())
            moved = torch._foreach_sub(made, average)
            torch._foreach_mul_(moved, 1 - keep)
            torch._foreach_add_(average, moved)
        return {name: value.detach() for name, value in losses.items()}

    def losses(self, inputs: Inputs) -> Losses:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            result = outcome(self.made, inputs)
        losses = F.cross_entropy(result.logits, result.targets, reduction="none")
        words = (losses * result.weights).sum() / result.weights.sum()
        sight, seen = words.new_zeros(()), words.new_zeros(())
        if result.features is not None and inputs.pictures is not None:
            sight, seen = self.tutor.loss(result.features, inputs.pictures.cells)
        return {"words": words, "sight": sight, "seen": seen}

    # ------------------------------------------------------------ stopping and going on

    def save(self, out: Path, *, exact: bool = False) -> None:
        """state_*.safetensors and state.json; half precision, each under 16 MB, or exact."""
        half, brief = (torch.float32, torch.float32) if exact else (torch.float16, torch.bfloat16)
        named = {**dict(self.made.named_parameters(prefix="made")), **dict(self.tutor.named_parameters(prefix="tutor"))}
        moments = {name: self.optimizer.state[p] for name, p in named.items()}
        files = {
            "weights": {name: p.detach().to(half) for name, p in named.items()},
            "average": {name: p.to(half) for name, p in self.average.named_parameters()},
            "first": {name: m["exp_avg"].to(brief) for name, m in moments.items() if m},
            "second": {name: m["exp_avg_sq"].to(brief) for name, m in moments.items() if m},
        }
        for name, tensors in files.items():
            save_file(
                {key: value.contiguous().cpu() for key, value in tensors.items()}, out / f"state_{name}.safetensors"
            )
        (out / "state.json").write_text(json.dumps({"steps": self.steps}))

    def resume(self, out: Path) -> None:
        """What the state lacks starts anew: moments, a head of the tutor; the average without a file is the weights."""
        files = {
            name: load_file(path) if (path := out / f"state_{name}.safetensors").exists() else {}
            for name in ("weights", "average", "first", "second")
        }
        named = {**dict(self.made.named_parameters(prefix="made")), **dict(self.tutor.named_parameters(prefix="tutor"))}
        self.steps = self.first = json.loads((out / "state.json").read_text())["steps"]
        with torch.no_grad():
            for name, p in named.items():
                if name.startswith("tutor.") and name not in files["weights"]:
                    continue
                p.copy_(files["weights"][name])
                if name in files["first"]:
                    self.optimizer.state[p] = {
                        "step": torch.tensor(
                            float(self.steps), device=self.device if self.device.type == "cuda" else None
                        ),
                        "exp_avg": files["first"][name].to(self.device, torch.float32),
                        "exp_avg_sq": files["second"][name].to(self.device, torch.float32),
                    }
            for name, p in self.average.named_parameters():
                p.copy_(files["average"].get(name, files["weights"][f"made.{name}"]))

    def new_positions(self) -> None:
        """Starts the learned positions anew, and what the optimizer remembers of them."""
        weight = self.made.visual.pos_embed.weight
        with torch.no_grad():
            start = smooth_positions(self.made.visual.config.position_side, weight.shape[1])
            for network_ in (self.made, self.average):
                network_.visual.pos_embed.weight.copy_(start)
        self.optimizer.state.pop(weight, None)


def _cooled(progress: float) -> float:
    """Of the learning rate: all of it, then down to a fiftieth, so that every run ends with weights worth keeping."""
    return 1.0 if progress < COOLING else 1.0 - 0.98 * (progress - COOLING) / (1 - COOLING)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--words", type=Path, help="folder of the tokenizer; made if not given")
    parser.add_argument("--photos", type=Path, help="the file of training.aura.photos; grey cards if not given")
    parser.add_argument("--checkpoint", type=Path, help="folder of the served form; OUT/checkpoint if not given")
    parser.add_argument("--resume", type=Path)
    parser.add_argument(
        "--exact", type=Path, help="folder for the exact state at the end, to go on from on this machine"
    )
    parser.add_argument("--new-positions", action="store_true", help="starts the learned positions of a state anew")
    parser.add_argument("--time-s", type=float, default=300.0)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--rows", type=int, default=20_480, help="of a step")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-every-s", type=float, default=60.0)
    parser.add_argument("--all-pairs", action="store_true", help="shows the pairs that are held out, too")
    parser.add_argument("--compile", action="store_true", help="fuses the small kernels of a step")
    parser.add_argument("--smoke", action="store_true")
    train(parser.parse_args(words))


def train(arguments: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, out = SMOKE if arguments.smoke else NANO, arguments.out
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = arguments.checkpoint or out / "checkpoint"
    words = arguments.words or checkpoint
    if arguments.words is None:
        vocabulary.write(words)
    if arguments.photos is None:
        pictures, album = np.full((1, 144, 256, 3), 128, np.uint8), Album((0.5,), ())
        unseen = pictures, album
    else:
        pictures, album = photos.read(arguments.photos, "train")
        unseen = photos.read(arguments.photos, "unseen")
    trainer = Trainer(device, sizes, seed=arguments.seed, rate=arguments.rate)
    if arguments.resume is not None:
        trainer.resume(arguments.resume)
    if arguments.new_positions:
        trainer.new_positions()
    if arguments.compile:
        trainer.compile()
    progress = Value(c_double, 0.3 if arguments.resume else 0.0)
    seed = arguments.seed + 7919 * trainer.steps
    room = Room.of(arguments.rows)
    data = Batches(
        words,
        album,
        seed=seed,
        room=room,
        progress=progress,
        unseen=None if arguments.all_pairs else 0.0,
        toy=arguments.smoke,
    )
    loader = DataLoader(
        data, batch_size=None, num_workers=arguments.workers, prefetch_factor=4 if arguments.workers else None
    )
    feeder = Feeder(Painter(pictures, device))
    held_out, never_shown = (Maker(words, unseen[1], seed=99, unseen=share, slips=0.0) for share in TITLES.values())
    held_feeder = Feeder(Painter(unseen[0], device))
    start, saved = time.monotonic(), 0.0  # the time for workers to start is part of the run
    print(f"{sum(p.numel() for p in trainer.made.parameters()):,} parameters on {device}", flush=True)

    def report(elapsed_s: float, held_out: dict[str, str] | None = None, **more: object) -> None:
        line = {"step": trainer.steps, "s": round(elapsed_s, 1), **more}
        with (out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line | ({} if held_out is None else {"held_out": held_out})) + "\n")
        shown = {} if held_out is None else {name: held_out[name] for name in SHOWN if name in held_out}
        print(*(f"{name} {value}" for name, value in {**line, **shown}.items()), sep="  ", flush=True)

    def check(elapsed_s: float, batches: int) -> None:
        trainer.save(out)
        export(trainer.average, words, checkpoint, sizes=sizes)
        plans = (TOY,) if arguments.smoke else PLANS
        rows = arguments.rows // 2
        shares = evaluate(trainer.average, held_feeder, held_out, rows=rows, batches=batches, plans=plans).shares()
        others = evaluate(
            trainer.average, held_feeder, never_shown, rows=rows, batches=batches, plans=plans[:1]
        ).shares()
        report(elapsed_s, shares | {f"never shown: {name}": share for name, share in others.items()})

    for inputs in ahead(loader, feeder, None if arguments.smoke else room, trainer.quiet):
        elapsed_s = time.monotonic() - start
        done = max(elapsed_s / arguments.time_s, (trainer.steps - trainer.first) / arguments.steps)
        if done >= 1:
            break
        progress.value = 0.3 + 0.7 * done if arguments.resume else done
        losses = trainer.step(inputs, done)
        if trainer.steps % 200 == 0:
            report(elapsed_s, **{name: round(float(value), 4) for name, value in losses.items()})
        if elapsed_s - saved > arguments.save_every_s:
            saved = elapsed_s
            check(elapsed_s, 1)
    if arguments.exact is not None:
        arguments.exact.mkdir(parents=True, exist_ok=True)
        trainer.save(arguments.exact, exact=True)
    check(time.monotonic() - start, 4)


if __name__ == "__main__":
    main()
