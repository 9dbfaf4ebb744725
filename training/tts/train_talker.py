"""Trains the Talker: phones, edges and voice on all texts, pitch and loudness on the clips that have sound.

    python -m training.tts.train_talker --corpus corpus.npz --tokenizer tokenizer.json --out DIR --time 440

Writes DIR/talker.pt (resumable: --resume) and DIR/talker.json, and prints losses, then free-running phone error on held-out
texts. Everything is on the device, and a step is one CUDA graph for each of a few lengths of clips.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.tts import clock, corpus
from training.tts.corpus import NOBODY, Corpus, joined
from training.tts.distance import distance
from training.tts.grad import count
from training.tts.graph import Dial, Step, adam, average
from training.tts.phones import phones_of
from training.tts.shape import BOOK_ROWS
from training.tts.state import State
from training.tts.talker_batch import Deck, Rows, chained
from training.tts.talker_model import Corruption, TrainedTalker, voice_vector
from training.tts.talker_speak import speak

MOST_FRAMES = 300  # of a spoken held-out text; one that has not ended by then never will
LENGTHS = (40, 56, 72, 96, 128, 192, 288)  # rows of the clips of a batch
_LONGEST_CHAIN = 170  # frames


def evaluate(
    model: TrainedTalker, rows: Rows, clips: Corpus, *, count: int, voices: bool = False, seed: int = 0
) -> dict[str, float]:
    """Free-running and greedy on held-out clips: phone error, ends, length ratio; both ways of giving the text.

    voices: in voices of their own, given by vectors, instead of by the named speakers.
    """
    frozen = copy.deepcopy(model).eval()
    frozen.fold()
    frozen.talker.requires_grad_(False)
    frozen.talker.prepare()
    hidden = frozen.talker.config.decoder.hidden
    device = frozen.talker.codec_head.weight.device
    found: dict[str, float] = {}
    random = np.random.default_rng(seed)
    for kind in ("domain", "general"):
        pool = np.flatnonzero(clips.held_out & (clips.domain == (kind == "domain")))
        some = random.permutation(pool)[:count]
        if not len(some):
            continue
        level = torch.tensor([float(clips.clip(n)[0, -1]) for n in some], device=device)
        for streaming in (False, True):
            said = speak(
                frozen.talker,
                rows,
                [clips.texts[n] for n in some],
                [NOBODY if voices else int(clips.speaker[n]) for n in some],
                streaming=streaming,
                most=MOST_FRAMES,
                vectors=voice_vector(level, hidden),
            )
            true = [clips.clip(n)[:, 0] for n in some]
            wrong = sum(distance(phones_of(a[:, 0]), phones_of(b)) for a, b in zip(said, true, strict=True))
            name = f"{kind}_{'beside' if streaming else 'before'}"
            found[name] = wrong / max(1, sum(len(phones_of(b)) for b in true))
            found[name + "_ends"] = float(np.mean([len(a) < MOST_FRAMES for a in said]))
            found[name + "_length"] = sum(map(len, said)) / max(1, sum(map(len, true)))
            spoken = [
                abs(float(np.median(a[:, 4])) - float(b)) < 1.5 for a, b in zip(said, level, strict=True) if len(a)
            ]
            found[name + "_voice"] = float(np.mean(spoken)) if spoken else 0.0
    return found


class Drawer:
    """Which clips the next batch has: all alike, or, for a share, only those whose pitch and loudness are known."""

    def __init__(self, deck: Deck, clips: Corpus, *, rows: int, share: float, device: torch.device) -> None:
        known = clips.codes[clips.starts[:-1], 1] < BOOK_ROWS
        self.pools: list[tuple[Tensor, Tensor]] = []
        self.lengths, self.sizes, weight = [], [], []
        shorter = 0
        for length in LENGTHS:
            here = ~clips.held_out & (deck.length <= length) & (deck.length > shorter)
            shorter = length
            pair = [np.flatnonzero(here & known), np.flatnonzero(here)]
            if not len(pair[1]):
                continue
            pair = [part if len(part) else pair[1] for part in pair]
            self.pools.append(tuple(torch.from_numpy(part).to(device) for part in pair))  # type: ignore[arg-type]
            self.lengths.append(length)
            self.sizes.append(max(1, rows // length))
            weight.append(here.sum() / self.sizes[-1])
        self.weight = np.array(weight) / np.sum(weight)
        self.share = share

    def draw(self, bucket: int) -> tuple[Tensor, Tensor]:
        """Clips int64 [B] and their weight in the loss of book 0: the few with sound come round often."""
        spoken, everything = self.pools[bucket]
        size, device = self.sizes[bucket], spoken.device
        from_spoken = torch.rand(size, device=device) < self.share
        one = spoken[(torch.rand(size, device=device) * len(spoken)).long().clamp_max(len(spoken) - 1)]
        two = everything[(torch.rand(size, device=device) * len(everything)).long().clamp_max(len(everything) - 1)]
        return torch.where(from_spoken, one, two), 1.0 - 0.7 * from_spoken.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--until", type=float, help="when training must be over, seconds since 1970; instead of --time")
    parser.add_argument("--time", type=float, default=440.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=int, default=8_192, help="rows of a batch")
    parser.add_argument("--peak", type=float, default=1.5e-3)
    parser.add_argument("--share", type=float, default=0.25, help="share of clips drawn from those with sound")
    parser.add_argument("--chains", type=int, default=8_000, help="clips made of others, of each kind")
    parser.add_argument("--clips", type=int, default=60, help="held-out clips of each kind to speak at the end")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--state", type=Path, help="a file for all of the state; a run that finds it goes on from there"
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="two steps")
    given = parser.parse_args()
    if given.smoke:
        given.steps, given.rows, given.clips, given.chains = 2, 400, 2, 6
    given.out.mkdir(parents=True, exist_ok=True)
    timer = clock.Clock(given.until - time.time() if given.until else given.time, given.steps)
    device = torch.device(given.device)
    torch.manual_seed(given.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    parts = corpus.load(given.corpus)
    named, host = joined(parts["times"], parts["sound"]), np.random.default_rng(given.seed)
    clips = joined(named, parts["variant"])
    chains = [chained(clips, given.chains, host, longest=_LONGEST_CHAIN, spoken=spoken) for spoken in (True, False)]
    clips = joined(clips, *(chain for chain in chains if len(chain)))
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    rows = Rows(tokenizer)
    deck = Deck(clips, rows, device)
    drawer = Drawer(deck, clips, rows=given.rows, share=given.share, device=device)
    model = TrainedTalker(tokenizer.get_vocab_size(), seed=given.seed)
    if given.resume:
        model.load_state_dict(clock.load(given.resume)["model"])
    model.to(device)
    print(f"{count(model.talker) / 1e6:.2f} M parameters, {len(clips)} clips, {len(clips.codes)} frames, {timer.elapsed_s:.0f} s", flush=True)  # fmt: skip
    weights = [w for w in model.parameters() if w.requires_grad]
    mean = [w.detach().clone() for w in weights]
    optimizer = adam(
        [{"params": [w for w in weights if w.dim() >= 2], "weight_decay": 0.02},
         {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0}], device, betas=(0.9, 0.98),
    )  # fmt: skip
    corruption, nearer = Corruption(), Dial(device)

    def step(bucket: int) -> dict[str, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        some, weight = drawer.draw(bucket)
        batch = deck.batch(some, drawer.lengths[bucket])
        losses = model.losses(batch, deck.codes, corruption, weight=weight)
        loss = losses["c0"] + 0.3 * (losses["c1"] + losses["c2"] + losses["c3"]) + 0.1 * losses["c4"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        average(mean, weights, nearer.value)
        return {name: value.detach() for name, value in losses.items()}

    captured = device.type == "cuda" and not given.eager
    state = State(given.state, timer, networks=(model,), mean=mean, optimizers=(optimizer,))
    if state.resume():
        print(f"{timer.elapsed_s:.0f} s: goes on from step {timer.step}, {timer.progress:.2f} of the run", flush=True)
    # All of them before the first that counts, with rates of zero.
    nearer.set(0.0)
    steps: list[Step] = []
    for bucket in reversed(range(len(drawer.pools))):
        steps.insert(
            0, Step(lambda bucket=bucket: step(bucket), captured=captured, pool=steps[0].pool if steps else None)
        )
    print(f"{timer.elapsed_s:.0f} s ready: {drawer.sizes} clips of {drawer.lengths} rows", flush=True)
    log, said, host = [], timer.elapsed_s, np.random.default_rng((given.seed, timer.step))
    while not timer.over:
        for group in optimizer.param_groups:
            group["lr"].fill_(clock.rate(timer.progress, timer.step, given.peak))
        nearer.set(max(0.001, 20 / (timer.step + 20) * 0.5))
        found = steps[int(host.choice(len(steps), p=drawer.weight))]()
        timer.step += 1
        if captured and timer.step % 8 == 0:
            torch.cuda.synchronize()  # the host must not run far ahead of its own clock
        if timer.elapsed_s - said > 15 or (timer.step == 100 and captured):
            said = timer.elapsed_s
            line = {name: round(float(value), 3) for name, value in found.items()}
            if not np.isfinite(line["c0"]):
                raise SystemExit(f"the loss is {line}")
            print(f"{said:.0f} s step {timer.step} {line}", flush=True)
            log.append({"s": round(said, 1), "step": timer.step, **line})
        if state.due():
            state.save()
            clock.save(given.out / "talker.pt", model=model, mean=mean)
    with torch.no_grad():
        for weight, value in zip(weights, mean, strict=True):
            weight.copy_(value)
    clock.save(given.out / "talker.pt", model=model)
    state.forget()
    print(f"{timer.step} steps, {timer.elapsed_s:.0f} s", flush=True)
    results = {"named": evaluate(model, rows, named, count=given.clips),
               "voices": evaluate(model, rows, parts["variant"], count=given.clips // 2, voices=True)}  # fmt: skip
    (given.out / "talker.json").write_text(json.dumps({"log": log, "held_out": results}))
    for name, values in results.items():
        print(name, json.dumps({key: round(value, 4) for key, value in values.items()}), flush=True)


if __name__ == "__main__":
    main()
