"""What the server has instead of the pipeline when that is in a process of its own.

    pipeline = PipelineProcess.load(config, report)     # a `server.turns.Pipeline`
    turn = pipeline.submit(request, sink)

A turn ends with exactly one Ended here too: if the process is lost, with an EngineError that says how.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from aura_omni.config import Config
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
from aura_omni.errors import AuraError, EngineError, Unavailable
from aura_omni.flow import Ended, Event, Report, StageName, StagePhase, TurnRequest, Video, VoiceTask

log = logging.getLogger(__name__)

CLOSING_S = 10.0  # until a process that was told to end is killed
_COUNTERS_S = 2.0  # until the last counters that came are good enough


@dataclass(slots=True, eq=False)
class _Submitted:
    """Kept until it was taken, has ended, and nobody waits for an answer to what it was shown, in whatever order."""

    sink: Callable[[Event], None]
    taken: Future[None] = field(default_factory=Future)  # result, or why it was refused
    shown: Future[None] | None = None  # likewise
    ended: bool = False

    @property
    def over(self) -> bool:
        return self.ended and self.taken.done() and (self.shown is None or self.shown.done())

    def tell(self, event: Event) -> None:
        try:
            self.sink(event)
        except Exception:
            # One listener's mistake; the others' events come through this thread too.
            log.exception("the listener of a turn failed")


@dataclass(frozen=True, slots=True)
class _Turn:
    number: int
    of: PipelineProcess

    def show(self, videos: Sequence[Video]) -> None:
        self.of.show(self.number, videos)

    def cancel(self) -> None:
        self.of.cancel(self.number)


class PipelineProcess:
    """A `server.turns.Pipeline`."""

    def __init__(self, link: Link, process: subprocess.Popen[bytes] | None) -> None:
        """link: to a `worker.Worker`, in that process if it has one of its own. Call `wait_until_loaded` before all else."""
        self._link, self._process = link, process
        # The event loop cancels turns, and must not wait until somebody's pictures are through.
        self._outbox = Outbox(link)
        self._what = Loaded((), (), (), None)
        self._reason = "the engine's process is not loaded"  # empty: ready
        self._report: Report = lambda stage, phase: None
        self._loaded: Future[Loaded] = Future()
        # Once the process is lost, nothing is added to the two; and nothing is shown to a turn that is being forgotten.
        self._lock = threading.Lock()
        self._lost = False
        self._turns: dict[int, _Submitted] = {}  # otherwise touched by the reading thread alone
        self._counts: dict[int, Future[Mapping[StageName, Counters]]] = {}
        self._numbers = itertools.count()
        self._counters: Mapping[StageName, Counters] = {}
        self._closing = False
        self._reader = threading.Thread(target=self._read, name="engine process", daemon=True)

    @classmethod
    def load(cls, config: Config, report: Report) -> PipelineProcess:
        """Start the process and wait until it can answer. Raises what `Pipeline.load` raises there, or EngineError when it is lost."""
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-P", "-m", "aura_omni.engine_process.worker", str(there.fileno())]
            # Else Python would first look for modules in the folder where the server was started.
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            # A terminal interrupts both, and the new process has to read modules before it can say that it does not mind.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SERVERS_SIGNALS)
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()], env=environ)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        link = Link(here)
        client = cls(link, process)
        with suppress(OSError):  # it has ended already, which is told below
            link.send(Start(config, logging.getLogger().level))
        client.wait_until_loaded(report)
        return client

    def wait_until_loaded(self, report: Report) -> None:
        self._report = report
        self._reader.start()
        try:
            self._what = self._loaded.result()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ as the pipeline

    @property
    def ready(self) -> bool:
        return not self._reason

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def progress(self) -> Mapping[StageName, StagePhase]:
        return dict.fromkeys(self.stages, "ready" if self.ready else "failed")

    @property
    def counters(self) -> Mapping[StageName, Counters]:
        """Asks the process, a millisecond or so; the last that came, when it does not answer."""
        number, answer = next(self._numbers), Future[Mapping[StageName, Counters]]()
        with self._lock:
            if self._lost:
                return self._counters
            self._counts[number] = answer
        self._outbox.put(Count(number))
        with suppress(TimeoutError, AuraError):
            self._counters = answer.result(_COUNTERS_S)
        return self._counters

    @property
    def served_names(self) -> tuple[str, ...]:
        return self._what.served_names

    @property
    def stages(self) -> tuple[StageName, ...]:
        return self._what.stages

    @property
    def speakers(self) -> tuple[str, ...]:
        return self._what.speakers

    @property
    def voice_task(self) -> VoiceTask | None:
        return self._what.voice_task

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return None if self._process is None else self._process.pid

    def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> _Turn:
        """As `Pipeline.submit`; sink gets the events on the thread that reads from the process."""
        number, submitted = next(self._numbers), _Submitted(sink)
        with self._lock:
            if self._reason or self._lost:
                raise Unavailable(self._reason)
            self._turns[number] = submitted
        self._outbox.put(Submit(number, request))
        try:
            submitted.taken.result()
        finally:
            del submitted  # a refusal knows this frame: it would keep itself, and the request's media, until some day they are looked for
        return _Turn(number, self)

    def show(self, number: int, videos: Sequence[Video]) -> None:
        """As `Turn.show` of the pipeline."""
        shown: Future[None] = Future()
        with self._lock:
            submitted = self._turns.get(number)
            if submitted is None or self._lost:
                return  # it has ended, or is being ended
            assert submitted.shown is None, "pictures are shown to a turn once"
            submitted.shown = shown
        self._outbox.put(Show(number, tuple(videos)))
        try:
            shown.result()
        finally:
            del shown, submitted  # as in `submit`

    def cancel(self, number: int) -> None:
        """End a turn, from any thread; nothing is said of one that has ended."""
        if number in self._turns:
            self._outbox.put(Cancel(number))

    def close(self) -> None:
        """End every turn as unavailable, then the process. Idempotent."""
        self._closing = True
        self._outbox.put(Close())
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSING_S)
        if self._process is not None:
            try:
                self._process.wait(CLOSING_S)
            except subprocess.TimeoutExpired:
                log.warning("the engine's process did not end within %g s and is killed", CLOSING_S)
                self._process.kill()
                self._process.wait()
        self._link.close()
        self._outbox.close()

    # ------------------------------------------------------------ what the process says

    def _read(self) -> None:
        try:
            while True:
                self._take(self._link.receive())
        except EOFError:
            pass
        except Exception:
            # Nobody else reads what the process says, and every turn must be told.
            log.critical("what the engine's process says cannot be understood", exc_info=True)
            self._link.close()
        self._end()

    def _take(self, message: object) -> None:
        match message:
            case Happened(events):
                for number, event in events:
                    self._hand_on(number, event)
            case Accepted(number):
                self._turns[number].taken.set_result(None)
                self._forget_if_over(number)
            case Refused(number, error):
                self._turns.pop(number).taken.set_exception(error)
            case Shown(number, error):
                shown = self._turns[number].shown
                assert shown is not None
                if error is None:
                    shown.set_result(None)
                else:
                    shown.set_exception(error)
                self._forget_if_over(number)
            case Counted(number, counters):
                self._counts.pop(number).set_result(counters)
            case Reported(stage, phase):
                self._report(stage, phase)
            case Loaded():
                self._reason = ""
                self._loaded.set_result(message)
            case NotLoaded(error):
                self._loaded.set_exception(error)
            case Stopped(reason):
                self._reason = reason
            case _:
                raise AssertionError(f"no such message: {type(message).__name__}")

    def _hand_on(self, number: int, event: Event) -> None:
        submitted = self._turns[number]
        submitted.tell(event)
        if isinstance(event, Ended):
            submitted.ended = True
            self._forget_if_over(number)

    def _forget_if_over(self, number: int) -> None:
        with self._lock:
            if self._turns[number].over:
                del self._turns[number]

    def _end(self) -> None:
        """The process says nothing more."""
        if self._closing:
            self._reason = "the server is stopping"
            error: AuraError = Unavailable(self._reason)
        else:
            self._reason = f"the engine's process has ended{self._how()}"
            error = EngineError(self._reason)
            log.critical("%s; every request ends", self._reason)
        with self._lock:
            self._lost = True
        if not self._loaded.done():
            self._loaded.set_exception(error)
        for submitted in self._turns.values():
            if not submitted.taken.done():
                submitted.taken.set_exception(error)
                continue
            if not submitted.ended:
                submitted.tell(Ended("error", error=error))
            if submitted.shown is not None and not submitted.shown.done():
                submitted.shown.set_result(None)  # the end has been told
        self._turns.clear()
        for answer in self._counts.values():
            answer.set_exception(error)
        self._counts.clear()

    def _how(self) -> str:
        """How it ended, as far as the system knows."""
        if self._process is None:
            return ""
        try:
            status = self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            return " to talk"
        if status >= 0:
            return f" with status {status}"
        name = signal.Signals(-status).name
        return f", killed by {name}" + (" (the system does so when memory runs out)" if name == "SIGKILL" else "")
