"""The HTTP application, and the process around it.

    app = create_app(ServerConfig(api_keys=("secret",)), pipeline)     # any object that is a turns.Pipeline
    run(ServerConfig(port=8091), load)                                 # listens at once, serves when load() is done

Knows endpoints and lifetimes. What an answer looks like is in chat.py (completion.py, stream.py), speech.py and
transcriptions.py.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.responses import HTMLResponse, JSONResponse

from aura_omni import __version__
from aura_omni.config.config import (
    DEFAULT_HOST,
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_PARTS,
    DEFAULT_PORT,
    DEFAULT_REQUEST_TIMEOUT_S,
    LOCAL_ORIGINS,
)
from aura_omni.errors import ConfigError, ModelNotFound, Unavailable, shown
from aura_omni.flow import Report
from aura_omni.interpreter import settled, shared_fairly
from aura_omni.media.fetch import MediaPolicy
from aura_omni.server import chat, errors, speech, transcriptions, voices
from aura_omni.server.connection import Connection
from aura_omni.server.cors import Cors, ForeignPages, Origins
from aura_omni.server.deadline import Deadlines
from aura_omni.server.docs_page import HEADERS, page
from aura_omni.server.early import EarlyAnswers
from aura_omni.server.errors import error_response
from aura_omni.server.loading import LoadingPipeline
from aura_omni.server.metrics import Counted, Metered, Metrics, metrics_router
from aura_omni.server.middleware import ApiKeys, BodyLimit, Outermost
from aura_omni.server.openapi import document
from aura_omni.server.parts import MediaReader
from aura_omni.server.turns import Pipeline
from aura_omni.server.voice_store import VoiceStore
from aura_omni.server.voices import Voiced

GRACE_S = 5.0  # how long answers in flight may finish after the signal to stop
_LAST_WORD_S = 2.0  # for telling the clients of the others, after the pipeline has ended their turns


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """host, port    where to listen; port 0 takes any free one
    api_keys         one of them must be sent as "Authorization: Bearer KEY"; none: the server is open
    max_body_bytes   limit of one request body; base64 makes media a third larger than media.max_bytes counts
    voices_dir       where uploaded voices are kept; None: none are taken
    media            which URLs may be fetched and how large media may be
    origins          web pages that may call, see cors.py
    timeout_s        longest work on one request; a request may ask for less
    media_limits     most "audio", "image" and "video" parts in one request; a kind that is not named has no limit
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    origins: tuple[str, ...] = LOCAL_ORIGINS
    timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S
    voices_dir: Path | None = None
    media: MediaPolicy = field(default_factory=MediaPolicy)
    media_limits: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_PARTS))


def create_app(config: ServerConfig, pipeline: Pipeline) -> FastAPI:
    """The application. It owns the pipeline: when it stops, it closes it. Raises ConfigError for a voices_dir of no use."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(pipeline.close)

    metrics = Metrics(pipeline)
    pipeline = Metered(pipeline, metrics)
    store = None if config.voices_dir is None else VoiceStore(config.voices_dir)
    if store is not None:
        pipeline = Voiced(pipeline, store)
    app = FastAPI(title="aura-omni", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.openapi = cache(lambda: document(app))  # type: ignore[method-assign]
    errors.install(app)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(Deadlines, longest_s=config.timeout_s)
    origins = Origins(config.origins)
    if config.api_keys:
        app.add_middleware(ApiKeys, keys=config.api_keys)
    else:
        app.add_middleware(ForeignPages, origins=origins)
    app.add_middleware(Outermost)
    app.add_middleware(Counted, metrics=metrics)
    app.add_middleware(Cors, origins=origins)
    app.add_middleware(EarlyAnswers)  # added last, so around the others
    media = MediaReader(config.media, config.media_limits)
    for part in (chat, speech, transcriptions):
        app.include_router(part.router(pipeline, media))
    app.include_router(voices.router(pipeline, store))
    app.include_router(metrics_router(metrics))
    _add_state(app, pipeline)
    return app


def _add_state(app: FastAPI, pipeline: Pipeline) -> None:
    """What the server says about itself."""
    created = int(time.time())

    def model(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "aura-omni"}

    def check_ready() -> None:
        if not pipeline.ready:
            raise Unavailable(pipeline.reason)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()), headers=HEADERS)

    @app.head("/live", include_in_schema=False)
    @app.get("/live")
    async def live() -> dict[str, str]:
        return {"status": "alive"}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> JSONResponse:
        stages = dict(pipeline.progress)
        if pipeline.ready:
            return JSONResponse({"status": "ready", "stages": stages})
        answer = Unavailable(pipeline.reason)
        more = {"status": "loading" if not stages or "failed" not in stages.values() else "failed", "stages": stages}
        return error_response(answer, more)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        check_ready()
        return {"status": "healthy"}

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        check_ready()
        return {"object": "list", "data": [model(name) for name in pipeline.served_names]}

    @app.head("/v1/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        check_ready()
        if name not in pipeline.served_names:
            raise ModelNotFound(f"no model {name[:100]!r}; this server has {', '.join(pipeline.served_names)}")
        return model(name)


class _Server(uvicorn.Server):
    """Stops in three steps: no new connections; answers finish within the grace; the others are told that it stops."""

    def __init__(self, app: FastAPI, pipeline: Pipeline, *, grace_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=ceil(grace_s + _LAST_WORD_S),
            )
        )
        self._pipeline = pipeline
        self._grace_s = grace_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's raises them again after the end, and the exit status would say that the process was killed."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_turns())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_turns(self) -> None:
        await asyncio.sleep(self._grace_s)
        await asyncio.to_thread(self._pipeline.close)


def run(config: ServerConfig, load: Callable[[Report], Pipeline], *, grace_s: float = GRACE_S) -> None:
    """Serve until SIGINT or SIGTERM, and return.

    The port opens at once and answers 503 while load(report) runs in a thread; then one line with URL and names is printed.
    After the signal answers may finish for grace_s; turns that take longer end as unavailable. Raises what load() raises, after the port is closed, and ConfigError when the port is taken.
    """
    with _listen(config.host, config.port) as listener, shared_fairly():
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

        def load_and_settle(report: Report) -> Pipeline:
            found = load(report)
            settled()  # here, as the first request would have to wait for it
            return found

        def loaded() -> None:
            if pipeline.failure is not None:
                server.should_exit = True
            else:
                print(f"aura-omni: {url} serves {', '.join(pipeline.served_names)}", flush=True)

        pipeline = LoadingPipeline(load_and_settle, loaded)
        server = _Server(create_app(config, pipeline), pipeline, grace_s=grace_s)
        pipeline.start()
        server.run(sockets=[listener])
    if pipeline.failure is not None:
        raise pipeline.failure


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        flag = "--port" if number in (errno.EADDRINUSE, errno.EACCES) else "--host"
        reason = (error.strerror if isinstance(error, OSError) else None) or "no such host name"
        raise ConfigError(f"cannot listen on {shown(host)} port {port}: {reason}; choose another {flag}") from None
