"""What a program asks of a pipeline without a server: whole answers, or events as they are made.

    with Pipeline.load("aura_omni.yaml") as pipeline:
        answer = pipeline.chat("What do you see?", video="clip.mp4")
        print(answer.text)
        answer.save("answer.wav")
        pipeline.say("Good morning.").save("morning.mp3")
        print(pipeline.transcribe("meeting.m4a").text)

Sounds, clips and pictures are paths, bytes of a file, or what `aura_omni.media` has decoded. The limits are those of the deploy
file's `media:`. Any thread may ask, several at once; the engine answers them together. An interrupted or closed iterator
cancels its turn, and comes back when the turn has freed what it held.
"""

from __future__ import annotations

import io
import queue
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self, TypedDict, TypeVar, Unpack

import numpy as np

from aura_omni.config import Config
from aura_omni.errors import BadMedia, BadRequest, TooLarge
from aura_omni.flow import (
    Audio,
    AudioChunk,
    Ended,
    Event,
    Message,
    Part,
    Playback,
    StageName,
    Text,
    TurnRequest,
    Video,
    Voice,
)
from aura_omni.heard import Heard, failure
from aura_omni.media.audio import decode_audio
from aura_omni.media.budget import Budget
from aura_omni.media.image import decode_image
from aura_omni.media.recording import Recording, Segment
from aura_omni.media.video import decode_video
from aura_omni.transcription import SEGMENTS_AT_ONCE, Transcription

T = TypeVar("T", Audio, Video)
File = str | Path | bytes  # where it is, or what is in it
Sampled = Mapping[
    StageName, Mapping[str, Any]
]  # for each stage the fields of flow.Sampling that differ from the deploy file's


class Turn(Protocol):
    def cancel(self) -> None: ...


class ChatOptions(TypedDict, total=False):
    """audio, video, image  of the user's message, in front of its text; one or a list
    history        earlier messages
    system_prompt  replaces the default one for live video
    speak          False: text alone; the Talker does not run
    voice          of the answer
    sampling       by stage, as {"aura": {"temperature": 0.0}, "talker": {"seed": 7}}
    """

    audio: Audio | File | Sequence[Audio | File]
    video: Video | File | Sequence[Video | File]
    image: Video | File | Sequence[Video | File]
    history: Sequence[Message]
    system_prompt: str | None
    speak: bool
    voice: Voice
    sampling: Sampled


class SayOptions(TypedDict, total=False):
    """voice: speaker, instruct, language, or a reference recording; sampling: by stage, as {"talker": {"seed": 7}}."""

    voice: Voice
    sampling: Sampled


class TranscribeOptions(TypedDict, total=False):
    """language: a code or a name, None finds it out; context: words to expect; sampling: as {"asr": {"max_tokens": 100}}."""

    language: str | None
    context: str
    sampling: Sampled


class _Asked:
    """A turn that has begun, and its events."""

    def __init__(self, asking: Asking, request: TurnRequest) -> None:
        if request.coming:
            raise BadRequest("pictures are Coming that nobody shows to this turn; give them with it", param="messages")
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # the budgets of the turn bound what it can hold
        self._ended = False
        self._turn = asking.submit(request, self._events.put)

    def __iter__(self) -> Iterator[Event]:
        while not self._ended:
            event = self._events.get()
            self._ended = isinstance(event, Ended)
            yield event

    def close(self) -> None:
        """Cancel what still runs, and come back when it has ended."""
        self._turn.cancel()
        for _ in self:
            pass


class Asking(ABC):
    """The part of a Pipeline that a program talks to. All methods raise AuraError (BadRequest and its kin for what is refused,
    before the engine; EngineError, Unavailable for a turn that fails)."""

    config: Config

    @abstractmethod
    def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> Turn: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------ whole

    def chat(self, text: str = "", **options: Unpack[ChatOptions]) -> Heard:
        """What is answered: `text`, `sound()` (float32 mono, 24 kHz), `silent`, `transcripts` of the recordings."""
        return self._whole(self.chat_request(text, **options))

    def say(self, text: str, **options: Unpack[SayOptions]) -> Heard:
        """The sound of a text: `sound()` float32 [n] mono at 24 kHz, or `save(path)`."""
        return self._whole(self.speech_request(text, **options))

    def transcribe(self, audio: Audio | File, **options: Unpack[TranscribeOptions]) -> Transcription:
        """What is said in a recording of up to hours: `text`, empty when nobody speaks, `segments` with times, `language`."""
        said = Transcription()
        for _ in self.transcribed(audio, said, **options):
            pass
        return said

    def _whole(self, request: TurnRequest) -> Heard:
        return Heard.of(self.events(replace(request, playback=Playback(live=False))))

    # ------------------------------------------------------------ as it comes

    def chat_events(self, text: str = "", **options: Unpack[ChatOptions]) -> Iterator[Event]:
        """Transcript (whole), TextDelta and AudioChunk (deltas) as they are made, Ended last."""
        return self.events(self.chat_request(text, **options))

    def say_chunks(self, text: str, **options: Unpack[SayOptions]) -> Iterator[np.ndarray]:
        """float32 [n] mono at 24 kHz, deltas; joined they are the sound that `say` returns. n is a multiple of 1920."""
        for event in self.events(self.speech_request(text, **options)):
            if isinstance(event, AudioChunk):
                yield event.samples
            elif isinstance(event, Ended) and (error := failure(event)) is not None:
                raise error

    def transcribed(
        self, audio: Audio | File, said: Transcription, **options: Unpack[TranscribeOptions]
    ) -> Iterator[Transcription]:
        """`said` each time that a segment has been added to it, 5 to 30 s of the recording, in order.

        The file is read while its first segments are heard, so hours of sound need the memory of a few segments.
        """
        waiting: deque[tuple[Segment, _Asked]] = deque()
        recording = Recording()
        with _opened(audio) as file:
            segments = self._segments(file, recording)
            try:
                while True:
                    while len(waiting) < SEGMENTS_AT_ONCE and (segment := next(segments, None)) is not None:
                        waiting.append((segment, _Asked(self, self.transcript_request(segment.audio, **options))))
                    if not waiting:
                        return
                    segment, asked = waiting[0]
                    said.add(Heard.of(asked), start_s=segment.start_s, end_s=segment.end_s)
                    said.duration_s = max(recording.duration_s, segment.end_s)
                    waiting.popleft()
                    yield said
            finally:
                for _, asked in waiting:
                    asked.close()

    def _segments(self, file: Audio | BinaryIO, recording: Recording) -> Iterator[Segment]:
        if isinstance(file, Audio):
            return iter([Segment(file, 0.0, file.duration_s)])
        return recording.segments(file, max_s=self.config.media.max_recording_s, param="audio")

    def events(self, request: TurnRequest) -> Iterator[Event]:
        """The events of one turn, Ended last; a turn that fails says so in it. The turn begins with the first `next`.

        Closing the iterator cancels the turn and returns when it has ended.
        """
        asked = _Asked(self, request)
        try:
            yield from asked
        finally:
            asked.close()

    # ------------------------------------------------------------ requests

    def chat_request(self, text: str = "", **options: Unpack[ChatOptions]) -> TurnRequest:
        """Media are read and decoded here. Raises BadMedia, TooLarge naming the argument."""
        budget = Budget()
        parts: list[Part] = [
            *(self._video(item, budget) for item in _several(options.get("video"))),
            *(self._image(item, budget) for item in _several(options.get("image"))),
            *(self._audio(item, budget) for item in _several(options.get("audio"))),
            *([Text(text)] if text else []),
        ]
        if not parts:
            raise BadRequest("there is nothing to answer; give a text, a recording, a clip or a picture", param="text")
        return TurnRequest(
            (*options.get("history", ()), Message("user", tuple(parts))),
            speak=options.get("speak", True),
            system_prompt=options.get("system_prompt"),
            voice=options.get("voice", Voice()),
            sampling=options.get("sampling", {}),
        )

    def speech_request(self, text: str, **options: Unpack[SayOptions]) -> TurnRequest:
        return TurnRequest(
            (Message("user", (Text(text),)),),
            part="speech",
            voice=options.get("voice", Voice()),
            sampling=options.get("sampling", {}),
        )

    def transcript_request(self, audio: Audio, **options: Unpack[TranscribeOptions]) -> TurnRequest:
        """Of one segment, or of any recording that fits ASR and the memory."""
        context = options.get("context")
        return TurnRequest(
            (*([Message("system", (Text(context),))] if context else []), Message("user", (audio,))),
            part="transcript",
            voice=Voice(language=options.get("language") or None),
            sampling=options.get("sampling", {}),
        )

    def sound(self, file: Audio | File) -> Audio:
        """A recording, decoded; also what `Voice.ref_audio` takes."""
        return self._audio(file, Budget())

    def _audio(self, file: Audio | File, budget: Budget) -> Audio:
        if isinstance(file, Audio):
            return file
        data = self._read(file, "audio")
        with _named(file):
            return decode_audio(data, max_s=self.config.media.max_audio_s, budget=budget, param="audio")

    def _video(self, file: Video | File, budget: Budget) -> Video:
        if isinstance(file, Video):
            return file
        limits = self.config.media
        data = self._read(file, "video")
        with _named(file):
            return decode_video(
                data, max_frames=limits.max_video_frames, max_pixels=limits.max_pixels, budget=budget, param="video"
            )

    def _image(self, file: Video | File, budget: Budget) -> Video:
        if isinstance(file, Video):
            return file
        data = self._read(file, "image")
        with _named(file):
            return decode_image(data, max_pixels=self.config.media.max_pixels, budget=budget, param="image")

    def _read(self, file: File, param: str) -> bytes:
        most = self.config.media.max_bytes
        try:
            if isinstance(file, bytes):
                size, data = len(file), file
            else:
                size = Path(file).stat().st_size
                data = Path(file).read_bytes() if size <= most else b""
        except OSError as error:
            raise BadMedia(f"cannot read {file!s}: {error.strerror or error}", param=param) from error
        if size > most:
            raise TooLarge(
                f"the file has {size:,} bytes, more than the limit of {most:,}; send a shorter or more compressed one, or raise "
                "media.max_bytes in the deploy file",
                param=param,
            )
        return data


@contextmanager
def _named(file: File) -> Iterator[None]:
    """What is wrong with a medium is told with the name of its file: there may be several."""
    try:
        yield
    except BadMedia as error:
        if isinstance(file, bytes):
            raise
        raise BadMedia(f"{file!s}: {error.message}", param=error.param) from error


@contextmanager
def _opened(audio: Audio | File) -> Iterator[Audio | BinaryIO]:
    """Raises BadMedia for a file that cannot be opened."""
    if isinstance(audio, Audio):
        yield audio
        return
    try:
        file: BinaryIO = io.BytesIO(audio) if isinstance(audio, bytes) else Path(audio).open("rb")  # noqa: SIM115
    except OSError as error:
        raise BadMedia(f"cannot read {audio!s}: {error.strerror or error}", param="audio") from error
    with file:
        yield file


def _several(given: T | File | Sequence[T | File] | None) -> Sequence[T | File]:
    if given is None:
        return ()
    return (given,) if isinstance(given, Audio | Video | str | Path | bytes) else given
