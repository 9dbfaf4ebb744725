"""The speech of one Turn: its text to frames, frames to sound, and sound to the listener.

    speaker = Speaker(plan, work, speech, post=engine.post, chunks=..., limits=...)
    speaker.follow(asked)                     # AURA is about to write: the Talker reads along, if it may
    speaker.read(delta)
    speaker.text_ended()                      # or, where nothing is followed: speaker.speak(ids)

Knows nothing of AURA or ASR. Everything is called on the engine thread; what is in progress, and the end, is `Work`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from aura_omni.assembly import Speech
from aura_omni.config import AudioChunks, SpeechConfig
from aura_omni.engine.sequence import FinishReason, Sequence
from aura_omni.flow import AudioChunk, Sampling
from aura_omni.plan import Plan
from aura_omni.stages.pace import Pace
from aura_omni.stages.silent import speakable
from aura_omni.stages.speech_guard import SpeechGuard
from aura_omni.stages.speech_text import SpeechText
from aura_omni.stages.spoken_ids import SpokenIds
from aura_omni.stages.vocoder import Reference as Spoken
from aura_omni.stages.vocoder import Stream
from aura_omni.stages.voices import Reference, Speaking
from aura_omni.work import Work

log = logging.getLogger(__name__)


class Speaker:
    def __init__(
        self,
        plan: Plan,
        work: Work,
        speech: Speech | None,
        *,
        post: Callable[[Callable[[], None]], object],
        chunks: AudioChunks,
        limits: SpeechConfig,
    ) -> None:
        """speech: None where nothing can speak."""
        self._plan, self._work, self._speech = plan, work, speech
        self._post, self._chunks, self._limits = post, chunks, limits
        self._reference: Reference | None = None  # of the voice to clone, once it is there
        self._then: Callable[[Reference | None], None] | None = None  # while it is waited for: what follows
        self._asked = ""  # the words of the last message: the answer is probably in their language
        self._handover: _Handover | None = None  # while AURA writes and the Talker is to follow
        self._chunker: _Chunker | None = None  # once the Talker speaks
        self._kept: list[np.ndarray] = []  # sound that the listener gets at the end

    # ------------------------------------------------------------ a text that is complete

    def speak(self, body: list[int] | None) -> None:
        """To frames and sound, and then the Turn ends. body: ids of what is spoken; None: there is no word in it."""
        speech, speaking = self._speech, self._plan.speaking
        if speech is None or speaking is None:
            self._work.finish(self._work.text_reason)
        elif body is None:
            log.info("an answer has no words to speak: it has no sound")
            self._work.speech_reason = "empty"
            self._work.finish(self._work.text_reason)
        else:
            self._with_voice(speech, speaking, lambda reference: self._talk(_Speech(speech, speaking, body, reference)))

    def body(self, text: str) -> list[int] | None:
        """Ids of a whole text in its spoken form; None: nothing of it is spoken."""
        speech, speaking = self._speech, self._plan.speaking
        if speech is None or speaking is None or not speakable(text):
            return None
        if self._plan.normalize:
            return speech.talker.writer.spoken(text, language=speaking.language, context=self._asked)
        return speech.talker.writer.body(text)

    # ------------------------------------------------------------ a text that is still being written

    @property
    def following(self) -> bool:
        """Whether the Talker gets the text while it is written."""
        return self._handover is not None

    @property
    def awaited(self) -> bool:
        """Whether the Talker will get the text while it is written, and has not got its first word yet."""
        return self._handover is not None and self._handover.speech is None

    def follow(self, asked: str) -> None:
        """A text will be written. The Talker waits for the whole of it if that was asked for or ids are passed."""
        self._asked = asked
        speech, speaking, voice = self._speech, self._plan.speaking, self._plan.request.voice
        if speech is not None and speaking is not None and not speaking.non_streaming and not voice.pass_token_ids:
            front = SpeechText(speaking.language, context=asked) if self._plan.normalize else None
            self._handover = _Handover(speech, speaking, SpokenIds(speech.talker.writer.encoder(), front))

    def read(self, delta: str) -> None:
        """Text that has just been written: the first of it starts the Talker, the rest feeds it."""
        handover = self._handover
        if handover is None:
            return
        ids = handover.text.push(delta)
        if handover.speech is not None:
            self._feed(handover.speech, ids)
            return
        handover.body += ids
        if handover.body:
            self._with_voice(handover.parts, handover.speaking, partial(self._hand_over, handover))

    def _hand_over(self, handover: _Handover, reference: Reference | None) -> None:
        """Start the Talker if there is text enough for it."""
        least = handover.parts.talker.least_body(handover.speaking, reference) + self._limits.tokens_ahead
        if len(handover.body) >= least and handover.text.speakable:
            handover.speech = _Speech(handover.parts, handover.speaking, handover.body, reference, open_ended=True)
            self._talk(handover.speech)

    def send_due(self) -> None:
        """To be called while the text is written: a Talker that waits for more of it sends nothing itself."""
        if self._chunker is not None:
            self._chunker.send_due()

    def text_ended(self) -> None:
        """All of the text that was followed has been read."""
        handover = self._handover
        assert handover is not None
        self._handover = None
        ids, speech = handover.text.end(), handover.speech
        if speech is None:
            self.speak(handover.body + ids if handover.text.speakable else None)
            return
        self._feed(speech, ids)
        speech.open_ended = False
        if speech.sequence is not None and speech.sequence in self._work:
            speech.parts.talker.close(speech.sequence)
        elif not self._work.running:
            self._end()  # the speech had ended before the text did

    def _feed(self, speech: _Speech, ids: list[int]) -> None:
        if not ids:
            return
        speech.body += ids
        assert speech.guard is not None
        speech.guard.tokens += len(ids)
        if speech.sequence is not None and speech.sequence in self._work:
            speech.parts.talker.feed(speech.sequence, ids)

    # ------------------------------------------------------------ Talker and Code2Wav at work

    def _talk(self, spoken: _Speech) -> None:
        talker, vocoder, request = spoken.parts.talker, spoken.parts.vocoder, self._plan.request
        sampling = self._plan.sampling["talker"]
        if (longest := request.voice.max_frames) is not None:
            # As every field of a request, over that of the deploy file; a request that says it twice gets the smaller.
            also = request.sampling.get("talker", {}).get("max_tokens")
            sampling = replace(sampling, max_tokens=longest if also is None else min(longest, also))
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
            self._work.count(audio_frames=1)
            chunker.add(codes, paused=sequence.paused)
            sequence.paused = False
            if self._plan.request.playback.live:
                sequence.lasts_until_s = pace.dry_at_s
            if guard.frame(codes) is not None:
                self._work.abort(sequence)

        def made(reason: FinishReason, _: Sequence) -> None:
            fault = guard.done() if reason == "stop" else guard.fault
            if fault is not None and self._talks_again(spoken, guard, sampling):
                spoken.stream = None
                vocoder.abort(stream)
                self._kept.clear()
                spoken.again = True
                self._talk(spoken)
                return
            # A budget of frames is what was asked for; the end of max_model_len is not.
            full = reason == "length" and guard.frames < sampling.max_tokens
            self._work.speech_stopped = full or fault is not None
            self._work.speech_reason = fault or ("length" if reason == "length" else "stop")
            chunker.send()
            vocoder.close(stream)  # drains, then ends

        spoken.stream = stream
        sequence = spoken.sequence = self._work.run("talker", build, on_output=frame, then=made)

    def _talks_again(self, spoken: _Speech, guard: SpeechGuard, sampling: Sampling) -> bool:
        """Whether speech that went wrong is made again from the start: once, if nobody has heard it, with other draws."""
        again = not (self._plan.request.playback.live or spoken.again or sampling.temperature == 0)
        log.warning(
            "the Talker ended or was stopped after %d frames for %d tokens of text (%s)%s",
            guard.frames,
            guard.tokens,
            guard.fault,
            "; it starts again" if again else "",
        )
        return again

    def _open_stream(self, spoken: _Speech, guard: SpeechGuard) -> Stream:
        voice, reference, vocoder = self._plan.request.voice, spoken.reference, spoken.parts.vocoder
        before = None
        if reference is not None and reference.codes is not None and voice.ref_audio is not None:
            before = Spoken(reference.codes.cpu().numpy(), voice.ref_audio.key)

        def sound(samples: np.ndarray) -> None:
            if self._work.over:
                return
            if self._plan.request.playback.live:
                self._work.send(AudioChunk(samples))
            else:
                self._kept.append(samples)
            if guard.sound(samples) is not None and spoken.sequence is not None and spoken.sequence in self._work:
                self._work.abort(spoken.sequence)

        def ended(reason: FinishReason, error: Exception | None) -> None:
            self._work.ended(stream, reason, error, sounded)

        def sounded(_: FinishReason) -> None:
            # Another try goes on, or the text is still being written and its end is the Turn's.
            if spoken.stream is stream and not self.following:
                self._end()

        stream = vocoder.open(sound, ended, reference=before)
        self._work.watch(stream, lambda: vocoder.abort(stream))
        return stream

    def _end(self) -> None:
        kept, self._kept = self._kept, []
        for samples in kept:
            self._work.send(AudioChunk(samples))
        self._work.finish(self._work.text_reason)

    def _with_voice(self, speech: Speech, speaking: Speaking, then: Callable[[Reference | None], None]) -> None:
        """Go on with the voice to clone, None if there is none: now, or when it is built, and then with the last `then` only."""
        voice, samples = self._plan.request.voice, self._plan.reference
        if samples is None or voice.ref_audio is None:
            then(None)
            return
        ref_text = voice.ref_text if speaking.clone == "continue" else None
        if self._reference is None:
            self._reference = speech.references.kept(voice.ref_audio, ref_text)
        if self._reference is not None:
            then(self._reference)
            return
        waits, self._then = self._then is not None, then
        if waits:
            return

        def built(_: FinishReason) -> None:
            last, self._then = self._then, None
            assert last is not None
            self._reference = asked.reference
            last(asked.reference)

        asked = speech.references.ask(
            voice.ref_audio,
            ref_text,
            lambda: speech.talker.reference(speaking, samples, ref_text, speech.encode),
            post=self._post,
            on_end=lambda reason, error: self._work.ended(asked, reason, error, built),
        )
        self._work.watch(asked, lambda: speech.references.abort(asked))


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

    def __init__(self, pace: Pace, push: Callable[..., None]) -> None:
        """push gets int64 [T, 16], and due_s as `VocoderRunner.push`."""
        self._pace, self._push = pace, push
        self._frames: list[np.ndarray] = []

    def add(self, frame: np.ndarray, *, paused: bool) -> None:
        """frame: int64 [16]; paused: as `Pace.came` has it."""
        self._frames.append(frame)
        self._pace.came(paused=paused)
        self.send_due()

    def send_due(self) -> None:
        if self._pace.due:
            self.send()

    def send(self) -> None:
        if self._frames:
            frames, self._frames = self._frames, []
            due_s = self._pace.dry_at_s
            self._pace.sent()
            self._push(np.stack(frames), due_s=due_s)
