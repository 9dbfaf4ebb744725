"""One request through the stages: what runs after what.

Knows the loaded stages and the engine's runners, and only what `pipeline` has checked. All of it but `show` and `cancel` runs on
the engine thread. Whatever a Turn holds in the engine (pages, slots, states) is free before its Ended is sent.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from functools import partial

from aura_omni.assembly import Stages
from aura_omni.coming import Pictures, Wait
from aura_omni.config import AudioChunks, SpeechConfig
from aura_omni.engine.engine import Engine
from aura_omni.engine.sequence import FinishReason, Sequence
from aura_omni.errors import Overloaded, Unavailable
from aura_omni.flow import TextDelta, Transcript, Video
from aura_omni.plan import Draft, Plan, Seen, text_of, with_transcripts
from aura_omni.speaking import Speaker
from aura_omni.stages.aura import AuraStage
from aura_omni.stages.silent import speakable
from aura_omni.stages.transcript import before_stop, joined
from aura_omni.work import Sink, Work

log = logging.getLogger(__name__)


class Turn:
    """One request through the stages. `show` and `cancel` may be called from any thread; all else runs on the engine thread."""

    def __init__(
        self,
        plan: Plan,
        sink: Sink,
        *,
        engine: Engine,
        parts: Stages,
        pictures: Pictures,
        see: Callable[[Seq[Video]], Seen],
        chunks: AudioChunks,
        limits: SpeechConfig,
    ) -> None:
        """see: completes a plan whose pictures are still to come, on any thread."""
        self._plan, self._engine, self._parts = plan, engine, parts
        self._work = Work(sink, parts.ar_runners, after=engine.after_launches if parts.ahead else None)
        self._speaker = Speaker(plan, self._work, parts.speech, post=engine.post, chunks=chunks, limits=limits)
        self._unheard = deque((clip, part) for clip, parts in enumerate(plan.hearing) for part in range(len(parts)))
        self._heard: list[list[Transcript]] = [[Transcript("")] * len(parts) for parts in plan.hearing]
        self._seen, self._see = plan.seen, see if plan.seen is None else None
        self._pictures = pictures
        self._wait: Wait | None = None  # for them
        self._writes = False  # ASR has written something
        self._thinking: Sequence | None = None
        self._known: set[tuple[int, int]] = set()  # clip and part of the transcripts that are there
        self._text = ""
        self._nothing_chosen = False  # a budget or a stop string, not silence, left nothing to hear

    def cancel(self) -> None:
        """Free everything the Turn holds and end it as cancelled. Idempotent; does nothing after the end."""
        with suppress(Unavailable):  # then the engine has ended every Turn already
            self._engine.post(lambda: self._work.finish("cancelled"))

    def show(self, videos: Seq[Video]) -> None:
        """The pictures that are Coming, in their order, once: checked and prepared on this thread, then handed over.

        Raises what `Pipeline.submit` would have raised for them; then the turn is cancelled. Does nothing after the end, which
        its Ended has told.
        """
        see, self._see = self._see, None
        try:
            assert see is not None, "a turn that waits for no pictures is shown some"
            if not self._work.over:
                seen = see(videos)
                with suppress(Unavailable):  # then the engine has ended every Turn already
                    self._engine.post(lambda: self._work.guard(lambda: self._shown(seen)))
        except Exception:
            self.cancel()
            raise

    # ------------------------------------------------------------ the order of the stages

    def begin(self) -> None:
        if self._seen is None:
            self._wait_for_pictures()
        self._work.guard(self._listen)

    def _wait_for_pictures(self) -> None:
        def ended(reason: FinishReason, error: Exception | None) -> None:
            self._work.ended(wait, reason, error, lambda _: self._go_on())

        wait = self._wait = self._pictures.wait(ended)
        self._work.watch(wait, lambda: self._pictures.abort(wait))

    def _shown(self, seen: Seen) -> None:
        if self._work.over:
            return
        assert self._wait is not None
        self._seen = seen
        self._pictures.came(self._wait)

    def _go_on(self) -> None:
        """With AURA, as far as what is heard and seen allows."""
        if self._seen is None:
            return
        if not self._listening:
            self._think(self._seen, self._transcripts())
        elif self._writes and self._draft is not None:
            self._think_ahead()

    @property
    def _draft(self) -> Draft | None:
        """What AURA may read as soon as ASR writes."""
        return None if self._seen is None else self._seen.draft

    def _listen(self) -> None:
        """Every part of every clip to a transcript, a few at a time; then on."""
        while self._unheard and self._listening < self._plan.at_once:
            try:
                self._listen_to(*self._unheard[0])
            except Overloaded:
                if not self._listening:
                    raise
                break  # others fill the stage: the next end of one of ours makes room
            self._unheard.popleft()
        if not self._listening:
            self._go_on()

    @property
    def _listening(self) -> int:
        """Parts that are in ASR, as long as no transcripts are there."""
        return self._work.running - (self._thinking is not None) - (self._seen is None)

    def _listen_to(self, clip: int, part: int) -> None:
        asr, listening = self._parts.asr, self._plan.hearing[clip][part]
        assert asr is not None
        ids: list[int] = []

        def heard(reason: FinishReason, sequence: Sequence) -> None:
            complete = reason != "length"
            if not complete and self._plan.request.sampling.get("asr", {}).get("max_tokens") is None:
                log.warning("max_tokens %d of ASR cut a transcript", sequence.sampling.max_tokens)
            self._heard[clip][part] = replace(asr.transcript(listening.prompt, ids), complete=complete)
            self._known.add((clip, part))
            if self._plan.request.part == "transcript" and not sequence.sampling.stop:
                self._say_known()
            if self._parts.aura is None:
                self._work.count(text_tokens=sequence.generated, cached_tokens=sequence.cached)
            self._listen()

        def hear(token: int) -> None:
            ids.append(token)
            if not self._writes:
                self._writes = True
                if self._draft is not None:
                    with suppress(Unavailable):
                        # In the next pass of the engine's loop: ASR, which somebody waits for, has launched its next steps by then.
                        self._engine.post(lambda: self._work.guard(self._think_ahead))

        build = partial(asr.sequence, listening.prompt, listening.sampling)
        self._work.run("asr", build, on_output=hear, then=heard)
        self._work.count(prompt_audio_tokens=listening.prompt.audio.length)
        if self._parts.aura is None:
            self._work.count(prompt_text_tokens=len(listening.prompt.tokens) - listening.prompt.audio.length)

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
            self._work.text_reason = "length"
        self._nothing_chosen = stopped or self._work.text_reason == "length"
        return transcripts

    def _think_ahead(self) -> None:
        """Let AURA read what will precede the first transcript, where that keeps nobody else out."""
        aura, draft = self._parts.aura, self._draft
        assert aura is not None
        assert draft is not None
        if self._thinking is None and not self._work.over and self._parts.ar_runners["aura"].spare:
            self._thinking = self._answer(aura, partial(aura.sequence, draft.prompt, known=draft.known))

    def _think(self, seen: Seen, transcripts: list[Transcript]) -> None:
        """What was heard, written and shown to an answer, or to silence."""
        request, aura = self._plan.request, self._parts.aura
        messages = with_transcripts(seen.messages, transcripts)
        if aura is None:
            self._tell(transcripts)
            self._echo(transcripts)
            return
        if not messages[-1].parts:
            self._tell(transcripts)
            self._work.finish(self._work.text_reason if self._nothing_chosen else "silent")
            return
        sampling = self._plan.sampling["aura"]
        prompt = seen.prompt
        if prompt is None or any(transcript.text for transcript in transcripts):
            prompt = aura.prompt(messages, system_prompt=request.system_prompt)
        self._speaker.follow(text_of(messages[-1]))
        self._tell(transcripts)
        self._work.count(prompt_text_tokens=prompt.text_tokens, prompt_video_tokens=prompt.video_tokens)
        if self._work.over:
            return  # whoever listens has failed
        if self._thinking is None:
            self._thinking = self._answer(aura, partial(aura.sequence, prompt))
        else:
            aura.close(self._thinking, prompt, sampling)
            self._parts.ar_runners["aura"].close(self._thinking)

    def _answer(self, aura: AuraStage, build: Callable[..., Sequence]) -> Sequence:
        """Start AURA's answer and say it."""
        sampling = self._plan.sampling["aura"]
        reader = aura.reader(sampling)

        def say(token: int) -> None:
            self._say(reader.push(token))
            self._speaker.send_due()
            if reader.stopped:
                self._work.abort(sequence)

        def thought(reason: FinishReason, sequence: Sequence) -> None:
            self._work.count(text_tokens=sequence.generated, cached_tokens=sequence.cached)
            chosen = sequence.outputs[-1:] != [] and sequence.outputs[-1] in aura.stop_ids
            delta = reader.end(chosen=chosen)
            if reader.decision == "silent":
                self._work.finish("silent")  # nothing is built for the Talker
                return
            self._say(delta)
            self._work.text_reason = "length" if reason == "length" and not reader.stopped else "stop"
            if self._speaker.following:
                self._speaker.text_ended()
            else:
                self._speaker.speak(self._answer_to_speak(aura, sequence.outputs))

        build = partial(build, sampling=sampling, urgent=lambda: self._speaker.awaited)
        sequence = self._work.run("aura", build, on_output=say, then=thought)
        return sequence

    def _echo(self, transcripts: list[Transcript]) -> None:
        """Without AURA the answer is what was said or written; when that is nothing there is no turn to take."""
        if self._parts.asr is None:
            text = text_of(self._plan.request.messages[-1])
        else:
            text = "\n".join(transcript.text for transcript in transcripts if transcript.text)
        if not text.strip():
            self._work.finish(self._work.text_reason if self._nothing_chosen else "silent")
            return
        self._work.count(prompt_text_tokens=self._plan.text_tokens)
        self._say(text[len(self._text) :])
        self._speaker.speak(self._plan.body)

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
        return self._speaker.body(self._text)

    def _say(self, delta: str) -> None:
        if delta:
            # The first is what is waited for; any other is read long after it has come.
            (self._work.send_late if self._text else self._work.send)(TextDelta(delta))
            self._text += delta
            self._speaker.read(delta)

    def _tell(self, transcripts: list[Transcript]) -> None:
        for transcript in transcripts:
            self._work.send_late(transcript)
