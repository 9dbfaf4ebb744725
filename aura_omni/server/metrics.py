"""GET /metrics for Prometheus, and what is counted for it.

Names and labels are vLLM's where it has such a number, under the prefix `aura_omni:`. No label says who asked. Turns are
counted around the pipeline (`Metered`), requests around the application (`Counted`), and what the engine counts anyway
is read when somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aura_omni.flow import VOICE_RATE, AudioChunk, Ended, Event, TextDelta, TurnRequest
from aura_omni.server.around import Around
from aura_omni.server.turns import Pipeline, Turn

_PREFIX = "aura_omni:"
_SECONDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 1.5, 2, 3, 5, 8, 15, 30, 60, 120, 300, 600)
_LEFT = "499"  # the client was gone before it had an answer, as nginx writes it


class Metrics:
    """One for each application: nothing is kept in the process-wide registry."""

    def __init__(self, pipeline: Pipeline) -> None:
        registry = self.registry = CollectorRegistry()
        registry.register(_Stages(pipeline))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(_PREFIX + name, text, labels, buckets=_SECONDS, registry=registry)

        self.http_requests = counter("http_requests", "Answered requests", "endpoint", "code")
        self.failures = counter("request_failures", "Requests that ended with an error, also in a stream", "reason")
        self.turns = counter(
            "turns", "Ended turns: stop, length, loop, silence, short, silent, cancelled, error", "part", "outcome"
        )
        self.first_text = seconds("time_to_first_token_seconds", "From a turn's start to its first text", "part")
        self.first_audio = seconds("time_to_first_audio_seconds", "From a turn's start to its first audio", "part")
        self.latency = seconds("e2e_request_latency_seconds", "From a turn's start to its end", "part")
        self.audio_s = counter("audio_seconds", "Seconds of speech made")


class Metered(Around):
    """A pipeline whose turns are counted. On the engine thread this costs a few microseconds an event."""

    def __init__(self, inner: Pipeline, metrics: Metrics) -> None:
        super().__init__(inner)
        self._metrics = metrics

    def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> Turn:
        return super().submit(request, _Watched(request, sink, self._metrics))


class _Watched:
    """The sink of one turn, with a clock."""

    def __init__(self, request: TurnRequest, sink: Callable[[Event], None], metrics: Metrics) -> None:
        self._part, self._sink, self._metrics = request.part, sink, metrics
        self._began_s = time.perf_counter()
        self._wrote = self._spoke = False

    def __call__(self, event: Event) -> None:
        passed_s = time.perf_counter() - self._began_s
        match event:
            case TextDelta() if not self._wrote:
                self._wrote = True
                self._metrics.first_text.labels(self._part).observe(passed_s)
            case AudioChunk():
                if not self._spoke:
                    self._spoke = True
                    self._metrics.first_audio.labels(self._part).observe(passed_s)
                self._metrics.audio_s.inc(len(event.samples) / VOICE_RATE)
            case Ended():
                self._metrics.turns.labels(self._part, _outcome(event)).inc()
                self._metrics.latency.labels(self._part).observe(passed_s)
        self._sink(event)


def _outcome(ended: Ended) -> str:
    """How the text ended or, where that is well, the speech; speech without a word in it is no fault."""
    cut = ended.reason == "stop" and ended.speech_reason not in (None, "empty")
    return str(ended.speech_reason if cut else ended.reason)


class Counted:
    """Counts every request by its route and status, and by what it failed with."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        code = _LEFT

        async def counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, counted)
        finally:
            route = scope.get("route")
            self._metrics.http_requests.labels(route.path if route is not None else "other", code).inc()
            if "failed_with" in state:
                self._metrics.failures.labels(state["failed_with"]).inc()


class _Stages(Collector):
    """What the engine counts, read when it is asked for."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily(f"{_PREFIX}ready", "1: every stage has done one inference and the engine runs")
        ready.add_metric([], float(self._pipeline.ready))
        yield ready
        counters = self._pipeline.counters
        for name, text, of in (
            ("num_requests_running", "Sequences in the stage's steps", lambda stage: stage.running),
            ("num_requests_waiting", "Sequences that wait for a seat", lambda stage: stage.waiting),
            ("kv_pages", "Pages of the KV cache", lambda stage: stage.pages),
            ("kv_pages_used", "Pages that sequences hold", lambda stage: stage.pages_used),
            ("kv_cache_usage_perc", "Used share of the pages, from 0 to 1", lambda stage: stage.pages_used / max(stage.pages, 1)),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["stage"])
            for stage, found in counters.items():
                gauge.add_metric([stage], of(found))
            yield gauge
        for name, text, of in (
            ("prompt_tokens", "Tokens in: of prompts; frames for code2wav", lambda stage: stage.prompt_tokens),
            ("generation_tokens", "Tokens out; frames for the talker and code2wav", lambda stage: stage.generated_tokens),
            ("prefix_cache_queries", "Prompt tokens that were looked up", lambda stage: stage.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens that were found", lambda stage: stage.cached_rows),
            ("num_preemptions", "Sequences that gave their pages back and waited again", lambda stage: stage.preemptions),
            ("engine_steps", "Steps of the stage", lambda stage: stage.steps),
            ("engine_step_rows", "Rows of all steps; frames for code2wav", lambda stage: stage.computed_rows),
            ("engine_step_seconds", "Time in which a step was under way, from its launch until its end was found; not that of kernels", lambda stage: stage.step_s),
        ):  # fmt: skip
            counter = CounterMetricFamily(_PREFIX + name, text, labels=["stage"])
            for stage, found in counters.items():
                counter.add_metric([stage], of(found))
            yield counter


def metrics_router(metrics: Metrics) -> APIRouter:
    routes = APIRouter()

    @routes.get("/metrics")
    def exposed() -> Response:
        """In Prometheus' text format."""
        return Response(generate_latest(metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    return routes
