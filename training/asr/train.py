"""Trains the small recogniser and leaves it as a checkpoint folder that the server loads.

    python -m training.asr.train OUT --data DATA --time-s 300              # one GPU
    python -m training.asr.train OUT --data DATA --time-s 300 --resume OUT_OF_BEFORE
    python -m training.asr.train OUT --smoke                               # seconds, CPU, made-up voice

DATA holds bundle/ (synthesizers), english.txt, asked.txt, piper/, festival/, recorded/ and heldout/; README.md says how each is made.
OUT gets the folder of the checkpoint (float16, running mean of the weights) about once a minute, with train.json beside the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aura_omni.models.weights import to_published
from training.asr.augment import augment, masked, warped
from training.asr.clips import (
    BATCH_S,
    FORMS,
    HELD_OUT_LINES,
    Clip,
    Clips,
    Columns,
    Form,
    Maker,
    behind,
    lines,
    recorded,
    sounded,
    withheld,
)
from training.asr.ctc import CtcLoss, scanned
from training.asr.network import Prompt, Trainee, letters, target
from training.asr.shape import FILES, NANO, SMOKE, Recogniser
from training.asr.steps import Steps
from training.asr.toy import toy_clips
from training.asr.voices import RATE
from training.asr.wer import wer
from training.text.grammar import sentence

# In a folder of its own, as the server reads all files beside the JSON; each below 16 MB.
WEIGHTS, GRADIENTS, SQUARES = (f"resume/{name}.safetensors" for name in ("weights", "gradients", "squares"))
# The last two may be missing: then only the weights go on.
EXACT = "exact.safetensors"  # all of it, in float32: four times 26 MB
TAKE_S = 1.0  # between two looks at what the processes have finished
FIRST_HOURS, FIRST_S = 0.3, 20.0  # of made speech, before the first step, and how long to wait for it
MEAN_STEPS = 4  # between two updates of the mean of the weights


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train. Rates follow the clock: a run ends when its time is over, wherever it runs."""

    peak_rate: float = 1.5e-3
    warm_up_steps: int = 400
    last_rate: float = 0.01  # of the peak
    decay: float = 0.02
    mean_keeps: float = 0.9995
    batch_s: float = BATCH_S
    every_s: float = 60.0  # between two states to go on from
    heard_s: float = 120.0  # between two looks at what it hears
    spelling: float = 1.0  # how much the letters count
    doubted: float = 0.15  # of the pieces before the one to write: replaced, so that it has to listen
    skipped: float = 0.05  # layers of the encoder that a clip goes past


class Training:
    def __init__(self, out: Path, recogniser: Recogniser, device: torch.device, plan: Plan, seed: int) -> None:
        self.out, self.recogniser, self.device, self.plan = out, recogniser, device, plan
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.noise = torch.Generator(device).manual_seed(seed)
        self.prompt = Prompt.of(recogniser.tokenizer)
        self.model = Trainee(recogniser.config, self.prompt).to(device)
        self.model.prepare()
        self.parameters = list(self.model.parameters())
        self.mean = [value.detach().clone() for value in self.parameters]
        matrices = [value for value in self.parameters if value.dim() > 1]
        others = [value for value in self.parameters if value.dim() < 2]
        groups = [{"params": matrices, "weight_decay": plan.decay}, {"params": others, "weight_decay": 0.0}]
        cuda = device.type == "cuda"
        self.rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.98), fused=cuda, capturable=cuda)
        self.step, self.steps_here, self.warm_up_steps = 0, 0, plan.warm_up_steps
        self.done: float | None = None  # of the whole training, 0 to 1; None before it is known
        self.losses = torch.zeros(2, device=device)  # sums since the last report: text, letters
        self.summed = 0
        self.log: list[dict[str, float]] = []

    def writer(self, text: str) -> tuple[list[int], list[int]]:
        return target(self.recogniser.tokenizer, self.prompt, text), letters(text)

    def resume(self, folder: Path) -> None:
        """From an earlier run: exactly, where it left all of its state, else from its weights, and the means of its optimizer if there."""
        names = [name for name, _ in self.model.named_parameters()]
        moments = None
        if (folder / EXACT).exists():
            found = load_file(folder / EXACT)
            self.step, self.done, self.warm_up_steps = int(found["step"]), float(found["done"]), 1
            weights, gradients, squares, means = (
                [found[f"{part}.{name}"] for name in names] for part in ("weights", "gradients", "squares", "mean")
            )
            moments = list(zip(gradients, squares, strict=True))
        else:
            kept = load_file(folder / WEIGHTS)
            weights = means = [kept[name].float() for name in names]
            if (folder / GRADIENTS).exists():
                gradients, roots = (load_file(folder / file) for file in (GRADIENTS, SQUARES))
                moments = [(gradients[name].float(), roots[name].float() ** 2) for name in names]
                self.warm_up_steps = 200
        if (folder / "train.json").exists():
            self.log = json.loads((folder / "train.json").read_text(encoding="utf-8"))
            self.step = self.step or int(self.log[-1]["step"]) if moments else 0
        with torch.no_grad():
            for number, (value, weight, averaged) in enumerate(zip(self.parameters, weights, means, strict=True)):
                value.copy_(weight)
                self.mean[number].copy_(averaged)
                if moments:
                    gradient, square = moments[number]
                    self.optimizer.state[value] = {
                        "step": torch.tensor(float(self.step), device=self.device),
                        "exp_avg": gradient.to(self.device),
                        "exp_avg_sq": square.to(self.device),
                    }

    # ------------------------------------------------------------ one step

    def loss(self, samples: Tensor, form: Form, table: Tensor, *, ctc: CtcLoss = scanned, vary: bool = True) -> Tensor:
        """samples: all clips; table: the `Columns` of one batch. Nothing here waits for the device, unless ctc does."""
        columns, noise = Columns.of(form, table), self.noise
        with torch.no_grad():
            if vary:
                waves = sounded(samples, form, columns, self._wobble(len(table)))
                waves = augment(waves, columns.samples, behind(samples, form, columns), noise)
            else:
                waves = sounded(samples, form, columns)
            mel, frames = self.model.log_mel(waves, columns.samples)
            if vary:
                mel = masked(warped(mel, noise), frames, noise)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            skipped = self.plan.skipped if vary else 0.0
            hidden, rows = self.model.hear(mel, frames, skipped=skipped, generator=noise)
            spell = self.model.spelling_loss(hidden, rows, columns.spelled, columns.spelled_count, ctc)
            wanted = columns.pieces
            written = self._doubted(wanted) if vary else wanted.clamp_min(0)
            smoothing = 0.05 if vary else 0.0
            text = self.model.text_loss(self.model.project(hidden), rows, wanted, written, smoothing=smoothing)
        self.losses += torch.stack((text, spell)).detach()
        return text + self.plan.spelling * spell

    def learn(self, samples: Tensor, form: Form, table: Tensor, *, ctc: CtcLoss = scanned) -> None:
        """One step, all of it on the device."""
        loss = self.loss(samples, form, table, ctc=ctc)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()

    def before_step(self, done: float) -> None:
        """done: how much of the whole training is over, 0 to 1."""
        plan, self.done = self.plan, done
        shape = plan.last_rate + (1 - plan.last_rate) * 0.5 * (1 + math.cos(math.pi * done))
        self.rate.fill_(plan.peak_rate * shape * min(1.0, (self.steps_here + 1) / self.warm_up_steps))

    def after_step(self) -> None:
        self.step, self.steps_here, self.summed = self.step + 1, self.steps_here + 1, self.summed + 1
        if self.step % MEAN_STEPS == 0:
            keep = min(self.plan.mean_keeps**MEAN_STEPS, (1 + self.step) / (80 + self.step))
            with torch.no_grad():
                torch._foreach_lerp_(self.mean, [*self.parameters], 1 - keep)

    def _wobble(self, rows: int) -> Tensor:
        """[rows, 3]: paces that come and go by up to 8 % within 0.3 to 1.5 s, in half of the rows."""
        drawn = torch.rand(rows, 4, device=self.device, generator=self.noise)
        rate = 2 * math.pi / RATE / (0.3 + 1.2 * drawn[:, 1])
        depth = 0.08 * drawn[:, 0] / rate * (drawn[:, 3] < 0.5)
        return torch.stack((depth, rate, 2 * math.pi * drawn[:, 2]), 1)

    def _doubted(self, wanted: Tensor) -> Tensor:
        """The targets as what was written before, some pieces of the text replaced by any others."""
        spoken = (wanted == self.prompt.tag).cumsum(1).bool() & (wanted != self.prompt.tag)
        chance = torch.rand(wanted.shape, device=self.device, generator=self.noise)
        size = self.recogniser.tokenizer.size
        others = (torch.rand(wanted.shape, device=self.device, generator=self.noise) * size).long()
        return torch.where(spoken & (chance < self.plan.doubted), others, wanted.clamp_min(0))

    # ------------------------------------------------------------ what came of it

    def averaged(self) -> Trainee:
        """The mean of the weights, as it will be read back from the file: in float16."""
        model = Trainee(self.recogniser.config, self.prompt).to(self.device)
        with torch.no_grad():
            for value, mean in zip(model.parameters(), self.mean, strict=True):
                value.copy_(mean.half().float())
        model.prepare()
        return model.eval()

    def heard(self, model: Trainee, clips: list[Clip], *, size: int = 64) -> list[str]:
        found: list[tuple[int, str]] = []
        order = sorted(range(len(clips)), key=lambda n: len(clips[n].samples))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            lengths = [max(RATE // 2, len(clips[n].samples) + 3_200) for n in chosen]
            waves = torch.zeros(len(chosen), max(lengths))
            for row, n in enumerate(chosen):
                samples = torch.from_numpy(clips[n].samples).float() / 32768
                waves[row, 1_600 : 1_600 + len(samples)] = samples
            for n, ids in zip(
                chosen, model.write(waves.to(self.device), torch.tensor(lengths, device=self.device)), strict=True
            ):
                tag = ids.index(self.prompt.tag) + 1 if self.prompt.tag in ids else 0
                found.append((n, self.recogniser.tokenizer.decode(ids[tag:])))
        return [text for _, text in sorted(found)]

    def report(
        self, model: Trainee, clips: Clips, heldout: dict[str, list[Clip]], seconds: float, until: float = math.inf
    ) -> dict[str, float]:
        """A line for the log: the losses since the last one, and what the model hears, set by set until the time is over."""
        row = {"s": round(seconds), "step": self.step, "hours": round(clips.hours, 2), "clips": len(clips)}
        text, spell = (self.losses / max(1, self.summed)).tolist()
        row |= {"text": round(text, 4), "spell": round(spell, 4)}
        self.losses.zero_()
        self.summed = 0
        for name, said in heldout.items():
            if time.monotonic() > until:
                break
            heard = self.heard(model, said)
            if said[0].text:
                row[name] = round(wer((clip.text, text) for clip, text in zip(said, heard, strict=True)), 4)
            else:
                row[name] = round(sum(bool(text) for text in heard) / len(heard), 4)
        self.log.append(row)
        print(json.dumps(row), flush=True)
        return row

    def save(self, model: Trainee) -> None:
        tensors = to_published(model.net, self.recogniser.config.layout)
        save_file(
            {name: value.half().cpu() for name, value in tensors.items()},
            self.out / "model.safetensors",
            {"format": "pt"},
        )
        (self.out / WEIGHTS).parent.mkdir(exist_ok=True)
        named = dict(self.model.named_parameters())
        state = self.optimizer.state
        # What a next run may begin with; the precision of the optimizer's means matters little.
        save_file({name: value.detach().half().cpu() for name, value in named.items()}, self.out / WEIGHTS)
        kept = {name: state[value]["exp_avg"].bfloat16().cpu() for name, value in named.items() if value in state}
        save_file(kept, self.out / GRADIENTS)
        kept = {
            name: state[value]["exp_avg_sq"].sqrt().bfloat16().cpu() for name, value in named.items() if value in state
        }
        save_file(kept, self.out / SQUARES)
        (self.out / "train.json").write_text(json.dumps(self.log, indent=1), encoding="utf-8")

    def keep(self, folder: Path) -> None:
        """All that `resume` needs to go on as if nothing had been, and the files of the checkpoint, in another folder."""
        state = {"step": torch.tensor(self.step), "done": torch.tensor(self.done or 0.0, dtype=torch.float64)}
        for (name, value), mean in zip(self.model.named_parameters(), self.mean, strict=True):
            moments = self.optimizer.state[value]
            parts = {"weights": value, "gradients": moments["exp_avg"], "squares": moments["exp_avg_sq"], "mean": mean}
            state |= {f"{part}.{name}": tensor.detach().cpu() for part, tensor in parts.items()}
        save_file(state, folder / "new.safetensors")
        for name in FILES:
            if (self.out / name).exists():
                shutil.copyfile(self.out / name, folder / name)
        (folder / "train.json").write_text(json.dumps(self.log, indent=1), encoding="utf-8")
        (folder / "new.safetensors").replace(folder / EXACT)


def evaluation(folder: Path, most: int) -> dict[str, list[Clip]]:
    """Held-out clips by voice and kind, those of the domain first; of music, pieces of 5 s."""
    paths = sorted(folder.glob("*.opus"), key=lambda path: ("domain" not in path.stem, path.stem))
    return {path.stem: recorded(folder, path.name, path.stem)[:most] for path in paths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--time-s", type=float, default=300.0)
    parser.add_argument("--part", default="1/1", help="which part of the whole training this run is: 1/2, then 2/2")
    parser.add_argument(
        "--keep", type=Path, help="a folder for all of the state and what was spoken; a later part resumes from it"
    )
    parser.add_argument(
        "--clips", type=int, default=400_000, help="sentences that the synthesizers speak meanwhile, at most"
    )
    parser.add_argument("--hours", type=float, default=140.0, help="of speech, at most")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--batch-s", type=float, default=BATCH_S, help="seconds of sound in a batch")
    parser.add_argument(
        "--heldout-clips", type=int, default=10_000, help="of each held-out set, in the last evaluation"
    )
    parser.add_argument("--peak", type=float, default=Plan().peak_rate, help="the highest rate of learning")
    parser.add_argument("--resume", type=Path, help="a folder of an earlier run, or KEEP")
    parser.add_argument("--eager", action="store_true", help="no captured graphs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    smoke(options.out) if options.smoke else run(options)


def collected(data: Path, avoid: frozenset[str]) -> list[Clip]:
    """The clips that come with the data."""
    kept = recorded(data / "recorded", "human*.opus", "human") + recorded(data / "recorded", "music.opus", "sounds")
    for group in ("piper", "festival"):
        kept += [clip for clip in recorded(data / group, "*.opus", group) if clip.text not in avoid]
    return kept


def device_here() -> torch.device:
    # Its plans are made anew for every shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(options: argparse.Namespace) -> None:
    started = time.monotonic()
    data, out, kept = options.data, options.out, options.keep
    part, parts = map(int, options.part.split("/"))
    everything = evaluation(data / "heldout", options.heldout_clips)
    avoid = withheld(clip for clips in evaluation(data / "heldout", 10_000).values() for clip in clips)
    maker = Maker(
        data / "bundle",
        data / "english.txt",
        workers=options.workers,
        count=options.clips,
        seed=options.seed,
        avoid=avoid,
        asked=data / "asked.txt",
    )
    english = lines(data / "english.txt")
    avoid |= frozenset(english[:HELD_OUT_LINES])
    device = device_here()
    if options.resume:
        recogniser = Recogniser.copied(options.resume, out)
    else:
        recogniser = Recogniser.written(out, english[HELD_OUT_LINES:], NANO)
    training = Training(out, recogniser, device, Plan(batch_s=options.batch_s, peak_rate=options.peak), options.seed)
    if options.resume:
        training.resume(options.resume)
    if kept:
        kept.mkdir(parents=True, exist_ok=True)
    clips = Clips(device, training.writer, capacity_s=3_600 * options.hours, kept=kept)
    clips.take(collected(data, avoid))
    clips.recall()
    first = clips.hours + min(FIRST_HOURS, options.clips * 1.5 / 3600)
    waited = time.monotonic()
    while clips.hours < first and time.monotonic() - waited < FIRST_S:
        clips.take(maker.ready(), remember=True)
        time.sleep(0.05)  # the processes are busy, and this one has nothing to do
    print(f"{time.monotonic() - started:.0f} s: {clips.hours:.2f} h to begin with", flush=True)
    steps = Steps(training, clips.samples, graphs=device.type == "cuda" and not options.eager)
    for form in FORMS:
        steps.prepare(clips.deal(training.rng, batch_s=options.batch_s, form=form))
    print(f"{time.monotonic() - started:.0f} s: {steps}", flush=True)
    some = {name: clips[:40] for name, clips in everything.items() if name != "people_long"}
    # The first part of the rates, or what is left of it.
    first_done, last_done = (part - 1) / parts if training.done is None else training.done, part / parts
    begun = taken_at = saved_at = heard_at = time.monotonic()
    end = started + options.time_s - 20.0
    while (now := time.monotonic()) < end:
        if now - taken_at > TAKE_S:
            clips.take(maker.ready(), remember=True)
            taken_at = now
        training.before_step(first_done + (last_done - first_done) * (now - begun) / (end - begun))
        steps.take(clips.deal(training.rng, batch_s=options.batch_s))
        training.after_step()
        if now - saved_at > training.plan.every_s:
            listen = now - heard_at > training.plan.heard_s
            finished(training, clips, some if listen else {}, started, kept, end)
            saved_at = time.monotonic()
            heard_at = saved_at if listen else heard_at
    maker.close()
    finished(training, clips, everything, started, kept, started + options.time_s - 3.0)


def finished(
    training: Training, clips: Clips, heldout: dict[str, list[Clip]], started: float, kept: Path | None, until: float
) -> None:
    """A checkpoint, and then what it hears."""
    if not bool(training.losses.isfinite().all()):
        raise RuntimeError(f"the training diverged after step {training.step}; the last checkpoint stays")
    model = training.averaged()
    training.save(model)
    if kept:
        training.keep(kept)
    if heldout:
        training.report(model, clips, heldout, time.monotonic() - started, until)
    for folder in (training.out, kept):
        if folder:
            (folder / "train.json").write_text(json.dumps(training.log, indent=1), encoding="utf-8")


def smoke(out: Path, *, steps: int = 60) -> None:
    """The whole way in seconds: a made-up voice, a tiny network, one checkpoint."""
    rng = random.Random(0)
    recogniser = Recogniser.written(out, [sentence(rng) for _ in range(200)], SMOKE, pieces=300)
    training = Training(out, recogniser, torch.device("cpu"), Plan(warm_up_steps=10), 0)
    clips = Clips(training.device, training.writer, capacity_s=200.0)
    made = toy_clips(40)
    clips.take(made)
    started = time.monotonic()
    every_step = Steps(training, clips.samples, graphs=False)
    for step in range(steps):
        training.before_step(step / steps)
        every_step.take(clips.deal(training.rng, batch_s=20.0))
        training.after_step()
    model = training.averaged()
    training.report(model, clips, {"toy": made[:8]}, time.monotonic() - started)
    training.save(model)


if __name__ == "__main__":
    main()
