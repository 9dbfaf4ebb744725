"""The voice as the product speaks it: words that are heard, ends, clicks, level, speed; and voices that are cloned.

    python -m training.tts.served words --sound DIR     # held-out texts: word error by Whisper, level, clicks against DIR's own sound
    python -m training.tts.served ends                  # 500 texts of 1 to 200 characters: each must end by itself
    python -m training.tts.served speed                 # one at a time: of real time, first sound
    python -m training.tts.served clone --sound DIR --reference speech.wav "what is said in it"

The texts follow `texts.clips`: none was trained on. --temperature is that of the Talker and its code predictor, --text
whether it has all of the text before its first frame or reads it beside them; without them the deploy file and the checkpoint decide. DIR is one that `data.py sound
--held-out` wrote. Recordings to clone are DIR's own speakers, and those of --reference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aura_omni.config import Options, load_here
from aura_omni.flow import Audio, AudioChunk, Ended, Voice
from aura_omni.heard import Heard
from aura_omni.pipeline import Pipeline
from training.tts.contour import pitch_of
from training.tts.ear import Ear, word_error, words
from training.tts.speakers import FRAME_SAMPLES, SPEAKERS, VOICE_RATE
from training.tts.texts import clips

_BASE = "nano:tts-base"
_MS = VOICE_RATE // 1000
_BEND = 2  # samples on either side that a click bends too
_LONGEST = 200  # characters of a text that must end


# ---------------------------------------------------------------- what is said


def held_out(kind: str, count: int, seed: int) -> list[str]:
    return [text for text, unseen in itertools.islice(clips(kind, seed), 60 * count + 200) if unseen][:count]


def of_all_lengths(count: int, seed: int, kinds: Sequence[str]) -> list[str]:
    """count texts, the first of 1 character, the last of 200, nearly evenly between: held-out texts, joined and cut."""
    sources = [itertools.cycle(held_out(kind, count // 2 + 1, seed)) for kind in kinds]
    short = itertools.cycle("A7?.bK2oIx9!e5W3Tn0z")
    found = []
    for number in range(count):
        size = 1 + round(number * (_LONGEST - 1) / max(1, count - 1))
        text = next(short) if size == 1 else ""
        while len(text) < size:
            text = f"{text} {next(sources[number % len(sources)])}".strip()
        found.append(text[:size].strip() or next(short))
    return found


# ---------------------------------------------------------------- what is measured of a sound


def roughness(samples: np.ndarray) -> float:
    """How far the sharpest bend of the wave stands out of the 20 ms around it: a click does, speech hardly."""
    bend = np.abs(np.diff(samples.astype(np.float64), 2))
    size = 10 * _MS
    if len(bend) < 3 * size:
        return 0.0
    power = np.concatenate([[0.0], np.cumsum(bend**2)])
    at = np.arange(size, len(bend) - size)
    own = power[at + _BEND + 1] - power[at - _BEND]  # of a step or an impulse
    around = (power[at + size] - power[at - size] - own) / (2 * size - 2 * _BEND - 1)
    # What is 60 dB below the speech is not heard, so nothing stands out of less than that.
    return float((bend[at] / np.sqrt(around + 1e-6 * np.mean(bend**2) + 1e-16)).max())


def level_of(samples: np.ndarray) -> tuple[float, float]:
    """(RMS of what is louder than -50 dB, peak), in dB of full scale."""
    blocks = samples[: len(samples) // (20 * _MS) * 20 * _MS].reshape(-1, 20 * _MS)
    power = (blocks.astype(np.float64) ** 2).mean(-1)
    loud = power[power > 1e-5]
    return (
        10 * np.log10(loud.mean()) if len(loud) else -120.0,
        20 * np.log10(max(1e-6, float(np.abs(samples).max(initial=0)))),
    )


@dataclass(frozen=True, slots=True)
class Spoken:
    text: str
    speaker: str
    samples: np.ndarray
    ended: Ended

    @property
    def by_itself(self) -> bool:
        return self.ended.speech_reason == "stop" and not self.ended.speech_stopped

    @property
    def seconds(self) -> float:
        return len(self.samples) / VOICE_RATE


def sane(spoken: Spoken) -> bool:
    """Neither cut nor dragged: digits and letters alone take longest, at most half a second for a character."""
    size = len(spoken.text)
    return 0.03 * size <= spoken.seconds <= 1.2 + 0.15 * size + 0.35 * sum(map(str.isdigit, spoken.text))


def sound_report(sounds: Sequence[np.ndarray]) -> dict[str, Any]:
    levels = np.array([level_of(sound) for sound in sounds if len(sound)])
    rough = np.array([roughness(sound) for sound in sounds])
    edges = [max(abs(float(sound[0])), abs(float(sound[-1]))) for sound in sounds if len(sound)]
    return {
        "rms_db": np.round(np.percentile(levels[:, 0], (5, 50, 95)), 1).tolist(),
        "peak_db": np.round(np.percentile(levels[:, 1], (5, 50, 100)), 1).tolist(),
        "clipped": round(float(np.mean([(np.abs(sound) > 0.999).mean() for sound in sounds if len(sound)])), 6),
        "roughness": np.round(np.percentile(rough, (50, 99, 100)), 1).tolist(),
        "edges": round(max(edges), 3),
    }


def median_pitch(samples: np.ndarray) -> float:
    """Hz; nan where nothing is voiced."""
    frames = torch.from_numpy(samples[: len(samples) // FRAME_SAMPLES * FRAME_SAMPLES]).view(-1, FRAME_SAMPLES)
    pitch = pitch_of(frames)
    return float(np.median(pitch[~np.isnan(pitch)])) if not np.isnan(pitch).all() else float("nan")


def recordings(folder: Path, speaker: str) -> Iterator[tuple[str, np.ndarray]]:
    """(text, float32 [n]) of DIR's clips of a speaker, or of all for ""."""
    raw = np.memmap(folder / "sound.s16", np.int16, "r")
    start = 0
    for line in map(json.loads, (folder / "index.jsonl").open(encoding="utf-8")):
        if line["speaker"] == speaker or not speaker:
            yield line["text"], raw[start : start + line["samples"]].astype(np.float32) / 32768
        start += line["samples"]


# ---------------------------------------------------------------- speaking


class Speaker:
    def __init__(self, given: argparse.Namespace) -> None:
        stages: dict[str, dict[str, Any]] = {"2": {}, "3": {}}
        if given.what == "clone":
            stages["2"]["model"] = stages["3"]["model"] = _BASE
        if given.temperature is not None:
            drawn = {"temperature": given.temperature, "top_k": 10}
            stages["2"] |= {
                "default_sampling_params": {**drawn, "seed": 42},
                "subtalker_sampling_params": {**drawn, "do_sample": given.temperature > 0},
            }
        self.pipeline = Pipeline.load(
            load_here(Options(deploy_config=given.deploy_config, stage_overrides=json.dumps(stages)))
        )
        self._before = None if given.text is None else given.text == "before"

    def request(self, text: str, voice: Voice) -> Any:
        voice = replace(voice, non_streaming=self._before)
        return self.pipeline.speech_request(text, voice=voice)

    def say(self, text: str, voice: Voice, name: str) -> Spoken:
        heard = Heard.of(self.pipeline.events(self.request(text, voice)))
        return Spoken(text, name, heard.sound(), heard.end)

    def say_all(self, texts: Sequence[str], voices: Sequence[tuple[str, Voice]]) -> Iterator[Spoken]:
        """The voices in turn, as many at once as the deploy file lets."""
        with ThreadPoolExecutor(self.pipeline.config.stage("talker").max_num_seqs) as pool:
            yield from pool.map(
                lambda n: self.say(texts[n], voices[n % len(voices)][1], voices[n % len(voices)][0]), range(len(texts))
            )


VOICES = [(speaker.name, Voice(speaker=speaker.name)) for speaker in SPEAKERS]


def listened(said: Iterable[Spoken], ear: Ear) -> tuple[dict[str, Any], list[Spoken]]:
    """What of it was heard."""
    kept, pairs = [], []
    by_speaker: dict[str, list[tuple[str, str]]] = {}
    for one in said:
        kept.append(one)
        pairs.append((one.text, ear.hear(one.samples)))
        by_speaker.setdefault(one.speaker, []).append(pairs[-1])
    report = {
        "clips": len(pairs),
        "words": sum(len(words(text)) for text, _ in pairs),
        "word_error": round(word_error(pairs), 4),
    }
    report |= {name: round(word_error(some), 4) for name, some in by_speaker.items()}
    report["ended"] = f"{sum(one.by_itself for one in kept)} of {len(kept)}"
    for said_text, heard in [pair for pair in pairs if words(pair[0]) != words(pair[1])][:8]:
        print(f"    {said_text!r} heard as {heard!r}", flush=True)
    return report, kept


def shown(**report: Any) -> None:
    print(json.dumps(report), flush=True)


# ---------------------------------------------------------------- the commands


def words_of(given: argparse.Namespace, speaker: Speaker) -> None:
    ear, everything = Ear(), []
    for kind in given.kinds:
        texts = held_out(kind, given.texts, given.seed)
        report, kept = listened(speaker.say_all(texts, VOICES), ear)
        everything += kept
        shown(what="words", kind=kind, temperature=given.temperature, text=given.text, **report)
    shown(what="spoken sound", **sound_report([one.samples for one in everything]))
    if given.sound:
        theirs = [samples for _, samples in itertools.islice(recordings(given.sound, ""), len(everything))]
        shown(what="training's sound", **sound_report(theirs))


def ends(given: argparse.Namespace, speaker: Speaker) -> None:
    said = list(speaker.say_all(of_all_lengths(given.texts, given.seed, given.kinds), VOICES))
    spoken = [one for one in said if one.ended.speech_reason != "empty"]
    bad = [one for one in spoken if not one.by_itself or not sane(one)]
    shown(
        what="ends", temperature=given.temperature, text=given.text, texts=len(said),
        reasons=dict(Counter(one.ended.speech_reason for one in said)),
        insane=sum(one.by_itself for one in bad),
        seconds_a_character=np.round(np.percentile([one.seconds / len(one.text) for one in spoken if len(one.text) > 20] or [0], (0, 50, 100)), 3).tolist(),
        **sound_report([one.samples for one in spoken]),
    )  # fmt: skip
    for one in bad:
        print(f"    {one.ended.speech_reason} {one.seconds:.2f} s {one.speaker} {one.text!r}", flush=True)


def speed(given: argparse.Namespace, speaker: Speaker) -> None:
    first, of_real_time = [], []
    total_s, processor_s = 0.0, time.process_time()
    for text, (_, voice) in zip(held_out("domain", given.texts, given.seed), itertools.cycle(VOICES), strict=False):
        started, made, sounded = time.monotonic(), 0, None
        for event in speaker.pipeline.events(speaker.request(text, voice)):
            if isinstance(event, AudioChunk):
                sounded = sounded or time.monotonic()
                made += len(event.samples)
        if sounded is not None:
            first.append(sounded - started)
            total_s += made / VOICE_RATE
            of_real_time.append((time.monotonic() - started) / (made / VOICE_RATE))
    processor_s = time.process_time() - processor_s
    shown(
        what="speed", texts=len(first), threads=torch.get_num_threads(),
        first_sound_s=np.round(np.percentile(first, (50, 95, 100)), 3).tolist(),
        processor_time=round(processor_s / total_s, 3),  # of real time; what a busy machine does not change
        of_real_time=np.round(np.percentile(of_real_time, (50, 95)), 3).tolist(),
    )  # fmt: skip


def clone(given: argparse.Namespace, speaker: Speaker) -> None:
    ear, talker = Ear(), speaker.pipeline.parts.speech.talker
    references: list[tuple[str, str, np.ndarray]] = []
    for each in SPEAKERS if given.sound else ():
        text, samples = next(clip for clip in recordings(given.sound, each.name) if len(clip[1]) > 2.5 * VOICE_RATE)
        references.append((each.name, text, samples))
    for file, text in given.reference or ():
        sound = speaker.pipeline.sound(Path(file))
        import soxr

        references.append(
            (Path(file).stem, text, soxr.resample(sound.samples, sound.rate, VOICE_RATE).astype(np.float32))
        )
    texts = held_out("domain", given.texts, given.seed)
    for name, text, samples in references:
        recording = Audio(samples, VOICE_RATE, name.encode())
        vector = talker.speaker(samples)
        for how in ("continue", "vector"):
            voice = Voice(
                ref_audio=recording, ref_text=text if how == "continue" else None, x_vector_only=how == "vector"
            )
            report, kept = listened(speaker.say_all(texts, [("like", voice)]), ear)
            loud = [one for one in kept if one.seconds > 0.5]
            alike = [float(torch.cosine_similarity(talker.speaker(one.samples), vector, -1)) for one in loud]
            report.pop("like")
            shown(
                what="clone", reference=name, how=how, **report,
                pitch=np.round([median_pitch(samples), np.nanmedian([median_pitch(one.samples) for one in loud])]).tolist(),
                cosine=round(float(np.mean(alike)), 3),
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("words", "ends", "speed", "clone"))
    parser.add_argument("--deploy-config", default="nano.yaml")
    parser.add_argument("--kinds", nargs="+", choices=("domain", "general"), default=["domain", "general"])
    parser.add_argument("--texts", type=int, help="of each kind; 500 for ends, else 120")
    parser.add_argument("--seed", type=int, default=900)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--text", choices=("before", "beside"), help="the frames")
    parser.add_argument("--sound", type=Path, help="held-out clips, to compare with or to clone")
    parser.add_argument("--reference", nargs=2, action="append", metavar=("FILE", "TEXT"), help="a recording to clone")
    parser.add_argument("--smoke", action="store_true", help="two texts")
    given = parser.parse_args()
    given.texts = 2 if given.smoke else given.texts or (500 if given.what == "ends" else 120)
    speaker = Speaker(given)
    with speaker.pipeline:
        {"words": words_of, "ends": ends, "speed": speed, "clone": clone}[given.what](given, speaker)


if __name__ == "__main__":
    main()
