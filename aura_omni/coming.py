"""Turns that wait for their pictures.

    wait = pictures.wait(on_end)
    pictures.came(wait)              # on_end("stop", None)
    pictures.abort(wait)             # on_end("cancelled", None)

Such a turn may have nothing else in progress. The engine knows this as a bystander: what waits when it stops ends as everything
else does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aura_omni.engine.sequence import FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """One turn's."""

    on_end: Callable[[FinishReason, Exception | None], None]


class Pictures:
    """An `engine.engine.Bystander`. Everything but `waiting` is called on the engine thread."""

    def __init__(self) -> None:
        self._waits: dict[Wait, None] = {}

    def wait(self, on_end: Callable[[FinishReason, Exception | None], None]) -> Wait:
        """on_end is called exactly once, later, with "stop", "cancelled" or "error" (and then the error)."""
        wait = Wait(on_end)
        self._waits[wait] = None
        return wait

    def came(self, wait: Wait) -> None:
        """Nothing happens if the wait is over."""
        self._end(wait, "stop")

    def abort(self, wait: Wait) -> None:
        """Nothing happens if the wait is over."""
        self._end(wait, "cancelled")

    def _end(self, wait: Wait, reason: FinishReason, error: Exception | None = None) -> None:
        if wait in self._waits:
            del self._waits[wait]
            wait.on_end(reason, error)

    @property
    def waiting(self) -> int:
        """How many wait; from any thread."""
        return len(self._waits)

    # ------------------------------------------------------------ Bystander

    def abort_all(self, error: Exception) -> None:
        for wait in list(self._waits):  # one's end may abort another's
            self._end(wait, "error", error)

    def check_integrity(self) -> None:
        """There is nothing to lose: a turn that ends ends its wait."""
