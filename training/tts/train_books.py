"""Trains the code predictor alone, on what a finished Talker hears while it reads clips with known codes. Minutes on one core.

    python -m training.tts.train_books --corpus many.npz --codes many_codes.npz --tokenizer tokenizer.json --resume talker.pt --out DIR

The Talker's decoder and all tables stay as they are, so its phones do not change. Writes DIR/talker.pt; prints the losses of
books 1.. on held-out clips.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from training.tts import clock
from training.tts.corpus import Corpus
from training.tts.grad import average
from training.tts.talker_batch import Rows, batches_by_length
from training.tts.talker_model import TrainedTalker


@torch.no_grad()
def heard_by(
    model: TrainedTalker, rows: Rows, corpus: Corpus, codes: Tensor, numbers: np.ndarray, random: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Hidden rows float16 [n, H] of all frames of the clips, with the true history, and the frames' numbers int64 [n]."""
    into, _ = model.tables()
    hidden, frames = [], []
    for some in batches_by_length(corpus, numbers, 1_500, random):
        batch = rows.batch(corpus, list(some), random, spoken_from=0, dropout=0.0)
        found = model.hidden(batch, codes, into, None)
        frame = batch.next_frame.flatten()
        at = (frame >= 0).nonzero()[:, 0]
        hidden.append(found[at].half())
        frames.append(frame[at])
    return torch.cat(hidden), torch.cat(frames)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--codes", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--resume", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--time", type=float, default=300.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=768, help="frames")
    parser.add_argument("--peak", type=float, default=1.5e-3)
    parser.add_argument("--fresh", action="store_true", help="forget the code predictor of --resume")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="two steps")
    given = parser.parse_args()
    if given.smoke:
        given.steps, given.batch = 2, 64
    corpus = Corpus.of_arrays(dict(np.load(given.corpus)), "sound_")
    acoustic = np.load(given.codes)["codes"].astype(np.int64)
    codes = torch.from_numpy(np.concatenate((corpus.codes.astype(np.int64)[:, None], acoustic), 1))
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    model = TrainedTalker(tokenizer.get_vocab_size(), seed=given.seed)
    predictor = model.talker.code_predictor
    learned = (predictor.decoder, predictor.small_to_mtp_projection, predictor.lm_head)
    fresh = [{name: weight.clone() for name, weight in part.state_dict().items()} for part in learned]
    model.load_state_dict(clock.load(given.resume)["model"])
    if given.fresh:
        for part, state in zip(learned, fresh, strict=True):
            part.load_state_dict(state)
    rows, random = Rows(tokenizer), np.random.default_rng(given.seed)
    hidden, frames = heard_by(model, rows, corpus, codes, np.flatnonzero(~corpus.held_out), random)
    unseen = heard_by(model, rows, corpus, codes, np.flatnonzero(corpus.held_out), random)
    targets, true = codes[frames], codes[unseen[1]]
    print(f"{len(hidden)} frames to learn from, {len(unseen[0])} held out", flush=True)
    into = model.tables()[0].detach()
    kept = {id(weight) for part in learned for weight in part.parameters() if weight.requires_grad}
    for weight in model.parameters():
        weight.requires_grad_(id(weight) in kept)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    mean = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.98), weight_decay=0.05)

    @torch.no_grad()
    def held_out() -> list[float]:
        return [round(float(loss), 3) for loss in model.acoustic(unseen[0].float(), true, into)]

    print("held out before:", held_out(), flush=True)
    timer, said = clock.Clock(given.time, given.steps), 0.0
    while not timer.over:
        for group in optimizer.param_groups:
            group["lr"] = clock.rate(timer.progress, timer.step, given.peak)
        at = torch.randint(0, len(hidden), (given.batch,))
        seen = F.dropout(hidden[at].float(), 0.15)
        losses = model.acoustic(seen, targets[at], into, wrong=0.1, dropped=0.1, smooth=0.02)
        optimizer.zero_grad(set_to_none=True)
        sum(losses[1:], losses[0]).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        timer.step += 1
        average(mean, model, min(0.995, timer.step / (timer.step + 20)))
        if timer.elapsed_s - said > 60:
            said = timer.elapsed_s
            print(f"{said:.0f} s step {timer.step} held out {held_out()}", flush=True)
    model.load_state_dict({**model.state_dict(), **mean})
    print(f"{timer.step} steps; held out {held_out()}", flush=True)
    clock.save(given.out / "talker.pt", model=model)


if __name__ == "__main__":
    main()
