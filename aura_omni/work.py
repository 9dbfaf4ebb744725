"""What one Turn has in progress, and its one end.

Knows runners and events, not which stage follows which. Everything is called on the engine thread.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from aura_omni.coming import Wait
from aura_omni.engine.runner import ArRunner
from aura_omni.engine.sequence import FinishReason, Sequence
from aura_omni.errors import AuraError, EngineError
from aura_omni.flow import Ended, Event, Reason, SpeechReason, StageName, Usage
from aura_omni.stages.references import Asked
from aura_omni.stages.vocoder import Stream

log = logging.getLogger(__name__)

Sink = Callable[[Event], None]
_Job = Sequence | Stream | Asked | Wait


class Work:
    """`_live` is what is in progress and how to abort each; the Turn ends when an outcome is known and nothing lives.

    text_reason, speech_reason, speech_stopped: how the text and the speech ended, for Ended; whoever makes them sets them.
    """

    def __init__(
        self,
        sink: Sink,
        runners: Mapping[StageName, ArRunner],
        *,
        after: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """after: as `Engine.after_launches`; None: launching takes long, as it computes."""
        self._sink, self._runners, self._after = sink, runners, after
        self._late: deque[Event] = deque()
        self._live: dict[_Job, Callable[[], None]] = {}
        self._outcome: tuple[Reason, AuraError | None] | None = None
        self._ended = False
        self._counts: Counter[str] = Counter()  # fields of Usage
        self.text_reason: Literal["stop", "length"] = "stop"
        self.speech_reason: SpeechReason | None = None
        self.speech_stopped = False

    # ------------------------------------------------------------ in progress

    @property
    def over(self) -> bool:
        """Whether the outcome is known: nothing that is still made is heard."""
        return self._outcome is not None

    @property
    def running(self) -> int:
        """How much is in progress."""
        return len(self._live)

    def __contains__(self, work: _Job) -> bool:
        return work in self._live

    def abort(self, work: _Job) -> None:
        self._live[work]()

    def watch(self, work: _Job, abort: Callable[[], None]) -> None:
        """The Turn does not end before `ended` is called for this."""
        self._live[work] = abort

    def run(
        self,
        stage: StageName,
        build: Callable[..., Sequence],
        *,
        on_output: Callable[[Any], Any],
        then: Callable[[FinishReason, Sequence], None],
    ) -> Sequence:
        """Start a generation; `then` follows its end unless the Turn is over by then."""
        runner = self._runners[stage]
        sequence: Sequence = build(
            on_output=lambda output: on_output(output) if self._outcome is None else None,
            on_end=lambda reason, error: self.ended(sequence, reason, error, lambda reason: then(reason, sequence)),
        )
        runner.add(sequence)
        self._live[sequence] = lambda: runner.abort(sequence)
        return sequence

    def ended(
        self,
        work: _Job,
        reason: FinishReason,
        error: Exception | None,
        then: Callable[[FinishReason], None],
    ) -> None:
        """Something in progress has ended; what follows it is `then`, unless that was the end of the Turn."""
        del self._live[work]
        if self._outcome is not None:
            self._settle()
        elif reason == "error":
            self.finish("error", error)
        else:
            # Without an outcome only a stop string or a guard can have cancelled it.
            self.guard(lambda: then("stop" if reason == "cancelled" else reason))

    def guard(self, action: Callable[[], None]) -> None:
        """Whatever goes wrong while a Turn is taken further ends that Turn, and no other."""
        try:
            action()
        except Exception as error:
            self.finish("error", error)

    # ------------------------------------------------------------ what the listener gets

    def send_late(self, event: Event) -> None:
        """When what follows from the same result has been launched: whoever takes an event further, on a thread of their own, wants
        the interpreter's lock just then, and both would take longer. In order with the others. Until then it takes a millisecond, and
        several where other stages have something to launch as well, so it is not for what is waited for."""
        if self._after is None:
            self.send(event)
            return
        self._late.append(event)
        if len(self._late) == 1:
            self._after(self._send_late)

    def _send_late(self) -> None:
        while self._late:
            self._send(self._late.popleft())

    def send(self, event: Event) -> None:
        self._send_late()
        if not self._ended:  # with a listener who failed at an earlier one
            self._send(event)

    def _send(self, event: Event) -> None:
        try:
            self._sink(event)
        except Exception:
            # Whoever listened is gone or broken: the turn serves nobody, and the engine must not fall with it.
            log.exception("the listener to a turn failed")
            self._late.clear()
            self.finish("cancelled")

    def count(self, **more: int) -> None:
        """Add to fields of the usage."""
        for name, count in more.items():
            self._counts[name] += count

    def finish(self, reason: Reason, error: Exception | None = None) -> None:
        """Know the outcome; abort what still lives; end when nothing does. Only the first call counts."""
        if self._outcome is not None:
            return
        if error is not None and not isinstance(error, AuraError):
            log.error("a turn failed", exc_info=error)
            error = EngineError(f"the turn failed inside the server: {type(error).__name__}")
        self._outcome = (reason, error)
        for abort in list(self._live.values()):
            abort()
        self._settle()

    def _settle(self) -> None:
        if self._live or self._ended or self._outcome is None:
            return
        self._ended = True
        reason, error = self._outcome
        self._send_late()
        self._send(Ended(reason, Usage(**self._counts), error, self.speech_reason, self.speech_stopped))
