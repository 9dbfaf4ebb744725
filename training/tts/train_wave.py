"""Trains the decoder to speak: codes fixed, the waveform half from scratch, the front going on with a smaller step.

    python -m training.tts.train_wave --corpus corpus.npz --opus sound.ogg --codec DIR/codec.pt --codes DIR/codes.npz --out DIR --time 300

Losses: log-mel, log-magnitudes at three resolutions, and from --judged of the run on, discriminators of complex
spectrograms. Writes DIR/wave.pt (all of MelCodec, averaged weights; resumable) and DIR/judges.pt.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.tts import clock
from training.tts.codec_model import MelCodec
from training.tts.corpus import Corpus
from training.tts.grad import average, refresh
from training.tts.speakers import FRAME_SAMPLES
from training.tts.spectrum import Mel
from training.tts.train_codec import load_sound

_LEAD = 2  # frames of a slice that only fill the layers' memory
_SLICE = 12  # frames of a slice whose sound is judged
_STEPS_A_FRAME = 4  # of the features that the waveform half reads
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
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--sound", type=Path)
    parser.add_argument("--opus", type=Path)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--codes", type=Path, required=True)
    parser.add_argument("--judges", type=Path, help="go on with these discriminators")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--time", type=float, default=300.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--predicted", type=Path, help="codes of predict.py, for --predicted-share of the crops")
    parser.add_argument("--predicted-share", type=float, default=0.6)
    parser.add_argument("--frames", type=int, default=84)
    parser.add_argument("--judged", type=float, default=0.4)
    parser.add_argument("--peak", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="two steps")
    given = parser.parse_args()
    if given.smoke:
        given.steps, given.batch = 2, 1
    given.out.mkdir(parents=True, exist_ok=True)
    timer = clock.Clock(given.time, given.steps)
    device = torch.device(given.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True  # every step has the same shapes
    corpus = Corpus.of_arrays(dict(np.load(given.corpus)), "sound_")
    frames = int(corpus.starts[-1])
    sound = load_sound(given.opus, given.sound, frames).to(device)
    book0 = torch.from_numpy(corpus.codes.astype(np.int64)).to(device)
    acoustic = torch.from_numpy(np.load(given.codes)["codes"].astype(np.int64)).to(device)
    predicted = (
        torch.from_numpy(np.load(given.predicted)["codes"].astype(np.int64)).to(device) if given.predicted else None
    )
    held = np.repeat(corpus.held_out, np.diff(corpus.starts))
    clean = np.convolve(held, np.ones(given.frames), "valid") == 0
    anywhere = torch.from_numpy(np.flatnonzero(clean)).to(device)
    begins = corpus.starts[:-1][~corpus.held_out]
    begins = torch.from_numpy(begins[begins + given.frames < frames].astype(np.int64)).to(device)
    model, judges, distance = MelCodec().to(device), Judges().to(device), Distance().to(device)
    model.load_state_dict(clock.load(given.codec)["model"])
    if given.judges:
        judges.load_state_dict(clock.load(given.judges)["model"])
    mean = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    new, old = [], []
    for name, weight in model.named_parameters():
        if name.startswith("encoder."):
            continue
        (new if name.startswith("decoder.decoder.") and ".decoder.0." not in name else old).append(weight)
    fused = device.type == "cuda"
    speaker = torch.optim.AdamW([{"params": new}, {"params": old}], betas=(0.8, 0.99), weight_decay=0.01, fused=fused)
    critic = torch.optim.AdamW(judges.parameters(), betas=(0.8, 0.99), weight_decay=0.01, fused=fused)
    crop = torch.arange(given.frames, device=device)
    # One generator on the host decides what the host must know, so that no step waits for the device.
    host = np.random.default_rng(0)
    said, kept = 0.0, 0.0
    while not timer.over:
        now = clock.rate(timer.progress, timer.step, given.peak)
        for group, share in zip(speaker.param_groups, (1.0, 0.3), strict=True):
            group["lr"] = now * share
        for group in critic.param_groups:
            group["lr"] = 0.4 * now
        at_begin = host.random() < 0.2
        pool = begins if at_begin else anywhere
        at = pool[torch.randint(0, len(pool), (given.batch,), device=device)][:, None] + crop
        refresh(model.decoder)
        codes = acoustic[at]
        if predicted is not None:
            guessed = torch.rand(given.batch, 1, 1, device=device) < given.predicted_share
            codes = torch.where(guessed, predicted[at], codes)
        books = torch.where(torch.rand(given.batch, device=device) < 0.9, 4, 2)
        features = model.front(model.embed(book0[at], model.rows_of(codes, books)))
        first = 0 if at_begin else int(host.integers(2, given.frames - _LEAD - _SLICE + 1))
        part = features[:, first * _STEPS_A_FRAME : (first + _LEAD + _SLICE) * _STEPS_A_FRAME]
        made = model.wave(part)
        true = sound[at[:, first : first + _LEAD + _SLICE]].float().flatten(1)
        skipped = 0 if at_begin else _LEAD * FRAME_SAMPLES
        made = made[:, skipped : skipped + _SLICE * FRAME_SAMPLES]
        true = true[:, skipped : skipped + _SLICE * FRAME_SAMPLES]
        mel, rest = distance(made, true)
        loss = 15.0 * mel + 5.0 * rest
        judged = timer.progress > given.judged
        if judged:
            with torch.no_grad():
                real = judges(true)
            opinion = judges(made)
            for (score, inner), (_, wanted) in zip(opinion, real, strict=True):
                loss = loss + (1.0 - score).square().mean() / 3
                near = [
                    (a - b).abs().mean() / b.abs().mean().clamp_min(1e-3) for a, b in zip(inner, wanted, strict=True)
                ]
                loss = loss + 2.0 * sum(near) / len(near)
        speaker.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(new, 5.0)
        torch.nn.utils.clip_grad_norm_(old, 5.0)
        speaker.step()
        if judged or timer.progress > given.judged - 0.05:
            critic.zero_grad(set_to_none=True)
            blame = made.new_zeros(())
            for (bad, _), (good, _) in zip(judges(made.detach()), judges(true), strict=True):
                blame = blame + (bad.square().mean() + (1.0 - good).square().mean()) / 3
            blame.backward()
            critic.step()
        timer.step += 1
        average(mean, model, min(0.999, timer.step / (timer.step + 20)))
        if timer.elapsed_s - said > 10:
            said = timer.elapsed_s
            line = f" blame {blame.item():.3f}" if judged else ""
            print(
                f"{said:.0f} s step {timer.step} mel {mel.item():.3f} spectra {rest.item():.3f} loss {loss.item():.2f}{line}",
                flush=True,
            )
        if timer.elapsed_s - kept > 60:
            kept = timer.elapsed_s
            clock.save(given.out / "wave.pt", model=model)
    model.load_state_dict({**model.state_dict(), **mean})
    clock.save(given.out / "wave.pt", model=model)
    clock.save(given.out / "judges.pt", model=judges)
    torch.backends.cudnn.benchmark = False  # from here on every clip has its own length
    with torch.no_grad():
        errors = []
        refresh(model.decoder)
        for clip in np.flatnonzero(corpus.held_out)[:30]:
            at = torch.arange(int(corpus.starts[clip]), int(corpus.starts[clip + 1]), device=device)[None]
            made = model.wave(model.front(model.embed(book0[at], model.rows_of(acoustic[at]))))
            errors.append(float(distance(made, sound[at].float().flatten(1))[0]))
    print(json.dumps({"steps": timer.step, "held_out_mel": round(float(np.mean(errors)), 4)}))


if __name__ == "__main__":
    main()
