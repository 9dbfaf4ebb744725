"""`say`, `transcribe` and `chat`: one pipeline, a few questions, no server. What they print is the answer and nothing else;
progress and errors go to standard error."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tqdm import tqdm

from aura_omni.assembly import checkpoint_of
from aura_omni.config import Config, narrowed
from aura_omni.errors import AuraError, BadRequest, fields_named
from aura_omni.flow import (
    SILENT_TEXT,
    VOICE_RATE,
    AudioChunk,
    Event,
    StageName,
    TextDelta,
    TranscriptFormat,
    Voice,
    why_mute,
)
from aura_omni.heard import Heard, failure
from aura_omni.media.encoder import AudioFormat, encode, start
from aura_omni.media.formats import audio_format_of_file
from aura_omni.offline_flags import STDIO
from aura_omni.pipeline import Pipeline
from aura_omni.stages.transcript import language_name
from aura_omni.stages.voices import Voices
from aura_omni.transcript_file import written
from aura_omni.transcription import Transcription

BAR_AFTER_S = 1.0  # short work needs no bar
_SUFFIXES: dict[TranscriptFormat, str] = {
    "text": ".txt",
    "json": ".json",
    "verbose_json": ".json",
    "srt": ".srt",
    "vtt": ".vtt",
}
# What the pipeline calls a part of a turn, by the flag that gives it
_FLAGS: Mapping[str, str] = {
    "speaker": "--voice", "language": "--language", "instruct": "--instruct", "ref_audio": "--ref-audio",
    "ref_text": "--ref-text", "x_vector_only": "no --ref-text", "system_prompt": "--system-prompt",
}  # fmt: skip


@fields_named(_FLAGS)
def say(arguments: argparse.Namespace, config: Config) -> int:
    text = _text(arguments.text)
    if not text.strip():
        raise BadRequest("there is nothing to say; give a text", param="text")
    output = _Output.of(arguments.output)
    _check_files(_reference(arguments))
    config = narrowed(config, "qwen3_tts")
    _check_names(arguments, config)
    with Pipeline.load(config) as pipeline:
        events = pipeline.events(
            pipeline.speech_request(text, voice=_voice(arguments, pipeline), sampling=_seeds(arguments, pipeline))
        )
        output.write(_shown(events, "speaking"))
    return 0


@fields_named(_FLAGS)
def transcribe(arguments: argparse.Namespace, config: Config) -> int:
    """1 when any file could not be written down; the others are."""
    if arguments.language is not None and arguments.language.strip().lower() != "auto":
        language_name(arguments.language)  # or BadRequest
    folder = Path(arguments.output_dir) if arguments.output_dir else None
    if folder is not None:
        twice = [name for name, count in Counter(map(_name, arguments.files)).items() if count > 1]
        if twice:
            raise BadRequest(f"two files are named {twice[0]}; write them into different folders", param="files")
        folder.mkdir(parents=True, exist_ok=True)
        _check_writable(folder)
    status = 0
    with Pipeline.load(narrowed(config, "qwen3_asr")) as pipeline:
        for file in arguments.files:
            try:
                text = _transcript(file, arguments, pipeline)
            except AuraError as error:
                if error.status >= 500:
                    raise
                error.name_fields(_FLAGS)
                _complain(f"{file}: {error.message}")
                status = 1
                continue
            if folder is None:
                print(text.rstrip("\n"), flush=True)
            else:
                name = f"{_name(file)}{_SUFFIXES[arguments.format]}"
                (folder / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    return status


@fields_named(_FLAGS)
def chat(arguments: argparse.Namespace, config: Config) -> int:
    text = _text(arguments.text)
    media = [*arguments.audio, *arguments.video, *arguments.image]
    if not media and not text.strip():
        raise BadRequest("there is nothing to answer; give a text, a recording, a clip or a picture", param="text")
    output = _Output.of(arguments.output) if arguments.output else None
    _check_files([*media, *_reference(arguments)])
    stages = [stage.name for stage in config.stages]
    if output is not None and "talker" not in stages:
        raise BadRequest(why_mute(stages), param="output")
    if "talker" in stages:
        _check_names(arguments, config)
    with Pipeline.load(config) as pipeline:
        events = pipeline.chat_events(
            text,
            audio=[pipeline.sound(_file(name)) for name in arguments.audio],
            video=[_file(name) for name in arguments.video],
            image=[_file(name) for name in arguments.image],
            system_prompt=arguments.system_prompt,
            speak=output is not None,
            voice=_voice(arguments, pipeline),
            sampling=_seeds(arguments, pipeline),
        )
        if output is None:
            _print(events)
        else:
            heard = output.write(_shown(events, "answering"))
            # Standard output carries the sound where it was asked for.
            stream = sys.stderr if arguments.output == STDIO else sys.stdout
            print(SILENT_TEXT if heard.silent else heard.text, file=stream)
    return 0


# ---------------------------------------------------------------- what goes in


def _text(given: str) -> str:
    return sys.stdin.read() if given == STDIO else given


def _file(name: str) -> str | bytes:
    return sys.stdin.buffer.read() if name == STDIO else name


def _reference(arguments: argparse.Namespace) -> list[str]:
    return [] if arguments.ref_audio is None else [arguments.ref_audio]


def _check_files(names: Iterable[str]) -> None:
    """Before anything is loaded."""
    for name in names:
        if name != STDIO and not Path(name).is_file():
            reason = "it is a folder" if Path(name).is_dir() else "there is no such file"
            raise BadRequest(f"cannot read {name}: {reason}", param="files")


def _check_names(arguments: argparse.Namespace, config: Config) -> None:
    """A voice and a language: the checkpoint's config.json has them, and is read long before its weights."""
    checkpoint = checkpoint_of(config.stage("talker"))
    voices = checkpoint.parse(lambda file: Voices.from_json(file, checkpoint.name))
    voices.check_names(Voice(speaker=arguments.voice, language=arguments.language))


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadRequest(
            f"nothing can be written into {folder}: permission denied; name another folder", param="output"
        )


def _name(file: str) -> str:
    return "stdin" if file == STDIO else Path(file).stem


def _voice(arguments: argparse.Namespace, pipeline: Pipeline) -> Voice:
    reference = arguments.ref_audio
    return Voice(
        speaker=arguments.voice,
        language=arguments.language,
        instruct=arguments.instruct,
        ref_audio=None if reference is None else pipeline.sound(_file(reference)),
        ref_text=arguments.ref_text,
        x_vector_only=reference is not None and arguments.ref_text is None,
    )


def _seeds(arguments: argparse.Namespace, pipeline: Pipeline) -> dict[StageName, dict[str, int]]:
    if arguments.seed is None:
        return {}
    return {stage: {"seed": arguments.seed} for stage in pipeline.stages if stage != "code2wav"}


def _transcript(file: str, arguments: argparse.Namespace, pipeline: Pipeline) -> str:
    said = Transcription()
    layout = "{desc}: {n:.0f} s heard in {elapsed}"
    with tqdm(desc=file, bar_format=layout, delay=BAR_AFTER_S, disable=None, leave=False) as bar:
        for _ in pipeline.transcribed(
            _file(file),
            said,
            language=arguments.language,
            context=arguments.prompt,
            sampling=_seeds(arguments, pipeline),
        ):
            bar.update(said.duration_s - bar.n)
    return written(said, arguments.format)


# ---------------------------------------------------------------- what comes out


class _Output:
    """Where sound goes: a file, written whole at the end, or standard output, written while it is made."""

    def __init__(self, path: Path | None, audio_format: AudioFormat) -> None:
        self._path = path
        self._format = audio_format

    @classmethod
    def of(cls, name: str) -> _Output:
        """Refuses, before anything is loaded, what could not be written."""
        if name == STDIO:
            return cls(None, "wav")
        path = Path(name)
        folder = path.absolute().parent
        if path.is_dir():
            raise BadRequest(f"{name} cannot be written: it is a folder; name a file in it", param="output")
        if not folder.is_dir():
            raise BadRequest(
                f"{name} cannot be written: the folder {folder} does not exist; make it first", param="output"
            )
        if not path.exists():
            _check_writable(folder)
        elif not os.access(path, os.W_OK):
            raise BadRequest(f"{name} cannot be written: permission denied; name another file", param="output")
        return cls(path, audio_format_of_file(path))

    def write(self, events: Iterable[Event]) -> Heard:
        """Raises what the turn failed with. A silent turn has no sound, and then no file."""
        if self._path is None:
            return Heard.of(_to_stdout(events))
        heard = Heard.of(events)
        if not heard.silent:
            self._path.write_bytes(encode(heard.sound(), VOICE_RATE, self._format))
        return heard


def _to_stdout(events: Iterable[Event]) -> Iterator[Event]:
    encoder = start("wav", VOICE_RATE)
    for event in events:
        if isinstance(event, AudioChunk):
            sys.stdout.buffer.write(encoder.feed(event.samples))
            sys.stdout.buffer.flush()
        yield event


def _print(events: Iterable[Event]) -> None:
    """The text as it is written."""
    heard = Heard()
    for event in events:
        heard.add(event)
        if isinstance(event, TextDelta):
            print(event.text, end="", flush=True)
    error = failure(heard.end)
    if error is not None:
        raise error
    print(SILENT_TEXT if heard.silent else "")


def _shown(events: Iterable[Event], doing: str) -> Iterator[Event]:
    """The same events, counted on standard error where a person looks at it."""
    layout = "{desc}: {n:.1f} s of speech in {elapsed}"
    with tqdm(desc=doing, bar_format=layout, delay=BAR_AFTER_S, disable=None, leave=False) as bar:
        for event in events:
            if isinstance(event, AudioChunk):
                bar.update(len(event.samples) / VOICE_RATE)
            yield event


def _complain(message: str) -> None:
    print(f"aura-omni: {message}", file=sys.stderr)
