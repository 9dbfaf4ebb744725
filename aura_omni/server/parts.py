"""Messages of a chat request as flow data: media fetched and decoded, in order, errors naming the part."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from aura_omni.config.config import DEFAULT_PARTS
from aura_omni.errors import BadRequest
from aura_omni.flow import Audio, Message, Part, Role, Text
from aura_omni.media.audio import decode_audio
from aura_omni.media.budget import Budget
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
MediaPart = AudioUrlPart | InputAudioPart | VideoUrlPart | ImageUrlPart

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_KINDS = {"audio_url": "audio", "input_audio": "audio", "video_url": "video", "image_url": "image"}
_NAMES_A_PLACE = re.compile(r"(?!data:)[A-Za-z][A-Za-z0-9+.-]*:", re.IGNORECASE)  # base64 has no colon


_AT_ONCE = 4  # media read side by side: of the server while they decode, of one request also while they are fetched


def _decoders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="decode")


@dataclass(frozen=True, slots=True)
class MediaReader:
    """What messages point at, as flow data. One for the server: its threads are the only ones that decode.

    most: how many "audio", "image" and "video" parts one request may have.
    """

    policy: MediaPolicy
    most: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_PARTS))
    decoders: ThreadPoolExecutor = field(default_factory=_decoders)

    async def messages(self, messages: Sequence[ChatMessage], *, budget: Budget) -> tuple[Message, ...]:
        """All messages, their media side by side. Raises AuraError naming messages[i].content[j]."""
        roles = [_ROLES[message.role] for message in messages]
        if roles[-1] != "user":
            raise BadRequest(
                f"the last message is from {roles[-1]!r}; a turn answers the user, so end with a user message",
                param=f"messages[{len(messages) - 1}].role",
            )
        contents = [_content(message, index) for index, message in enumerate(messages)]
        self._count(contents)
        turn = asyncio.Semaphore(_AT_ONCE)  # so that few files as sent are held, and the others only as decoded

        async def load(part: ContentPart, where: str) -> Part:
            if isinstance(part, TextPart):
                return Text(part.text)
            async with turn:
                return await self._load(part, f"{where}.{part.type}", budget)

        loaded = iter(
            await together(
                [
                    load(part, f"messages[{index}].content[{number}]")
                    for index, content in enumerate(contents)
                    for number, part in enumerate(content)
                ]
            )
        )
        return tuple(
            Message(role, tuple(next(loaded) for _ in content)) for role, content in zip(roles, contents, strict=True)
        )

    def _count(self, contents: Sequence[Sequence[ContentPart]]) -> None:
        found: dict[str, int] = {}
        for index, content in enumerate(contents):
            for number, part in enumerate(content):
                kind = _KINDS.get(part.type)
                if kind is None:
                    continue
                found[kind] = found.get(kind, 0) + 1
                if found[kind] > self.most.get(kind, found[kind]):
                    raise BadRequest(
                        f"more than {self.most[kind]} {kind} parts, the limit of this server; send fewer, "
                        "or raise limit_mm_per_prompt",
                        param=f"messages[{index}].content[{number}]",
                    )

    async def _load(self, part: MediaPart, param: str, budget: Budget) -> Part:
        pixels = self.policy.max_pixels
        match part:
            case AudioUrlPart():
                return await self.audio(part.audio_url.url, param=param, budget=budget)
            case InputAudioPart():
                return await self.audio(part.input_audio.data, param=param, budget=budget)
            case VideoUrlPart():
                frames = self.policy.max_video_frames
                decode = partial(decode_video, max_frames=frames, max_pixels=pixels, budget=budget, param=param)
                return await self._medium(part.video_url.url, decode, param)
            case ImageUrlPart():
                picture = partial(decode_image, max_pixels=pixels, budget=budget, param=param)
                return await self._medium(part.image_url.url, picture, param)

    async def audio(self, source: str, *, param: str, budget: Budget) -> Audio:
        """source is a URL, a data URL or bare base64."""
        return await self._medium(source, self._sound(param, budget), param)

    async def sound(self, data: bytes, *, param: str, budget: Budget) -> Audio:
        """data: a file, of at most policy.max_bytes."""
        return await self._decoded(partial(self._sound(param, budget), data))

    def _sound(self, param: str, budget: Budget) -> Callable[[bytes], Audio]:
        return partial(decode_audio, max_s=self.policy.max_audio_s, budget=budget, param=param)

    async def _medium(self, source: str, decode: Callable[[bytes], T], param: str) -> T:
        if _NAMES_A_PLACE.match(source):
            data = await fetch(source, self.policy, param=param)
            return await self._decoded(lambda: decode(data))
        return await self._decoded(lambda: decode(decode_base64(source, self.policy, param=param)))

    async def _decoded(self, decode: Callable[[], T]) -> T:
        """In a thread that cannot be interrupted: a request that is given up does not make room before it is done."""
        return await asyncio.get_running_loop().run_in_executor(self.decoders, decode)


def _content(message: ChatMessage, index: int) -> list[ContentPart]:
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
    return content


async def together(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results in order. The first failure cancels the others and is raised as it is, not in a group."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
