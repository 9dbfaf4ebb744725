"""Trains the Talker: book 0 on all texts, the acoustic books on clips whose codes are known.

    python -m training.tts.train_talker --corpus corpus.npz --tokenizer tokenizer.json --out DIR --time 440 [--codes codes.npz]

Writes DIR/talker.pt (resumable: --resume), and prints losses, then free-running phone error on held-out texts.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.tts import clock, shape
from training.tts.corpus import Corpus, joined
from training.tts.distance import distance
from training.tts.grad import average, count
from training.tts.phones import phones_of
from training.tts.talker_batch import MOST_SPOKEN, Batch, Rows, batches_by_length
from training.tts.talker_model import Corruption, TrainedTalker
from training.tts.talker_speak import speak

MOST_FRAMES = 250  # of a spoken held-out text; one that has not ended by then never will


def all_codes(times: Corpus, sound: Corpus, acoustic: np.ndarray | None) -> Tensor:
    """int64 [frames, 1 + ACOUSTIC_BOOKS]; -1 where only the phones are known."""
    book0 = np.concatenate((times.codes, sound.codes)).astype(np.int64)
    made = np.full((len(book0), 1 + shape.ACOUSTIC_BOOKS), -1, dtype=np.int64)
    made[:, 0] = book0
    if acoustic is not None:
        made[len(times.codes) :, 1:] = acoustic
    return torch.from_numpy(made)


def evaluate(
    model: TrainedTalker, rows: Rows, corpus: Corpus, *, clips: int, books: bool, seed: int = 0
) -> dict[str, float]:
    """Free-running and greedy on held-out clips: phone error, ends, length ratio; both ways of giving the text."""
    frozen = copy.deepcopy(model).eval()
    frozen.fold()
    frozen.talker.requires_grad_(False)
    frozen.talker.prepare()
    found: dict[str, float] = {}
    random = np.random.default_rng(seed)
    for kind in ("domain", "general"):
        pool = np.flatnonzero(corpus.held_out & (corpus.domain == (kind == "domain")))
        some = random.permutation(pool)[:clips]
        if not len(some):
            continue
        for streaming in (False, True):
            texts = [corpus.texts[n] for n in some]
            said = speak(
                frozen.talker,
                rows,
                texts,
                [int(corpus.speaker[n]) for n in some],
                streaming=streaming,
                books=books,
                most=MOST_FRAMES,
            )
            true = [corpus.clip(n) for n in some]
            wrong = sum(distance(phones_of(a[:, 0]), phones_of(b)) for a, b in zip(said, true, strict=True))
            name = f"{kind}_{'beside' if streaming else 'before'}"
            found[name] = wrong / max(1, sum(len(phones_of(b)) for b in true))
            found[name + "_ends"] = float(np.mean([len(a) < MOST_FRAMES for a in said]))
            found[name + "_length"] = sum(map(len, said)) / max(1, sum(map(len, true)))
    return found


class Endless(IterableDataset[tuple[Tensor, ...]]):
    """Batches of all training clips, and, for `share` of them, only of clips from number `spoken` on (those with sound)."""

    def __init__(self, corpus: Corpus, tokenizer: str, *, size: int, spoken: int, share: float, seed: int) -> None:
        self.corpus, self.tokenizer, self.size, self.spoken, self.share, self.seed = (
            corpus,
            tokenizer,
            size,
            spoken,
            share,
            seed,
        )

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        worker = get_worker_info()
        random = np.random.default_rng((self.seed, worker.id if worker else 0))
        rows = Rows(Tokenizer.from_str(self.tokenizer))
        train = np.flatnonzero(~self.corpus.held_out)
        pools = {"all": train, "sound": train[train >= self.spoken]}
        first = int(self.corpus.starts[self.spoken]) if self.share else int(self.corpus.starts[-1])
        waiting: dict[str, list[np.ndarray]] = {name: [] for name in pools}
        while True:
            name = "sound" if random.random() < self.share else "all"
            if not waiting[name]:
                waiting[name] = batches_by_length(self.corpus, pools[name], self.size, random)
            yield rows.batch(self.corpus, list(waiting[name].pop()), random, spoken_from=first).parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--codes", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--time", type=float, default=440.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=int, default=2_000, help="rows of a batch")
    parser.add_argument("--peak", type=float, default=1.5e-3)
    parser.add_argument("--share", type=float, default=0.3, help="share of batches that have sound only")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--clips", type=int, default=60, help="held-out clips of each kind to speak at the end")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="two steps")
    given = parser.parse_args()
    if given.smoke:
        given.steps, given.rows, given.clips = 2, 400, 0
    given.out.mkdir(parents=True, exist_ok=True)
    timer = clock.Clock(given.time, given.steps)
    device = torch.device(given.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    arrays = dict(np.load(given.corpus))
    times, sound = Corpus.of_arrays(arrays, "times_"), Corpus.of_arrays(arrays, "sound_")
    acoustic = np.load(given.codes)["codes"] if given.codes else None
    corpus = joined(times, sound)
    codes = all_codes(times, sound, acoustic).to(device)
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    rows = Rows(tokenizer)
    model = TrainedTalker(tokenizer.get_vocab_size(), seed=given.seed)
    if given.resume:
        model.load_state_dict(clock.load(given.resume)["model"])
    model.to(device)
    print(f"{count(model.talker) / 1e6:.2f} M parameters, {len(corpus)} clips, {len(codes)} frames", flush=True)
    mean = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    plain = [w for w in model.parameters() if w.requires_grad and w.dim() < 2]
    wide = [w for w in model.parameters() if w.requires_grad and w.dim() >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": wide, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.98), fused=device.type == "cuda",
    )  # fmt: skip
    corruption = Corruption()
    log, said = [], 0.0
    share = given.share if acoustic is not None else 0.0
    data = Endless(corpus, tokenizer.to_str(), size=given.rows, spoken=len(times), share=share, seed=given.seed)
    source = iter(DataLoader(data, batch_size=None, num_workers=given.workers))
    while not timer.over:
        for group in optimizer.param_groups:
            group["lr"] = clock.rate(timer.progress, timer.step, given.peak)
        batch = Batch(*next(source)).to(device)
        losses = model.losses(batch, codes, corruption)
        # The few clips with sound come round often: their text must not be learned by heart.
        only_sound = len(batch.spoken) > 0.9 * len(batch.wanted) or len(batch.spoken) == MOST_SPOKEN
        loss = losses["c0"] * (0.3 if only_sound else 1.0) + sum(0.4 * losses[name] for name in losses if name != "c0")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        timer.step += 1
        average(mean, model, min(0.998, timer.step / (timer.step + 20)))
        if timer.elapsed_s - said > 15:
            said = timer.elapsed_s
            line = {name: round(float(value.detach()), 3) for name, value in losses.items()}
            print(f"{said:.0f} s step {timer.step} {line}", flush=True)
            log.append({"s": said, "step": timer.step, **line})
            clock.save(given.out / "talker.pt", model=model)
    model.load_state_dict({**model.state_dict(), **mean})
    clock.save(given.out / "talker.pt", model=model)
    found = evaluate(model, rows, corpus, clips=given.clips, books=acoustic is not None)
    print(json.dumps({name: round(value, 4) for name, value in found.items()}, indent=1))
    (given.out / "talker.json").write_text(json.dumps({"log": log, "held_out": found}, indent=1))


if __name__ == "__main__":
    main()
