"""One request through the stages: what runs after what, what is in progress, and how it ends.

Knows the loaded stages and the engine's runners, and only what `pipeline` has checked. All of it but `cancel` runs on the
engine thread. Whatever a Turn holds in the engine (pages, slots, states) is free before its Ended is sent.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from aura_omni.assembly import Speech, Stages
from aura_omni.config import AudioChunks, SpeechConfig
from aura_omni.engine.engine import Engine
from aura_omni.engine.sequence import FinishReason, Sequence
from aura_omni.errors import AuraError, EngineError, Overloaded, Unavailable
from aura_omni.flow import (
    Audio,
    AudioChunk,
    Ended,
    Event,
    Message,
    Reason,
    Sampling,
    SpeechReason,
    StageName,
    Text,
    TextDelta,
    Transcript,
    TurnRequest,
    Usage,
    Video,
)
from aura_omni.stages.asr import AsrPrompt
from aura_omni.stages.aura import AuraStage
from aura_omni.stages.pace import Pace
from aura_omni.stages.silent import speakable
from aura_omni.stages.speech_guard import SpeechGuard
from aura_omni.stages.speech_text import SpeechText
from aura_omni.stages.spoken_ids import SpokenIds
from aura_omni.stages.transcript import before_stop, joined
from aura_omni.stages.vocoder import Reference as Spoken
from aura_omni.stages.vocoder import Stream
from aura_omni.stages.voices import Reference, Speaking

log = logging.getLogger(__name__)

Sink = Callable[[Event], None]

# Ids that the Talker has in hand before it starts. It reads 12.5 a second and AURA writes ten times as many, so this only
# bridges a pause of AURA right after its first words.
TOKENS_AHEAD = 3


@dataclass(frozen=True, slots=True)
class Listening:
    """A part of a clip, and how it is transcribed."""

    prompt: AsrPrompt
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Plan:
    """What `submit` worked out on the caller's thread: all that can be refused has been, all that is slow on the CPU is done.

    hearing: for each Audio part of the messages, in order, its parts (long clips are cut; none: no sound in it).
    at_once: parts that may be in ASR at the same time; more would let one Turn fill the server.
    reference: samples float32 at VOICE_RATE of the voice to clone.
    normalize: what is spoken is a clean form of what is written.
    body: ids of the text to speak where the request brings it; text_tokens: of the request, for such a pipeline.
    """

    request: TurnRequest
    sampling: Mapping[StageName, Sampling]
    hearing: tuple[tuple[Listening, ...], ...]
    at_once: int
    speaking: Speaking | None
    reference: np.ndarray | None
    normalize: bool = True
    body: list[int] | None = None
    text_tokens: int = 0


class Turn:
    """One request through the stages. `cancel` may be called from any thread; all else runs on the engine thread.

    `_live` is the work in progress and how to abort each; the Turn ends when an outcome is known and nothing lives.
    """

    def __init__(
        self, plan: Plan, sink: Sink, *, engine: Engine, parts: Stages, chunks: AudioChunks, limits: SpeechConfig
    ) -> None:
        self._plan, self._sink, self._engine, self._parts = plan, sink, engine, parts
        self._chunks, self._limits = chunks, limits
        self._live: dict[Sequence | Stream, Callable[[], None]] = {}
        self._outcome: tuple[Reason, AuraError | None] | None = None
        self._ended = False
        self._unheard = deque((clip, part) for clip, parts in enumerate(plan.hearing) for part in range(len(parts)))
        self._heard: list[list[Transcript]] = [[Transcript("")] * len(parts) for parts in plan.hearing]
        self._known: set[tuple[int, int]] = set()  # clip and part of the transcripts that are there
        self._handover: _Handover | None = None  # while AURA writes and the Talker is to follow
        self._chunker: _Chunker | None = None  # once the Talker speaks
        self._usage = Usage()
        self._text = ""
        self._asked = ""  # the words of the last message: the answer is probably in their language
        self._kept: list[np.ndarray] = []  # sound that the listener gets at the end
        self._text_reason: Literal["stop", "length"] = "stop"
        self._nothing_chosen = False  # a budget or a stop string, not silence, left nothing to hear
        self._speech_reason: SpeechReason | None = None

    def cancel(self) -> None:
        """Free everything the Turn holds and end it as cancelled. Idempotent; does nothing after the end."""
        with suppress(Unavailable):  # then the engine has ended every Turn already
            self._engine.post(lambda: self._finish("cancelled"))

    # ------------------------------------------------------------ the order of the stages

    def begin(self) -> None:
        self._guard(self._listen)

    def _listen(self) -> None:
        """Every part of every clip to a transcript, a few at a time; then on."""
        while self._unheard and len(self._live) < self._plan.at_once:
            try:
                self._listen_to(*self._unheard[0])
            except Overloaded:
                if not self._live:
                    raise
                break  # others fill the stage: the next end of one of ours makes room
            self._unheard.popleft()
        if not self._live:
            self._think(self._transcripts())

    def _listen_to(self, clip: int, part: int) -> None:
        asr, listening = self._parts.asr, self._plan.hearing[clip][part]
        assert asr is not None
        reader = asr.reader(listening.prompt)

        def heard(reason: FinishReason, sequence: Sequence) -> None:
            complete = reason != "length"
            if not complete:
                log.warning("max_tokens %d of ASR cut a transcript", sequence.sampling.max_tokens)
            self._heard[clip][part] = replace(reader.transcript(), complete=complete)
            self._known.add((clip, part))
            if self._plan.request.part == "transcript" and not sequence.sampling.stop:
                self._say_known()
            if self._parts.aura is None:
                self._count(text_tokens=sequence.generated, cached_tokens=sequence.cached)
            self._listen()

        build = partial(asr.sequence, listening.prompt, listening.sampling)
        self._run("asr", build, on_output=reader.push, then=heard)
        self._count(prompt_audio_tokens=listening.prompt.audio.length)
        if self._parts.aura is None:
            self._count(prompt_text_tokens=len(listening.prompt.tokens) - listening.prompt.audio.length)

    def _say_known(self) -> None:
        """Of a long recording, what is heard up to the first part that is still missing; a stop string needs the whole."""
        texts = []
        for clip, parts in enumerate(self._heard):
            known = 0
            while known < len(parts) and (clip, known) in self._known:
                known += 1
            texts.append(joined(parts[:known]).text)
            if known < len(parts):
                break
        self._say("\n".join(filter(None, texts))[len(self._text) :])

    def _transcripts(self) -> list[Transcript]:
        """One for each clip; also settles how the text ended, for the case that it is all there is to say."""
        transcripts: list[Transcript] = []
        stop = self._plan.sampling["asr"].stop if "asr" in self._plan.sampling else ()
        stopped = False
        for parts in self._heard:
            transcript, met = before_stop(joined(parts), stop)
            if stopped and self._parts.aura is None:
                transcript = Transcript("")  # the answer has ended before it
            stopped = stopped or met
            transcripts.append(transcript)
        if not stopped and not all(transcript.complete for transcript in transcripts):
            self._text_reason = "length"
        self._nothing_chosen = stopped or self._text_reason == "length"
        return transcripts

    def _think(self, transcripts: list[Transcript]) -> None:
        """What was heard, written and shown to an answer, or to silence."""
        request, aura = self._plan.request, self._parts.aura
        messages = with_transcripts(request.messages, transcripts)
        if aura is None:
            self._tell(transcripts)
            self._echo(transcripts)
            return
        if not messages[-1].parts:
            self._tell(transcripts)
            self._finish(self._text_reason if self._nothing_chosen else "silent")
            return
        self._asked = text_of(messages[-1])
        sampling = self._plan.sampling["aura"]
        prompt = aura.prompt(messages, system_prompt=request.system_prompt)
        self._handover = self._new_handover()
        self._tell(transcripts)
        self._count(prompt_text_tokens=prompt.text_tokens, prompt_video_tokens=prompt.video_tokens)
        reader = aura.reader(sampling)

        def say(token: int) -> None:
            self._say(reader.push(token))
            if self._chunker is not None:
                self._chunker.send_due()  # a Talker that waits for more text sends nothing itself
            if reader.stopped:
                self._live[sequence]()

        def thought(reason: FinishReason, sequence: Sequence) -> None:
            self._count(text_tokens=sequence.generated, cached_tokens=sequence.cached)
            chosen = sequence.outputs[-1:] != [] and sequence.outputs[-1] in aura.stop_ids
            delta = reader.end(chosen=chosen)
            if reader.decision == "silent":
                self._finish("silent")  # nothing is built for the Talker
                return
            self._say(delta)
            self._text_reason = "length" if reason == "length" and not reader.stopped else "stop"
            if self._handover is None:
                self._speak(self._answer_to_speak(aura, sequence.outputs))
            else:
                self._hand_over_rest()

        sequence = self._run("aura", partial(aura.sequence, prompt, sampling), on_output=say, then=thought)

    def _echo(self, transcripts: list[Transcript]) -> None:
        """Without AURA the answer is what was said or written; when that is nothing there is no turn to take."""
        if self._parts.asr is None:
            text = text_of(self._plan.request.messages[-1])
        else:
            text = "\n".join(transcript.text for transcript in transcripts if transcript.text)
        if not text.strip():
            self._finish(self._text_reason if self._nothing_chosen else "silent")
            return
        self._count(prompt_text_tokens=self._plan.text_tokens)
        self._say(text[len(self._text) :])
        self._speak(self._plan.body)

    def _answer_to_speak(self, aura: AuraStage, outputs: list[int]) -> list[int] | None:
        """Ids of AURA's whole answer for the Talker; None: nothing of it is spoken.

        For `pass_token_ids` they are AURA's own, if they say what is shown; a stop string, a spelled marker and the like they
        do not, and then they are those of the text that is shown.
        """
        speech = self._parts.speech
        if speech is None or not speakable(self._text):
            return None
        if self._plan.request.voice.pass_token_ids:
            shown = aura.tokenizer.decode(outputs).strip() == self._text.strip()
            return speech.talker.writer.body_of_ids(outputs if shown else aura.tokenizer.encode(self._text))
        spoken = self._text
        if (front := self._speech_text()) is not None:
            spoken = front.feed(self._text) + front.finish()
        return speech.talker.writer.body(spoken) if speakable(spoken) else None

    def _speech_text(self) -> SpeechText | None:
        """None: what is written is what is spoken."""
        speaking = self._plan.speaking
        if not self._plan.normalize or speaking is None:
            return None
        return SpeechText(speaking.language, context=self._asked)

    def _say(self, delta: str) -> None:
        if delta:
            self._text += delta
            self._send(TextDelta(delta))
            if self._handover is not None:
                self._hand_over(delta)

    def _speak(self, body: list[int] | None) -> None:
        """The answer to frames, and frames to sound. body: ids of what is spoken; None: nothing is."""
        speech, speaking = self._parts.speech, self._plan.speaking
        if speech is None or speaking is None:
            self._finish(self._text_reason)
        elif body is None:
            log.info("an answer of %d characters has no words to speak: it has no sound", len(self._text))
            self._speech_reason = "empty"
            self._finish(self._text_reason)
        else:
            self._talk(_Speech(speech, speaking, body, self._reference(speech, speaking)))

    def _talk(self, spoken: _Speech) -> None:
        """Talker and Code2Wav at work on it."""
        talker, vocoder, voice = spoken.parts.talker, spoken.parts.vocoder, self._plan.request.voice
        sampling = self._plan.sampling["talker"]
        if voice.max_frames is not None:
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, voice.max_frames))
        if spoken.again and sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + 1) % 2**63)
        prompt = talker.prompt(spoken.speaking, spoken.body, spoken.reference)
        build = partial(
            talker.sequence, prompt, sampling, predictor=spoken.parts.predictor, open_ended=spoken.open_ended
        )
        guard = spoken.guard = SpeechGuard(self._limits, least_frames=sampling.min_tokens)
        guard.tokens = len(spoken.body)
        stream = self._open_stream(spoken, guard)
        pace = Pace(self._plan.request.playback, first=self._chunks.first_frames, most=self._chunks.frames)
        chunker = self._chunker = _Chunker(pace, partial(vocoder.push, stream))

        def frame(codes: np.ndarray) -> None:
            self._count(audio_frames=1)
            chunker.add(codes)
            if guard.frame(codes) is not None:
                self._live[sequence]()

        def made(reason: FinishReason, _: Sequence) -> None:
            if guard.fault is not None and self._talks_again(spoken, guard, sampling):
                spoken.stream = None
                vocoder.abort(stream)
                self._kept.clear()
                spoken.again = True
                self._talk(spoken)
                return
            self._speech_reason = guard.fault or ("length" if reason == "length" else "stop")
            chunker.send()
            vocoder.close(stream)  # drains, then ends

        spoken.stream = stream
        sequence = spoken.sequence = self._run("talker", build, on_output=frame, then=made)

    def _talks_again(self, spoken: _Speech, guard: SpeechGuard, sampling: Sampling) -> bool:
        """Whether speech that went wrong is made again from the start: once, if nobody has heard it, with other draws."""
        again = not (self._plan.request.playback.live or spoken.again or sampling.temperature == 0)
        log.warning(
            "the Talker was stopped after %d frames for %d tokens of text (%s)%s",
            guard.frames,
            guard.tokens,
            guard.fault,
            "; it starts again" if again else "",
        )
        return again

    # ------------------------------------------------------------ the Talker while AURA is still writing

    def _new_handover(self) -> _Handover | None:
        """None: the Talker gets the text when it is complete, as asked for or because ids are passed."""
        speech, speaking, voice = self._parts.speech, self._plan.speaking, self._plan.request.voice
        if speech is None or speaking is None or speaking.non_streaming or voice.pass_token_ids:
            return None
        return _Handover(speech, speaking, SpokenIds(speech.talker.writer.encoder(), self._speech_text()))

    def _hand_over(self, delta: str) -> None:
        """Text that AURA has just said, to the Talker: the first of it starts a sequence, the rest feeds it."""
        handover = self._handover
        assert handover is not None
        ids = handover.text.push(delta)
        if handover.speech is not None:
            self._feed(handover.speech, ids)
            return
        handover.body += ids
        if not handover.body:
            return
        reference = self._reference(handover.parts, handover.speaking)
        least = handover.parts.talker.least_body(handover.speaking, reference) + TOKENS_AHEAD
        if len(handover.body) >= least and handover.text.speakable:
            handover.speech = _Speech(handover.parts, handover.speaking, handover.body, reference, open_ended=True)
            self._talk(handover.speech)

    def _hand_over_rest(self) -> None:
        """AURA has ended its text."""
        handover = self._handover
        assert handover is not None
        self._handover = None
        ids, speech = handover.text.end(), handover.speech
        if speech is None:
            self._speak(handover.body + ids if handover.text.speakable else None)
            return
        self._feed(speech, ids)
        speech.open_ended = False
        if speech.sequence in self._live:
            speech.parts.talker.close(speech.sequence)
        elif not self._live:
            self._finish(self._text_reason)  # the speech had ended before the text did

    def _feed(self, speech: _Speech, ids: list[int]) -> None:
        """More of its text."""
        if not ids:
            return
        speech.body += ids
        assert speech.guard is not None
        speech.guard.tokens += len(ids)
        if speech.sequence in self._live:
            speech.parts.talker.feed(speech.sequence, ids)

    def _open_stream(self, spoken: _Speech, guard: SpeechGuard) -> Stream:
        voice, reference, vocoder = self._plan.request.voice, spoken.reference, spoken.parts.vocoder
        before = None
        if reference is not None and reference.codes is not None and voice.ref_audio is not None:
            before = Spoken(reference.codes.cpu().numpy(), voice.ref_audio.key)

        def sound(samples: np.ndarray) -> None:
            if self._outcome is not None:
                return
            if self._plan.request.playback.live:
                self._send(AudioChunk(samples))
            else:
                self._kept.append(samples)
            if guard.sound(samples) is not None and spoken.sequence in self._live:
                self._live[spoken.sequence]()

        def ended(reason: FinishReason, error: Exception | None) -> None:
            self._over(stream, reason, error, sounded)

        def sounded(_: FinishReason) -> None:
            # Another try goes on, or AURA is still writing and its end is the Turn's.
            if spoken.stream is stream and self._handover is None:
                self._finish(self._text_reason)

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
        if reason in ("stop", "length"):
            kept, self._kept = self._kept, []
            for samples in kept:
                self._send(AudioChunk(samples))
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


@dataclass(slots=True, eq=False)
class _Speech:
    """What is being spoken. body: ids of its text, as far as it is known; open_ended: more of it follows."""

    parts: Speech
    speaking: Speaking
    body: list[int]
    reference: Reference | None
    open_ended: bool = False
    again: bool = False  # this is the second try
    guard: SpeechGuard | None = None
    sequence: Sequence | None = None
    stream: Stream | None = None


@dataclass(slots=True, eq=False)
class _Handover:
    """The way of a text from AURA to the Talker. body: its ids so far, until it is being spoken."""

    parts: Speech
    speaking: Speaking
    text: SpokenIds
    body: list[int] = field(default_factory=list)
    speech: _Speech | None = None


class _Chunker:
    """Frames on their way to Code2Wav: they wait until there are as many as are to be decoded and sent together."""

    def __init__(self, pace: Pace, push: Callable[[np.ndarray], None]) -> None:
        """push gets int64 [T, 16]."""
        self._pace, self._push = pace, push
        self._frames: list[np.ndarray] = []

    def add(self, frame: np.ndarray) -> None:
        """frame: int64 [16]."""
        self._frames.append(frame)
        self._pace.came()
        self.send_due()

    def send_due(self) -> None:
        if self._pace.due:
            self.send()

    def send(self) -> None:
        if self._frames:
            frames, self._frames = self._frames, []
            self._pace.sent()
            self._push(np.stack(frames))


def text_of(message: Message) -> str:
    return "\n".join(part.text for part in message.parts if isinstance(part, Text))


def with_transcripts(messages: tuple[Message, ...], transcripts: list[Transcript] | None) -> tuple[Message, ...]:
    """Each Audio part replaced by its transcript; without transcripts, and where nothing was heard, by nothing."""
    heard = iter(transcripts or ())

    def parts(message: Message) -> Iterator[Text | Video]:
        for part in message.parts:
            if not isinstance(part, Audio):
                yield part
            elif transcripts is not None and (text := next(heard).text):
                yield Text(text)

    return tuple(replace(message, parts=tuple(parts(message))) for message in messages)
