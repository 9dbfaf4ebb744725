"""Clips as arrays: texts, voices, codes, and sound where there is some.

    python -m training.tts.corpus --times DIR .. --sound DIR .. --out FILE.npz --opus FILE.ogg

The file has three parts: `times` (clips without sound), `sound`, and `variant`, each clip of `sound` once more in a voice that
is shifted by another factor. Sound comes one frame late: the codes of a clip end with a frame of silence, its sound begins
with one, so that a causal decoder has heard of the next 80 ms when it speaks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.tts.contour import BOOKS, ROWS, UNKNOWN, books_of
from training.tts.phones import CODES, PHONES, SILENCE, Span, frame_codes
from training.tts.speakers import FRAME_SAMPLES, SPEAKERS, VOICE_RATE

LEVEL = 1.5  # brings Piper to -23 dB below full scale, with peaks at 0.95
NOBODY = 255  # speaker of a shifted voice
SHIFTS = (0.78, 1.42)  # of shifted voices, against the voice as synthesized
_PARTS = ("texts", "speaker", "domain", "held_out", "starts", "codes", "source")


@dataclass
class Corpus:
    """Clip n has frames [starts[n], starts[n + 1]) of codes uint16 [frames, 1 + BOOKS] (UNKNOWN in books that are not known).

    speaker: index into SPEAKERS or NOBODY; source: the clip of `sound` that it is made from, -1 for none.
    """

    texts: list[str]
    speaker: np.ndarray
    domain: np.ndarray  # bool
    held_out: np.ndarray  # bool
    starts: np.ndarray  # int64 [clips + 1]
    codes: np.ndarray
    source: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    def clip(self, number: int) -> np.ndarray:
        return self.codes[self.starts[number] : self.starts[number + 1]]

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        texts = np.frombuffer("\n".join(self.texts).encode(), dtype=np.uint8)
        # One column after another packs best.
        made = {"texts": texts, "speaker": self.speaker.astype(np.uint8), "domain": self.domain, "held_out": self.held_out,
                "starts": self.starts.astype(np.int32), "codes": np.ascontiguousarray(self.codes.T), "source": self.source.astype(np.int32)}  # fmt: skip
        return {prefix + name: value for name, value in made.items()}

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray], prefix: str) -> Corpus:
        part = {name: arrays[prefix + name] for name in _PARTS}
        part["texts"] = bytes(part["texts"]).decode().split("\n")
        part["starts"], part["codes"] = part["starts"].astype(np.int64), np.ascontiguousarray(part["codes"].T)
        return cls(**part)


class _Gathering:
    def __init__(self) -> None:
        self._rows: list[tuple[str, int, bool, bool, int]] = []
        self._codes: list[np.ndarray] = []

    def add(
        self, text: str, speaker: int, domain: bool, held_out: bool, source: int, spans: list[Span], frames: int,
        *, shift: float, sound: Tensor | None,
    ) -> None:  # fmt: skip
        book0 = frame_codes(spans, frames)
        codes = np.empty((frames + 1, 1 + BOOKS), dtype=np.uint16)
        codes[:-1, 0], codes[:-1, 1:] = book0, books_of(spans, book0, shift, sound)
        quiet = 0 if sound is not None else UNKNOWN
        codes[-1] = (SILENCE * PHONES + SILENCE, quiet, quiet, 0, codes[0, 4])
        self._rows.append((text, speaker, domain, held_out, source))
        self._codes.append(codes)

    def corpus(self) -> Corpus:
        texts, speaker, domain, held_out, source = zip(*self._rows, strict=True)
        starts = np.cumsum([0, *map(len, self._codes)])
        columns = (np.array(column) for column in (speaker, domain, held_out))
        return Corpus(list(texts), *columns, starts, np.concatenate(self._codes), np.array(source))


def _lines(folder: Path, limit: int | None) -> Iterator[dict]:
    """The last line may still be being written."""
    for line in (folder / "index.jsonl").read_text(encoding="utf-8").splitlines()[:limit]:
        try:
            clip = json.loads(line)
        except json.JSONDecodeError:
            return
        yield clip


def read_times(folders: list[Path], *, limit: int | None = None) -> Corpus:
    names, found = [voice.name for voice in SPEAKERS], _Gathering()
    for folder in folders:
        for clip in _lines(folder, limit):
            if clip["spans"]:
                number = names.index(clip["speaker"])
                spans = [Span(*span) for span in clip["spans"]]
                found.add(clip["text"], number, clip["kind"] == "domain", clip["held_out"], -1, spans,
                          clip["samples"] // FRAME_SAMPLES, shift=SPEAKERS[number].pitch, sound=None)  # fmt: skip
    return found.corpus()


def read_sound(folders: list[Path], *, limit: int | None = None, seed: int = 0) -> tuple[Corpus, Corpus, np.ndarray]:
    """Clips, their variants, and the sound of the clips, int16 [frames, 1920]; it is not late, and has no frame of silence more."""
    names, found, variants, kept = [voice.name for voice in SPEAKERS], _Gathering(), _Gathering(), []
    random = np.random.default_rng(seed)
    for folder in folders:
        sound = np.memmap(folder / "sound.s16", dtype="<i2", mode="r")
        at = 0
        for clip in _lines(folder, limit):
            start, at = at, at + clip["samples"]
            if at > len(sound):
                break
            if not clip["spans"]:
                continue
            raw = np.array(sound[start:at]).reshape(-1, FRAME_SAMPLES)
            frames, heard = len(raw), leveled(raw)
            number = names.index(clip["speaker"])
            spans = [Span(*span) for span in clip["spans"]]
            about = (clip["kind"] == "domain", clip["held_out"], len(kept))
            pitch = SPEAKERS[number].pitch
            found.add(clip["text"], number, *about, spans, frames, shift=pitch, sound=heard)
            wanted = SHIFTS[0] * (SHIFTS[1] / SHIFTS[0]) ** random.random()
            fewer = round(frames * pitch / wanted)  # whole frames, so that both machines make the same sound
            factor = frames / fewer
            squeezed = [Span(span.phone, span.start_s / factor, span.stop_s / factor) for span in spans]
            variants.add(
                clip["text"], NOBODY, *about, squeezed, fewer, shift=pitch * factor, sound=resampled(heard, fewer)
            )
            kept.append(raw)
    return found.corpus(), variants.corpus(), np.concatenate(kept)


def leveled(raw: np.ndarray) -> Tensor:
    """int16 -> float32 at the level that is trained."""
    return (torch.from_numpy(raw.astype(np.float32)) * (LEVEL / 32768)).clamp_(-1, 1)


def resampled(sound: Tensor, frames: int) -> Tensor:
    """[n, 1920] -> [frames, 1920]: as if played n / frames times as fast; pitch and formants go with it."""
    flat = sound.flatten().float()
    count = frames * FRAME_SAMPLES
    spectrum = torch.fft.rfft(flat)
    width = count // 2 + 1
    spectrum = spectrum[:width] if len(spectrum) >= width else F.pad(spectrum, (0, width - len(spectrum)))
    return (torch.fft.irfft(spectrum, n=count) * (count / len(flat))).clamp(-1, 1).view(frames, FRAME_SAMPLES)


def late_sound(clips: Corpus, originals: Corpus, raw: np.ndarray, device: torch.device) -> Tensor:
    """Sound of `clips` in step with their codes, float16 [frames, 1920] on the device: each clip begins with a silent frame.

    originals: the corpus that raw [frames, 1920], not late, belongs to; clips: it, or its variants.
    """
    made = torch.zeros(int(clips.starts[-1]), FRAME_SAMPLES, dtype=torch.float16, device=device)
    first = originals.starts - np.arange(len(originals) + 1)  # without the frames of silence
    everything = torch.from_numpy(raw).to(device)
    for number, source in enumerate(clips.source):
        heard = everything[first[source] : first[source + 1]].float().mul_(LEVEL / 32768).clamp_(-1, 1)
        start, stop = int(clips.starts[number]) + 1, int(clips.starts[number + 1])
        if stop - start != len(heard):
            heard = resampled(heard, stop - start)
        made[start:stop] = heard.half()
    return made


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
        source=np.concatenate([part.source for part in parts]),
    )


def known(codes: np.ndarray, *, unknown: bool = False) -> np.ndarray:
    """codes [frames, 1 + BOOKS] as int64, if each has a row in its table; unknown: codes of acoustic books may be UNKNOWN, here -1.

    A code without a row must not reach a device: there it is a fault without a name.
    """
    made = codes.astype(np.int64)
    if unknown:
        made[:, 1:][made[:, 1:] == UNKNOWN] = -1
    least, most = np.array([0] + [-1 if unknown else 0] * BOOKS), np.array([CODES] + [ROWS] * BOOKS)
    wrong = np.flatnonzero(((made < least) | (made >= most)).any(1))
    if len(wrong):
        raise ValueError(
            f"{len(wrong)} frames have codes that no row stands for; the first is {codes[wrong[0]].tolist()}"
        )
    return made


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


def read_opus(path: Path, samples: int, *, threads: int = 4) -> np.ndarray:
    """int16 [samples] at 24 kHz; hours take seconds, so parts of the file are read side by side."""
    import soundfile

    with soundfile.SoundFile(str(path)) as file:
        if file.samplerate != VOICE_RATE:
            raise ValueError(f"{path} is at {file.samplerate} Hz, not {VOICE_RATE}")
        there = min(samples, file.frames)
    found = np.zeros(samples, dtype=np.int16)

    def read(part: int) -> None:
        start, stop = there * part // threads, there * (part + 1) // threads
        with soundfile.SoundFile(str(path)) as file:
            file.seek(start)
            found[start:stop] = file.read(stop - start, dtype="int16")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    return found


def load(path: Path) -> dict[str, Corpus]:
    """The parts of a file, by name."""
    arrays = dict(np.load(path))
    return {name: Corpus.of_arrays(arrays, f"{name}_") for name in ("times", "sound", "variant")}


def load_raw(originals: Corpus, path: Path) -> np.ndarray:
    """int16 [frames, 1920] of the clips with sound; path: opus (.ogg) or raw samples (.s16)."""
    count = (int(originals.starts[-1]) - len(originals)) * FRAME_SAMPLES
    samples = read_opus(path, count) if path.suffix == ".ogg" else np.fromfile(path, dtype="<i2", count=count)
    return samples.reshape(-1, FRAME_SAMPLES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=Path, nargs="+", required=True)
    parser.add_argument("--sound", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--opus", type=Path, required=True)
    parser.add_argument("--bits", type=int, default=20_000)
    parser.add_argument("--limit", type=int, help="clips of each folder")
    given = parser.parse_args()
    torch.set_num_threads(1)
    times = read_times(given.times, limit=given.limit)
    spoken, variants, sound = read_sound(given.sound, limit=given.limit)
    parts = {"times": times, "sound": spoken, "variant": variants}
    np.savez_compressed(
        given.out, **{key: value for name, part in parts.items() for key, value in part.arrays(f"{name}_").items()}
    )
    print(f"{len(times)} clips of times, {len(spoken)} with {len(sound) * 0.08 / 60:.1f} minutes of sound; {given.out.stat().st_size / 1e6:.1f} MB")  # fmt: skip
    write_opus(given.opus, sound.reshape(-1), given.bits)
    back = read_opus(given.opus, sound.size).astype(np.float64)[: 1 << 22]
    straight = sound.reshape(-1)[: 1 << 22].astype(np.float64)
    lags = {lag: round(float(np.corrcoef(straight[100:-100], np.roll(back, lag)[100:-100])[0, 1]), 4) for lag in (-1, 0, 1)}  # fmt: skip
    print(f"opus {given.opus.stat().st_size / 1e6:.1f} MB; correlation by lag {lags}")


if __name__ == "__main__":
    main()
