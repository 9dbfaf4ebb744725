"""A pipeline without models: a script of events, sent from a thread of its own, and the server around it."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import uvicorn

from aura_omni.counters import Counters
from aura_omni.flow import (
    FRAME_SAMPLES,
    STAGES,
    VOICE_RATE,
    Audio,
    AudioChunk,
    Coming,
    Ended,
    Event,
    Message,
    Part,
    StageName,
    StagePhase,
    Text,
    TextDelta,
    Transcript,
    TurnRequest,
    Usage,
    Video,
    VoiceTask,
)
from aura_omni.server.app import ServerConfig, create_app
from aura_omni.server.connection import Connection

WAIT_S = 30.0  # no wait in these tests takes longer; most take milliseconds
USAGE = Usage(
    prompt_text_tokens=11,
    prompt_audio_tokens=13,
    prompt_video_tokens=17,
    cached_tokens=5,
    text_tokens=3,
    audio_frames=4,
)


def tone(hz: float, frames: int) -> np.ndarray:
    """float32 [frames * 1920] at 24 kHz; frequency says whose audio it is."""
    times_s = np.arange(frames * FRAME_SAMPLES) / VOICE_RATE
    return (0.5 * np.sin(2 * np.pi * hz * times_s)).astype(np.float32)


def said(request: TurnRequest) -> str:
    """The text parts of the last message."""
    return " ".join(part.text for part in request.messages[-1].parts if isinstance(part, Text))


@dataclass(frozen=True)
class Pause:
    """In a script: wait until the turn is cancelled (or released), for at most this long."""

    longest_s: float = WAIT_S


Script = Callable[[TurnRequest], Iterable[Event | Pause]]


def plain_answer(request: TurnRequest) -> Iterator[Event]:
    """Hears each audio part, says "Hello there.", and speaks 4 frames if asked to."""
    for part in request.messages[-1].parts:
        if isinstance(part, Audio):
            yield Transcript(f"{part.duration_s:.1f} s of sound", "English")
    yield TextDelta("Hello ")
    yield TextDelta("there.")
    if request.speak:
        yield AudioChunk(tone(440, 1))
        yield AudioChunk(tone(440, 3))
    yield Ended("stop", USAGE, speech_reason="stop" if request.speak else None)


def unseen(videos: Sequence[Video]) -> Iterable[Event | Pause]:
    raise AssertionError("pictures are shown to a turn that waits for none")


@dataclass
class FakeTurn:
    """see: what the turn says once it is shown its pictures, or why these are refused."""

    see: Callable[[Sequence[Video]], Iterable[Event | Pause]] = unseen
    cancelled: threading.Event = field(default_factory=threading.Event)
    cancelled_at_s: float | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    shown: list[Sequence[Video]] = field(default_factory=list)
    seen: Iterable[Event | Pause] = ()
    goes_on: threading.Event = field(default_factory=threading.Event)  # it was shown its pictures, or cancelled

    def show(self, videos: Sequence[Video]) -> None:
        self.shown.append(videos)
        assert len(self.shown) == 1, "pictures are shown once"
        try:
            self.seen = self.see(videos)
        except BaseException:
            self.cancel()
            raise
        self.goes_on.set()

    def once_shown(self) -> Iterator[Event | Pause]:
        assert self.goes_on.wait(WAIT_S)
        yield from self.seen
        yield Ended("cancelled")

    def cancel(self) -> None:
        if not self.cancelled.is_set() and not self.ended.is_set():
            self.cancelled_at_s = time.monotonic()
        self.cancelled.set()
        self.goes_on.set()


class FakePipeline:
    served_names: tuple[str, ...] = ("AURA", "aurateam/AURA")
    stages: tuple[StageName, ...] = STAGES
    speakers: tuple[str, ...] = ("vivian", "ryan")
    voice_task: VoiceTask | None = "CustomVoice"

    def __init__(self, script: Script = plain_answer) -> None:
        self.script = script
        self.ready = True
        self.reason = ""
        self.requests: list[TurnRequest] = []
        self.turns: list[FakeTurn] = []
        self.talker_calls = 0
        self.closed = False
        self._lock = threading.Lock()

    @property
    def progress(self) -> dict[StageName, StagePhase]:
        return dict.fromkeys(self.stages, "ready" if self.ready else "failed")

    @property
    def counters(self) -> dict[StageName, Counters]:
        pages = {"pages": 10, "pages_used": 4, "cached_rows": 5}
        return {
            name: Counters(running=index, waiting=2, steps=7, prompt_tokens=8, generated_tokens=9, **pages)
            for index, name in enumerate(self.stages)
        }

    def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> FakeTurn:
        def see(videos: Sequence[Video]) -> Iterable[Event | Pause]:
            self.requests[number] = complete(self.requests[number], videos)
            return self._begun(self.requests[number])

        turn = FakeTurn(see)
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            self.turns.append(turn)
            self.talker_calls += request.speak
        events = turn.once_shown() if request.coming else self._begun(request)
        threading.Thread(target=self._play, args=(turn, events, sink), daemon=True).start()
        return turn

    def _begun(self, request: TurnRequest) -> Iterable[Event | Pause]:
        events = iter(self.script(request))
        first = list(itertools.islice(events, 1))  # a script may refuse the request: that is raised here
        return itertools.chain(first, events)

    def _play(self, turn: FakeTurn, events: Iterable[Event | Pause], sink: Callable[[Event], None]) -> None:
        for event in events:
            if isinstance(event, Pause):
                turn.cancelled.wait(event.longest_s)
                continue
            if turn.cancelled.is_set():
                event = Ended("cancelled")
            if isinstance(event, Ended):
                turn.ended.set()
            sink(event)
            if isinstance(event, Ended):
                return

    def close(self) -> None:
        self.closed = True
        for turn in self.turns:
            turn.cancel()


def complete(request: TurnRequest, videos: Sequence[Video]) -> TurnRequest:
    """With its pictures."""
    shown = iter(videos)

    def parts(message: Message) -> Iterator[Part]:
        return (next(shown) if isinstance(part, Coming) else part for part in message.parts)

    messages = tuple(replace(message, parts=tuple(parts(message))) for message in request.messages)
    assert next(shown, None) is None, "more pictures than are Coming"
    return replace(request, messages=messages)


def pictures(request: TurnRequest) -> list[Video]:
    return [part for message in request.messages for part in message.parts if isinstance(part, Video)]


@contextmanager
def serving(pipeline: FakePipeline, config: ServerConfig | None = None) -> Iterator[str]:
    """A real uvicorn on a free port of the loopback; yields its URL and stops it."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(config or ServerConfig(), pipeline),
            http=Connection,
            log_level="error",
            timeout_graceful_shutdown=2,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"
