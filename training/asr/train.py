"""Trains the small recogniser and leaves it as a checkpoint folder that the server loads.

    python -m training.asr.train OUT --data DATA --time-s 300              # one GPU
    python -m training.asr.train OUT --data DATA --time-s 300 --resume OUT_OF_BEFORE
    python -m training.asr.train OUT --smoke                               # seconds, CPU, made-up voice

DATA holds bundle/ (synthesizers), english.txt, piper/, festival/, recorded/ and heldout/; README.md says how each is made.
OUT gets the folder of the checkpoint (float16, running mean of the weights) about once a minute, with train.json beside the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aura_omni.models.qwen3_asr import HOP_SAMPLES
from aura_omni.models.weights import to_published
from training.asr.augment import augment
from training.asr.clips import HELD_OUT_LINES, Batch, Clip, Clips, Maker, lines, recorded, withheld
from training.asr.network import IGNORED, Prompt, Trainee, letters, padded, target
from training.asr.shape import NANO, SMOKE, Recogniser
from training.asr.toy import toy_clips
from training.asr.voices import RATE
from training.asr.wer import wer
from training.text.grammar import sentence

# In a folder of its own, as the server reads all files beside the JSON; each below 16 MB.
WEIGHTS, GRADIENTS, SQUARES = (f"resume/{name}.safetensors" for name in ("weights", "gradients", "squares"))
TAKE_STEPS = 20  # between two looks at what the processes have finished
CLIP_S = 2.8  # of a made clip on average, at most; it is 2.0
FIRST_HOURS = 0.7  # of made speech, before the first step


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train. Rates follow the clock: a run ends when its time is over, wherever it runs."""

    peak_rate: float = 1.6e-3  # a resumed run begins with 0.75 of it
    warm_up_steps: int = 300
    last_rate: float = 0.02  # of the peak
    decay: float = 0.02
    mean_keeps: float = 0.998
    batch_s: float = 750.0
    every_s: float = 100.0  # between two checkpoints
    spelling_until: float = 0.6  # of the time: every step spells; later one in three does, which the device waits for
    doubted: float = 0.12  # of the pieces before the one to write: replaced, so that it has to listen


class Training:
    def __init__(
        self, out: Path, recogniser: Recogniser, clips: Clips, device: torch.device, plan: Plan, seed: int
    ) -> None:
        self.out, self.recogniser, self.clips, self.device, self.plan = out, recogniser, clips, device, plan
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.noise = torch.Generator(device).manual_seed(seed)
        self.prompt = Prompt.of(recogniser.tokenizer)
        self.model = Trainee(recogniser.config, self.prompt).to(device)
        self.model.prepare()
        self.mean = [value.detach().clone() for value in self.model.parameters()]
        matrices = [value for value in self.model.parameters() if value.dim() > 1]
        others = [value for value in self.model.parameters() if value.dim() < 2]
        groups = [{"params": matrices, "weight_decay": plan.decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=device.type == "cuda")
        self.step, self.steps_before, self.peak = 0, 0, plan.peak_rate
        self.sums: dict[str, Tensor] = {}
        self.counts: Counter[str] = Counter()
        self.log: list[dict[str, float]] = []
        self.targets: dict[str, list[int]] = {}
        self.spellings: dict[str, list[int]] = {}

    def resume(self, folder: Path) -> None:
        """From the weights of an earlier run, its log, and, where the run left it, the state of its optimizer."""
        named = dict(self.model.named_parameters())
        self.log = json.loads((folder / "train.json").read_text(encoding="utf-8"))
        self.step = self.steps_before = int(self.log[-1]["step"])
        self.peak *= 0.75
        weights = load_file(folder / WEIGHTS)
        with torch.no_grad():
            for name, value in named.items():
                value.copy_(weights[name])
        self.mean = [value.detach().clone() for value in named.values()]
        if (folder / GRADIENTS).exists():
            gradients, squares = load_file(folder / GRADIENTS), load_file(folder / SQUARES)
            for name, value in named.items():
                self.optimizer.state[value] = {
                    "step": torch.tensor(float(self.step), device=value.device),
                    "exp_avg": gradients[name].to(value),
                    "exp_avg_sq": squares[name].to(value) ** 2,
                }

    # ------------------------------------------------------------ one step

    def loss(self, batch: Batch, *, spelling: float, vary: bool) -> Tensor:
        waves = batch.waves
        if vary:
            background = self.clips.background(self.rng, *waves.shape)
            waves = augment(waves, batch.samples, background, self.noise)
        with torch.no_grad():
            mel, frames = self.model.log_mel(waves, batch.samples)
            if vary:
                mel = self._masked(self._warped(mel), frames)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden, rows = self.model.hear(mel, frames)
            wanted = padded([self._target(text) for text in batch.texts], IGNORED, self.device)
            written = self._doubted(wanted) if vary else wanted.clamp_min(0)
            text = self.model.text_loss(
                self.model.project(hidden), rows, wanted, written, smoothing=0.05 if vary else 0.0
            )
            self._note("text", text)
            if not spelling:
                return text
            # Last, because it waits for the device.
            spelled = [self._spelled(text) for text in batch.texts]
            lengths = torch.tensor([len(row) for row in spelled])
            rows_here = self.model.rows(torch.tensor(batch.lengths) // HOP_SAMPLES)
            spell = self.model.spelling_loss(hidden, rows_here, padded(spelled, 0, self.device), lengths)
        self._note("spell", spell)
        return text + spelling * spell

    def _note(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums.get(name, torch.zeros((), device=self.device)) + value.detach()
        self.counts[name] += 1

    def train(self, batch: Batch, *, done: float, vary: bool = True) -> None:
        """done: how much of the time is over, 0 to 1."""
        plan, self.step = self.plan, self.step + 1
        shape = plan.last_rate + (1 - plan.last_rate) * 0.5 * (1 + math.cos(math.pi * done))
        rate = self.peak * shape * min(1.0, (self.step - self.steps_before) / plan.warm_up_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        spelling = 1.0 if done < plan.spelling_until or self.step % 3 == 0 else 0.0
        loss = self.loss(batch, spelling=spelling, vary=vary)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        keep = min(plan.mean_keeps, (1 + self.step) / (20 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(self.mean, list(self.model.parameters()), 1 - keep)

    def _spelled(self, text: str) -> list[int]:
        if text not in self.spellings:
            self.spellings[text] = letters(text)
        return self.spellings[text]

    def _target(self, text: str) -> list[int]:
        if text not in self.targets:
            self.targets[text] = target(self.recogniser.tokenizer, self.prompt, text)
        return self.targets[text]

    def _doubted(self, wanted: Tensor) -> Tensor:
        """The targets as what was written before, some pieces of the text replaced by any others."""
        spoken = (wanted == self.prompt.tag).cumsum(1).bool() & (wanted != self.prompt.tag)
        chance = torch.rand(wanted.shape, device=self.device, generator=self.noise)
        size = self.recogniser.tokenizer.size
        others = torch.randint(0, size, wanted.shape, device=self.device, generator=self.noise)
        return torch.where(spoken & (chance < self.plan.doubted), others, wanted.clamp_min(0))

    def _warped(self, mel: Tensor) -> Tensor:
        """Each clip from a shorter or longer throat: its bins moved by up to 7 %, while pitch and pace stay."""
        batch, bins, _ = mel.shape
        scale = 1 + 0.07 * (2 * torch.rand(batch, 1, device=mel.device, generator=self.noise) - 1)
        at = (torch.arange(bins, device=mel.device) * scale).clamp_max(bins - 1)
        low = at.floor().long()
        lower, upper = (
            mel.gather(1, place[:, :, None].expand_as(mel)) for place in (low, (low + 1).clamp_max(bins - 1))
        )
        return torch.lerp(lower, upper, (at - low)[:, :, None])

    def _masked(self, mel: Tensor, frames: Tensor) -> Tensor:
        """Some stretches of time and of frequency silenced (to the clip's own floor)."""
        batch, bins, length = mel.shape
        floor = mel.amin((1, 2), keepdim=True)

        def stripes(size: int, limit: Tensor, widest: int, count: int) -> Tensor:
            width = torch.randint(0, widest + 1, (batch, count), device=mel.device, generator=self.noise)
            first = torch.rand(batch, count, device=mel.device, generator=self.noise) * (
                limit[:, None] - width
            ).clamp_min(1)
            place = torch.arange(size, device=mel.device)[:, None]
            return ((place >= first[:, None]) & (place < (first + width)[:, None])).any(-1)

        hidden = (
            stripes(bins, torch.full_like(frames, bins), 18, 2)[:, :, None] | stripes(length, frames, 16, 2)[:, None]
        )
        return torch.where(hidden & (torch.arange(length, device=mel.device) < frames[:, None])[:, None], floor, mel)

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

    def report(self, model: Trainee, heldout: dict[str, list[Clip]], seconds: float) -> dict[str, float]:
        row = {"s": round(seconds), "step": self.step, "hours": round(self.clips.hours, 2), "clips": len(self.clips)}
        row |= {name: round(float(value) / self.counts[name], 4) for name, value in self.sums.items()}
        self.sums.clear()
        self.counts.clear()
        if not all(math.isfinite(value) for value in row.values()):
            raise RuntimeError(f"the training diverged: {row}; the last checkpoint stays")
        for name, clips in heldout.items():
            heard = self.heard(model, clips)
            if clips[0].text:
                row[name] = round(wer((clip.text, text) for clip, text in zip(clips, heard, strict=True)), 4)
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


def evaluation(folder: Path, most: int) -> dict[str, list[Clip]]:
    """Held-out clips by voice and kind; of music, pieces of 5 s."""
    return {path.stem: recorded(folder, path.name, path.stem)[:most] for path in sorted(folder.glob("*.opus"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--time-s", type=float, default=300.0)
    parser.add_argument("--clips", type=int, default=240_000, help="sentences that the synthesizers speak meanwhile")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--batch-s", type=float, default=750.0, help="seconds of sound in a batch")
    parser.add_argument(
        "--heldout-clips", type=int, default=10_000, help="of each held-out set, in the last evaluation"
    )
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    smoke(options.out) if options.smoke else run(options)


def run(options: argparse.Namespace) -> None:
    started = time.monotonic()
    data: Path = options.data
    everything = evaluation(data / "heldout", options.heldout_clips)
    avoid = withheld(clip for clips in evaluation(data / "heldout", 10_000).values() for clip in clips)
    maker = Maker(
        data / "bundle",
        data / "english.txt",
        workers=options.workers,
        count=options.clips,
        seed=options.seed,
        avoid=avoid,
    )
    # Its plans are made anew for every shape, and here hardly two batches have the same.
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    english = lines(data / "english.txt")
    avoid |= frozenset(english[:HELD_OUT_LINES])
    if options.resume:
        recogniser = Recogniser.copied(options.resume, options.out)
    else:
        recogniser = Recogniser.written(options.out, english[HELD_OUT_LINES:], NANO)
    kept = recorded(data / "recorded", "human*.opus", "human") + recorded(data / "recorded", "music.opus", "sounds")
    for group in ("piper", "festival"):
        kept += [clip for clip in recorded(data / group, "*.opus", group) if clip.text not in avoid]
    seconds = sum(len(clip.samples) / RATE + 0.05 for clip in kept) + options.clips * CLIP_S + 60.0
    clips = Clips(device, capacity_s=seconds)
    clips.take(kept)
    training = Training(options.out, recogniser, clips, device, Plan(batch_s=options.batch_s), options.seed)
    if options.resume:
        training.resume(options.resume)
    first = clips.hours + min(FIRST_HOURS, options.clips * 1.5 / 3600)
    while clips.hours < first:
        clips.take(maker.ready())
        time.sleep(0.05)  # the processes are busy, and this one has nothing to do
    print(f"{time.monotonic() - started:.0f} s: {clips.hours:.2f} h to begin with", flush=True)
    some = {name: clips[:40] for name, clips in everything.items()}
    begun = time.monotonic()
    end = started + options.time_s - 15.0
    saved_at = begun
    while (now := time.monotonic()) < end:
        if training.step % TAKE_STEPS == 0:
            clips.take(maker.ready())
        training.train(clips.batch(training.rng, batch_s=training.plan.batch_s), done=(now - begun) / (end - begun))
        if now - saved_at > training.plan.every_s:
            model = training.averaged()
            training.report(model, some, time.monotonic() - started)
            training.save(model)
            saved_at = time.monotonic()
    maker.close()
    model = training.averaged()
    training.report(model, everything, time.monotonic() - started)
    training.save(model)


def smoke(out: Path, *, steps: int = 60) -> None:
    """The whole way in seconds: a made-up voice, a tiny network, one checkpoint."""
    rng = random.Random(0)
    recogniser = Recogniser.written(out, [sentence(rng) for _ in range(200)], SMOKE, pieces=300)
    clips = Clips(torch.device("cpu"), capacity_s=200.0)
    made = toy_clips(40)
    clips.take(made)
    training = Training(out, recogniser, clips, torch.device("cpu"), Plan(warm_up_steps=10), 0)
    started = time.monotonic()
    for step in range(steps):
        training.train(clips.batch(training.rng, batch_s=20.0), done=step / steps)
    model = training.averaged()
    training.report(model, {"toy": made[:8]}, time.monotonic() - started)
    training.save(model)


if __name__ == "__main__":
    main()
