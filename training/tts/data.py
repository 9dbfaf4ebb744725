"""Makes the training data: texts with phone times (cheap, many) or with sound too (dear, some).

    python -m training.tts.data times --out DIR --domain 12000 --general 30000
    python -m training.tts.data sound --out DIR --minutes 90
    python -m training.tts.data sound --out DIR --minutes 6 --held-out --seed 50     # to be listened to, never trained on

Each line of index.jsonl is one clip: text, speaker, kind, held-out or not, samples at 24 kHz (a whole number of frames), spans
[[phone, start_s, stop_s], ...], and for sound its place in sound.s16 (int16, mono, 24 kHz). Runs can be stopped and continued.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import soxr

from training.tts.phones import FRAME_S, Span, UnknownPhone, to_spans
from training.tts.piper import RATE, Piper
from training.tts.speakers import FRAME_SAMPLES, SPEAKERS, VOICE_RATE, Speaker
from training.tts.texts import clips

_GAIN = 0.8  # Piper's own level has peaks at 0.9
_BATCH = 16


def timed(piper: Piper, sentences: list[list[int]], durations: list[np.ndarray], speaker: Speaker) -> list[Span]:
    spans: list[Span] = []
    for ids, seconds in zip(sentences, durations, strict=True):
        start = spans[-1].stop_s if spans else 0.0
        spans += to_spans(piper.characters(ids), (seconds / speaker.pitch).tolist(), start)
    return spans


def line_of(text: str, held_out: bool, kind: str, speaker: Speaker, spans: list[Span], samples: int) -> dict[str, Any]:
    return {
        "text": text, "held_out": held_out, "kind": kind, "speaker": speaker.name, "samples": samples,
        "spans": [[span.phone, round(span.start_s, 4), round(span.stop_s, 4)] for span in spans],
    }  # fmt: skip


def make_times(out: Path, *, domain: int, general: int, seed: int) -> None:
    piper = Piper(sound=False)
    index = out / "index.jsonl"
    done = sum(1 for _ in index.open(encoding="utf-8")) if index.exists() else 0
    source = itertools.chain(
        ((*clip, "domain") for clip in itertools.islice(clips("domain", seed), domain)),
        ((*clip, "general") for clip in itertools.islice(clips("general", seed), general)),
    )
    wanted = enumerate(source)
    started, made = time.monotonic(), 0
    with index.open("a", encoding="utf-8") as file:
        while batch := list(itertools.islice(wanted, _BATCH)):
            speaker = SPEAKERS[batch[0][0] // _BATCH % len(SPEAKERS)]
            if batch[-1][0] < done:
                continue
            read = [piper.sentences(text) for _, (text, _, _) in batch]
            flat = [ids for sentences in read for ids in sentences]
            durations = iter(piper.durations(flat, length_scale=speaker.length_scale))
            for (_, (text, held_out, kind)), sentences in zip(batch, read, strict=True):
                mine = [next(durations) for _ in sentences]
                try:
                    spans = timed(piper, sentences, mine, speaker)
                except UnknownPhone:
                    spans = []
                frames = math.ceil(spans[-1].stop_s / FRAME_S) if spans else 0
                file.write(json.dumps(line_of(text, held_out, kind, speaker, spans, frames * FRAME_SAMPLES)) + "\n")
                made += 1
            file.flush()
    print(f"{made} clips in {time.monotonic() - started:.0f} s")


def make_sound(out: Path, *, minutes: float, seed: int, held_out: bool) -> None:
    """Half domain, half general; the speakers in turn. held_out: only texts that are never trained on."""
    piper = Piper(sound=True)
    index, data = out / "index.jsonl", out / "sound.s16"
    done = [json.loads(line) for line in index.open(encoding="utf-8")] if index.exists() else []
    total = sum(line["samples"] for line in done)
    if data.exists():
        with data.open("r+b") as file:
            file.truncate(2 * total)
    sources = [
        (kind, (clip for clip in clips(kind, seed) if clip[1] or not held_out)) for kind in ("domain", "general")
    ]
    number = 0
    with index.open("a", encoding="utf-8") as lines, data.open("ab") as sound:
        while total < minutes * 60 * VOICE_RATE:
            kind, source = sources[number % 2]
            speaker = SPEAKERS[number // 2 % len(SPEAKERS)]
            text, unseen = next(source)
            number += 1
            if number <= len(done):
                continue
            sentences = piper.sentences(text)
            spoken = [piper.speak(ids, length_scale=speaker.length_scale) for ids in sentences]
            try:
                spans = timed(piper, sentences, [seconds for _, seconds in spoken], speaker)
            except UnknownPhone:
                spans, spoken = [], []
            samples = np.concatenate([part for part, _ in spoken]) * _GAIN if spoken else np.zeros(0, np.float32)
            samples = soxr.resample(samples, RATE * speaker.pitch, VOICE_RATE, "HQ")
            samples = np.pad(samples, (0, -len(samples) % FRAME_SAMPLES))
            sound.write((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
            lines.write(json.dumps(line_of(text, unseen, kind, speaker, spans, len(samples))) + "\n")
            sound.flush()
            lines.flush()
            total += len(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("times", "sound"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--domain", type=int, default=12_000)
    parser.add_argument("--general", type=int, default=30_000)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", action="store_true", help="sound: only texts that are never trained on")
    parser.add_argument("--smoke", action="store_true", help="a handful of clips, in seconds")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.smoke:
        given.domain, given.general, given.minutes = 20, 20, 0.2
    if given.what == "times":
        make_times(given.out, domain=given.domain, general=given.general, seed=given.seed)
    else:
        make_sound(given.out, minutes=given.minutes, seed=given.seed + 1, held_out=given.held_out)


if __name__ == "__main__":
    main()
