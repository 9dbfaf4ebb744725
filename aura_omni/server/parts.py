"""Messages of a chat request as flow data: media fetched and decoded, in order, errors naming the part."""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TypeVar

from aura_omni.config.config import DEFAULT_PARTS
from aura_omni.errors import BadRequest
from aura_omni.flow import Audio, Coming, Message, Part, Role, Text, Video
from aura_omni.media.audio import decode_audio
from aura_omni.media.budget import Budget
from aura_omni.media.fetch import MediaPolicy, decode_base64, fetch
from aura_omni.media.image import decode_image
from aura_omni.media.video import decode_video
from aura_omni.media.wav import plain_wav
from aura_omni.server.schemas import (
    AudioUrlPart,
    ChatMessage,
    ContentPart,
    ImageUrlPart,
    InputAudioPart,
    TextPart,
    VideoUrlPart,
)
from aura_omni.server.turns import Pictures

T = TypeVar("T")
SoundPart = AudioUrlPart | InputAudioPart
PicturePart = VideoUrlPart | ImageUrlPart

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_KINDS = {"audio_url": "audio", "input_audio": "audio", "video_url": "video", "image_url": "image"}
_NAMES_A_PLACE = re.compile(r"(?!data:)[A-Za-z][A-Za-z0-9+.-]*:", re.IGNORECASE)  # base64 has no colon


# Characters of base64 of one request, 12 s of 16 kHz, that are decoded on the event loop if they are plain WAV: half a millisecond. In
# threads, six that came together took 13 ms, as each has the others wait for Python's lock.
SHORT_WAV = 2**19
_AT_ONCE = 4  # media of one request that are read side by side, also while they are fetched


def threads(cores: int) -> int:
    """Media of all requests that are decoded side by side, of each kind of decoder. Some cores stay with who serves them and what computes."""
    return max(4, min(16, cores - 4))


def _threads(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(os.cpu_count() or 1), thread_name_prefix=name)


@dataclass(frozen=True, slots=True)
class Read:
    """Messages whose sounds are all there.

    messages: with Coming where pictures are still being decoded; pictures: waits for those. None: all are there.
    """

    messages: tuple[Message, ...]
    pictures: Pictures | None


@dataclass(frozen=True, slots=True)
class MediaReader:
    """What messages point at, as flow data. One for the server: only its threads decode, and the event loop what is short plain WAV.

    most: how many "audio", "image" and "video" parts one request may have.
    hearers: decode the sounds of messages; a turn begins when they are there, so they do not wait for anybody's pictures.
    """

    policy: MediaPolicy
    most: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_PARTS))
    decoders: ThreadPoolExecutor = field(default_factory=partial(_threads, "decode"))
    hearers: ThreadPoolExecutor = field(default_factory=partial(_threads, "hear"))

    @asynccontextmanager
    async def reading(self, messages: Sequence[ChatMessage], *, budget: Budget) -> AsyncIterator[Read]:
        """All messages, their media side by side; pictures do not begin before sounds that came with the request are there.

        The block begins as soon as all sounds are there or, without any, all pictures. Leaving it gives up what is not decoded
        yet. Raises AuraError naming messages[i].content[j], as does waiting for pictures.
        """
        roles = _roles(messages)
        contents = [_content(message, index) for index, message in enumerate(messages)]
        self._count(contents)
        turn = asyncio.Semaphore(_AT_ONCE)  # so that few files as sent are held, and the others only as decoded

        async def decoded(load: Callable[..., Awaitable[T]], part: SoundPart | PicturePart, where: str) -> T:
            async with turn:
                return await load(part, param=f"{where}.{part.type}", budget=budget)

        sounds: list[Awaitable[Audio]] = []
        pictures: list[Callable[[], Awaitable[Video]]] = []
        fetched, length = False, 0  # of all sounds as they came
        for index, content in enumerate(contents):
            for number, part in enumerate(content):
                where = f"messages[{index}].content[{number}]"
                if isinstance(part, SoundPart):
                    fetched |= _NAMES_A_PLACE.match(_source(part)) is not None
                    length += len(_source(part))
                    sounds.append(decoded(partial(self._sound_part, beside=length > SHORT_WAV), part, where))
                elif isinstance(part, PicturePart):
                    pictures.append(partial(decoded, self._picture_part, part, where))

        media = _Media(sounds, pictures, sounds_first=not fetched)
        try:
            heard = iter(await media.heard())
            if sounds and pictures and not media.seen:
                shown: Iterator[Video | Coming] = repeat(Coming())
                coming: Pictures | None = media.shown
            else:
                shown, coming = iter(await media.shown()), None

            def flow(part: ContentPart) -> Part:
                if isinstance(part, TextPart):
                    return Text(part.text)
                return next(heard) if isinstance(part, SoundPart) else next(shown)

            parts = [tuple(map(flow, content)) for content in contents]
            yield Read(tuple(map(Message, roles, parts)), coming)
        finally:
            await media.close()

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

    async def _sound_part(self, part: SoundPart, *, param: str, budget: Budget, beside: bool) -> Audio:
        return await self.audio(_source(part), param=param, budget=budget, beside=beside)

    async def _picture_part(self, part: PicturePart, *, param: str, budget: Budget) -> Video:
        pixels = self.policy.max_pixels
        match part:
            case VideoUrlPart():
                frames = self.policy.max_video_frames
                decode = partial(decode_video, max_frames=frames, max_pixels=pixels, budget=budget, param=param)
                return await self._medium(part.video_url.url, decode, param, self.decoders)
            case ImageUrlPart():
                picture = partial(decode_image, max_pixels=pixels, budget=budget, param=param)
                return await self._medium(part.image_url.url, picture, param, self.decoders)

    async def audio(self, source: str, *, param: str, budget: Budget, beside: bool = False) -> Audio:
        """source is a URL, a data URL or bare base64. beside: the event loop has decoded enough for its request."""
        decode = partial(decode_audio, max_s=self.policy.max_audio_s, budget=budget, param=param)
        if not beside and _may_be_short_wav(source):
            data = decode_base64(source, self.policy, param=param)
            return decode(data) if plain_wav(io.BytesIO(data)) else await _in(self.hearers, lambda: decode(data))
        return await self._medium(source, decode, param, self.hearers)

    async def _medium(self, source: str, decode: Callable[[bytes], T], param: str, pool: ThreadPoolExecutor) -> T:
        """Decoded in a thread that cannot be interrupted: a request that is given up does not make room before it is done."""
        if _NAMES_A_PLACE.match(source):
            data = await fetch(source, self.policy, param=param)
            return await _in(pool, lambda: decode(data))
        return await _in(pool, lambda: decode(decode_base64(source, self.policy, param=param)))


async def _in(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def _may_be_short_wav(source: str) -> bool:
    """Whether it is base64 of a file that says to be WAV, and not long. Not with percent signs, which are read a hundred times as slowly."""
    if len(source) > SHORT_WAV or _NAMES_A_PLACE.match(source) or "%" in source:
        return False
    return source.startswith("UklGR", source.find(",", 0, 100) + 1)  # "RIFF"


def _source(part: SoundPart) -> str:
    return part.audio_url.url if isinstance(part, AudioUrlPart) else part.input_audio.data


def _roles(messages: Sequence[ChatMessage]) -> list[Role]:
    roles = [_ROLES[message.role] for message in messages]
    if roles[-1] != "user":
        raise BadRequest(
            f"the last message is from {roles[-1]!r}; a turn answers the user, so end with a user message",
            param=f"messages[{len(messages) - 1}].role",
        )
    return roles


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


class _Media:
    """Of one request, on their way.

    sounds_first: pictures are begun when the sounds are there. They would only slow them, and are needed later.
    """

    def __init__(
        self,
        sounds: Sequence[Awaitable[Audio]],
        pictures: Sequence[Callable[[], Awaitable[Video]]],
        *,
        sounds_first: bool,
    ) -> None:
        self._hearing = asyncio.ensure_future(together(sounds))
        self._seeing = asyncio.ensure_future(self._see(pictures, sounds_first))

    async def _see(self, pictures: Sequence[Callable[[], Awaitable[Video]]], sounds_first: bool) -> list[Video]:
        if sounds_first:
            await asyncio.wait({self._hearing})
        return await together([begin() for begin in pictures])

    async def heard(self) -> list[Audio]:
        """Raises also what is found to be wrong with a picture meanwhile."""
        await asyncio.wait({self._hearing, self._seeing}, return_when=asyncio.FIRST_COMPLETED)
        if self.seen:
            self._seeing.result()
        return await self._hearing

    @property
    def seen(self) -> bool:
        return self._seeing.done()

    async def shown(self) -> list[Video]:
        return await self._seeing

    async def close(self) -> None:
        """Give up what is not there yet."""
        hearing, seeing = self._hearing, self._seeing
        hearing.cancel()
        seeing.cancel()
        await asyncio.gather(hearing, seeing, return_exceptions=True)
        # A failure knows who waited for it: it would keep itself, and the request's media.
        del self._hearing, self._seeing


async def together(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results in order. The first failure cancels the others and is raised as it is, not in a group."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        while tasks:  # none is kept: a failure knows this frame, and so would keep itself
            tasks.pop().cancel()
