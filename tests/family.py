"""A tiny random family on disk, made once per run, and pipelines over it."""

from __future__ import annotations

import atexit
import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from aura_omni.config import Config, Options, load
from aura_omni.flow import (
    Audio,
    AudioChunk,
    Ended,
    Event,
    Message,
    Part,
    Text,
    TextDelta,
    Transcript,
    TurnRequest,
    Video,
)
from aura_omni.media.audio import decode_audio
from aura_omni.media.video import decode_video
from aura_omni.nano.random_family import write_family
from aura_omni.pipeline import Pipeline

DATA = Path(__file__).parent / "data"
SEED = 3  # its models hear something in human_a.wav and answer the clip with words


@cache
def family() -> Path:
    folder = Path(mkdtemp(prefix="aura-omni-family-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # 67 MiB, of every run
    write_family(folder, seed=SEED)
    return folder


def config(tts: str = "tts_custom_voice", *, pipeline: str = "tiny.yaml", **stages: Mapping[str, Any]) -> Config:
    """tiny.yaml over the family; stages: fields of single stages by name, as in `config(talker={"max_num_seqs": 2})`."""
    names = {"qwen3_tts.yaml": ("talker", "code2wav"), "qwen3_asr.yaml": ("asr",)}.get(
        pipeline, ("asr", "aura", "talker", "code2wav")
    )
    folders = {"asr": "asr", "aura": "aura", "talker": tts, "code2wav": tts}
    overrides = {
        str(number): {"model": str(family() / folders[name]), **stages.get(name, {})}
        for number, name in enumerate(names)
    }
    return load(Options(deploy_config=pipeline, stage_overrides=json.dumps(overrides)), environ={}, platform="cpu")


@contextmanager
def running(config: Config) -> Iterator[Pipeline]:
    """A pipeline at work; at the end nothing may be left over in it."""
    pipeline = Pipeline.load(config)
    try:
        yield pipeline
        pipeline.engine.check_integrity()
        for name, runner in pipeline.parts.ar_runners.items():
            assert runner.counters.pages_used == 0, f"{name} still holds pages"
        if pipeline.parts.speech is not None:
            assert pipeline.parts.speech.vocoder.slots_used == 0
    finally:
        pipeline.close()


class Listener:
    """Collects the events of one turn."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ended = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Ended):
            self._ended.set()

    def wait(self, timeout_s: float = 60) -> Listener:
        assert self._ended.wait(timeout_s), f"no end within {timeout_s} s: {self.events[-3:]}"
        return self

    @property
    def end(self) -> Ended:
        (end,) = [event for event in self.events if isinstance(event, Ended)]
        assert self.events[-1] is end
        return end

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    @property
    def heard(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Transcript)]

    @property
    def samples(self) -> np.ndarray:
        chunks = [event.samples for event in self.events if isinstance(event, AudioChunk)]
        return np.concatenate(chunks) if chunks else np.zeros(0, np.float32)


def ask(pipeline: Pipeline, request: TurnRequest) -> Listener:
    listener = Listener()
    pipeline.submit(request, listener)
    return listener.wait()


@cache
def recording() -> Audio:
    return decode_audio((DATA / "human_a.wav").read_bytes(), max_s=60)


@cache
def clip() -> Video:
    return decode_video((DATA / "bikes.mp4").read_bytes(), max_frames=4, max_pixels=10**7)


WORDS = {"aura": {"max_tokens": 12}}


def spoken(*parts: Part, **fields: Any) -> TurnRequest:
    """One user message; without parts the recording, the clip and a written question. fields: of the TurnRequest."""
    fields.setdefault("sampling", WORDS)
    return TurnRequest((Message("user", parts or (recording(), clip(), Text("What do you see?"))),), **fields)


class Script:
    """Stands in for the reader of AURA's answer: for each token, whatever it is, one character of the text."""

    decision, stopped = "speak", False

    def __init__(self, text: str) -> None:
        self._rest = iter(text)

    def push(self, _: int) -> str:
        return next(self._rest, "")

    def end(self, *, chosen: bool) -> str:
        return "".join(self._rest)
