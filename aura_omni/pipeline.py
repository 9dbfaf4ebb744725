"""The stages joined for one Turn, and the server's only door to them.

    pipeline = Pipeline.load(config)
    turn = pipeline.submit(request, sink)     # any thread; what can be refused is refused here, before the engine
    turn.cancel()                             # any thread, any time

`sink` gets flow events on the engine thread and must return at once: any number, then exactly one Ended. Whatever a Turn
holds in the engine (pages, slots, states) is free before its Ended is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from aura_omni.assembly import Speech, Stages, assemble
from aura_omni.config import AudioChunks, Config
from aura_omni.engine.engine import Engine
from aura_omni.engine.sequence import FinishReason, Sequence
from aura_omni.errors import AuraError, BadRequest, EngineError, Unavailable
from aura_omni.flow import (
    VOICE_RATE,
    Audio,
    AudioChunk,
    Ended,
    Event,
    Message,
    Reason,
    Sampling,
    StageName,
    Text,
    TextDelta,
    Transcript,
    TurnRequest,
    Usage,
    Video,
)
from aura_omni.media.audio import resample
from aura_omni.stages.asr import AsrPrompt
from aura_omni.stages.clips import has_energy, split_long
from aura_omni.stages.silent import speakable
from aura_omni.stages.transcript import joined
from aura_omni.stages.vocoder import Reference as Spoken
from aura_omni.stages.vocoder import Stream, VocoderRunner
from aura_omni.stages.voices import Reference, Speaking

log = logging.getLogger(__name__)

Sink = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What `submit` worked out on the caller's thread: all that can be refused has been, all that is slow on the CPU is done.

    hearing: for each Audio part of the messages, in order, the prompts of its parts (long clips are cut; none: no sound in it).
    reference: samples float32 at VOICE_RATE of the voice to clone.
    """

    request: TurnRequest
    sampling: Mapping[StageName, Sampling]
    hearing: tuple[tuple[AsrPrompt, ...], ...]
    speaking: Speaking | None
    reference: np.ndarray | None


class Pipeline:
    def __init__(self, config: Config, stages: Stages) -> None:
        """stages: loaded, one for each of config.stages. The engine is not started yet."""
        self.config = config
        self.parts = stages
        self.stages: tuple[StageName, ...] = tuple(stage.name for stage in config.stages)
        self.served_names = config.served_names
        self.engine = Engine(stages.runners())

    @classmethod
    def load(cls, config: Config) -> Pipeline:
        """Load every stage's checkpoint, refuse what does not fit, start the engine. Takes as long as reading the weights."""
        pipeline = cls(config, assemble(config))
        pipeline.engine.start()
        return pipeline

    @property
    def ready(self) -> bool:
        return self.engine.alive

    @property
    def reason(self) -> str:
        return "" if self.ready else f"the engine is not running: {self.engine.failure or 'it is stopped'}"

    def close(self) -> None:
        """End every Turn and stop the engine. Idempotent."""
        self.engine.close()

    def submit(self, request: TurnRequest, sink: Sink) -> Turn:
        """Check and prepare on this thread (long recordings and references cost up to 100 ms), then hand over.

        Raises BadRequest and its kin (BadMedia, BadVoice, PromptTooLong), or Unavailable. Then sink is never called.
        """
        if not self.ready:
            raise Unavailable(self.reason)
        turn = Turn(self, self._plan(request), sink)
        self.engine.post(turn.begin)
        return turn

    # ------------------------------------------------------------ checks, on the caller's thread

    def _plan(self, request: TurnRequest) -> Plan:
        sampling = {name: self._sampling(name, request.sampling.get(name, {})) for name in self.stages}
        self._check_parts(request)
        speaking = self._speaking(request)
        hearing: tuple[tuple[AsrPrompt, ...], ...] = ()
        if self.parts.asr is not None:
            asr = self.parts.asr
            clips = [part for message in request.messages for part in message.parts if isinstance(part, Audio)]
            hearing = tuple(
                tuple(asr.prompt(part) for part in split_long(clip)) if has_energy(clip.samples, clip.rate) else ()
                for clip in clips
            )
        if self.parts.aura is not None:
            # Refuses impossible frames and a prompt that is too long even before anything was heard.
            self.parts.aura.prompt(_with_transcripts(request.messages, None), system_prompt=request.system_prompt)
        reference = None
        if speaking is not None and speaking.clone is not None:
            assert request.voice.ref_audio is not None  # Voices.resolve has checked it
            reference = resample(request.voice.ref_audio.samples, request.voice.ref_audio.rate, VOICE_RATE)
        return Plan(request, sampling, hearing, speaking, reference)

    def _sampling(self, name: StageName, wanted: Mapping[str, Any]) -> Sampling:
        """Request over deploy file over checkpoint. What a stage cannot do without (its stop ids) it adds itself."""
        return self.parts.defaults[name].merged(self.config.stage(name).sampling).merged(wanted)

    def _check_parts(self, request: TurnRequest) -> None:
        parts = [part for message in request.messages for part in message.parts]
        if self.parts.asr is None and any(isinstance(part, Audio) for part in parts):
            raise BadRequest(f"this server speaks but does not listen (pipeline {self.config.pipeline}); send text")
        if self.parts.aura is None and any(isinstance(part, Video) for part in parts):
            raise BadRequest(f"this server does not see (pipeline {self.config.pipeline}); send no image or video")
        if self.parts.aura is None and self.parts.speech is None and not any(isinstance(part, Audio) for part in parts):
            raise BadRequest("this server only transcribes; the last message needs an audio part")
        if not request.messages or request.messages[-1].role != "user":
            raise BadRequest("the last message must be the user's", param="messages")

    def _speaking(self, request: TurnRequest) -> Speaking | None:
        if not request.speak or self.parts.speech is None:
            return None
        return self.parts.speech.talker.voices.resolve(request.voice)


class Turn:
    """One request through the stages. `cancel` may be called from any thread; all else runs on the engine thread.

    `_live` is the work in progress and how to abort each; the Turn ends when an outcome is known and nothing lives.
    """

    def __init__(self, pipeline: Pipeline, plan: Plan, sink: Sink) -> None:
        self._pipeline, self._parts, self._plan, self._sink = pipeline, pipeline.parts, plan, sink
        self._live: dict[Sequence | Stream, Callable[[], None]] = {}
        self._outcome: tuple[Reason, AuraError | None] | None = None
        self._ended = False
        self._usage = Usage()
        self._text = ""
        self._text_reason: Literal["stop", "length"] = "stop"
        self._speech_reason: Literal["stop", "length"] | None = None

    def cancel(self) -> None:
        """Free everything the Turn holds and end it as cancelled. Idempotent; does nothing after the end."""
        with suppress(Unavailable):  # then the engine has ended every Turn already
            self._pipeline.engine.post(lambda: self._finish("cancelled"))

    # ------------------------------------------------------------ the order of the stages

    def begin(self) -> None:
        self._guard(self._listen)

    def _listen(self) -> None:
        """Every Audio part to a transcript, all at once."""
        asr = self._parts.asr
        readers = [[asr.reader(prompt) for prompt in prompts] for prompts in self._plan.hearing] if asr else []

        def heard() -> None:
            if not self._live:
                self._think([joined([reader.transcript() for reader in parts]) for parts in readers])

        for prompts, parts in zip(self._plan.hearing, readers, strict=True):
            for prompt, reader in zip(prompts, parts, strict=True):
                assert asr is not None
                self._count(prompt_audio_tokens=prompt.audio.length)
                self._run(
                    "asr",
                    partial(asr.sequence, prompt, self._plan.sampling["asr"]),
                    on_output=reader.push,
                    then=lambda *_: heard(),
                )
        heard()

    def _think(self, transcripts: list[Transcript]) -> None:
        """What was heard, written and shown to an answer, or to silence."""
        request, aura = self._plan.request, self._parts.aura
        messages = _with_transcripts(request.messages, transcripts)
        if aura is None or not messages[-1].parts:
            self._tell(transcripts)
            self._echo(messages[-1])
            return
        sampling = self._plan.sampling["aura"]
        prompt = aura.prompt(messages, system_prompt=request.system_prompt)
        self._tell(transcripts)
        self._count(prompt_text_tokens=prompt.text_tokens, prompt_video_tokens=prompt.video_tokens)
        reader = aura.reader(sampling)

        def say(token: int) -> None:
            self._say(reader.push(token))
            if reader.stopped:
                self._live[sequence]()

        def thought(reason: FinishReason, sequence: Sequence) -> None:
            self._count(text_tokens=sequence.generated, cached_tokens=sequence.cached)
            delta = reader.end()
            if reader.decision == "silent":
                self._finish("silent")  # nothing is built for the Talker
                return
            self._say(delta)
            self._text_reason = "length" if reason == "length" else "stop"
            self._speak(sequence.outputs)

        sequence = self._run("aura", partial(aura.sequence, prompt, sampling), on_output=say, then=thought)

    def _echo(self, message: Message) -> None:
        """Without AURA the answer is what was said or written; when that is nothing there is no turn to take."""
        text = "\n".join(part.text for part in message.parts if isinstance(part, Text))
        if not text.strip():
            self._finish("silent")
            return
        self._say(text)
        self._speak(None)

    def _say(self, delta: str) -> None:
        if delta:
            self._text += delta
            self._send(TextDelta(delta))

    def _speak(self, ids: list[int] | None) -> None:
        """The answer to frames, and frames to sound. ids: AURA's own, for `pass_token_ids`."""
        speech, speaking, voice = self._parts.speech, self._plan.speaking, self._plan.request.voice
        if speech is None or speaking is None or not speakable(self._text):
            self._finish(self._text_reason)
            return
        talker, vocoder = speech.talker, speech.vocoder
        body = (
            talker.writer.body_of_ids(ids)
            if voice.pass_token_ids and ids is not None
            else talker.writer.body(self._text)
        )
        reference = self._reference(speech, speaking)
        sampling = self._plan.sampling["talker"]
        if voice.max_frames is not None:
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, voice.max_frames))
        build = partial(talker.sequence, talker.prompt(speaking, body, reference), sampling, predictor=speech.predictor)
        stream = self._open_stream(vocoder, reference)
        chunker = _Chunker(self._pipeline.config.audio_chunks)

        def frame(codes: np.ndarray) -> None:
            self._count(audio_frames=1)
            if (chunk := chunker.push(codes)) is not None:
                vocoder.push(stream, chunk)

        def spoken(reason: FinishReason, _: Sequence) -> None:
            self._speech_reason = "length" if reason == "length" else "stop"
            if (rest := chunker.rest()) is not None:
                vocoder.push(stream, rest)
            vocoder.close(stream)  # drains, then ends the Turn

        self._run("talker", build, on_output=frame, then=spoken)

    def _open_stream(self, vocoder: VocoderRunner, reference: Reference | None) -> Stream:
        voice = self._plan.request.voice
        before = None
        if reference is not None and reference.codes is not None and voice.ref_audio is not None:
            before = Spoken(reference.codes.cpu().numpy(), voice.ref_audio.key)

        def sound(samples: np.ndarray) -> None:
            if self._outcome is None:
                self._send(AudioChunk(samples))

        def ended(reason: FinishReason, error: Exception | None) -> None:
            self._over(stream, reason, error, lambda _: self._finish(self._text_reason))

        stream = vocoder.open(sound, ended, reference=before)
        self._live[stream] = lambda: vocoder.abort(stream)
        return stream

    def _reference(self, speech: Speech, speaking: Speaking) -> Reference | None:
        """The voice to clone: built once per recording and transcript, then remembered."""
        voice, samples = self._plan.request.voice, self._plan.reference
        if samples is None or voice.ref_audio is None:
            return None
        ref_text = voice.ref_text if speaking.clone == "continue" else None
        return speech.references.get(
            voice.ref_audio, ref_text, lambda: speech.talker.reference(speaking, samples, ref_text, speech.encode)
        )

    # ------------------------------------------------------------ work in progress, and the end

    def _run(
        self,
        stage: StageName,
        build: Callable[..., Sequence],
        *,
        on_output: Callable[[Any], Any],
        then: Callable[[FinishReason, Sequence], None],
    ) -> Sequence:
        """Start a generation; `then` follows its end unless the Turn is over by then."""
        runner = self._parts.ar_runners[stage]
        sequence: Sequence = build(
            on_output=lambda output: on_output(output) if self._outcome is None else None,
            on_end=lambda reason, error: self._over(sequence, reason, error, lambda reason: then(reason, sequence)),
        )
        runner.add(sequence)
        self._live[sequence] = lambda: runner.abort(sequence)
        return sequence

    def _over(
        self,
        work: Sequence | Stream,
        reason: FinishReason,
        error: Exception | None,
        then: Callable[[FinishReason], None],
    ) -> None:
        del self._live[work]
        if self._outcome is not None:
            self._settle()
        elif reason == "error":
            self._finish("error", error)
        else:
            # Without an outcome only a stop string can have cancelled it.
            self._guard(lambda: then("stop" if reason == "cancelled" else reason))

    def _guard(self, action: Callable[[], None]) -> None:
        """Whatever goes wrong while a Turn is taken further ends that Turn, and no other."""
        try:
            action()
        except Exception as error:
            self._finish("error", error)

    def _finish(self, reason: Reason, error: Exception | None = None) -> None:
        """Know the outcome; abort what still lives; end when nothing does."""
        if self._outcome is not None:
            return
        if error is not None and not isinstance(error, AuraError):
            log.error("a turn failed", exc_info=error)
            error = EngineError(f"the turn failed inside the server: {type(error).__name__}")
        self._outcome = (reason, error)
        for abort in list(self._live.values()):
            abort()
        self._settle()

    def _settle(self) -> None:
        if self._live or self._ended or self._outcome is None:
            return
        self._ended = True
        reason, error = self._outcome
        self._send(Ended(reason, self._usage, error, self._speech_reason))

    def _send(self, event: Event) -> None:
        try:
            self._sink(event)
        except Exception:
            # Whoever listened is gone or broken: the turn serves nobody, and the engine must not fall with it.
            log.exception("the listener to a turn failed")
            self._finish("cancelled")

    def _tell(self, transcripts: list[Transcript]) -> None:
        for transcript in transcripts:
            self._send(transcript)

    def _count(self, **more: int) -> None:
        self._usage = replace(self._usage, **{name: getattr(self._usage, name) + count for name, count in more.items()})


class _Chunker:
    """Frames to the chunks in which they are decoded and sent: a first one, then chunks of one size."""

    def __init__(self, sizes: AudioChunks) -> None:
        self._sizes = sizes
        self._frames: list[np.ndarray] = []
        self._started = False

    def push(self, frame: np.ndarray) -> np.ndarray | None:
        """int64 [16] -> the chunk [T, 16] that it completes, if any."""
        self._frames.append(frame)
        wanted = self._sizes.frames if self._started else self._sizes.first_frames
        return self.rest() if len(self._frames) >= wanted else None

    def rest(self) -> np.ndarray | None:
        if not self._frames:
            return None
        chunk, self._frames, self._started = np.stack(self._frames), [], True
        return chunk


def _with_transcripts(messages: tuple[Message, ...], transcripts: list[Transcript] | None) -> tuple[Message, ...]:
    """Each Audio part replaced by its transcript; without transcripts, and where nothing was heard, by nothing."""
    heard = iter(transcripts or ())

    def parts(message: Message) -> Iterator[Text | Video]:
        for part in message.parts:
            if not isinstance(part, Audio):
                yield part
            elif transcripts is not None and (text := next(heard).text):
                yield Text(text)

    return tuple(replace(message, parts=tuple(parts(message))) for message in messages)
