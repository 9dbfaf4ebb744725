"""AURA reads what turns to come will begin with, while it has nothing else to do.

    reading = pipeline.prepare(messages, due_s=time.monotonic() + 5)      # any thread
    reading.wait()
    reading.cancel()                                                      # any thread, any time

A live session that cuts its history makes everything behind the cut new to AURA: thousands of rows, which the next turn would
have to wait for. But what will be left is known rounds before.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress

from aura_omni.engine.engine import Engine
from aura_omni.engine.runner import ArRunner
from aura_omni.engine.sequence import FinishReason, Sequence
from aura_omni.errors import AuraError, Unavailable
from aura_omni.stages.aura import AuraStage
from aura_omni.stages.aura_prompt import AuraPrompt


class Reading:
    """Goes behind everything that somebody waits for. Where no seat is free, or there are not enough pages, it ends unread: it
    only ever saves time. What it has read stays for as long as the prefix cache has room, longer the later it was last asked for.
    """

    def __init__(self, prompt: AuraPrompt, *, due_s: float, engine: Engine, stage: AuraStage, runner: ArRunner) -> None:
        self._engine, self._runner = engine, runner
        self._read: Future[bool] = Future()
        self._sequence: Sequence = stage.reading(prompt, due_s=due_s, on_end=self._ended)

    @property
    def over(self) -> bool:
        return self._read.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it has ended: whether it was read, as far as that is worth a step (`runner.LEAST_ONLY_READ`). Raises TimeoutError, or what it failed of."""
        return self._read.result(timeout_s)

    def cancel(self) -> None:
        """What is read by now stays read. Idempotent."""
        with suppress(Unavailable):  # then the engine has ended it already
            self._engine.post(lambda: self._runner.abort(self._sequence))

    def begin(self) -> None:
        """Engine thread."""
        if not self._runner.spare:
            self._read.set_result(False)
            return
        try:
            self._runner.add(self._sequence)
        except AuraError as error:
            self._read.set_exception(error)

    def _ended(self, reason: FinishReason, error: Exception | None) -> None:
        if error is None:
            self._read.set_result(reason == "stop")
        else:
            self._read.set_exception(error)
