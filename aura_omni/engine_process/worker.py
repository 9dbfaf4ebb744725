"""The engine's process: loads the pipeline, submits turns to it, and sends back what they say.

    python -m aura_omni.engine_process.worker FD     # started by client.py, with a socket

Ends when the server's end of the socket is closed, however that came about, so no engine is left without its server.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from aura_omni.counters import Counters
from aura_omni.engine_process.messages import (
    SERVERS_SIGNALS,
    Accepted,
    Cancel,
    Close,
    Count,
    Counted,
    Happened,
    Loaded,
    NotLoaded,
    Refused,
    Reported,
    Show,
    Shown,
    Start,
    Stopped,
    Submit,
)
from aura_omni.engine_process.wire import Link, Outbox
from aura_omni.errors import AuraError
from aura_omni.flow import Audio, Ended, Event, Report, StageName, Text, TurnRequest, Video, VoiceTask
from aura_omni.interpreter import settled, shared_fairly

log = logging.getLogger(__name__)

# Turns are checked and prepared by the thread that reads messages: a millisecond or so each, so that others gain nothing, but each that
# computes has the engine's thread wait longer for Python's lock. Those with so much sound, text, or of so many messages and frames that they
# take ten times that, up to hundreds of milliseconds, have a thread of their own.
LONG_SOUND_S, LONG_SAMPLES, LONG_TEXT, LONG_HISTORY = 60.0, 60 * 48_000, 20_000, 1_000


class Turn(Protocol):
    def show(self, videos: Sequence[Video]) -> None: ...
    def cancel(self) -> None: ...


class Pipeline(Protocol):
    """What is needed of `pipeline.Pipeline`."""

    @property
    def served_names(self) -> tuple[str, ...]: ...
    @property
    def stages(self) -> tuple[StageName, ...]: ...
    @property
    def speakers(self) -> tuple[str, ...]: ...
    @property
    def voice_task(self) -> VoiceTask | None: ...
    @property
    def counters(self) -> Mapping[StageName, Counters]: ...
    @property
    def reason(self) -> str: ...
    def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> Turn: ...
    def wait_until_stopped(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Going:
    """A turn that has not ended. long: it is prepared by the thread for long ones."""

    turn: Turn
    long: bool


def main() -> None:
    for number in SERVERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SERVERS_SIGNALS)  # which the client has blocked for us
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    start = link.receive()
    assert isinstance(start, Start)
    logging.basicConfig(level=start.log_level, format="%(asctime)s %(levelname)s %(message)s")

    def load(report: Report) -> Pipeline:
        from aura_omni import pipeline  # torch

        loaded = pipeline.Pipeline.load(start.config, report)
        settled()
        return loaded

    with shared_fairly():
        # Loading cannot be interrupted, but nobody is left to load for.
        Worker(link, load, orphaned=lambda: os._exit(1)).run()


class Worker:
    def __init__(self, link: Link, load: Callable[[Report], Pipeline], *, orphaned: Callable[[], None]) -> None:
        """orphaned: called, on any thread, when the server is gone before the pipeline was loaded."""
        self._link, self._load, self._orphaned = link, load, orphaned
        self._pipeline: Pipeline | None = None
        # Of messages and (turn, event); so the engine never waits for the server to read.
        self._outbox = Outbox(link, _together)
        self._turns: dict[int, _Going] = {}
        self._lock = threading.Lock()  # guards them
        self._long_planner = ThreadPoolExecutor(1, thread_name_prefix="plan long")
        self._told = threading.Event()  # that loading has ended, well or not
        self._reader = threading.Thread(target=self._read, name="messages", daemon=True)

    def run(self) -> None:
        """Until the pipeline cannot be loaded, or the server is gone."""
        self._reader.start()
        try:
            pipeline = self._pipeline = self._load(lambda stage, phase: self._outbox.put(Reported(stage, phase)))
        except Exception as error:
            if not isinstance(error, AuraError):
                log.error("the pipeline could not be loaded", exc_info=error)
            self._outbox.put(NotLoaded(_told(error)))
            self._told.set()
            self._outbox.close()
            return
        self._told.set()
        self._outbox.put(Loaded(pipeline.served_names, pipeline.stages, pipeline.speakers, pipeline.voice_task))
        pipeline.wait_until_stopped()
        self._outbox.put(Stopped(pipeline.reason))
        self._reader.join()
        self._outbox.close()

    def _read(self) -> None:
        try:
            while self._take(self._link.receive()):
                pass
        except EOFError:
            pass
        except Exception:
            log.critical("what the server's process says cannot be understood; the engine ends", exc_info=True)
        if not self._told.is_set():
            self._orphaned()
            self._told.wait()
        if self._pipeline is not None:
            self._pipeline.close()
        self._long_planner.shutdown()

    def _take(self, message: object) -> bool:
        """Whether more will come."""
        if isinstance(message, Close):
            return False
        pipeline = self._pipeline
        assert pipeline is not None, "a message came before the pipeline was loaded"
        match message:
            case Submit():
                long = _is_long(message.request)
                self._prepare(partial(self._submit, pipeline, message, long), long=long)
            case Show(turn, videos):
                going = self._going(turn)
                if going is None:  # it has ended
                    self._outbox.put(Shown(turn))
                else:
                    long = going.long or _frames(videos) > LONG_HISTORY
                    self._prepare(partial(self._show, turn, going.turn, videos), long=long)
            case Cancel(turn):
                going = self._going(turn)
                if going is not None:  # else it has ended
                    going.turn.cancel()
            case Count(number):
                self._outbox.put(Counted(number, pipeline.counters))
            case _:
                raise AssertionError(f"no such message: {type(message).__name__}")
        return True

    def _prepare(self, work: Callable[[], None], *, long: bool) -> None:
        if long:
            self._long_planner.submit(work)
        else:
            work()

    def _going(self, number: int) -> _Going | None:
        with self._lock:
            return self._turns.get(number)

    def _submit(self, pipeline: Pipeline, message: Submit, long: bool) -> None:
        number, ended = message.turn, threading.Event()

        def sink(event: Event) -> None:
            self._outbox.put((number, event))
            if isinstance(event, Ended):
                with self._lock:
                    ended.set()
                    self._turns.pop(number, None)

        try:
            turn = pipeline.submit(message.request, sink)
        except Exception as error:
            if not isinstance(error, AuraError):
                log.error("a request could not be prepared", exc_info=error)
            self._outbox.put(Refused(number, _told(error)))
            return
        with self._lock:
            if not ended.is_set():
                self._turns[number] = _Going(turn, long)
        self._outbox.put(Accepted(number))

    def _show(self, number: int, turn: Turn, videos: Sequence[Video]) -> None:
        try:
            turn.show(videos)
        except Exception as error:
            if not isinstance(error, AuraError):
                log.error("the pictures of a request could not be prepared", exc_info=error)
            self._outbox.put(Shown(number, _told(error)))
        else:
            self._outbox.put(Shown(number))


def _is_long(request: TurnRequest) -> bool:
    """Whether others should not wait while the turn is prepared."""
    parts, voice = [part for message in request.messages for part in message.parts], request.voice
    sounds = [part for part in (*parts, voice.ref_audio) if isinstance(part, Audio)]
    texts = [part.text for part in parts if isinstance(part, Text)]
    texts += filter(None, (request.system_prompt, voice.instruct, voice.ref_text))
    return (
        sum(sound.duration_s for sound in sounds) > LONG_SOUND_S
        or sum(len(sound.samples) for sound in sounds) > LONG_SAMPLES
        or sum(map(len, texts)) > LONG_TEXT
        or len(request.messages) + _frames(part for part in parts if isinstance(part, Video)) > LONG_HISTORY
    )


def _frames(videos: Iterable[Video]) -> int:
    return sum(len(video.frames) for video in videos)


def _told(error: Exception) -> AuraError:
    """What the server's process is told of an error: one of ours, as others may not survive the way."""
    return error if isinstance(error, AuraError) else AuraError(f"the server failed: {type(error).__name__}: {error}")


def _together(waiting: list[object]) -> Iterator[object]:
    """Messages, with (turn, event) that follow each other as one."""
    events: list[tuple[int, Event]] = []
    for message in waiting:
        if isinstance(message, tuple):
            events.append(message)
            continue
        if events:
            yield Happened(tuple(events))
            events = []
        yield message
    if events:
        yield Happened(tuple(events))


if __name__ == "__main__":
    main()
