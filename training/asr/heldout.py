"""The sentences of the evaluation, spoken by voices that no training hears: a flite speaker, a festival speaker, espeak variants.

    apt-get install flite festival festvox-kdlpc16k
    python -m training.asr.heldout OUT --english sentences.txt --bundle bundle

Writes OUT/VOICE_domain.opus and OUT/VOICE_general.opus. The domain's sentences come from the grammar with a seed of its own,
the general ones are the lines of English that the training leaves alone. --people FOLDER adds recordings of people, FOLDER/*.wav with
what is said in FOLDER/*.txt, as OUT/people.opus.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
import soxr

from training.asr.clips import HELD_OUT_LINES, lines
from training.asr.opus_writer import write
from training.asr.voices import HELD_OUT_ESPEAK, RATE, Mouth, trimmed
from training.text.grammar import sentence

DOMAIN, GENERAL = 100, 50


def program(*command: str, text: str) -> np.ndarray:
    """What a program writes to the wave file that stands for OUT in its command line, at 16 kHz; the text is in the file TEXT."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text").write_text(text, encoding="utf-8")
        out = Path(folder) / "out.wav"
        places = {"OUT": str(out), "TEXT": str(Path(folder) / "text")}
        subprocess.run([places.get(part, part) for part in command], check=True, capture_output=True)
        return trimmed(read(out))


def read(path: Path) -> np.ndarray:
    """float32 [n] at 16 kHz of a mono file."""
    samples, rate = soundfile.read(path, dtype="float32")
    return samples if rate == RATE else soxr.resample(samples, rate, RATE)


def voices(bundle: Path) -> dict[str, Callable[[str, random.Random], np.ndarray]]:
    mouth = Mouth(bundle)

    def rms(text: str, rng: random.Random) -> np.ndarray:
        stretch = f"duration_stretch={rng.uniform(0.9, 1.2):.2f}"
        return program("flite", "-voice", "rms", "--setf", stretch, "-f", "TEXT", "-o", "OUT", text=text)

    def ked(text: str, rng: random.Random) -> np.ndarray:
        return program("text2wave", "-eval", "(voice_ked_diphone)", "TEXT", "-o", "OUT", text=text)

    def espeak(text: str, rng: random.Random) -> np.ndarray:
        return mouth.speak(f"espeak:{rng.choice(HELD_OUT_ESPEAK)}", text, rng)

    return {"rms": rms, "ked": ked, "espeak": espeak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--people", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.people:
        files = sorted(options.people.glob("*.wav"))
        write(
            options.out,
            "people",
            [(read(file), file.with_suffix(".txt").read_text(encoding="utf-8").strip()) for file in files],
        )
    for number, (name, say) in enumerate(voices(options.bundle).items()):
        rng = random.Random(f"held out {name}")
        domain = [sentence(rng) for _ in range(DOMAIN)]
        first = number * GENERAL
        general = lines(options.english)[:HELD_OUT_LINES][first : first + GENERAL]
        for kind, texts in (("domain", domain), ("general", general)):
            write(options.out, f"{name}_{kind}", [(say(text, rng), text) for text in texts])


if __name__ == "__main__":
    main()
