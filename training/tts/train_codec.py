"""Trains the codec as a mel model, then writes the acoustic codes of all clips.

    python -m training.tts.train_codec --corpus corpus.npz (--sound sound.s16 | --opus sound.ogg) --out DIR --time 70

Writes DIR/codec.pt (resumable) and DIR/codes.npz; prints mel errors with 0..4 books and how much each book is used.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.tts import clock, shape
from training.tts.codec_model import MelCodec
from training.tts.corpus import LEVEL, Corpus, read_opus
from training.tts.grad import refresh
from training.tts.speakers import FRAME_SAMPLES
from training.tts.spectrum import FRAMES_A_CODE, MELS, Mel

_DROPPED = torch.tensor([0.08, 0.12, 0.12, 0.13, 0.55])  # how often only 0, 1, .. 4 acoustic books are used


def load_sound(opus: Path | None, raw: Path | None, frames: int) -> Tensor:
    """float16 [frames, 1920], at the level that is trained."""
    count = frames * FRAME_SAMPLES
    if opus:
        samples = read_opus(opus, count)
    else:
        assert raw is not None
        samples = np.fromfile(raw, dtype="<i2", count=count)
    return (
        (torch.from_numpy(samples.copy()).float().mul_(LEVEL / 32768).clamp_(-1, 1)).half().view(frames, FRAME_SAMPLES)
    )


@torch.no_grad()
def all_mels(sound: Tensor, device: torch.device, *, block: int = 256) -> Tensor:
    """Log-mel of every frame, float16 [frames, 8, 80]; neighbours beyond a block's edge are taken from the sound."""
    spectrum, made = Mel().to(device), []
    padded = F.pad(sound, (0, 0, 1, 1))
    for start in range(0, len(sound), block):
        part = padded[start : start + block + 2].to(device).float().flatten()[None]
        mel = spectrum(part)[0].view(-1, FRAMES_A_CODE, MELS)
        made.append(mel[1:-1].half().cpu())
    return torch.cat(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--sound", type=Path)
    parser.add_argument("--opus", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--time", type=float, default=70.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--frames", type=int, default=80)
    parser.add_argument("--plain", type=float, default=0.15, help="share of the run before anything is quantised")
    parser.add_argument("--peak", type=float, default=2e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="two steps")
    given = parser.parse_args()
    if given.smoke:
        given.steps, given.batch = 2, 2
    given.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(given.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    corpus = Corpus.of_arrays(dict(np.load(given.corpus)), "sound_")
    frames = int(corpus.starts[-1])
    sound = load_sound(given.opus, given.sound, frames)
    mels = all_mels(sound, device).to(device)
    book0 = torch.from_numpy(corpus.codes.astype(np.int64)).to(device)
    mean, spread = mels[:: max(1, frames // 4096)].float().mean(), mels[:: max(1, frames // 4096)].float().std()
    print(f"{frames * 0.08 / 60:.1f} minutes; log-mel {mean:.2f} +- {spread:.2f}", flush=True)
    # Clips lie one after another, so a crop may span two; only the held-out ones are kept out.
    held = np.repeat(corpus.held_out, np.diff(corpus.starts))
    clean = np.convolve(held, np.ones(given.frames), "valid") == 0
    starts = torch.from_numpy(np.flatnonzero(clean)).to(device)
    model = MelCodec().to(device)
    torch.nn.init.constant_(model.head.bias, float(mean))
    trained = [
        w for name, w in model.named_parameters() if not name.startswith("decoder.decoder.") or ".decoder.0." in name
    ]
    begun = False
    if given.resume:
        kept = clock.load(given.resume)
        model.load_state_dict(kept["model"])
        begun = True
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda")
    timer = clock.Clock(given.time, given.steps)
    said, dropped = 0.0, _DROPPED.to(device)
    crop = torch.arange(given.frames, device=device)
    while not timer.over:
        for group in optimizer.param_groups:
            group["lr"] = clock.rate(timer.progress, timer.step, given.peak)
        at = starts[torch.randint(0, len(starts), (given.batch,), device=device)][:, None] + crop
        mel, phones = mels[at].float(), book0[at]
        target = mel.flatten(1, 2)
        x = model.encoder((mel - mean) / spread, phones)
        flat = x.flatten(0, 1)
        commit = torch.zeros((), device=device)
        if not begun and timer.progress > given.plain:
            with torch.no_grad():
                more = [
                    starts[torch.randint(0, len(starts), (512,), device=device)][:, None] + crop[:8] for _ in range(2)
                ]
                pool = [model.encoder((mels[i].float() - mean) / spread, book0[i])[:, 1:-1].flatten(0, 1) for i in more]
            model.books.start(torch.cat(pool))
            begun = True
        if begun:
            codes, sums = model.books.codes(flat.detach())
            model.books.follow(flat.detach(), codes)
            number = torch.multinomial(dropped, given.batch, replacement=True)
            chosen = torch.stack(sums)[number.repeat_interleave(given.frames), torch.arange(len(flat), device=device)]
            commit = (flat - sums[-1]).square().mean()
            used = (number > 0).repeat_interleave(given.frames)[:, None]
            acoustic = (chosen + (flat - flat.detach()) * used).view_as(x)
        else:
            kept_frames = (torch.rand(given.batch, 1, 1, device=device) > 0.1).float()
            acoustic = (x + 0.05 * torch.randn_like(x)) * kept_frames
            commit = 1e-3 * x.square().mean()
        refresh(model.decoder)
        made = model.mel(model.front(model.embed(phones, acoustic)))
        error = (made - target).abs().mean()
        loss = error + 0.25 * commit
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        timer.step += 1
        if timer.elapsed_s - said > 10:
            said = timer.elapsed_s
            print(f"{said:.0f} s step {timer.step} mel {error.item():.3f} commit {commit.item():.4f}", flush=True)
    model.eval()
    found = {}
    coded = []
    with torch.no_grad():
        for start in range(0, frames, 4096):  # one long row: the encoder sees one neighbour on each side
            at = torch.arange(max(0, start - 1), min(frames, start + 4097), device=device)[None]
            x = model.encoder((mels[at].float() - mean) / spread, book0[at])
            codes, _ = model.books.codes(x[0])
            first = 1 if start else 0
            coded.append(codes[first : first + min(4096, frames - start)])
        coded = torch.cat(coded)
        some = np.flatnonzero(corpus.held_out)[:40]
        for books in range(shape.ACOUSTIC_BOOKS + 1):
            errors = []
            for clip in some:
                at = torch.arange(int(corpus.starts[clip]), int(corpus.starts[clip + 1]), device=device)[None]
                refresh(model.decoder)
                made = model.mel(model.front(model.embed(book0[at], model.rows_of(coded[at], books))))
                errors.append(float((made - mels[at].float().flatten(1, 2)).abs().mean()))
            found[f"mel_{books}_books"] = float(np.mean(errors))
        for book in range(shape.ACOUSTIC_BOOKS):
            share = torch.bincount(coded[:, book], minlength=shape.BOOK_ROWS).float() / frames
            found[f"bits_{book + 1}"] = float(-(share * share.clamp_min(1e-9).log2()).sum())
    clock.save(given.out / "codec.pt", model=model, mean=float(mean), spread=float(spread))
    np.savez_compressed(given.out / "codes.npz", codes=coded.cpu().numpy().astype(np.uint8))
    (given.out / "codec.json").write_text(json.dumps(found, indent=1))
    print(timer.step, "steps", json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
