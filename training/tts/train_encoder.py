"""Trains what turns a reference recording into a prompt: the codec's encoder (sound to the given codes) and the speaker encoder.

    python -m training.tts.train_encoder --corpus corpus.npz --sound sound.ogg --out DIR --time 440

The encoder's books are made so that the nearest row is a classifier: book 0 has a subspace for each of a frame's two phones,
every acoustic book a subspace of its own, so that what one book takes away does not touch the next. Codes come one frame late,
so that the causal encoder has heard 80 ms more. The speaker encoder learns the vector that the Talker takes for a voice.
Writes DIR/encoder.pt (resumable: --resume).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.speaker_encoder import mel_filters
from training.tts import clock, shape
from training.tts.contour import BOOKS
from training.tts.grad import encoder_latents, speaker_vectors
from training.tts.graph import Dial, Step, adam, average
from training.tts.phones import CODES, PHONES
from training.tts.state import State
from training.tts.talker_model import voice_vector
from training.tts.train_wave import Crops

_WIDTH = shape.SIZES.codec_book // 2
_LATE = 2  # sound is one frame late in a corpus, and the encoder hears one frame more
_VOICE = 22  # frames of a crop of one voice
_FAR = 100.0  # where rows lie that must never be the nearest


class TrainedEncoder(nn.Module):
    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = shape.codec()[1]
        self.speaker = shape.speaker_encoder()
        self.phones = nn.Parameter(torch.randn(2, PHONES, _WIDTH // 2) * 0.7)
        self.rows = nn.Parameter(torch.randn(BOOKS, shape.BOOK_ROWS, _WIDTH // BOOKS) * 0.7)
        for name, weight in self.encoder.named_parameters():
            if "layer_scale" in name:
                nn.init.constant_(weight, 0.3)

    def logits(self, samples: Tensor) -> list[Tensor]:
        """samples [B, n] -> of the first phone, the second phone, and books 1 to 4, each [B, T, rows]."""
        first, rest = encoder_latents(self.encoder, samples)
        halves = zip(first.chunk(2, -1), self.phones, strict=True)
        spaces = zip(rest.chunk(BOOKS, -1), self.rows, strict=True)
        return [_nearness(x, rows) for x, rows in (*halves, *spaces)]

    @torch.no_grad()
    def fill_books(self) -> None:
        """Write the tables into the product's books."""
        books = self.encoder.quantizer
        (semantic,) = books.semantic_residual_vector_quantizer.layers
        table = semantic["codebook"].embed_sum
        code = torch.arange(CODES)
        table.fill_(_FAR)
        table[:CODES] = torch.cat((self.phones[0][code // PHONES], self.phones[1][code % PHONES]), -1)
        for number, layer in enumerate(books.acoustic_residual_vector_quantizer.layers):
            table = layer["codebook"].embed_sum
            table.fill_(_FAR)
            if number < BOOKS:
                space = _WIDTH // BOOKS
                table[: shape.BOOK_ROWS] = 0.0
                table[: shape.BOOK_ROWS, number * space : (number + 1) * space] = self.rows[number]
            else:
                table[0] = 0.0
        for name, value in self.encoder.named_parameters():
            if name.endswith("cluster_usage"):
                value.fill_(1.0)


def _nearness(x: Tensor, rows: Tensor) -> Tensor:
    """Minus half the squared distance, up to what all rows share."""
    return x @ rows.T - 0.5 * rows.square().sum(-1)


def disturbed(samples: Tensor) -> Tensor:
    """[B, n] at other levels, through other microphones (short random filters), and with noise."""
    b, n = samples.shape
    device = samples.device
    away = (torch.arange(9, device=device) - 4).abs().float()
    taps = torch.randn(b, 1, 9, device=device) * 0.3 * torch.exp(-0.45 * away) * (away > 0) + (away == 0).float()
    heard = F.conv1d(F.pad(samples, (4, 4))[None], taps, groups=b)[0]
    kind = torch.rand(b, 1, device=device)
    samples = torch.where(kind < 0.5, heard, samples)
    loud = samples.square().mean(1, keepdim=True).sqrt()
    ratio = torch.exp(-0.115 * (torch.rand(b, 1, device=device) * 35 + 10))  # 10 to 45 dB below
    noise = torch.randn(b, n, device=device)
    coloured = F.avg_pool1d(noise[:, None], 5, 1, 2)[:, 0] * 2.2
    noise = torch.where(torch.rand(b, 1, device=device) < 0.5, noise, coloured)
    samples = samples + noise * loud * ratio * (torch.rand(b, 1, device=device) < 0.7)
    return samples * torch.exp(0.115 * (torch.rand(b, 1, device=device) * 16 - 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--sound", type=Path, required=True, help=".ogg or .s16")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, help="when training must be over, seconds since 1970; instead of --time")
    parser.add_argument("--time", type=float, default=440.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--peak", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--state", type=Path, help="a file for all of the state; a run that finds it goes on from there"
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="two steps")
    given = parser.parse_args()
    if given.smoke:
        given.steps, given.batch = 2, 2
    given.out.mkdir(parents=True, exist_ok=True)
    timer = clock.Clock(given.until - time.time() if given.until else given.time, given.steps)
    device = torch.device(given.device)
    torch.manual_seed(given.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    crops, filters = Crops(given.corpus, given.sound, device), mel_filters().to(device)
    alone = crops.alone(_VOICE)
    model = TrainedEncoder(seed=given.seed)
    if given.resume:
        model.load_state_dict(clock.load(given.resume)["model"])
    model.to(device)
    for name, weight in model.named_parameters():
        weight.requires_grad_("codebook" not in name)  # they are written at the end
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    mean = [weight.detach().clone() for weight in weights]
    optimizer = adam([{"params": weights, "weight_decay": 0.01}], device, betas=(0.9, 0.98))
    nearer = Dial(device)

    def errors(samples: Tensor, codes: Tensor) -> list[Tensor]:
        """samples [B, n]; codes [B, T, 1 + BOOKS] of the same frames of a corpus -> a loss for each kind of logits."""
        wanted = codes[:, :-_LATE]
        target = [wanted[..., 0] // PHONES, wanted[..., 0] % PHONES, *wanted[..., 1:].unbind(-1)]
        found = [logits[:, _LATE:].flatten(0, 1) for logits in model.logits(samples)]
        return [F.cross_entropy(logits, part.flatten()) for logits, part in zip(found, target, strict=True)]

    def step() -> dict[str, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        at = crops.draw(given.batch, begin=False)
        parts = errors(disturbed(crops.sound[at].float().flatten(1)), crops.codes[at])
        one = alone[(torch.rand(2 * given.batch, device=device) * len(alone)).long().clamp_max(len(alone) - 1)]
        one = one[:, None] + torch.arange(_VOICE, device=device)
        vector = speaker_vectors(model.speaker, disturbed(crops.sound[one].float().flatten(1)), filters)
        voice = (vector - voice_vector(crops.codes[one[:, 0], BOOKS].float(), vector.shape[1])).square().mean()
        loss = sum(parts, start=voice * 20)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 2.0)
        optimizer.step()
        average(mean, weights, nearer.value)
        names = ("first", "second", "pitch", "loudness", "edges", "voice")
        return {**{name: part.detach() for name, part in zip(names, parts, strict=True)}, "vector": voice.detach()}

    captured = device.type == "cuda" and not given.eager
    state = State(given.state, timer, networks=(model,), mean=mean, optimizers=(optimizer,))
    if state.resume():
        print(f"{timer.elapsed_s:.0f} s: goes on from step {timer.step}, {timer.progress:.2f} of the run", flush=True)
    nearer.set(0.0)
    run = Step(step, captured=captured)
    print(f"{timer.elapsed_s:.0f} s ready", flush=True)
    said = timer.elapsed_s
    while not timer.over:
        optimizer.param_groups[0]["lr"].fill_(clock.rate(timer.progress, timer.step, given.peak))
        nearer.set(max(0.001, 10 / (timer.step + 20)))
        found = run()
        timer.step += 1
        if captured and timer.step % 8 == 0:
            torch.cuda.synchronize()  # the host must not run far ahead of its own clock
        if timer.elapsed_s - said > 20:
            said = timer.elapsed_s
            line = {name: round(float(value), 3) for name, value in found.items()}
            if not np.isfinite(line["first"]):
                raise SystemExit(f"the loss is {line}")
            print(f"{said:.0f} s step {timer.step} {line}", flush=True)
        if state.due():
            state.save()
            clock.save(given.out / "encoder.pt", model=model, mean=mean)
    with torch.no_grad():
        for weight, value in zip(weights, mean, strict=True):
            weight.copy_(value)
    clock.save(given.out / "encoder.pt", model=model)
    state.forget()
    torch.backends.cudnn.benchmark = False
    right: dict[str, list[float]] = {"first": [], "second": [], "pitch": [], "voice": [], "vector": []}
    with torch.no_grad():
        every = voice_vector(torch.arange(shape.BOOK_ROWS, device=device).float(), shape.SIZES.talker.hidden)
        for start, stop in crops.held_out:
            samples, codes = crops.sound[start:stop].float().flatten()[None], crops.codes[start : stop - _LATE]
            found = [logits[0, _LATE:].argmax(-1) for logits in model.logits(samples)]
            right["first"].append(float((found[0] == codes[:, 0] // PHONES).float().mean()))
            right["second"].append(float((found[1] == codes[:, 0] % PHONES).float().mean()))
            right["pitch"].append(float(((found[2] - codes[:, 1]).abs() < 2).float().mean()))
            right["voice"].append(float(((found[5] - codes[:, 4]).abs() < 4).float().mean()))
            level = torch.cdist(speaker_vectors(model.speaker, samples, filters), every).argmin()
            right["vector"].append(float((level - codes[0, 4]).abs() < 4))
    print(
        json.dumps({"steps": timer.step, **{name: round(float(np.mean(v)), 3) for name, v in right.items()}}),
        flush=True,
    )


if __name__ == "__main__":
    main()
