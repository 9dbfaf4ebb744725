"""Codes of many clips by a codec that is trained already: the Talker then learns from hours of speech without their sound.

    python -m training.tts.encode --sound DIR .. --codec codec.pt --times DIR .. --out corpus.npz --codes codes.npz

Writes a corpus as `corpus.py` does (its clips with sound are those of --sound) and their acoustic codes, about 1 MB an hour.
Valid for this codec.pt only, and for every wave.pt that was trained from it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from training.tts.corpus import joined, read
from training.tts.listen import Listener


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sound", type=Path, nargs="+", required=True)
    parser.add_argument("--times", type=Path, nargs="+", required=True)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codes", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="clips of each folder of sound")
    given = parser.parse_args()
    torch.set_num_threads(1)
    spoken, coded = [], []
    for folder in given.sound:
        listener = Listener(folder, given.codec, None, limit=given.limit)
        spoken.append(listener.clips)
        coded += [listener.codes(clip)[:, 1:].numpy().astype(np.uint8) for clip in range(len(listener.clips))]
    times, sound = joined(*(read(folder)[0] for folder in given.times)), joined(*spoken)
    np.savez_compressed(given.out, **times.arrays("times_"), **sound.arrays("sound_"))
    np.savez_compressed(given.codes, codes=np.concatenate(coded))
    print(
        f"{len(sound)} clips, {sound.starts[-1] * 0.08 / 3600:.2f} h; {given.codes.stat().st_size / 1e6:.2f} MB of codes"
    )


if __name__ == "__main__":
    main()
