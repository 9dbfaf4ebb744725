"""Clips as arrays: texts, speakers, the codes of book 0, and sound where there is some.

python -m training.tts.corpus --times DIR --sound DIR --out FILE.npz [--opus FILE.ogg]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.tts.phones import Span, frame_codes
from training.tts.speakers import FRAME_SAMPLES, SPEAKERS, VOICE_RATE

LEVEL = 1.5  # brings Piper to -23 dB below full scale, with peaks at 0.95


@dataclass
class Corpus:
    """codes is flat, clip n has frames [starts[n], starts[n + 1]); the sound of frame f is samples [1920 f, 1920 (f + 1))."""

    texts: list[str]
    speaker: np.ndarray  # index into data.SPEAKERS
    domain: np.ndarray  # bool
    held_out: np.ndarray  # bool
    starts: np.ndarray  # int64 [clips + 1]
    codes: np.ndarray  # uint16 [frames]

    def __len__(self) -> int:
        return len(self.texts)

    def clip(self, number: int) -> np.ndarray:
        return self.codes[self.starts[number] : self.starts[number + 1]]

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        texts = np.frombuffer("\n".join(self.texts).encode(), dtype=np.uint8)
        made = {
            "texts": texts,
            "speaker": self.speaker.astype(np.uint8),
            "domain": self.domain,
            "held_out": self.held_out,
        }
        made |= {"starts": self.starts.astype(np.int32), "codes": self.codes}
        return {prefix + name: value for name, value in made.items()}

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray], prefix: str) -> Corpus:
        texts = bytes(arrays[prefix + "texts"]).decode().split("\n")
        part = {name: arrays[prefix + name] for name in ("speaker", "domain", "held_out", "starts", "codes")}
        return cls(texts, **part)


def read(folder: Path, *, limit: int | None = None) -> tuple[Corpus, np.ndarray | None]:
    """A folder of `data.py`; the sound as int16 [frames * 1920], or None. A last line that is still being written is left out."""
    texts, speaker, domain, held_out, starts, codes, kept = [], [], [], [], [0], [], []
    names = [voice.name for voice in SPEAKERS]
    at = 0
    sound = np.fromfile(folder / "sound.s16", dtype="<i2") if (folder / "sound.s16").exists() else None
    for line in (folder / "index.jsonl").read_text(encoding="utf-8").splitlines()[:limit]:
        try:
            clip = json.loads(line)
        except json.JSONDecodeError:
            break
        start, at = at, at + clip["samples"]
        if sound is not None and at > len(sound):
            break
        if not clip["spans"]:
            continue
        frames = clip["samples"] // FRAME_SAMPLES
        texts.append(clip["text"])
        speaker.append(names.index(clip["speaker"]))
        domain.append(clip["kind"] == "domain")
        held_out.append(clip["held_out"])
        codes.append(frame_codes([Span(*span) for span in clip["spans"]], frames))
        starts.append(starts[-1] + frames)
        kept.append((start, at))
    made = Corpus(
        texts, np.array(speaker), np.array(domain), np.array(held_out), np.array(starts), np.concatenate(codes).astype(np.uint16)
    )  # fmt: skip
    return made, None if sound is None else np.concatenate([sound[start:stop] for start, stop in kept])


def joined(*parts: Corpus) -> Corpus:
    """One corpus after the other."""
    starts = [np.zeros(1, dtype=np.int64)]
    for part in parts:
        starts.append(starts[-1][-1] + part.starts[1:])
    names = ("speaker", "domain", "held_out")
    return Corpus(
        [text for part in parts for text in part.texts],
        *(np.concatenate([getattr(part, name) for part in parts]) for name in names),
        starts=np.concatenate(starts),
        codes=np.concatenate([part.codes for part in parts]),
    )


def write_opus(path: Path, sound: np.ndarray, bits_per_s: int) -> None:
    import av

    with av.open(str(path), "w", format="ogg") as file:
        stream = file.add_stream("libopus", rate=VOICE_RATE, options={"b": str(bits_per_s), "application": "audio"})
        stream.layout = "mono"
        for start in range(0, len(sound), VOICE_RATE):
            frame = av.AudioFrame.from_ndarray(sound[None, start : start + VOICE_RATE], format="s16", layout="mono")
            frame.rate, frame.pts = VOICE_RATE, start
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))


def read_opus(path: Path, samples: int) -> np.ndarray:
    """int16 [samples] at 24 kHz."""
    import soundfile

    found, rate = soundfile.read(str(path), dtype="int16")
    if rate != VOICE_RATE:
        raise ValueError(f"{path} is at {rate} Hz, not {VOICE_RATE}")
    return np.pad(found[:samples], (0, max(0, samples - len(found))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=Path, nargs="+", required=True)
    parser.add_argument("--sound", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--opus", type=Path)
    parser.add_argument("--bits", type=int, default=24_000)
    parser.add_argument("--limit", type=int)
    given = parser.parse_args()
    times = joined(*(read(folder, limit=given.limit)[0] for folder in given.times))
    spoken, sound = read(given.sound, limit=given.limit)
    np.savez_compressed(given.out, **times.arrays("times_"), **spoken.arrays("sound_"))
    print(
        f"{len(times)} clips of times, {len(spoken)} with {spoken.starts[-1] * 0.08 / 60:.1f} minutes of sound; {given.out.stat().st_size / 1e6:.1f} MB"
    )
    if given.opus and sound is not None:
        write_opus(given.opus, sound, given.bits)
        back = read_opus(given.opus, len(sound))
        a, b = sound[: 1 << 22].astype(np.float64), back[: 1 << 22].astype(np.float64)
        lags = {lag: float(np.corrcoef(a[100:-100], np.roll(b, lag)[100:-100])[0, 1]) for lag in (-2, -1, 0, 1, 2)}
        print(f"opus {given.opus.stat().st_size / 1e6:.1f} MB; correlation by lag {lags}")


if __name__ == "__main__":
    main()
