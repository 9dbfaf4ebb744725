"""Hears the held-out clips through the ASR stage and the paged engine, as the server does.

    python -m training.asr.evaluate CHECKPOINT HELDOUT [--gain-db -30] [--snr-db 10]

One line per file of HELDOUT: clips, seconds, word error rate and share of clips whose every word is right (or, where nobody
speaks, the share of clips that are not empty), and how many times faster than real time.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.runner import ArRunner
from aura_omni.flow import SPEECH_RATE, Audio
from aura_omni.media.level import has_energy
from aura_omni.stages.asr import SAMPLING, AsrStage
from training.asr.clips import Clip, recorded
from training.asr.sounds import sound
from training.asr.voices import RATE
from training.asr.wer import wer, words

AT_ONCE = 8


class Ear:
    """An ASR checkpoint that hears several clips at once."""

    def __init__(self, folder: Path) -> None:
        self.stage = AsrStage.load(Checkpoint(folder, folder.name), device=torch.device("cpu"), dtype=torch.float32)
        self._engine = ArRunner(
            self.stage,
            pages=2_000,
            page_size=16,
            max_num_seqs=AT_ONCE,
            max_num_batched_tokens=2_048,
            max_model_len=4_096,
            max_waiting=AT_ONCE,
            prefix_caching=False,
        )

    def hear(self, clips: Sequence[np.ndarray]) -> list[str]:
        """float32 [n] each at 16 kHz -> transcripts."""
        texts: list[str] = []
        for start in range(0, len(clips), AT_ONCE):
            readers, sequences = [], []
            for samples in clips[start : start + AT_ONCE]:
                prompt = self.stage.prompt(Audio(samples, RATE, samples.tobytes()))
                reader = self.stage.reader(prompt)
                readers.append(reader)
                if has_energy(samples, SPEECH_RATE):
                    sequences.append(self.stage.sequence(prompt, SAMPLING, on_output=reader.push, on_end=_raise))
            for sequence in sequences:
                self._engine.add(sequence)
            while self._engine.busy:
                self._engine.step()
            texts += [reader.transcript().text for reader in readers]
        return texts

    def ids(self, samples: np.ndarray, *, limit: int) -> list[int]:
        """The ids that are written for one clip, at most `limit`, without the end."""
        found: list[int] = []
        sampling = replace(SAMPLING, max_tokens=max(1, limit))
        sequence = self.stage.sequence(
            self.stage.prompt(Audio(samples, RATE, samples.tobytes())), sampling, on_output=found.append, on_end=_raise
        )
        self._engine.add(sequence)
        while self._engine.busy:
            self._engine.step()
        return [token for token in found[:limit] if token not in self.stage.stop_ids]


def _raise(reason: str, error: Exception | None) -> None:
    if error is not None:
        raise error


def quiet_sets(count: int = 60, seed: int = 5_000_000) -> dict[str, list[np.ndarray]]:
    """Clips in which nobody speaks, drawn with seeds that no training used."""

    noise = np.random.default_rng(seed)
    rng = random.Random(seed)
    lengths = [round(rng.uniform(0.6, 6.0) * RATE) for _ in range(count)]
    return {
        "silence": [(noise.standard_normal(n) * 10 ** rng.uniform(-6, -3.5)).astype(np.float32) for n in lengths],
        "white noise": [(noise.standard_normal(n) * 10 ** rng.uniform(-3, -0.8)).astype(np.float32) for n in lengths],
        "tones and other sounds": [sound(rng) * np.float32(10 ** rng.uniform(-1.5, 0)) for _ in lengths],
    }


def disturbed(samples: np.ndarray, gain_db: float, snr_db: float | None, noise: np.random.Generator) -> np.ndarray:
    wave = samples.astype(np.float32) / 32768
    wave = np.pad(wave, (3_200, 4_800))
    if snr_db is not None:
        level = np.sqrt(np.mean(wave**2)) * 10 ** (-snr_db / 20)
        wave = wave + (noise.standard_normal(len(wave)) * level).astype(np.float32)
    return (wave * np.float32(10 ** (gain_db / 20))).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--gain-db", type=float, default=0.0)
    parser.add_argument("--snr-db", type=float)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--texts", type=Path, help="write all (said, heard) pairs there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ear, noise = Ear(options.checkpoint), np.random.default_rng(0)
    pairs: dict[str, list[tuple[str, str]]] = {}
    sets: dict[str, tuple[list[np.ndarray], list[str]]] = {}
    for path in sorted(options.heldout.glob("*.opus")):
        clips: list[Clip] = recorded(options.heldout, path.name, path.stem)
        waves = [disturbed(clip.samples, options.gain_db, options.snr_db, noise) for clip in clips]
        sets[path.stem] = (waves, [clip.text for clip in clips])
    for name, quiet in quiet_sets().items():
        sets[name] = (quiet, [""] * len(quiet))
    print(f"{'set':<26}{'clips':>6}{'s':>7}{'WER %':>8}{'all right %':>13}{'not empty %':>13}{'x real time':>13}")
    for name, (waves, texts) in sets.items():
        started = time.monotonic()
        heard = ear.hear(waves)
        spent, seconds = time.monotonic() - started, sum(map(len, waves)) / RATE
        pairs[name] = list(zip(texts, heard, strict=True))
        if any(texts):
            right = sum(words(said) == words(text) for said, text in pairs[name])
            result = f"{100 * wer(pairs[name]):8.1f}{100 * right / len(heard):13.1f}{'':>13}"
        else:
            result = f"{'':>21}{100 * sum(map(bool, heard)) / len(heard):13.1f}"
        print(f"{name:<26}{len(waves):>6}{seconds:7.0f}{result}{seconds / spent:13.1f}", flush=True)
    if options.texts:
        options.texts.write_text(json.dumps(pairs, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
