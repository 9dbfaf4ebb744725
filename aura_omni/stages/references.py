"""Reference voices by content: built one after another on a thread of their own, and kept.

    reference = references.kept(audio, ref_text)
    if reference is None:
        asked = references.ask(audio, ref_text, build, post=engine.post, on_end=on_end)   # asked.reference, at its end
    references.abort(asked)

A long recording takes seconds to encode, and in the engine's loop everybody's speech would wait for that. The engine knows this
as a bystander: what waits when it stops ends as everything else does.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from aura_omni.counters import Counters
from aura_omni.engine.lane import Lane
from aura_omni.engine.sequence import FinishReason
from aura_omni.errors import Overloaded, Unavailable
from aura_omni.flow import Audio
from aura_omni.stages.voices import Reference

log = logging.getLogger(__name__)

_Key = tuple[bytes, str | None]


@dataclass(slots=True, eq=False)
class Asked:
    """One wait for a reference."""

    key: _Key
    on_end: Callable[[FinishReason, Exception | None], None]
    reference: Reference | None = None  # before on_end("stop")


@dataclass(slots=True, eq=False)
class _Build:
    """asked: who waits for it, in the order they came; only the engine thread looks at it."""

    key: _Key
    build: Callable[[], Reference]
    post: Callable[[Callable[[], None]], object]
    asked: dict[Asked, None] = field(default_factory=dict)


class References:
    """An `engine.engine.Bystander`. Everything but `counters` is called on the engine thread."""

    def __init__(self, lane: Lane, *, capacity: int, max_waiting: int) -> None:
        """lane: where references are built. capacity: references kept, the least recently used is dropped first.
        max_waiting: how many may wait for a reference at the same time."""
        if capacity < 1:
            raise ValueError(f"a reference store of capacity {capacity} holds nothing")
        self._lane, self._capacity, self._max_waiting = lane, capacity, max_waiting
        self._kept: OrderedDict[_Key, Reference] = OrderedDict()
        self._builds: dict[_Key, _Build] = {}  # that wait or are under way
        self._queue: dict[_Key, _Build] = {}  # those of them that wait
        self._lock = threading.Lock()  # of the queue
        self._worker = _worker()
        self._count = 0  # of builds so far

    def kept(self, audio: Audio, ref_text: str | None) -> Reference | None:
        """ref_text is None when only the speaker vector is used."""
        key = (audio.key, ref_text)
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def ask(
        self,
        audio: Audio,
        ref_text: str | None,
        build: Callable[[], Reference],
        *,
        post: Callable[[Callable[[], None]], object],
        on_end: Callable[[FinishReason, Exception | None], None],
    ) -> Asked:
        """Have a reference built that is not kept; those who ask for the same one share one build.

        build is called on the thread of this object, if anybody still waits by then; post: the engine's. on_end is called
        exactly once, later, with "stop", "cancelled" or "error" (and then the error, as `build` raised it). Raises Overloaded.
        """
        if sum(len(build.asked) for build in self._builds.values()) >= self._max_waiting:
            raise Overloaded(
                f"{self._max_waiting} requests wait for their reference voices, which is the limit; try again later"
            )
        asked = Asked((audio.key, ref_text), on_end)
        found = self._builds.get(asked.key)
        if found is None:
            found = self._builds[asked.key] = _Build(asked.key, build, post)
            with self._lock:
                self._queue[asked.key] = found
            self._worker.submit(self._build_next)
        found.asked[asked] = None
        return asked

    def abort(self, asked: Asked) -> None:
        """End the wait now. A build that nobody waits for does not start; one under way ends, and is kept. Twice is once."""
        build = self._builds.get(asked.key)
        if build is None or asked not in build.asked:
            return
        del build.asked[asked]
        if not build.asked:
            with self._lock:
                waited = self._queue.pop(asked.key, None)
            if waited is not None:
                del self._builds[asked.key]
        asked.on_end("cancelled", None)

    # ------------------------------------------------------------ Bystander

    def abort_all(self, error: Exception) -> None:
        """Also the end of the thread. A build under way is not waited for: it uses nothing of the engine's."""
        worker, self._worker = self._worker, _worker()  # threads come with work
        with self._lock:
            self._queue.clear()
        worker.shutdown(wait=False, cancel_futures=True)
        builds, self._builds = self._builds, {}
        for build in builds.values():
            self._end(build, "error", error)

    def check_integrity(self) -> None:
        with self._lock:
            queued = list(self._queue.values())
        for build in queued:
            assert self._builds.get(build.key) is build, "a reference will be built that is not known any more"
            assert build.asked, "a reference will be built that nobody waits for"
        assert len(self._kept) <= self._capacity, "more references than allowed"

    @property
    def counters(self) -> Counters:
        """A step is a build."""
        waiting = len(self._queue)
        running = max(0, len(self._builds) - waiting)
        return Counters(running=running, waiting=waiting, steps=self._count, prompt_tokens=0, generated_tokens=0)

    # ------------------------------------------------------------ from thread to thread

    def _build_next(self) -> None:
        """On the thread of this object: once for every build that was asked for, so some find nothing left to do."""
        with self._lock:
            if not self._queue:
                return
            build = self._queue.pop(next(iter(self._queue)))
        reference, failure = None, None
        try:
            with self._lane.active():
                reference = build.build()
        except Exception as error:
            failure = error  # whoever waits gets it
        with suppress(Unavailable):  # then the engine has ended everybody already
            build.post(lambda: self._built(build, reference, failure))

    def _built(self, build: _Build, reference: Reference | None, error: Exception | None) -> None:
        self._count += 1
        if self._builds.get(build.key) is build:  # else the engine has ended everybody meanwhile
            del self._builds[build.key]
        if reference is not None:
            self._kept[build.key] = reference
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        elif not build.asked:
            log.warning("a reference that nobody waits for any more could not be built", exc_info=error)
        self._end(build, "stop" if error is None else "error", error, reference)

    def _end(
        self, build: _Build, reason: FinishReason, error: Exception | None, reference: Reference | None = None
    ) -> None:
        while build.asked:  # one's end may abort another's wait
            asked = next(iter(build.asked))
            del build.asked[asked]
            asked.reference = reference
            asked.on_end(reason, error)


def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="references")
