"""A pipeline that is still loading: it answers "not yet", so that the port can be open meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from aura_omni.counters import Counters
from aura_omni.errors import AuraError, Unavailable
from aura_omni.flow import Event, Report, StageName, StagePhase, TurnRequest, VoiceTask
from aura_omni.server.turns import Pipeline, Turn


class LoadingPipeline:
    """Runs load() in a thread and then stands for its result. on_loaded is called in that thread, also on failure."""

    def __init__(self, load: Callable[[Report], Pipeline], on_loaded: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self._load = load
        self._on_loaded = on_loaded
        self._lock = threading.Lock()
        self._loaded: Pipeline | None = None
        self._phases: dict[StageName, StagePhase] = {}
        self._closed = False
        # Loading cannot be interrupted; as a daemon it does not keep a process that was told to stop
        self._thread = threading.Thread(target=self._run, name="loading", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            pipeline = self._load(self._report)
        except BaseException as error:  # whatever it is, it is raised again where the server was started
            self.failure = error
        else:
            with self._lock:
                self._loaded = pipeline
                closed = self._closed
            if closed:
                pipeline.close()
                return
        self._on_loaded()

    def _report(self, name: StageName, phase: StagePhase) -> None:
        self._phases[name] = phase

    @property
    def ready(self) -> bool:
        return self._loaded is not None and self._loaded.ready

    @property
    def reason(self) -> str:
        if self._loaded is not None:
            return self._loaded.reason
        if isinstance(self.failure, AuraError):
            return f"starting failed: {self.failure.message}"
        done = sum(phase == "ready" for phase in self.progress.values())
        stages = f", {done} of {len(self.progress)} stages are ready" if self.progress else ""
        return f"the server is loading its checkpoints{stages}; ask again in a moment"

    @property
    def progress(self) -> Mapping[StageName, StagePhase]:
        return self._loaded.progress if self._loaded is not None else self._phases.copy()

    @property
    def counters(self) -> Mapping[StageName, Counters]:
        return self._loaded.counters if self._loaded is not None else {}

    @property
    def served_names(self) -> tuple[str, ...]:
        return self._loaded.served_names if self._loaded is not None else ()

    @property
    def stages(self) -> tuple[StageName, ...]:
        return self._loaded.stages if self._loaded is not None else ()

    @property
    def speakers(self) -> tuple[str, ...]:
        return self._loaded.speakers if self._loaded is not None else ()

    @property
    def voice_task(self) -> VoiceTask | None:
        return self._loaded.voice_task if self._loaded is not None else None

    def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> Turn:
        if self._loaded is None:
            raise Unavailable(self.reason)
        return self._loaded.submit(request, sink)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            loaded = self._loaded
        if loaded is not None:
            loaded.close()
