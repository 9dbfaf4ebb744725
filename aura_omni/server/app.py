"""The HTTP application, and the process around it.

    app = create_app(ServerConfig(api_keys=("secret",)), pipeline)     # any object that is a turns.Pipeline
    run(ServerConfig(port=8091), load)                                 # listens at once, serves when load() is done

Knows endpoints and lifetimes. What an answer looks like is in chat.py, completion.py and stream.py.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI

from aura_omni import __version__
from aura_omni.config.config import DEFAULT_HOST, DEFAULT_MAX_BODY_BYTES, DEFAULT_PARTS, DEFAULT_PORT
from aura_omni.errors import ConfigError, ModelNotFound, Unavailable
from aura_omni.media.fetch import MediaPolicy
from aura_omni.server import chat, errors
from aura_omni.server.loading import LoadingPipeline
from aura_omni.server.middleware import ApiKeys, BodyLimit, RequestId
from aura_omni.server.parts import MediaReader
from aura_omni.server.turns import Pipeline

GRACE_S = 5  # how long answers in flight may finish after the signal to stop


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """host, port    where to listen; port 0 takes any free one
    api_keys         one of them must be sent as "Authorization: Bearer KEY"; none: the server is open
    max_body_bytes   limit of one request body; base64 makes media a third larger than media.max_bytes counts
    media            which URLs may be fetched and how large media may be
    media_limits     most "audio", "image" and "video" parts in one request; a kind that is not named has no limit
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    media: MediaPolicy = field(default_factory=MediaPolicy)
    media_limits: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_PARTS))


def create_app(config: ServerConfig, pipeline: Pipeline) -> FastAPI:
    """The application. It owns the pipeline: when it stops, it closes it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(pipeline.close)

    app = FastAPI(title="aura-omni", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    errors.install(app)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    if config.api_keys:
        app.add_middleware(ApiKeys, keys=config.api_keys)
    app.add_middleware(RequestId)  # added last, so outermost
    app.include_router(chat.router(pipeline, MediaReader(config.media, config.media_limits)))
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

    @app.get("/health")
    async def health() -> dict[str, str]:
        check_ready()
        return {"status": "healthy"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        check_ready()
        return {"object": "list", "data": [model(name) for name in pipeline.served_names]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        check_ready()
        if name not in pipeline.served_names:
            raise ModelNotFound(f"no model {name[:100]!r}; this server has {', '.join(pipeline.served_names)}")
        return model(name)


def run(config: ServerConfig, load: Callable[[], Pipeline]) -> None:
    """Serve until SIGINT or SIGTERM.

    The port opens at once and answers 503 while load() runs in a thread; then one line with URL and names is printed.
    Raises what load() raises, after the port is closed, and ConfigError when the port is taken.
    """
    with _listen(config.host, config.port) as listener:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

        def loaded() -> None:
            if pipeline.failure is not None:
                server.should_exit = True
            else:
                print(f"aura-omni: {url} serves {', '.join(pipeline.served_names)}", flush=True)

        pipeline = LoadingPipeline(load, loaded)
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(config, pipeline),
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        pipeline.start()
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    if pipeline.failure is not None:
        raise pipeline.failure


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from None
