"""Who speaks, in which language and manner: a request's Voice checked against what the checkpoint can do.

Knows names and limits, not tensors. What a recording becomes is built and kept by `references`.

    voices = Voices.from_json(config, checkpoint.name)
    speaking = voices.resolve(Voice(speaker="Ryan", language="en"))       # or BadVoice, before anything runs
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aura_omni.errors import BadVoice, CheckpointError, field_name, shown
from aura_omni.flow import VOICE_RATE, Audio, Voice, VoiceTask
from aura_omni.media.level import may_be_speech
from aura_omni.media.spoken import check_transcript
from aura_omni.models.fields import whole

_TASKS: dict[str, VoiceTask] = {"base": "Base", "custom_voice": "CustomVoice", "voice_design": "VoiceDesign"}
_LACKS: dict[VoiceTask, str] = {
    "Base": "a speaker encoder to clone a voice with",
    "CustomVoice": "named speakers",
    "VoiceDesign": "voices made from a description",
}
_DEFAULT_SPEAKER = "vivian"  # as upstream; the first of the file where a checkpoint has no such speaker
_ISO_LANGUAGES = {
    "en": "english",
    "de": "german",
    "es": "spanish",
    "zh": "chinese",
    "ja": "japanese",
    "fr": "french",
    "ko": "korean",
    "ru": "russian",
    "it": "italian",
    "pt": "portuguese",
}
MAX_REFERENCE_S = 60
_SOUND_ALONE = f"set {field_name('x_vector_only')} to use only the voice's sound"
_OF_NANO: Mapping[VoiceTask, str] = {"Base": "nano:tts-base", "CustomVoice": "nano:tts"}


@dataclass(frozen=True, slots=True)
class Speaking:
    """A Voice that the checkpoint can speak with; every default filled in. Ids are of the codec vocabulary.

    clone: None, or how a reference is used: "speaker" (its vector alone) or "continue" (its text and codes too).
    """

    task: VoiceTask
    language_id: int | None  # None: the model finds out
    speaker_id: int | None
    instruct: str  # "" for none
    clone: str | None
    non_streaming: bool
    language: str | None = None  # that the text is in, by its lower-case name; None: not said, and it may be any


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What is kept of a reference recording, on the host: stages use it in lanes of their own.

    speaker [H] is its vector; codes int64 [T, 16] and text_ids (its transcript) only to continue from it.
    """

    speaker: Tensor
    codes: Tensor | None = None
    text_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Voices:
    """What one checkpoint can speak with. languages and speakers by lower-case name, in the file's order."""

    checkpoint: str
    task: VoiceTask
    takes_instruct: bool
    languages: Mapping[str, int]  # dialects too
    speakers: Mapping[str, int]
    dialects: Mapping[str, str]  # speaker -> dialect that Chinese turns into
    least_samples: int  # of a reference at 24 kHz

    @classmethod
    def from_json(cls, config: Mapping[str, Any], checkpoint: str, *, least_samples: int = 0) -> Voices:
        """From a published config.json. Raises CheckpointError for a kind of checkpoint that is not known here."""
        kind, talker = config.get("tts_model_type"), config["talker_config"]
        if not isinstance(kind, str) or kind not in _TASKS:
            raise CheckpointError(f"checkpoint {checkpoint} has tts_model_type {kind!r}; known are {', '.join(_TASKS)}")
        task = _TASKS[kind]
        published, tongues = talker.get("spk_id") or {}, talker["codec_language_id"]
        speakers = {name.lower(): whole(published, name, least=0) for name in published}
        dialects = {name.lower(): dialect for name, dialect in (talker.get("spk_is_dialect") or {}).items() if dialect}
        languages = {name.lower(): whole(tongues, name, least=0) for name in tongues}
        beyond = [name for name, number in {**speakers, **languages}.items() if number >= talker["vocab_size"]]
        if beyond:
            raise CheckpointError(f"checkpoint {checkpoint}: the ids of {', '.join(beyond)} are not below vocab_size")
        if task == "CustomVoice" and not speakers:
            raise CheckpointError(f"checkpoint {checkpoint} is a custom_voice checkpoint without speakers (spk_id)")
        unknown = sorted(set(dialects.values()) - set(languages))
        if unknown:
            raise CheckpointError(
                f"checkpoint {checkpoint} has speakers of dialects without an id: {', '.join(unknown)}"
            )
        return cls(
            checkpoint=checkpoint,
            task=task,
            # The small CustomVoice was not trained on instructions; its own package drops them without a word.
            takes_instruct=task == "VoiceDesign" or (task == "CustomVoice" and config.get("tts_model_size") != "0b6"),
            languages=languages,
            speakers=speakers,
            dialects=dialects,
            least_samples=least_samples,
        )

    @property
    def language_names(self) -> list[str]:
        """What a request may ask for, besides ISO 639-1 codes of the same. Dialects come with their speakers."""
        return ["auto", *(name for name in self.languages if "dialect" not in name)]

    @property
    def _only_language(self) -> str | None:
        """What every text must be in for a checkpoint that speaks one language."""
        return next(iter(self.languages)) if len(self.languages) == 1 else None

    def resolve(self, voice: Voice) -> Speaking:
        """Check every field, and fill in what is not given. Raises BadVoice naming the field, its value and what there is."""
        self._refuse_fields_of_other_tasks(voice)
        speaker = self._speaker(voice.speaker) if self.task == "CustomVoice" else None
        language = self._language(voice.language)
        return Speaking(
            task=self.task,
            language_id=self._language_id(language, speaker),
            speaker_id=None if speaker is None else self.speakers[speaker],
            instruct=self._instruct(voice.instruct),
            clone=self._clone(voice) if self.task == "Base" else None,
            non_streaming=self.task != "Base" if voice.non_streaming is None else voice.non_streaming,
            language=language or self._only_language,
        )

    def check_names(self, voice: Voice) -> None:
        """What `resolve` refuses of a task, a speaker and a language alone: also of a Voice that nothing is spoken with."""
        self._refuse_fields_of_other_tasks(voice)
        if self.task == "CustomVoice":
            self._speaker(voice.speaker)
        self._language(voice.language)

    def _refuse_fields_of_other_tasks(self, voice: Voice) -> None:
        if voice.task not in (None, self.task):
            raise BadVoice(
                f"{field_name('task')} is {voice.task}, which needs {_LACKS[voice.task]}; this server's Talker is {self.task}. "
                f"Leave it out, or {self._serve(voice.task)}",
                param="task",
            )
        if voice.speaker and self.task != "CustomVoice":
            instead = (
                f"send {field_name('ref_audio')}"
                if self.task == "Base"
                else f"describe the voice in {field_name('instruct')}"
            )
            raise BadVoice(
                f"{field_name('speaker')} is {shown(voice.speaker)}, but this server's Talker ({self.task}) has no named speakers; leave it out and "
                f"{instead}, or {self._serve('CustomVoice')}",
                param="speaker",
            )
        if self.task == "Base":
            return
        for name, given in (
            ("ref_audio", voice.ref_audio is not None),
            ("ref_text", bool(voice.ref_text)),
            ("x_vector_only", voice.x_vector_only),
        ):
            if given:
                raise BadVoice(
                    f"{field_name(name)} is given, but this server's Talker ({self.task}) cannot clone a voice; leave it out, or "
                    f"{self._serve('Base')}",
                    param=name,
                )

    def _serve(self, task: VoiceTask) -> str:
        """The way out for who needs another kind of checkpoint."""
        of_nano = f" ({_OF_NANO[task]})" if task in _OF_NANO and self.checkpoint.startswith("nano:") else ""
        return f"serve a {task} checkpoint{of_nano} in the Talker and Code2Wav"

    def _speaker(self, name: str | None) -> str:
        if not name or not name.strip():
            return _DEFAULT_SPEAKER if _DEFAULT_SPEAKER in self.speakers else next(iter(self.speakers))
        found = name.strip().lower()
        if found not in self.speakers:
            raise BadVoice(
                f"{field_name('speaker')} {shown(name)} is unknown; there are {', '.join(self.speakers)}",
                param="speaker",
            )
        return found

    def _language(self, name: str | None) -> str | None:
        wanted = (name or "auto").strip().lower()
        wanted = _ISO_LANGUAGES.get(wanted.replace("_", "-").partition("-")[0], wanted)
        if wanted not in self.language_names:
            raise BadVoice(
                f"{field_name('language')} {shown(name)} is unknown; there are {', '.join(self.language_names)}, or their ISO 639-1 codes",
                param="language",
            )
        return None if wanted == "auto" else wanted

    def _language_id(self, language: str | None, speaker: str | None) -> int | None:
        if speaker is not None and speaker in self.dialects and language in (None, "chinese"):
            return self.languages[self.dialects[speaker]]
        return None if language is None else self.languages[language]

    def _instruct(self, instruct: str | None) -> str:
        if not instruct or not instruct.strip():
            if self.task == "VoiceDesign":
                raise BadVoice(
                    f"{field_name('instruct')} is missing: this server's Talker (VoiceDesign) makes a voice from its description; "
                    "send one",
                    param="instruct",
                )
            return ""
        if not self.takes_instruct:
            raise BadVoice(
                f"{field_name('instruct')} is given, but this server's Talker ({self.task}) does not follow instructions; leave it out, "
                "or serve a 1.7B CustomVoice or a VoiceDesign checkpoint in the Talker and Code2Wav",
                param="instruct",
            )
        return instruct

    def _clone(self, voice: Voice) -> str:
        if voice.ref_audio is None:
            raise BadVoice(
                f"{field_name('ref_audio')} is missing: this server's Talker (Base) speaks with the voice of a recording; send one, "
                f"with its transcript as {field_name('ref_text')}, or {_SOUND_ALONE}",
                param="ref_audio",
            )
        self.check_reference(voice.ref_audio)
        if voice.x_vector_only:
            return "speaker"
        if not voice.ref_text or not voice.ref_text.strip():
            raise BadVoice(
                f"{field_name('ref_text')} is missing: send the transcript of {field_name('ref_audio')}, or {_SOUND_ALONE}",
                param="ref_text",
            )
        check_transcript(voice.ref_text, voice.ref_audio.duration_s, way_out=_SOUND_ALONE)
        return "continue"

    def check_reference(self, audio: Audio) -> None:
        samples = len(audio.samples) * VOICE_RATE // audio.rate
        if samples < self.least_samples:
            raise BadVoice(
                f"{field_name('ref_audio')} has {samples:,} samples at {VOICE_RATE:,} Hz; at least {self.least_samples:,} "
                f"({self.least_samples / VOICE_RATE:.3f} s) are needed, several seconds work best",
                param="ref_audio",
            )
        if audio.duration_s > MAX_REFERENCE_S:
            seconds = math.ceil(audio.duration_s * 100) / 100  # never as long as what is taken
            raise BadVoice(
                f"{field_name('ref_audio')} is {seconds:.2f} s long; at most {MAX_REFERENCE_S} s are taken. Cut it",
                param="ref_audio",
            )
        if not may_be_speech(audio.samples, audio.rate):
            raise BadVoice(
                f"nobody speaks in {field_name('ref_audio')}: it is silence or one steady sound; send a recording of speech",
                param="ref_audio",
            )
