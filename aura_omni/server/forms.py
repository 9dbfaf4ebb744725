"""Bodies that are forms with one file: fields checked as those of a JSON body are, the file left where it was spooled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from aura_omni.errors import BadMedia, BadRequest, TooLarge
from aura_omni.server.schemas import Body, checked, wrong_type

B = TypeVar("B", bound=Body)

_MOST_FIELDS = 100
_LONGEST_FIELD = 2**20  # bytes


async def read_form(
    request: Request, kind: type[B], *, file: str, longest: int, way_out: str = "Send a shorter clip"
) -> tuple[B, UploadFile]:
    """The fields and the file that is called `file`; who gets it closes it.

    Raises BadRequest naming the field, TooLarge for a file over `longest` bytes.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise BadRequest(wrong_type("a form with a file", given=media_type, wanted="multipart/form-data"))
    try:
        form = await request.form(max_files=1, max_fields=_MOST_FIELDS, max_part_size=_LONGEST_FIELD)
    except HTTPException as error:
        raise BadRequest(_why_no_form(str(error.detail), file)) from None
    try:
        body = checked(kind, _fields(form, kind, file))
        upload = form.get(file)
        if not isinstance(upload, UploadFile):
            raise BadRequest(f"{file} is required: a recording, as a file of the form", param=file)
        size = upload.size or 0
        if size > longest:
            raise TooLarge(f"the file has {size:,} bytes; this server takes {longest:,}. {way_out}", param=file)
        if not size:
            raise BadMedia("the file is empty; send a recording", param=file)
    except BaseException:
        await form.close()
        raise
    return body, upload


def _why_no_form(detail: str, file: str) -> str:
    """The parser's words are for its programmer."""
    reasons = {
        "Too many files": f"the form has more than one file; send one, named {file!r}",
        "Too many fields": f"the form has more than {_MOST_FIELDS} fields; send fewer",
        "Field exceeded": f"a field of the form has more than {_LONGEST_FIELD:,} bytes; only the file may be so large",
        "Part exceeded": f"a field of the form has more than {_LONGEST_FIELD:,} bytes; only the file may be so large",
        "Missing boundary": "the Content-Type of the form has no boundary; let your client set that header itself",
        "The Content-Disposition": "a field of the form has no name; name every field",
    }
    broken = "the body is not a form as its Content-Type announces it; let your client write both"
    return next((reason for begin, reason in reasons.items() if detail.startswith(begin)), broken)


@asynccontextmanager
async def closed_after(upload: UploadFile) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await upload.close()


def _fields(form: FormData, kind: type[Body], file: str) -> dict[str, Any]:
    """All but the file, by name, as what their texts stand for. A list is sent item by item; official clients add [] to its
    name."""
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name != file:
                raise BadRequest(f"the file is sent as {name[:60]!r}; its name must be {file!r}", param=file)
        elif name.endswith("[]") or kind.form_values.get(name) is list:
            fields.setdefault(name.removesuffix("[]"), []).append(value)
        elif name == file:
            continue  # refused by who needs a file
        elif name in fields:
            raise BadRequest(f"{name[:60]} is sent twice; send it once", param=name[:60])
        else:
            fields[name] = _meant(value, kind.form_values.get(name))
    return fields


def _meant(text: str, kind: type | None) -> Any:
    """What is no such value stays a text, and is refused with its limits."""
    spelled = text.strip().lower()
    if kind is bool and spelled in _FLAGS:
        return _FLAGS[spelled]
    if kind in (int, float):
        try:
            return kind(text) if spelled else None
        except ValueError:
            return text
    return text


_FLAGS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False, "": False}
