"""Word error of what Whisper hears, on clips that were never trained on: the sound itself, codec and back, the Talker.

    python -m training.tts.listen --sound DIR --wave wave.pt [--talker talker.pt --tokenizer tokenizer.json]

DIR is one that `data.py sound --held-out` wrote. Kinds of sound, in `--what`: sound (as synthesized), mel (the codec's own
mel through Griffin-Lim), codec (true codes), talker and talker-beside (its codes, the text
before or beside the frames).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from training.tts import clock, corpus, shape
from training.tts.codec_model import TrainedCodec
from training.tts.ear import Ear, word_error, words
from training.tts.grad import refresh
from training.tts.speakers import SPEAKERS, VOICE_RATE
from training.tts.spectrum import griffin_lim
from training.tts.talker_batch import Rows
from training.tts.talker_model import TrainedTalker
from training.tts.talker_speak import speak

KINDS = ("sound", "mel", "codec", "talker", "talker-beside")


class Listener:
    """The clips of a folder, and every kind of sound that can be made of them."""

    def __init__(self, folder: Path, wave: Path, *, limit: int | None = None) -> None:
        self.clips, _, raw = corpus.read_sound([folder], limit=limit)
        self._sound = corpus.late_sound(self.clips, self.clips, raw, torch.device("cpu"))
        self._model = TrainedCodec().eval()
        self._model.load_state_dict(clock.load(wave)["model"])
        refresh(self._model.decoder)

    def sound(self, clip: int) -> torch.Tensor:
        """float32 [samples]"""
        return self._sound[int(self.clips.starts[clip]) : int(self.clips.starts[clip + 1])].float().flatten()

    def codes(self, clip: int) -> torch.Tensor:
        """int64 [frames, 1 + ACOUSTIC_BOOKS]"""
        return torch.from_numpy(self.clips.clip(clip).astype(np.int64))

    def features(self, codes: torch.Tensor) -> torch.Tensor:
        return self._model.front(codes[None, :, : 1 + shape.ACOUSTIC_BOOKS])

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return self._model.wave(self.features(codes))[0].clamp(-1, 1)

    def through_mel(self, codes: torch.Tensor) -> torch.Tensor:
        return griffin_lim(self._model.mel(self.features(codes))[0])


def talker_of(path: Path, tokenizer: Tokenizer) -> TrainedTalker:
    """Folded and prepared, to be spoken with."""
    trained = TrainedTalker(tokenizer.get_vocab_size())
    trained.load_state_dict(clock.load(path)["model"])
    trained.eval().requires_grad_(False)
    trained.fold()
    trained.talker.prepare()
    return trained


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sound", type=Path, required=True)
    parser.add_argument("--wave", type=Path, required=True)
    parser.add_argument("--talker", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--clips", type=int, default=60, help="of each kind of text")
    parser.add_argument("--what", nargs="+", choices=KINDS, default=["sound", "codec", "talker", "talker-beside"])
    parser.add_argument("--temperature", type=float, default=0.0, help="of the Talker and its code predictor")
    parser.add_argument("--keep", type=Path, help="folder for the sounds")
    parser.add_argument("--smoke", action="store_true", help="one clip of each kind of text")
    given = parser.parse_args()
    if given.smoke:
        given.clips = 1
    torch.set_num_threads(1)
    listener, ear = Listener(given.sound, given.wave), Ear()
    clips = listener.clips
    chosen = {
        kind: np.flatnonzero(clips.held_out & (clips.domain == (kind == "domain")))[: given.clips]
        for kind in ("domain", "general")
    }

    def spoken(numbers: np.ndarray, *, beside: bool) -> Callable[[int], torch.Tensor]:
        tokenizer = Tokenizer.from_file(str(given.tokenizer))
        made = speak(
            talker_of(given.talker, tokenizer).talker,
            Rows(tokenizer),
            [clips.texts[n] for n in numbers],
            [int(clips.speaker[n]) for n in numbers],
            streaming=beside,
            temperature=given.temperature,
            book_temperature=given.temperature,
        )
        codes = {int(n): torch.from_numpy(row) for n, row in zip(numbers, made, strict=True)}
        return lambda n: listener.decode(codes[n])

    for what in given.what:
        for kind, numbers in chosen.items():
            sounds: dict[str, Callable[[int], torch.Tensor]] = {
                "sound": listener.sound,
                "mel": lambda n: listener.through_mel(listener.codes(n)),
                "codec": lambda n: listener.decode(listener.codes(n)),
            }
            make = sounds[what] if what in sounds else spoken(numbers, beside=what == "talker-beside")
            pairs: list[tuple[str, str]] = []
            by_speaker: dict[str, list[tuple[str, str]]] = {}
            for n in map(int, numbers):
                samples = make(n).numpy()
                pairs.append((clips.texts[n], ear.hear(samples)))
                by_speaker.setdefault(SPEAKERS[clips.speaker[n]].name, []).append(pairs[-1])
                if given.keep:
                    import soundfile

                    given.keep.mkdir(parents=True, exist_ok=True)
                    soundfile.write(given.keep / f"{what}_{kind}_{n}.wav", samples, VOICE_RATE)
            result = {"what": what, "kind": kind, "clips": len(pairs), "word_error": round(word_error(pairs), 4)}
            result |= {name: round(word_error(some), 4) for name, some in by_speaker.items()}
            print(json.dumps(result), flush=True)
            for said, heard in [pair for pair in pairs if words(pair[0]) != words(pair[1])][:6]:
                print(f"    {said!r} heard as {heard!r}", flush=True)


if __name__ == "__main__":
    main()
