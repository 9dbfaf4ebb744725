"""Recordings that Debian packages ship, in the same form as the Piper speech: one human voice, and music.

    apt-get download asterisk-core-sounds-en asterisk-core-sounds-en-g722 asterisk-moh-opsound-g722     # dpkg -x each into DEBS
    python -m training.asr.recordings DEBS OUT

The prompts of a telephone exchange (570 short ones, one speaker, with their transcript) are the only human speech in the
training. Of the music all but the last two pieces are used; those two are for the evaluation.
"""

from __future__ import annotations

import argparse
import gzip
import re
from pathlib import Path

import av
import numpy as np

from training.asr.opus import RATE
from training.asr.opus_writer import write
from training.asr.voices import trimmed

LONGEST_S = 14.0
MUSIC_S = 40.0
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def g722(path: Path) -> np.ndarray:
    """float32 [n] at 16 kHz."""
    with av.open(str(path), format="g722") as container:
        blocks = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
    return np.concatenate(blocks).astype(np.float32) / 32768


def prompts(debs: Path) -> list[tuple[np.ndarray, str]]:
    listing = gzip.decompress(
        (debs / "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz").read_bytes()
    ).decode()
    found = []
    for line in listing.splitlines():
        name, colon, text = line.partition(": ")
        path = next(debs.glob(f"usr/share/asterisk/sounds/*/{name}.g722"), None) if colon and "*" not in name else None
        text = re.sub(r"\s+", " ", re.sub(r"\b\d\b", lambda digit: _DIGITS[int(digit.group())], text)).strip(" .")
        if (
            path is None
            or not re.fullmatch(r"[A-Za-z][A-Za-z' ,.?!;-]*", text)
            or re.search(r"[A-Z]{2}|\b[b-hj-z]\b", text)
        ):
            continue
        samples = trimmed(g722(path))
        # Names of letters and symbols are spelled, not read; a transcript far from the length is another recording.
        if 0.25 * RATE < len(samples) < LONGEST_S * RATE and 4 < len(text) / (len(samples) / RATE) < 30:
            text = text[0].upper() + text[1:]
            found.append((samples, text if text[-1] in ".?!" else text + "."))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("debs", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    human = prompts(options.debs)
    for start in range(0, len(human), 100):
        write(options.out, f"human{start // 100}", human[start : start + 100])
    pieces = sorted(options.debs.glob("usr/share/asterisk/moh/*.g722"))
    for kind, chosen in (("music", pieces[:-2]), ("heldout_music", pieces[-2:])):
        clips = []
        for piece in chosen:
            samples = g722(piece)
            middle = len(samples) // 3
            clips.append((samples[middle : middle + round(MUSIC_S * RATE)], ""))
        write(options.out, kind, clips)
    print(
        f"{len(human)} prompts, {sum(len(samples) for samples, _ in human) / RATE / 60:.1f} minutes; {len(pieces)} pieces of music"
    )


if __name__ == "__main__":
    main()
