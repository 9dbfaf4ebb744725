"""Trains the codec's decoder to speak from the given codes.

    python -m training.tts.train_wave --corpus corpus.npz --sound sound.ogg --out DIR --time 440

First the front alone, through a linear head, to mel spectrograms; then all of it to sound (log-mel, log-magnitudes at four
resolutions); at last with discriminators of complex spectrograms too. Half of what it hears are shifted voices. Writes
DIR/wave.pt (averaged weights; --resume goes on from it) and DIR/judges.pt. Steps are CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.tts import clock, corpus
from training.tts.codec_model import TrainedCodec
from training.tts.contour import told
from training.tts.grad import refresh
from training.tts.graph import Dial, Step, adam, average
from training.tts.speakers import FRAME_SAMPLES
from training.tts.spectrum import FRAMES_A_CODE, Mel
from training.tts.state import State

_CROP = 76  # frames that the front reads
_LEAD = 2  # frames of a slice that only fill the layers' memory
_SLICE = 18  # frames of a slice whose sound is judged
_STEPS_A_FRAME = 4  # of the features that the waveform half reads
_MEL_EDGE = 4  # mel frames at the edges of a crop that see beyond it
_RESOLUTIONS = (256, 512, 1_024, 2_048)


class Judge(nn.Module):
    """Complex spectrogram [B, n] -> a map of opinions, and the layers before it."""

    def __init__(self, size: int, channels: int = 24) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("window", torch.hann_window(size), persistent=False)
        layers = [nn.Conv2d(2, channels, (3, 9), padding=(1, 4))]
        for dilation in (1, 2, 4):
            layers.append(
                nn.Conv2d(channels, channels, (3, 9), stride=(1, 2), dilation=(dilation, 1), padding=(dilation, 4))
            )
        layers.append(nn.Conv2d(channels, channels, 3, padding=1))
        self.layers = nn.ModuleList(layers)
        self.last = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, samples: Tensor) -> tuple[Tensor, list[Tensor]]:
        found = torch.stft(samples, self.size, self.size // 4, window=self.window, return_complex=True)
        x = torch.view_as_real(found).permute(0, 3, 2, 1) / self.size**0.5
        inner = []
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda, cache_enabled=False):
            for layer in self.layers:
                x = F.leaky_relu(layer(x), 0.2)
                inner.append(x)
            return self.last(x).float(), inner


class Judges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Judge(size) for size in (512, 1_024, 2_048))

    def forward(self, samples: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        return [judge(samples) for judge in self.parts]


class Distance(nn.Module):
    """Spectral distance of two sounds [B, n]."""

    def __init__(self) -> None:
        super().__init__()
        self.mel = Mel()
        for size in _RESOLUTIONS:
            self.register_buffer(f"window{size}", torch.hann_window(size), persistent=False)

    def forward(self, made: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        mel = (self.mel(made) - self.mel(true)).abs().mean()
        rest = made.new_zeros(())
        for size in _RESOLUTIONS:
            window = getattr(self, f"window{size}")
            a, b = (
                torch.view_as_real(torch.stft(x, size, size // 4, window=window, return_complex=True))
                .square()
                .sum(-1)
                .add(1e-7)
                .sqrt()
                for x in (made, true)
            )
            scale = size**0.5 / 100
            rest = (
                rest
                + ((a + scale).log() - (b + scale).log()).abs().mean()
                + 0.5 * (a - b).abs().mean() / size**0.5 * 10
            )
        return mel, rest / len(_RESOLUTIONS)


class Crops:
    """Codes and sound of all clips on the device, and where crops may begin."""

    def __init__(self, path: Path, sound: Path, device: torch.device) -> None:
        parts = corpus.load(path)
        raw = corpus.load_raw(parts["sound"], sound)
        clips = [parts["sound"], parts["variant"]]
        self.device = device
        self.sound = torch.cat([corpus.late_sound(part, parts["sound"], raw, device) for part in clips])
        self.codes = torch.from_numpy(corpus.known(np.concatenate([part.codes for part in clips]))).to(device)
        self.anywhere: list[Tensor] = []
        self.begins: list[Tensor] = []
        self._starts: list[Tensor] = []
        offset = 0
        for part in clips:
            # Clips lie one after another, so a crop may span two; only the held-out ones are kept out.
            held = np.repeat(part.held_out, np.diff(part.starts))
            clean = np.flatnonzero(np.convolve(held, np.ones(_CROP), "valid") == 0)
            begins = np.intersect1d(part.starts[:-1], clean)
            for pools, found in ((self.anywhere, clean), (self.begins, begins)):
                pools.append(torch.from_numpy(found + offset).to(device))
            self._starts.append(torch.from_numpy(part.starts[:-1] + offset).to(device))
            offset += len(held)
        self.held_out = [
            (int(parts["sound"].starts[n]), int(parts["sound"].starts[n + 1]))
            for n in np.flatnonzero(parts["sound"].held_out)[:40]
        ]

    def alone(self, frames: int) -> Tensor:
        """Where crops of `frames` frames of one clip may begin, the held-out ones left out."""
        edges = torch.cat([*self._starts, self._starts[-1].new_tensor([len(self.codes)])])
        inside = torch.searchsorted(edges, everywhere := torch.cat(self.anywhere), right=True)
        return everywhere[edges[inside] - everywhere > frames]

    def draw(self, count: int, *, begin: bool) -> Tensor:
        """Frames int64 [count, _CROP]."""
        named, shifted = (
            pool[(torch.rand(count, device=self.device) * len(pool)).long().clamp_max(len(pool) - 1)]
            for pool in (self.begins if begin else self.anywhere)
        )
        start = torch.where(torch.rand(count, device=self.device) < 0.55, named, shifted)
        return start[:, None] + torch.arange(_CROP, device=self.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--sound", type=Path, required=True, help=".ogg or .s16")
    parser.add_argument(
        "--resume", type=Path, help="go on from this wave.pt (and the judges.pt beside it): no mel stage"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, help="when training must be over, seconds since 1970; instead of --time")
    parser.add_argument("--time", type=float, default=440.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--mel", type=float, default=0.25, help="share of the run for the front alone")
    parser.add_argument("--judged", type=float, default=0.5, help="from this share of the run on there are judges")
    parser.add_argument("--peak", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--state", type=Path, help="a file for all of the state; a run that finds it goes on from there"
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="three steps, one of each kind")
    given = parser.parse_args()
    if given.smoke:
        given.steps, given.batch, given.mel, given.judged = 3, 1, 0.2, 0.6
    given.out.mkdir(parents=True, exist_ok=True)
    timer = clock.Clock(given.until - time.time() if given.until else given.time, given.steps)
    device = torch.device(given.device)
    torch.manual_seed(given.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True  # every step has the same shapes
    crops = Crops(given.corpus, given.sound, device)
    model, judges, distance = TrainedCodec(seed=given.seed).to(device), Judges().to(device), Distance().to(device)
    nn.init.constant_(model.head.bias, -1.7)  # the mean of log-mels
    if given.resume:
        model.load_state_dict(clock.load(given.resume)["model"])
        judges.load_state_dict(clock.load(given.resume.with_name("judges.pt"))["model"])
        given.mel, given.judged = 0.0, 0.02
    print(f"{len(crops.codes) * 0.08 / 3600:.2f} h of sound, {timer.elapsed_s:.0f} s", flush=True)
    weights = list(model.parameters())
    mean = [weight.detach().clone() for weight in weights]
    new, old = [], []
    for name, weight in model.named_parameters():
        (new if name.startswith("decoder.decoder.") and ".decoder.0." not in name else old).append(weight)
    speaker = adam(
        [{"params": new, "weight_decay": 0.01}, {"params": old, "weight_decay": 0.01}], device, betas=(0.8, 0.99)
    )
    critic = adam([{"params": list(judges.parameters()), "weight_decay": 0.01}], device, betas=(0.8, 0.99))
    nearer = Dial(device)

    def learn(loss: Tensor) -> None:
        speaker.zero_grad(set_to_none=True)
        # Only these: gradients of the judges would be added to those of the critic's last step, which a graph must not read.
        loss.backward(inputs=weights)
        for part in (new, old):
            if part[0].grad is not None:
                torch.nn.utils.clip_grad_norm_(part, 5.0)
        speaker.step()
        average(mean, weights, nearer.value)

    def heard(at: Tensor) -> tuple[Tensor, Tensor]:
        """Features of a crop, and the error of their mel."""
        refresh(model.decoder)
        features = model.front(told(crops.codes[at]))
        true = distance.mel(crops.sound[at].float().flatten(1))
        near = (model.mel(features) - true)[:, FRAMES_A_CODE:-_MEL_EDGE].abs().mean()
        return features, near

    def mel_step() -> dict[str, Tensor]:
        _, near = heard(crops.draw(2 * given.batch, begin=False))
        learn(near)
        return {"front": near.detach()}

    def wave_step(*, begin: bool, judged: bool) -> dict[str, Tensor]:
        at = crops.draw(given.batch, begin=begin)
        features, near = heard(at)
        count, skipped = (_SLICE, 0) if begin else (_LEAD + _SLICE, _LEAD * FRAME_SAMPLES)
        # Where the slice lies is drawn on the device; a stream's first frames are heard without a past.
        first = torch.randint(2, _CROP - count + 1, (1,), device=device) * (0 if begin else 1)
        steps = torch.arange(count * _STEPS_A_FRAME, device=device) + first * _STEPS_A_FRAME
        frames = torch.arange(count, device=device) + first
        made = model.wave(features.index_select(1, steps))[:, skipped:]
        true = crops.sound[at.index_select(1, frames)].float().flatten(1)[:, skipped:]
        mel, rest = distance(made, true)
        loss = 15.0 * mel + 5.0 * rest + 5.0 * near
        found = {"front": near.detach(), "mel": mel.detach(), "spectra": rest.detach()}
        if judged:
            with torch.no_grad():
                real = judges(true)
            for (score, inner), (_, wanted) in zip(judges(made), real, strict=True):
                loss = loss + (1.0 - score).square().mean() / 3
                alike = [
                    (a - b).abs().mean() / b.abs().mean().clamp_min(1e-3) for a, b in zip(inner, wanted, strict=True)
                ]
                loss = loss + 2.0 * sum(alike) / len(alike)
        learn(loss)
        if judged:
            critic.zero_grad(set_to_none=True)
            blame = made.new_zeros(())
            for (bad, _), (good, _) in zip(judges(made.detach()), judges(true), strict=True):
                blame = blame + (bad.square().mean() + (1.0 - good).square().mean()) / 3
            blame.backward()
            critic.step()
            found["blame"] = blame.detach()
        return found

    captured = device.type == "cuda" and not given.eager
    stages: dict[str, list[Callable[[], dict[str, Tensor]]]] = {
        "mel": [mel_step],
        "wave": [lambda: wave_step(begin=False, judged=False), lambda: wave_step(begin=True, judged=False)],
        "judged": [lambda: wave_step(begin=False, judged=True), lambda: wave_step(begin=True, judged=True)],
    }
    state = State(given.state, timer, networks=(model, judges), mean=mean, optimizers=(speaker, critic))
    if state.resume():
        print(f"{timer.elapsed_s:.0f} s: goes on from step {timer.step}, {timer.progress:.2f} of the run", flush=True)
    # All of them before the first that counts, with rates of zero.
    nearer.set(0.0)
    if not given.mel:
        del stages["mel"]
    made: dict[str, list[Step]] = {}
    pool: object = None
    for name, parts in stages.items():
        made[name] = []
        for part in parts:
            made[name].append(Step(part, captured=captured, pool=pool))
            pool = made[name][-1].pool
    print(f"{timer.elapsed_s:.0f} s: {'captured' if captured else 'ready'}", flush=True)
    stage, host = "", np.random.default_rng((given.seed, timer.step))
    said = timer.elapsed_s
    while not timer.over:
        progress = timer.progress
        wanted = "mel" if progress < given.mel else "wave" if progress < given.judged else "judged"
        now = clock.rate(progress, timer.step, given.peak)
        for group, share in zip(speaker.param_groups, (1.0, 1.0 if wanted == "mel" else 0.5), strict=True):
            group["lr"].fill_(now * share)
        critic.param_groups[0]["lr"].fill_(0.4 * now)
        if wanted != stage:
            stage = wanted
            print(f"{timer.elapsed_s:.0f} s step {timer.step}: {stage}", flush=True)
        steps = made[stage]
        found = steps[-1 if len(steps) > 1 and host.random() < 0.2 else 0]()
        timer.step += 1
        nearer.set(max(0.001, 10 / (timer.step + 20)))
        if captured and timer.step % 8 == 0:
            torch.cuda.synchronize()  # the host must not run far ahead of its own clock
        if timer.elapsed_s - said > 15:
            said = timer.elapsed_s
            line = {name: round(float(value), 3) for name, value in found.items()}
            if not np.isfinite(line["front"]):
                raise SystemExit(f"the loss is {line}")
            print(f"{said:.0f} s step {timer.step} {line}", flush=True)
        if state.due():
            state.save()
            clock.save(given.out / "wave.pt", model=model, mean=mean)
            clock.save(given.out / "judges.pt", model=judges)
    with torch.no_grad():
        for weight, value in zip(weights, mean, strict=True):
            weight.copy_(value)
    clock.save(given.out / "wave.pt", model=model)
    clock.save(given.out / "judges.pt", model=judges)
    state.forget()
    torch.backends.cudnn.benchmark = False  # from here on every clip has its own length
    with torch.no_grad():
        errors = []
        refresh(model.decoder)
        for start, stop in crops.held_out:
            made = model.wave(model.front(crops.codes[None, start:stop]))
            errors.append(float(distance(made, crops.sound[start:stop].float().flatten()[None])[0]))
    print(json.dumps({"steps": timer.step, "held_out_mel": round(float(np.mean(errors)), 4)}), flush=True)


if __name__ == "__main__":
    main()
