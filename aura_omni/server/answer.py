"""From a turn to the bytes of one HTTP answer: whole, or as it comes. Every endpoint that runs a turn ends here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from aura_omni.errors import AuraError, ModelNotFound
from aura_omni.flow import Ended, Event, TurnRequest
from aura_omni.heard import Heard, failure
from aura_omni.server.deadline import LAST_WORDS_S, deadline
from aura_omni.server.errors import log_failure
from aura_omni.server.turns import Pictures, Pipeline, opened, unless_gone

EVENT_STREAM: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # reverse proxies would collect the stream
}


class WhileConnected(Response):
    """A response that is made while it is sent, and dropped the moment the client goes away or its time is over."""

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        async def work() -> None:
            await self._work(sending)

        limit = deadline()
        try:
            # A turn ends by itself at the limit; this is for media that take longer, and clients that do not read.
            async with asyncio.timeout_at(limit.at_s + LAST_WORDS_S):
                await unless_gone(receive, work())
        except TimeoutError:
            if not begun:
                raise limit.passed() from None
            log_failure(scope, limit.passed())  # the answer has no end, and the closed connection says so


def served_model(given: str | None, pipeline: Pipeline) -> str:
    """The name under which a request is answered. Raises ModelNotFound."""
    model = given or pipeline.served_names[0]
    if model not in pipeline.served_names:
        raise ModelNotFound(
            f"no model {model[:100]!r}; this server has {', '.join(pipeline.served_names)}", param="model"
        )
    return model


async def whole_turn(
    pipeline: Pipeline, request: TurnRequest, *, pictures: Pictures | None = None
) -> tuple[Heard, Ended]:
    """All that a turn says; pictures as `opened` has them. Raises what it failed with."""
    async with opened(pipeline, request, pictures) as events:
        return await whole_events(events)


async def whole_events(events: AsyncIterator[Event]) -> tuple[Heard, Ended]:
    heard = Heard()
    async for event in events:
        heard.add(event)
    ended = heard.ended
    assert ended is not None, "every turn ends with Ended"
    error = failure(ended)
    if error is not None:
        raise error
    return heard, ended


async def send_whole(response: Response, send: Send) -> None:
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


async def stream_turn(
    pipeline: Pipeline,
    request: TurnRequest,
    send: Send,
    *,
    pictures: Pictures | None = None,
    headers: Mapping[str, str],
    pieces: Callable[[Event], Iterable[bytes]],
    last_words: Callable[[AuraError], bytes] | None,
    costly: bool = False,
) -> AuraError | None:
    """Send the pieces that each event makes; returns the error that the stream ended with, if it has begun.

    Headers leave with the first piece, so a turn that fails before it has something to say gets a real status: that is raised.
    pictures: as `opened` has them.
    last_words: what a stream that fails later ends with. None: nothing can be said in it, so it is left without an end, and
    the closed connection tells the client that it is not whole.
    costly: making pieces takes a while, so they are made beside the event loop.
    """
    async with opened(pipeline, request, pictures) as events:
        return await stream_events(events, send, headers=headers, pieces=pieces, last_words=last_words, costly=costly)


async def stream_events(
    events: AsyncIterator[Event],
    send: Send,
    *,
    headers: Mapping[str, str],
    pieces: Callable[[Event], Iterable[bytes]],
    last_words: Callable[[AuraError], bytes] | None,
    costly: bool = False,
) -> AuraError | None:
    """`stream_turn` for events that come from anywhere, Ended last."""
    begun = False
    error: AuraError | None = None
    async for event in events:
        error = failure(event) if isinstance(event, Ended) else None
        said: Iterable[bytes] = ()
        if error is None:
            try:
                said = await asyncio.to_thread(_made, pieces, event) if costly else _made(pieces, event)
            except AuraError as unspeakable:  # what a stage made cannot be encoded
                error = unspeakable
        if error is not None:
            if not begun:
                raise error
            if last_words is None:
                return error
            said = (last_words(error),)
        for piece in said:
            if not begun:
                raw = [(name.encode(), value.encode()) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": raw})
                begun = True
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if error is not None:
            break
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return error


def _made(pieces: Callable[[Event], Iterable[bytes]], event: Event) -> list[bytes]:
    return list(pieces(event))
