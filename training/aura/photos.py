"""Photographic backgrounds out of the test films, as one small file.

    python -m training.aura.photos OUT.npz FILM.mp4 [FILM.mp4 ...]

Each film gives 4 frames a second, 256x144. `train` holds the first two thirds of each, `unseen` the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from training.aura.looks import Album

RATE = 4.0


def frames_of(film: Path) -> np.ndarray:
    """uint8 [n, 144, 256, 3]."""
    from PIL import Image  # and PyAV: training itself needs neither

    from aura_omni.media.video import decode_video

    video = decode_video(film.read_bytes(), max_frames=80, max_pixels=4_000_000, fps=RATE)
    return np.stack([np.asarray(Image.fromarray(frame).resize((256, 144))) for frame in video.frames])


def album(photos: np.ndarray, films: np.ndarray) -> Album:
    light = photos.reshape(len(photos), -1).mean(1) / 255
    return Album(tuple(light.tolist()), tuple((int(start), int(count)) for start, count in films))


def read(path: Path, part: str) -> tuple[np.ndarray, Album]:
    """part: "train" or "unseen"."""
    with np.load(path) as kept:
        photos, films = kept[part], kept[f"{part}_films"]
    return photos, album(photos, films)


def main() -> None:
    out, *names = sys.argv[1:]
    parts: dict[str, list[np.ndarray]] = {"train": [], "unseen": []}
    for name in names:
        frames = frames_of(Path(name))
        cut = 2 * len(frames) // 3
        parts["train"].append(frames[:cut])
        parts["unseen"].append(frames[cut:])
    arrays = {}
    for part, films in parts.items():
        starts = np.cumsum([0, *(len(film) for film in films[:-1])])
        arrays[part] = np.concatenate(films)
        arrays[f"{part}_films"] = np.stack([starts, [len(film) for film in films]], axis=1)
    np.savez_compressed(out, **arrays)
    print({name: array.shape for name, array in arrays.items()}, Path(out).stat().st_size)


if __name__ == "__main__":
    main()
