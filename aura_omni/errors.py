"""Everything that can go wrong, each with its HTTP status and API code.

AuraError                     500  internal_error
├── BadRequest                400  invalid_request        the body, an option or a medium is wrong
│   ├── UnsupportedOption     400  unsupported_option     a known field we do not serve, refused by name
│   ├── BadMedia              400  invalid_media          unreadable, empty, non-finite, without frames, ...
│   ├── BadVoice              400  invalid_voice          mode, speaker or reference the checkpoint cannot do
│   └── PromptTooLong         400  context_length_exceeded
├── Unauthorized              401  invalid_api_key
├── Forbidden                 403  forbidden_media        a path or host outside the allow-list
│   └── ForeignPage           403  forbidden_origin       a browser asks for a page that may not call
├── NotFound                  404  not_found
│   └── ModelNotFound         404  model_not_found
├── MethodNotAllowed          405  method_not_allowed
├── UploadTimedOut            408  request_timeout        the request itself did not arrive within its time
├── Conflict                  409  conflict               the name is taken by something else
├── TooLarge                  413  request_too_large
├── Overloaded                429  overloaded             admission limits; try again later
├── ConfigError               500  config_error           at start, never while serving
│   ├── DoesNotFit            500  does_not_fit           memory fractions or sizes that cannot hold the weights
│   └── CheckpointError       500  checkpoint_error       missing, unused or misshaped weights, bad config.json
├── Unavailable               503  unavailable            starting, stopping
├── TimedOut                  504  timeout                not done within the request's time
└── EngineError               500  engine_error           a stage failed; the turn ends with reason "error"
    └── CodeOutOfRange        500  code_out_of_range      Code2Wav was handed a code that no codebook has

A message names the value, the limit and the way out. `param` names the part of the request, for example
`messages[0].content[1].audio_url`. Fields that a message names are written `field_name("ref_audio")`: whoever took the request says
by `name_fields` what they are called in it.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class AuraError(Exception):
    """Base of all errors that reach a user."""

    status: int = 500
    code: str = "internal_error"
    type: str = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self._marked = message
        self.message = _unmarked(message)
        super().__init__(self.message)
        self.param = param

    def name_fields(self, names: Mapping[str, str]) -> None:
        """Call fields, in the message and in param, as a request does; what `names` lacks is called so there too."""
        self._marked = _FIELD.sub(lambda found: field_name(names.get(found[1], found[1])), self._marked)
        self.message = _unmarked(self._marked)
        self.args = (self.message,)
        if self.param is not None:
            self.param = names.get(self.param, self.param)


class BadRequest(AuraError):
    status, code, type = 400, "invalid_request", "invalid_request_error"


class UnsupportedOption(BadRequest):
    code = "unsupported_option"


class BadMedia(BadRequest):
    code = "invalid_media"


class BadVoice(BadRequest):
    code = "invalid_voice"


class PromptTooLong(BadRequest):
    code = "context_length_exceeded"


class Unauthorized(AuraError):
    status, code, type = 401, "invalid_api_key", "authentication_error"


class Forbidden(AuraError):
    status, code, type = 403, "forbidden_media", "permission_error"


class ForeignPage(Forbidden):
    code = "forbidden_origin"


class NotFound(AuraError):
    status, code, type = 404, "not_found", "not_found_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(AuraError):
    status, code, type = 405, "method_not_allowed", "invalid_request_error"


class UploadTimedOut(AuraError):
    status, code, type = 408, "request_timeout", "invalid_request_error"


class Conflict(AuraError):
    status, code, type = 409, "conflict", "invalid_request_error"


class TooLarge(AuraError):
    status, code, type = 413, "request_too_large", "invalid_request_error"


class Overloaded(AuraError):
    status, code, type = 429, "overloaded", "rate_limit_error"


class ConfigError(AuraError):
    code = "config_error"


class DoesNotFit(ConfigError):
    code = "does_not_fit"


class CheckpointError(ConfigError):
    code = "checkpoint_error"


class Unavailable(AuraError):
    status, code = 503, "unavailable"


class TimedOut(AuraError):
    status, code = 504, "timeout"


class EngineError(AuraError):
    code = "engine_error"


class CodeOutOfRange(EngineError):
    code = "code_out_of_range"


# ---------------------------------------------------------------- words of messages


def field_name(name: str) -> str:
    """The name of a field in a message, which a request may spell differently. Its marks are characters that `shown` never has."""
    return f"\x02{name}\x03"


_FIELD = re.compile("\x02([^\x02\x03]*)\x03")


def _unmarked(message: str) -> str:
    # Not by `re`, which is gone where what a program left open is cancelled while its interpreter ends.
    return message.replace("\x02", "").replace("\x03", "")


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """What is refused meanwhile is refused by these names of its fields."""
    try:
        yield
    except BadRequest as error:
        error.name_fields(names)
        raise


def shown(value: Any) -> str:
    """A value for a message, as Python and JSON write it (true, false and null as JSON does), at most 80 characters: what was given may
    be megabytes, the limit must stay visible."""
    text = _SHORT.repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]}...{text[-17:]}"


class _Short(reprlib.Repr):
    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"

    def repr_NoneType(self, x: None, level: int) -> str:
        return "null"

    def repr_int(self, x: int, level: int) -> str:
        return (
            repr(x) if x.bit_length() < 256 else f"<a number of {x.bit_length():,} bits>"
        )  # repr refuses 4,301 digits


_SHOWN = 80
_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = _SHOWN


def nearest(name: object, known: Iterable[object]) -> str | None:
    """The known name that was probably meant."""
    close = difflib.get_close_matches(str(name)[:60], [str(item) for item in known], n=1)
    return close[0] if close else None


def meant(name: object, known: Iterable[object]) -> str:
    """The end of a message about an unknown name: the one that was probably meant, or all of them."""
    names = sorted({str(item) for item in known})
    close = nearest(name, names)
    return f"did you mean {close}?" if close else f"known: {', '.join(names)}"
