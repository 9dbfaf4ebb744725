"""The loop: one thread that owns the device and steps the stages, the most urgent first.

Knows runners, not what they run. Whoever wants something of a runner posts a function, which the loop calls between two
steps; so runners, stage models and listeners need no locks. Steps do not wait for the device, so the stages share it; only
when no runner has anything to do but wait does the loop look again a little later. But a launch takes the thread up to some
milliseconds, so before each one it takes in what has arrived, and what follows from that in more urgent stages goes first.

    with Engine({"code2wav": code2wav, "talker": talker, "aura": aura, "asr": asr}) as engine:
        engine.post(lambda: aura.add(sequence))
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Literal, Protocol, TypeVar

from aura_omni.engine.stage_model import Runner
from aura_omni.errors import AuraError, EngineError, Unavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOOK_AGAIN_S = 20e-6  # while the device computes; the system's timer makes it some 70 microseconds
_Phase = Literal["new", "running", "closing", "ended"]


class Bystander(Protocol):
    """What has no steps, and so no part in the loop, but requests that end with the engine. Engine thread."""

    def abort_all(self, error: Exception) -> None:
        """End every request with reason "error"."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if anything is lost or left over."""
        ...


class Engine:
    def __init__(self, runners: Mapping[str, Runner], bystanders: Mapping[str, Bystander] | None = None) -> None:
        """runners: in order of urgency. Each pass of the loop lets every runner launch, so none of them starves."""
        self._runners = dict(runners)
        self._ending: dict[str, Runner | Bystander] = {**runners, **(bystanders or {})}
        self._by_urgency = tuple(runners.values())
        self._inbox: deque[Callable[[], None]] = deque()
        self._late: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()  # guards the inbox and the phase
        self._phase: _Phase = "new"
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether requests are served: started, not closed, and the loop has not failed."""
        return self._phase == "running"

    @property
    def failure(self) -> Exception | None:
        """What the loop died of, if it did."""
        return self._failure

    def start(self) -> None:
        with self._wake:
            if self._phase != "new":
                raise EngineError(f"the engine cannot be started: it is {self._phase}")
            self._phase = "running"
        # A program may end without `close`, and a thread with PyTorch's frames that the interpreter ends itself aborts the process.
        atexit.register(self.close)
        self._thread.start()

    def close(self) -> None:
        """Stop: end every request with an Unavailable error, then return. Functions posted before are still called."""
        with self._wake:
            started = self._phase != "new"
            if self._phase == "running":
                self._phase = "closing"
            self._wake.notify()
        if started:
            self._thread.join()
        else:
            self._end()
        atexit.unregister(self.close)

    def wait_until_stopped(self) -> None:
        """Returns when the loop has ended, by `close` or by a failure, and with it every request."""
        self._thread.join()

    def post(self, function: Callable[[], T]) -> Future[T]:
        """Have the engine's thread call `function` soon, in the order of posting; from any thread, never waits.

        The future gets its result or its error. An error that is not an `AuraError` is also logged.
        Raises Unavailable when the engine is not running any more: then the function will never be called.
        """
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except Exception as error:
                # Whoever posted it gets it; the loop has others to serve.
                if not isinstance(error, AuraError):
                    logger.error("a function posted to the engine failed", exc_info=error)
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._wake:
            if self._phase in ("closing", "ended"):
                why = f"it has failed: {self._failure}" if self._failure else "it is stopping"
                raise Unavailable(f"the engine takes no more requests, {why}")
            self._inbox.append(job)
            self._wake.notify()
        return future

    def after_launches(self, function: Callable[[], None]) -> None:
        """Call `function`, which must not fail, when all runners have launched what they can. On the engine's thread only.

        For what wakes another thread, which then wants the interpreter's lock: no launch waits for it.
        """
        self._late.append(function)

    def call(self, function: Callable[[], T]) -> T:
        """`post`, and wait for the result or raise the error. On the engine's own thread: call at once."""
        if threading.current_thread() is self._thread:
            return function()
        return self.post(function).result()

    def check_integrity(self) -> None:
        """Raise AssertionError if anything is lost or left over anywhere. From any thread, waits for the loop."""
        for one in self._ending.values():
            self.call(one.check_integrity)

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            # Nobody is left to catch it, and every request must be told.
            logger.critical("the engine's loop failed, every request ends", exc_info=error)
            self._failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
        self._end()

    def _loop(self) -> None:
        worked = False
        while True:
            with self._wake:
                if not worked:
                    soon = any(runner.flying or runner.holds for runner in self._runners.values())
                    self._wake.wait_for(lambda: self._inbox or self._phase == "closing", LOOK_AGAIN_S if soon else None)
                if self._phase == "closing":
                    return
            self._drain()
            worked = self._pass()

    def _pass(self) -> bool:
        """Every runner may launch, and once more before each less urgent one if anything has landed. Returns whether any did."""
        worked = False
        for place, runner in enumerate(self._by_urgency):
            if self._land():
                worked = True
                for urgent in self._by_urgency[:place]:
                    urgent.launch()
            worked |= runner.launch()
        while self._late:
            self._late.popleft()()
        return worked

    def _land(self) -> bool:
        landed = False
        for runner in self._by_urgency:
            landed |= runner.land()
        return landed

    def _drain(self) -> None:
        for _ in range(len(self._inbox)):  # what these functions post waits for the next pass
            self._inbox.popleft()()

    def _end(self) -> None:
        with self._wake:
            self._phase = "ended"  # from here on nothing is posted
        self._drain()
        for name, one in self._ending.items():
            try:
                one.abort_all(self._failure or Unavailable("the server is stopping"))
            except Exception:
                # The others' requests must end too.
                logger.exception("the requests of %s could not be ended", name)
