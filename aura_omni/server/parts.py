"""Messages of a chat request as flow data: media fetched and decoded, in order, errors naming the part."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from aura_omni.errors import BadRequest
from aura_omni.flow import Audio, Message, Part, Role, Text, Video
from aura_omni.media.audio import decode_audio
from aura_omni.media.fetch import MediaPolicy, decode_base64, fetch
from aura_omni.media.image import decode_image
from aura_omni.media.video import decode_video
from aura_omni.server.schemas import (
    AudioUrlPart,
    ChatMessage,
    ContentPart,
    ImageUrlPart,
    InputAudioPart,
    TextPart,
    VideoUrlPart,
)

T = TypeVar("T")

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NAMES_A_PLACE = re.compile(r"(?!data:)[A-Za-z][A-Za-z0-9+.-]*:", re.IGNORECASE)  # base64 has no colon


async def flow_messages(messages: Sequence[ChatMessage], policy: MediaPolicy) -> tuple[Message, ...]:
    """All messages with their media, fetched and decoded side by side. Raises AuraError naming messages[i].content[j]."""
    roles = [_ROLES[message.role] for message in messages]
    if roles[-1] != "user":
        raise BadRequest(
            f"the last message is from {roles[-1]!r}; a turn answers the user, so end with a user message",
            param=f"messages[{len(messages) - 1}].role",
        )
    parts = [_parts(message, index, policy) for index, message in enumerate(messages)]
    loaded = iter(await together([part for several in parts for part in several]))
    return tuple(
        Message(role, tuple(next(loaded) for _ in several)) for role, several in zip(roles, parts, strict=True)
    )


def _parts(message: ChatMessage, index: int, policy: MediaPolicy) -> list[Awaitable[Part]]:
    content: list[ContentPart] = list(message.content)
    if not content and message.audio is not None and message.audio.transcript is not None:
        content = [TextPart(type="text", text=message.audio.transcript)]
    if not content:
        way_out = "; earlier audio is not kept here, send its transcript as content" if message.audio else ""
        raise BadRequest(f"messages[{index}].content is empty{way_out}", param=f"messages[{index}].content")
    for number, part in enumerate(content):
        if message.role != "user" and not isinstance(part, TextPart):
            raise BadRequest(
                f"{part.type} in a message of {message.role!r}; only the user's messages may have media",
                param=f"messages[{index}].content[{number}]",
            )
    return [_load(part, policy, f"messages[{index}].content[{number}]") for number, part in enumerate(content)]


async def _load(part: ContentPart, policy: MediaPolicy, where: str) -> Part:
    param = f"{where}.{part.type}"
    match part:
        case TextPart():
            return Text(part.text)
        case AudioUrlPart():
            return await load_audio(part.audio_url.url, policy, param=param)
        case InputAudioPart():
            return await load_audio(part.input_audio.data, policy, param=param)
        case VideoUrlPart():
            return await load_video(part.video_url.url, policy, param=param)
        case ImageUrlPart():
            return await load_image(part.image_url.url, policy, param=param)


async def load_audio(source: str, policy: MediaPolicy, *, param: str) -> Audio:
    """source is a URL, a data URL or bare base64."""
    data = await _bytes(source, policy, param)
    return await asyncio.to_thread(decode_audio, data, max_s=policy.max_audio_s, param=param)


async def load_video(source: str, policy: MediaPolicy, *, param: str) -> Video:
    data = await _bytes(source, policy, param)
    return await asyncio.to_thread(
        decode_video, data, max_frames=policy.max_video_frames, max_pixels=policy.max_pixels, param=param
    )


async def load_image(source: str, policy: MediaPolicy, *, param: str) -> Video:
    data = await _bytes(source, policy, param)
    return await asyncio.to_thread(decode_image, data, max_pixels=policy.max_pixels, param=param)


async def _bytes(source: str, policy: MediaPolicy, param: str) -> bytes:
    if _NAMES_A_PLACE.match(source):
        return await fetch(source, policy, param=param)
    return await asyncio.to_thread(decode_base64, source, policy, param=param)


async def together(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results in order. The first failure cancels the others and is raised as it is, not in a group."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
