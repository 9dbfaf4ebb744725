"""Every failure leaves in one shape: {"error": {message, type, param, code}}, short and without the caller's payload."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from aura_omni.errors import (
    AuraError,
    BadRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    TimedOut,
    Unauthorized,
    Unavailable,
    UnsupportedOption,
    UploadTimedOut,
    nearest,
    shown,
)

_LOG = logging.getLogger(__name__)
MESSAGE_LENGTH = 500  # characters; a message may quote a value, never a payload
_BEFORE_CUT = 200  # of a longer one; its end has the limit and the way out
_RETRY_AFTER_S = {Unavailable: 5, Overloaded: 1}


def error_body(error: AuraError) -> dict[str, Any]:
    message = error.message
    if len(message) > MESSAGE_LENGTH:
        message = f"{message[:_BEFORE_CUT]}...{message[_BEFORE_CUT + 3 - MESSAGE_LENGTH :]}"
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: AuraError, more: Mapping[str, Any] | None = None) -> JSONResponse:
    """more: fields beside `error`."""
    headers = {}
    for kind, seconds in _RETRY_AFTER_S.items():
        if isinstance(error, kind):
            headers["retry-after"] = str(seconds)
    if isinstance(error, TimedOut | UploadTimedOut):
        headers["x-should-retry"] = "false"  # official clients would do all that again, under the same limit
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({**error_body(error), **(more or {})}, status_code=error.status, headers=headers)


def error_line(error: AuraError) -> bytes:
    """The last line of an event stream that failed; no [DONE] follows it."""
    return b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"


def error_event(error: AuraError) -> bytes:
    """The same for streams whose events have a type."""
    return b"data: " + json.dumps({"type": "error", **error_body(error)}).encode() + b"\n\n"


def bad_request(invalid: ValidationError) -> BadRequest:
    """The first problem of a body, with the path to it."""
    problems = invalid.errors(include_url=False)
    problem = problems[0]
    path = _path(problem["loc"])
    # An object where a text or an object may be: what is wrong with it as an object
    if isinstance(problem["input"], dict):
        inside = re.compile(re.escape(path) + r"($|[.\[])")
        problem = next((other for other in problems[1:] if inside.match(_path(other["loc"]))), problem)
        path = _path(problem["loc"])
    context = problem.get("ctx", {})
    if problem["type"] in ("unknown_field", "unsupported_option"):
        path = f"{path}.{context['field']}" if path else str(context["field"])
        kind = UnsupportedOption if problem["type"] == "unsupported_option" else BadRequest
        return kind(problem["msg"], param=path)
    if problem["type"] == "missing":
        return BadRequest(f"{path} is required", param=path)
    if problem["type"] == "union_tag_invalid":
        return BadRequest(
            f"{path}.type is {shown(context['tag'])}; it must be one of {context['expected_tags']}", param=path
        )
    if problem["type"] == "union_tag_not_found":
        return BadRequest(f"{path}.type is required: what kind of content part is this?", param=path)
    # Of a field that may be several things each is a problem of its own
    wanted = dict.fromkeys(_wanted(other) for other in problems if _path(other["loc"]) == path)
    if path.rpartition(".")[2] in SHORT_FORMS:
        wanted = {"a string": None, **wanted}
    return BadRequest(
        f"{path or 'the body'} is {shown(problem['input'])}; it must be {' or '.join(wanted)}", param=path or None
    )


# Fields whose values may also be a plain text, which has become the long form before anything else is checked
SHORT_FORMS = frozenset({"content", "audio_url", "input_audio", "video_url", "image_url"})


_WANTED: Mapping[str, str] = {
    "string_type": "a string", "bool_type": "true or false", "int_type": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "finite_number": "a number", "list_type": "a list", "dict_type": "an object",
    "model_type": "an object", "model_attributes_type": "an object",
    "too_short": "a list of at least {min_length}", "literal_error": "{expected}", "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}  # fmt: skip


def _wanted(problem: ErrorDetails) -> str:
    """What a value must be, in our words; the rest of the sentence is before it."""
    words = _WANTED.get(problem["type"])
    limits = {
        name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in problem.get("ctx", {}).items()
    }
    return problem["msg"] if words is None else words.format(**limits)


_UNION = re.compile(
    r"str|list\[.*\]|[A-Z]\w*"
)  # members of unions, as the validator names them; our fields are in lower case


def _path(location: Sequence[int | str]) -> str:
    """('messages', 0, 'content', 1, 'audio_url', 'audio_url', 'url') -> messages[0].content[1].audio_url.url"""
    path = ""
    for index, step in enumerate(location):
        if isinstance(step, int):
            path += f"[{step}]"
        elif index >= 2 and location[index - 2] == "content" and isinstance(location[index - 1], int):
            continue  # which member of the union of content parts was tried, not a field of the body
        elif _UNION.fullmatch(step):
            continue
        else:
            path += f".{step}" if path else step
    return path


def log_failure(scope: Scope, error: AuraError) -> None:
    """Once for each request that fails. Only what fails on the server's side is logged: what the client did wrong is its own
    business; metrics count both."""
    scope["state"]["failed_with"] = error.code
    if error.status < 500:
        return
    level = logging.ERROR
    if isinstance(
        error, Unavailable
    ):  # who asks whether the server is ready asks often, and "not yet" is a good answer
        level = logging.WARNING if scope["method"] == "POST" else logging.DEBUG
    cause = f" ({error.__cause__!r})" if error.__cause__ is not None else ""
    where = f"{scope['method']} {scope['path']}"
    _LOG.log(level, "%s %s: %d %s: %s%s", request_id(scope), where, error.status, error.code, error.message, cause)


async def refuse(error: AuraError, scope: Scope, receive: Receive, send: Send) -> None:
    """The answer to a request that fails outside of the application."""
    log_failure(scope, error)
    await error_response(error)(scope, receive, send)


def request_id(scope: Scope) -> str:
    """As middleware.Outermost decided it."""
    return str(scope["state"]["request_id"])


def install(app: FastAPI) -> None:
    """Answer what the app raises in the shape above; bugs are answered around it, by middleware.Outermost."""

    async def from_aura(request: Request, error: Exception) -> Response:
        assert isinstance(error, AuraError)
        log_failure(request.scope, error)
        return error_response(error)

    async def from_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        answer = in_our_words(request, error)
        log_failure(request.scope, answer)
        response = error_response(answer)
        response.headers.update(error.headers or {})
        if isinstance(answer, MethodNotAllowed):
            response.headers["allow"] = ", ".join(methods(request.url.path))
        return response

    def methods(path: str) -> list[str]:
        paths: dict[str, dict[str, Any]] = app.openapi()["paths"]
        here = [item for of, item in paths.items() if re.fullmatch(re.sub(r"{\w+}", ".+", of), path)]
        return sorted({method.upper() for item in here for method in item})

    def in_our_words(request: Request, error: HTTPException) -> AuraError:
        path = request.url.path
        if error.status_code == 404:
            near = nearest(path, app.openapi()["paths"])
            hint = f"; did you mean {near}?" if near else "."
            return NotFound(f"there is no {shown(path)}{hint} GET /docs describes what there is")
        if error.status_code == 405:
            # The router names those of one of the endpoints of a path
            return MethodNotAllowed(
                f"{shown(path)} takes {', '.join(methods(path))}, not {request.method[:20]}; GET /docs describes what there is"
            )
        return BadRequest(str(error.detail))

    app.add_exception_handler(AuraError, from_aura)
    app.add_exception_handler(HTTPException, from_http)
