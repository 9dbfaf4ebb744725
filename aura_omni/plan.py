"""What `pipeline` works out of a request before the engine hears of it, and what a Turn then follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aura_omni.errors import BadRequest
from aura_omni.flow import Audio, Coming, Message, Part, Sampling, StageName, Text, Transcript, TurnRequest, Video
from aura_omni.stages.asr import AsrPrompt
from aura_omni.stages.aura_prompt import AuraPrompt
from aura_omni.stages.voices import Speaking


@dataclass(frozen=True, slots=True)
class Listening:
    """A part of a clip, and how it is transcribed."""

    prompt: AsrPrompt
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Draft:
    """AURA's prompt without anything heard. Its first `known` rows stay as they are whatever that will be."""

    prompt: AuraPrompt
    known: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What follows from the pictures of a request, or from there being none.

    messages: with all of its pictures.
    prompt: AURA's prompt if nothing is heard in any clip, or there is none; None: there is no AURA.
    draft: what AURA may read while ASR hears.
    """

    messages: tuple[Message, ...]
    prompt: AuraPrompt | None
    draft: Draft | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What `submit` worked out on the caller's thread: all that can be refused has been, all that is slow on the CPU is done,
    but for what needs pictures that are still to come.

    hearing: for each Audio part of the messages, in order, its parts (long clips are cut; none: no sound in it).
    at_once: parts that may be in ASR at the same time; more would let one Turn fill the server.
    seen: None: pictures are still to come.
    reference: samples float32 at VOICE_RATE of the voice to clone.
    normalize: what is spoken is a clean form of what is written.
    body: ids of the text to speak where the request brings it; text_tokens: of the request, for such a pipeline.
    """

    request: TurnRequest
    sampling: Mapping[StageName, Sampling]
    hearing: tuple[tuple[Listening, ...], ...]
    at_once: int
    seen: Seen | None
    speaking: Speaking | None
    reference: np.ndarray | None
    normalize: bool = True
    body: list[int] | None = None
    text_tokens: int = 0


def text_of(message: Message) -> str:
    return "\n".join(part.text for part in message.parts if isinstance(part, Text))


def with_pictures(request: TurnRequest, videos: Sequence[Video]) -> tuple[Message, ...]:
    """Messages with each Coming part replaced by its picture. Raises BadRequest for more or fewer pictures than are Coming."""
    if len(videos) != request.coming:
        raise BadRequest(
            f"{len(videos)} pictures are shown to a turn that waits for {request.coming}", param="messages"
        )
    shown = iter(videos)

    def parts(message: Message) -> Iterator[Part]:
        return (next(shown) if isinstance(part, Coming) else part for part in message.parts)

    return tuple(replace(message, parts=tuple(parts(message))) for message in request.messages)


def with_transcripts(messages: tuple[Message, ...], transcripts: list[Transcript] | None) -> tuple[Message, ...]:
    """Each Audio part replaced by its transcript; without transcripts, and where nothing was heard, by nothing."""
    heard = iter(transcripts or ())

    def parts(message: Message) -> Iterator[Part]:
        for part in message.parts:
            if not isinstance(part, Audio):
                yield part
            elif transcripts is not None and (text := next(heard).text):
                yield Text(text)

    return tuple(replace(message, parts=tuple(parts(message))) for message in messages)
