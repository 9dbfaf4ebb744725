"""A small copy of Piper's sense of time: learned from clips with known spans, it times many more texts for almost nothing.

    python -m training.tts.rhythm --times DIR .. --general 50000 --out DIR

Writes DIR/index.jsonl in the form of `data.py`, without sound. Errors on held-out clips are printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.tts.data import line_of
from training.tts.phones import FRAME_S, Span, UnknownPhone, to_spans
from training.tts.piper import Piper
from training.tts.speakers import FRAME_SAMPLES, SPEAKERS
from training.tts.texts import clips

_CHARACTERS = 256


class Rhythm(nn.Module):
    """Piper's ids int64 [B, L] -> seconds of each id at length scale 1, [B, L]."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_CHARACTERS, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2 * d, dilation=d) for d in (1, 2, 3, 1))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in self.layers)
        self.leave = nn.Linear(width, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * (ids > 0)[..., None]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(layer(norm(x).transpose(1, 2)).transpose(1, 2))
        return F.softplus(self.leave(x)[..., 0] - 3.0)


def without_pads(piper: Piper, text: str) -> list[list[int]]:
    """Ids of each sentence without the padding between them, whose time goes to the phone before it anyway."""
    return [[number for number in ids if number] for ids in piper.sentences(text)]


def groups(piper: Piper, sentences: list[list[int]]) -> list[Span]:
    """Spans in numbers of characters instead of seconds: which characters each phone consists of."""
    spans: list[Span] = []
    start = 0
    for ids in sentences:
        spans += to_spans(piper.characters(ids), [1.0] * len(ids), float(start))
        start += len(ids)
    return spans


def padded(rows: list[list[int]]) -> Tensor:
    table = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, ids in enumerate(rows):
        table[row, : len(ids)] = torch.tensor(ids)
    return table


def learn(piper: Piper, folders: list[Path], *, epochs: int, limit: int | None) -> Rhythm:
    scale = {voice.name: voice.tempo for voice in SPEAKERS}
    items: list[tuple[list[int], list[int], list[float], bool]] = []
    for folder in folders:
        for line in (folder / "index.jsonl").read_text(encoding="utf-8").splitlines()[:limit]:
            try:
                clip = json.loads(line)
            except json.JSONDecodeError:
                break
            if not clip["spans"]:
                continue
            sentences = without_pads(piper, clip["text"])
            spans = groups(piper, sentences)
            if [span.phone for span in spans] != [span[0] for span in clip["spans"]]:
                continue
            owner = [row for row, span in enumerate(spans) for _ in range(int(span.stop_s - span.start_s))]
            seconds = [(stop - start) * scale[clip["speaker"]] for _, start, stop in clip["spans"]]
            items.append(([number for ids in sentences for number in ids], owner, seconds, clip["held_out"]))
    items.sort(key=lambda item: len(item[0]))
    print(f"{len(items)} clips to learn from", flush=True)
    torch.manual_seed(0)
    model = Rhythm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    random = np.random.default_rng(0)
    batches = [items[n : n + 48] for n in range(0, len(items), 48)]
    total = epochs * len(batches)
    for step, number in enumerate(
        itertools.chain.from_iterable(random.permutation(len(batches)) for _ in range(epochs))
    ):
        batch = [item for item in batches[number] if not item[3]]
        if not batch:
            continue
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * step / total))
        loss, _ = _error(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        found = [_error(model, [item])[1] for item in items if item[3]]
    print(f"{total} steps; held out: mean error of a phone {1000 * np.mean(found):.1f} ms")
    return model.eval()


def _error(model: Rhythm, batch: list[tuple[list[int], list[int], list[float], bool]]) -> tuple[Tensor, float]:
    ids = padded([item[0] for item in batch])
    made = model(ids)
    made = torch.cat([made[row, : len(item[0])] for row, item in enumerate(batch)])
    owner, first = [], 0
    for item in batch:
        owner += [first + row for row in item[1]]
        first += len(item[2])
    wanted = torch.tensor([seconds for item in batch for seconds in item[2]])
    sums = torch.zeros(first).index_add(0, torch.tensor(owner), made)
    near = (sums - wanted).abs()
    return (near / (wanted + 0.03)).mean(), float(near.detach().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=Path, nargs="+", required=True)
    parser.add_argument("--domain", type=int, default=0)
    parser.add_argument("--general", type=int, default=50_000)
    parser.add_argument("--lexicon", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--smoke", action="store_true", help="seconds")
    given = parser.parse_args()
    if given.smoke:
        given.epochs, given.limit, given.general = 1, 60, 20
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    piper = Piper(sound=False)
    model = learn(piper, given.times, epochs=given.epochs, limit=given.limit)
    print(f"learned after {time.monotonic() - began:.0f} s", flush=True)
    source = itertools.chain(
        ((*clip, "domain") for clip in itertools.islice(clips("domain", 7), given.domain)),
        ((*clip, "general") for clip in itertools.islice(clips("general", 0), given.general)),
        ((*clip, "lexicon") for clip in itertools.islice(clips("lexicon", 0), given.lexicon)),
    )
    number = 0
    with (given.out / "index.jsonl").open("w", encoding="utf-8") as file, torch.no_grad():
        while batch := list(itertools.islice(source, 64)):
            read = []
            for text, held_out, kind in batch:
                sentences = without_pads(piper, text)
                try:
                    spans = groups(piper, sentences)
                except UnknownPhone:
                    continue
                if spans:
                    read.append((text, held_out, kind, [n for ids in sentences for n in ids], spans))
            seconds = model(padded([item[3] for item in read])).numpy()
            for row, (text, held_out, kind, _, spans) in enumerate(read):
                speaker = SPEAKERS[number % len(SPEAKERS)]
                number += 1
                ends = np.concatenate(([0.0], np.cumsum(seconds[row]) / speaker.tempo))
                timed = [Span(s.phone, float(ends[int(s.start_s)]), float(ends[int(s.stop_s)])) for s in spans]
                frames = math.ceil(timed[-1].stop_s / FRAME_S)
                file.write(json.dumps(line_of(text, held_out, kind, speaker, timed, frames * FRAME_SAMPLES)) + "\n")
    print(f"{number} clips timed after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
