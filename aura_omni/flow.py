"""What a Turn is made of: what goes in, and what comes out stage by stage.

Plain frozen data, shared by the server, the pipeline and the stages. Knows nothing of HTTP, tokens or models.
Events are deltas unless they say "whole". A Turn sends any number of events and then exactly one `Ended`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from aura_omni.errors import AuraError, BadRequest, field_name, shown

SPEECH_RATE = 16_000  # Hz, what ASR hears
VOICE_RATE = 24_000  # Hz, what Code2Wav speaks
FRAME_SAMPLES = 1_920  # one codec frame
FRAME_S = FRAME_SAMPLES / VOICE_RATE  # 0.08 s, so 12.5 frames per second
CODEBOOKS = 16

SILENT_TEXT = "<|silent|>"

Role = Literal["system", "user", "assistant"]
Reason = Literal["stop", "length", "silent", "cancelled", "error"]
# "length": the frame budget ran out before the Talker said it was done; "loop", "silence": it repeated itself or made no sound
# for too long and was stopped; "short": it said it was done long before its text can have been spoken; "empty": of what is written nothing is spoken (code, emoji), so the Talker never heard of it
SpeechReason = Literal["stop", "length", "loop", "silence", "short", "empty"]
VoiceTask = Literal["Base", "CustomVoice", "VoiceDesign"]
TurnPart = Literal["turn", "speech", "transcript"]
TranscriptFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
TRANSCRIPT_FORMATS: tuple[TranscriptFormat, ...] = ("json", "text", "verbose_json", "srt", "vtt")


# ---------------------------------------------------------------- what goes in


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """How large the media of a request may be, each by itself."""

    max_bytes: int = 100 * 2**20  # one medium as sent
    timeout_s: float = 20.0  # one fetch, redirects included
    max_audio_s: float = 1_200.0  # of a message
    max_recording_s: float = 14_400.0  # one file to transcribe, which is read piece by piece
    max_video_frames: int = 128  # after sampling
    max_pixels: int = 50_000_000  # one picture or video frame


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Audio:
    """samples float32 [n] mono in [-1, 1] at rate Hz, n > 0, finite; key identifies the content (a hash)."""

    samples: np.ndarray
    rate: int
    key: bytes

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.rate


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """frames uint8 [n, h, w, 3] RGB upright, n >= 1; times_s float [n] of each frame from the clip's start.

    fps is the rate the frames were sampled at (AURA: 2.0). An image is a Video of one frame with still=True.
    key identifies pixels and times (a hash).
    """

    frames: np.ndarray
    times_s: tuple[float, ...]
    fps: float
    key: bytes
    still: bool = False


@dataclass(frozen=True, slots=True)
class Coming:
    """The place of a Video that is still being decoded: the turn begins without it and gets it by `Turn.show`."""


Part = Text | Audio | Video | Coming


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Voice:
    """How the answer is spoken. None means "as the checkpoint and the deploy file say"."""

    task: VoiceTask | None = None
    language: str | None = None
    speaker: str | None = None
    instruct: str | None = None
    ref_audio: Audio | None = None  # at its own rate
    ref_text: str | None = None
    x_vector_only: bool = False
    pass_token_ids: bool = False  # hand AURA's token ids to the Talker instead of its text
    # Whether the Talker gets the whole text before its first frame. None: where AURA writes the text (and its ids are not passed)
    # as the deploy file says, which is no unless it says so: the text is read while it is written; else as the checkpoint's package does it (Base no, the others yes).
    non_streaming: bool | None = None
    # Whether what is spoken is a clean form of what is written (stages/speech_text). None: as the deploy file says. Ids that are
    # passed are never changed.
    normalize: bool | None = None
    max_frames: int | None = None


@dataclass(frozen=True, slots=True)
class Playback:
    """How the speech is listened to. It decides which frames are decoded and sent together, never what is said."""

    # False: nobody hears it before its end; all of it is sent then, and speech that went wrong is made again
    live: bool = True
    speed: float = 1.0  # seconds of speech played in a second
    first_frames: int | None = None  # of the first chunk; None or 0: as the deploy file says


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Field names are vLLM's. temperature 0 is greedy; top_k 0 or -1 is off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 256
    seed: int | None = None
    ignore_eos: bool = False

    def merged(self, changes: Mapping[str, Any]) -> Sampling:
        """A copy with the named fields replaced, checked. Raises BadRequest naming the field, its value and its limit."""
        return replace(self, **checked_sampling(changes))


_LIMITS: dict[str, tuple[Any, float, float]] = {
    "temperature": ((int, float), 0.0, 100.0),
    "top_p": ((int, float), 0.0, 1.0),
    "top_k": (int, -1, 2**31),
    "min_p": ((int, float), 0.0, 1.0),
    "repetition_penalty": ((int, float), 0.01, 100.0),
    "presence_penalty": ((int, float), -2.0, 2.0),
    "frequency_penalty": ((int, float), -2.0, 2.0),
    "min_tokens": (int, 0, 2**31),
    "max_tokens": (int, 1, 2**31),
    "seed": (int, -(2**63), 2**63 - 1),
}


_TOKEN_IDS = 2**31  # ids are below this, whatever the vocabulary
_MOST_STOPS, _LONGEST_STOP = 16, 256  # texts, characters: every new token is compared with all of them
_MOST_STOP_TOKENS = 256
_MOST_BIASES = 1_024


def checked_sampling(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Validate sampling fields by name, type and range; None means "not given" and is left out."""
    clean: dict[str, Any] = {}
    for name, value in changes.items():
        if value is None:
            continue
        if name in _LIMITS:
            kind, low, high = _LIMITS[name]
            if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
                number = "a whole number" if kind is int else "a number"
                raise BadRequest(
                    f"{field_name(name)} is {shown(value)}; it must be {number} from {_plain(low)} to {_plain(high)}",
                    param=name,
                )
            clean[name] = value
        elif name == "stop":
            clean[name] = _checked_stop(value)
        elif name == "stop_token_ids":
            clean[name] = _checked_stop_tokens(value)
        elif name == "logit_bias":
            clean[name] = _checked_bias(value)
        elif name == "ignore_eos":
            if not isinstance(value, bool):
                raise BadRequest(f"{field_name(name)} is {shown(value)}; it must be true or false", param=name)
            clean[name] = value
        else:
            raise BadRequest(f"{shown(name)} is not a sampling field of this server", param=name[:60])
    return clean


def _plain(limit: float) -> str:
    """As somebody would type it: 2147483648, not 2.14748e+09."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _checked_stop(value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list | tuple) else (value,)
    if len(texts) > _MOST_STOPS:
        raise BadRequest(f"{field_name('stop')} has {len(texts):,} strings; at most {_MOST_STOPS}", param="stop")
    if not all(isinstance(text, str) and text for text in texts):
        raise BadRequest(
            f"{field_name('stop')} is {shown(value)}; it must be a non-empty string or a list of them", param="stop"
        )
    longest = max(map(len, texts), default=0)
    if longest > _LONGEST_STOP:
        raise BadRequest(
            f"a string of {field_name('stop')} has {longest:,} characters; at most {_LONGEST_STOP}", param="stop"
        )
    return tuple(texts)


def _checked_stop_tokens(value: Any) -> tuple[int, ...]:
    name = "stop_token_ids"
    if isinstance(value, list | tuple) and len(value) > _MOST_STOP_TOKENS:
        raise BadRequest(f"{field_name(name)} has {len(value):,} ids; at most {_MOST_STOP_TOKENS}", param=name)
    if not isinstance(value, list | tuple) or not all(type(token) is int for token in value):
        raise BadRequest(f"{field_name(name)} is {shown(value)}; it must be a list of token ids", param=name)
    _check_token_ids(value, name)
    return tuple(value)


def _checked_bias(value: Any) -> dict[int, float]:
    name = "logit_bias"
    if isinstance(value, Mapping) and len(value) > _MOST_BIASES:
        raise BadRequest(f"{field_name(name)} has {len(value):,} entries; at most {_MOST_BIASES:,}", param=name)
    try:
        bias = {int(token): float(weight) for token, weight in value.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise BadRequest(
            f"{field_name(name)} is {shown(value)}; it must map token ids to numbers", param=name
        ) from None
    _check_token_ids(bias, name)
    for token, weight in bias.items():
        if not -100 <= weight <= 100:
            raise BadRequest(
                f"{field_name(name)} of token {token} is {weight:g}; weights must be from -100 to 100", param=name
            )
    return bias


def _check_token_ids(tokens: Iterable[int], name: str) -> None:
    for token in tokens:
        if not 0 <= token < _TOKEN_IDS:
            raise BadRequest(
                f"{field_name(name)} has the token id {shown(token)}; ids are from 0 to {_TOKEN_IDS - 1}", param=name
            )


StageName = Literal["asr", "aura", "talker", "code2wav"]
STAGES: tuple[StageName, ...] = ("asr", "aura", "talker", "code2wav")


def why_mute(stages: Sequence[StageName]) -> str:
    """Why a pipeline of these stages, of which none is a Talker, does not speak, and what would."""
    if "aura" not in stages:
        return f"this server does not speak; its stages are {', '.join(stages)}"
    return (
        "the voice of this server is switched off: its deploy file says enabled: false for the Talker and Code2Wav, so it "
        'answers in text (modalities ["text"]). To hear answers, serve real checkpoints (aura-omni serve --deploy-config '
        "aura_omni.yaml), or enable both in a copy of the deploy file with the model of a Qwen3-TTS"
    )


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One request through the stages.

    sampling holds, for each stage, only the fields that the request sets; they are merged over the deploy file's.
    part: all stages that the server has ("turn"), or only those that speak the last message's text ("speech") or write down
    what is heard in it ("transcript"): then the turn is as on a server that has no other stages.
    messages: those of a "turn" may have Coming parts.
    """

    messages: tuple[Message, ...]
    part: TurnPart = "turn"
    speak: bool = True  # False: text only, neither Talker nor Code2Wav hears of the turn
    system_prompt: str | None = None  # replaces the default live-video prompt
    voice: Voice = Voice()
    playback: Playback = Playback()
    sampling: Mapping[StageName, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def coming(self) -> int:
        """How many pictures are."""
        return sum(isinstance(part, Coming) for message in self.messages for part in message.parts)


# ---------------------------------------------------------------- what comes out


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was heard in one Audio part. Whole. Empty text: no speech. complete False: the token budget cut it."""

    text: str
    language: str | None = None
    complete: bool = True


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of AURA's answer; without AURA, of what is spoken or was heard. Delta; joined deltas are the answer. Never sent
    for a silent turn."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class AudioChunk:
    """samples float32 [n] mono at VOICE_RATE in [-1, 1]. Delta; n is a multiple of FRAME_SAMPLES."""

    samples: np.ndarray


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one Turn. prompt_* count AURA's prompt (text and video) and ASR's audio tokens."""

    prompt_text_tokens: int = 0
    prompt_audio_tokens: int = 0
    prompt_video_tokens: int = 0
    cached_tokens: int = 0
    text_tokens: int = 0  # generated by AURA
    audio_frames: int = 0  # generated by the Talker

    @property
    def prompt_tokens(self) -> int:
        return self.prompt_text_tokens + self.prompt_audio_tokens + self.prompt_video_tokens


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of every Turn. error is set exactly when reason is "error".

    reason is how the text ended; speech_reason how the speech did (None when none was asked for, or the turn was silent).
    speech_stopped: it is not all that was to be said: a guard stopped it, the Talker was full, or it ended too soon for its text.
    """

    reason: Reason
    usage: Usage = Usage()
    error: AuraError | None = None
    speech_reason: SpeechReason | None = None
    speech_stopped: bool = False


Event = Transcript | TextDelta | AudioChunk | Ended


# ---------------------------------------------------------------- how far a start has come

# ready: the stage has done one real inference
StagePhase = Literal["waiting", "loading", "loaded", "ready", "failed"]
Report = Callable[[StageName, StagePhase], None]


def unreported(_: StageName, __: StagePhase) -> None:
    """For a start that nobody watches."""
