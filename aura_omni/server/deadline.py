"""How long the server works on one request: its own limit, or less where the request says so.

    app.add_middleware(Deadlines, longest_s=600.0)      # reads x-request-timeout
    deadline().at_s                                     # anywhere below: when the time of this request is over

The time counts from the request's arrival, so it also runs while its body comes: one that is not there by then is
UploadTimedOut, 408, before any work. Later what ends then says TimedOut, 504, and frees every stage.
"""

from __future__ import annotations

import asyncio
import math
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aura_omni.errors import BadRequest, TimedOut, UploadTimedOut, shown
from aura_omni.server.errors import refuse

HEADER = "x-request-timeout"
LEAST_S = 0.1
LAST_WORDS_S = 1.0  # for a stream to say that its time is over


@dataclass(frozen=True, slots=True)
class Deadline:
    """at_s: on the event loop's clock; asked: the request set it, not the server."""

    at_s: float
    seconds: float
    asked: bool

    def passed(self) -> TimedOut:
        """The error of a request that is not done by then."""
        if self.asked:
            return TimedOut(
                f"no whole answer within {self.seconds:g} s, as {HEADER} asked; allow more, or ask for less"
            )
        return TimedOut(
            f"no whole answer within {self.seconds:g} s, the limit of this server; ask for less, or raise "
            "--request-timeout"
        )

    def not_here(self) -> UploadTimedOut:
        """The error of a request whose body is not there by then."""
        whose = f"as {HEADER} asked" if self.asked else "the limit of this server (--request-timeout)"
        return UploadTimedOut(
            f"the body of the request was not there within {self.seconds:g} s, {whose}; send it faster, or send less"
        )


_NEVER = Deadline(math.inf, math.inf, asked=False)
_current: ContextVar[Deadline] = ContextVar("deadline", default=_NEVER)


def deadline() -> Deadline:
    """Of the request that runs here."""
    return _current.get()


class Deadlines:
    def __init__(self, app: ASGIApp, *, longest_s: float) -> None:
        self.app = app
        self._longest_s = longest_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            seconds, asked = self._seconds(Headers(scope=scope).get(HEADER))
        except BadRequest as error:
            await refuse(error, scope, receive, send)
            return
        limit = Deadline(asyncio.get_running_loop().time() + seconds, seconds, asked)
        whole = False

        async def in_time() -> Message:
            nonlocal whole
            if whole:  # what comes now is the end of the connection, and it may take as long as the answer
                return await receive()
            try:
                async with asyncio.timeout_at(limit.at_s):
                    message = await receive()
            except TimeoutError:
                raise limit.not_here() from None
            whole = not message.get("more_body", False)
            return message

        token = _current.set(limit)
        try:
            await self.app(scope, in_time, send)
        finally:
            _current.reset(token)

    def _seconds(self, given: str | None) -> tuple[float, bool]:
        if given is None:
            return self._longest_s, False
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not seconds >= LEAST_S:
            raise BadRequest(f"{HEADER} is {shown(given)}; it must be seconds, at least {LEAST_S:g}", param=HEADER)
        return (seconds, True) if seconds < self._longest_s else (self._longest_s, False)
