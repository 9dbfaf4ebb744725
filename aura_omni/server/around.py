"""A pipeline around another: everything as the inner one has it, but what a subclass changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aura_omni.counters import Counters
from aura_omni.flow import Event, StageName, StagePhase, TurnRequest, VoiceTask
from aura_omni.server.turns import Pipeline, Turn


class Around:
    """A `turns.Pipeline`."""

    def __init__(self, inner: Pipeline) -> None:
        self._inner = inner

    @property
    def ready(self) -> bool:
        return self._inner.ready

    @property
    def reason(self) -> str:
        return self._inner.reason

    @property
    def progress(self) -> Mapping[StageName, StagePhase]:
        return self._inner.progress

    @property
    def counters(self) -> Mapping[StageName, Counters]:
        return self._inner.counters

    @property
    def served_names(self) -> tuple[str, ...]:
        return self._inner.served_names

    @property
    def stages(self) -> tuple[StageName, ...]:
        return self._inner.stages

    @property
    def speakers(self) -> tuple[str, ...]:
        return self._inner.speakers

    @property
    def voice_task(self) -> VoiceTask | None:
        return self._inner.voice_task

    def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> Turn:
        return self._inner.submit(request, sink)

    def close(self) -> None:
        self._inner.close()
