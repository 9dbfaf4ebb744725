"""The stages joined for one Turn, and the only door to them, for the server and for programs (`asking`).

    pipeline = Pipeline.load(config)
    turn = pipeline.submit(request, sink)     # any thread; what can be refused is refused here, before the engine
    turn.show(videos)                         # any thread: the pictures that the request says are Coming
    turn.cancel()                             # any thread, any time
    pipeline.prepare(messages)                # what turns to come will begin with: `reading`

`sink` gets flow events on the engine thread and must return at once: any number, then exactly one Ended. Whatever a Turn
holds in the engine (pages, slots, states) is free before its Ended is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from typing import Any, get_args

from aura_omni.asking import Asking
from aura_omni.assembly import PAGE_SIZE, Stages, assemble
from aura_omni.coming import Pictures
from aura_omni.config import Config, Options, load_here
from aura_omni.counters import Counters
from aura_omni.engine.engine import Bystander, Engine
from aura_omni.errors import BadRequest, ConfigError, PromptTooLong, Unavailable, field_name, fields_named
from aura_omni.flow import (
    STAGES,
    VOICE_RATE,
    Audio,
    Coming,
    Message,
    Report,
    Sampling,
    StageName,
    StagePhase,
    Text,
    TurnPart,
    TurnRequest,
    Video,
    Voice,
    VoiceTask,
    checked_sampling,
    unreported,
    why_mute,
)
from aura_omni.media.audio import resample
from aura_omni.media.level import may_be_speech
from aura_omni.plan import Draft, Listening, Plan, Seen, text_of, with_pictures, with_transcripts
from aura_omni.reading import Reading
from aura_omni.stages.aura import SAMPLING
from aura_omni.stages.aura_prompt import AuraPrompt
from aura_omni.stages.silent import speakable
from aura_omni.stages.talker import TalkerStage
from aura_omni.stages.talker_prompt import LEAST_PREFILL
from aura_omni.stages.transcript import language_name
from aura_omni.stages.voices import Speaking
from aura_omni.turn import Turn
from aura_omni.warm_up import warm_up
from aura_omni.work import Sink

# What a sampling field of a stage is called where a request has them by stage
_OF_STAGE: Mapping[StageName, Mapping[str, str]] = {
    stage: {item.name: f"{stage}.{item.name}" for item in fields(Sampling)} for stage in STAGES
}


class Pipeline(Asking):
    def __init__(self, config: Config, stages: Stages) -> None:
        """stages: loaded, one for each of config.stages. The engine is not started yet."""
        self.config = config
        self.parts = stages
        self.stages: tuple[StageName, ...] = tuple(stage.name for stage in config.stages)
        self.served_names = config.served_names
        self._pictures = Pictures()
        bystanders: dict[str, Bystander] = {"pictures": self._pictures}
        if stages.speech is not None:
            bystanders["references"] = stages.speech.references
        self.engine = Engine(stages.runners(), bystanders)
        self._planners = {
            part: _Planner(config, needed, part)
            for part in get_args(TurnPart)
            if (needed := _stages_of(stages, part)) is not None
        }

    @classmethod
    def load(cls, config: Config | str, report: Report = unreported) -> Pipeline:
        """Load every stage's checkpoint, refuse what does not fit, start the engine, have each stage do one inference.

        Takes as long as reading the weights. config: as `config.load` returns it, or the name of a deploy file, packaged
        ("nano.yaml") or a path. report: told on this thread how far each stage has come.
        """
        if isinstance(config, str):
            config = load_here(Options(deploy_config=config))
        for stage in config.stages:
            report(stage.name, "waiting")
        pipeline = cls(config, assemble(config, report))
        pipeline.check_defaults()
        pipeline.engine.start()
        with ExitStack() as unless_ready:
            unless_ready.callback(pipeline.close)
            warm_up(pipeline.submit, stages=pipeline.stages, voice_task=pipeline.voice_task, report=report)
            unless_ready.pop_all()
        return pipeline

    @property
    def ready(self) -> bool:
        return self.engine.alive

    @property
    def reason(self) -> str:
        return "" if self.ready else f"the engine is not running: {self.engine.failure or 'it is stopped'}"

    @property
    def progress(self) -> Mapping[StageName, StagePhase]:
        """How far each stage is; after `load` all are ready until the engine stops."""
        return dict.fromkeys(self.stages, "ready" if self.ready else "failed")

    @property
    def counters(self) -> Mapping[StageName, Counters]:
        """Of every stage; read without the engine's help."""
        runners = self.parts.runners()
        return {name: runners[name].counters for name in self.stages}

    def close(self) -> None:
        """End every Turn and stop the engine. Idempotent."""
        self.engine.close()

    def wait_until_stopped(self) -> None:
        """Returns when no Turn is answered any more, because of `close` or because the engine has failed; all have ended."""
        self.engine.wait_until_stopped()

    def submit(self, request: TurnRequest, sink: Sink) -> Turn:
        """Check and prepare on this thread (long recordings and references cost up to 100 ms), then hand over.

        What is said is heard while pictures are still Coming; whatever needs them is checked and prepared by `Turn.show`.
        Raises BadRequest and its kin (BadMedia, BadVoice, PromptTooLong), or Unavailable. Then sink is never called.
        """
        if not self.ready:
            raise Unavailable(self.reason)
        planner = self._planners.get(request.part)
        if planner is None:
            if request.part == "speech":
                raise BadRequest(why_mute(self.stages), param="part")
            raise BadRequest(f"this server does not listen (pipeline {self.config.pipeline})", param="part")
        plan = planner.plan(request)
        turn = Turn(
            plan,
            sink,
            engine=self.engine,
            parts=planner.parts,
            pictures=self._pictures,
            see=partial(planner.see, plan),
            chunks=self.config.audio_chunks,
            limits=self.config.speech,
        )
        self.engine.post(turn.begin)
        return turn

    def prepare(
        self, messages: Sequence[Message], *, system_prompt: str | None = None, due_s: float = math.inf
    ) -> Reading:
        """Have AURA read what turns to come will begin with, when nobody waits for it: messages without Audio, as they will be sent.

        due_s: when that will be, on time.monotonic(); of several what is due first is read first. Raises as `submit`.
        """
        if not self.ready:
            raise Unavailable(self.reason)
        aura = self.parts.aura
        if aura is None:
            raise BadRequest(f"this server reads no messages (pipeline {self.config.pipeline})", param="messages")
        if any(isinstance(part, Audio | Coming) for message in messages for part in message.parts):
            raise BadRequest(
                "what was said must be text, and what is shown be there, before it can be read", param="messages"
            )
        runner = self.parts.ar_runners["aura"]
        prompt = aura.prompt((*messages, Message("user", ())), system_prompt=system_prompt)
        runner.check(len(prompt.tokens), SAMPLING)
        reading = Reading(prompt, due_s=due_s, engine=self.engine, stage=aura, runner=runner)
        self.engine.post(reading.begin)
        return reading

    @property
    def speakers(self) -> tuple[str, ...]:
        """Names of the voices that the Talker's checkpoint has; none for one that clones or designs them."""
        return () if self.parts.speech is None else tuple(self.parts.speech.talker.voices.speakers)

    @property
    def voice_task(self) -> VoiceTask | None:
        """What the Talker's checkpoint can do; None: there is no Talker."""
        return None if self.parts.speech is None else self.parts.speech.talker.voices.task

    def check_defaults(self) -> None:
        """Raises ConfigError for what would refuse every request: sampling of a deploy file, contexts that hold nothing."""
        self._planners["turn"].check_defaults()


def _stages_of(stages: Stages, part: TurnPart) -> Stages | None:
    """The stages that a part of a turn runs through; None if they are not all there."""
    match part:
        case "turn":
            return stages
        case "speech":
            kept = replace(stages, asr=None, aura=None) if stages.speech is not None else None
            name: StageName = "talker"
        case "transcript":
            kept = replace(stages, aura=None, speech=None) if stages.asr is not None else None
            name = "asr"
    return kept and replace(kept, ar_runners={name: stages.ar_runners[name]})


class _Planner:
    """From a request to a Plan through given stages. Raises whatever can be refused."""

    def __init__(self, config: Config, parts: Stages, part: TurnPart) -> None:
        self.config = config
        self.parts = parts
        self._stages = [stage.name for stage in config.stages if stage.name in parts.runners()]
        self._named = (
            f"pipeline {config.pipeline}" if part == "turn" else f"part {part!r} of pipeline {config.pipeline}"
        )

    # ------------------------------------------------------------ checks, on the caller's thread

    def plan(self, request: TurnRequest) -> Plan:
        sampling = {name: self._sampling(name, request.sampling.get(name, {})) for name in self._stages}
        self._check_parts(request)
        if self.parts.aura is None:
            self._refuse_what_does_nothing(request)
        for name in self._stages:
            with fields_named(_OF_STAGE[name]):
                self._check_sampling(name, sampling[name])
                if name != "asr" or self._longest_transcript(request) is not None:
                    self._check_least(name, request, sampling[name])
        speaking = self._speaking(request)
        prompt = None if request.coming else self._prompt(request, request.messages, sampling)
        body = self._body(request, speaking)
        text_tokens = 0 if speaking is None else self._check_speech(request, speaking, body, sampling["talker"])
        reference = None
        if speaking is not None and speaking.clone is not None:
            assert request.voice.ref_audio is not None  # Voices.resolve has checked it
            reference = resample(request.voice.ref_audio.samples, request.voice.ref_audio.rate, VOICE_RATE)
        hearing = self._hearing(request, sampling)
        return Plan(
            request=request,
            sampling=sampling,
            hearing=hearing,
            at_once=self.config.stage("asr").max_num_seqs if self.parts.asr is not None else 0,
            seen=None if request.coming else self._seen(request.messages, hearing, prompt),
            speaking=speaking,
            reference=reference,
            normalize=self._normalizes(request),
            body=body,
            text_tokens=text_tokens,
        )

    def see(self, plan: Plan, videos: Sequence[Video]) -> Seen:
        """What a plan lacks whose pictures were still to come. Raises whatever can be refused of them."""
        messages = with_pictures(plan.request, videos)
        return self._seen(messages, plan.hearing, self._prompt(plan.request, messages, plan.sampling))

    def _sampling(self, name: StageName, wanted: Mapping[str, Any]) -> Sampling:
        """Request over deploy file over checkpoint. What a stage cannot do without (its stop ids) it adds itself."""
        return self.parts.defaults[name].merged(self.config.stage(name).sampling).merged(wanted)

    def _check_sampling(self, name: StageName, sampling: Sampling) -> None:
        if name == "talker":
            if sampling.stop:
                raise BadRequest(
                    f"{field_name('stop')} is given to the Talker, which writes no text; leave it out", param="stop"
                )
            sampling = TalkerStage.bounded(sampling)
        if name in self.parts.ar_runners:
            self.parts.ar_runners[name].check(1, sampling)

    def _check_least(self, name: StageName, request: TurnRequest, sampling: Sampling) -> None:
        """A request's least number of tokens is not above the most that its stage may make, whoever set that."""
        asked = request.sampling.get(name, {})
        least, most, most_name = asked.get("min_tokens"), sampling.max_tokens, "max_tokens"
        longest = request.voice.max_frames if name == "talker" else None
        if longest is not None and (longest < most or asked.get("max_tokens") is None):
            most, most_name = longest, "max_frames"
        if least is not None and least > most:
            raise BadRequest(
                f"{field_name('min_tokens')} is {least}, more than {field_name(most_name)}, which is {most}; set it to {most} at "
                f"most, or raise {field_name(most_name)}",
                param="min_tokens",
            )

    def _check_parts(self, request: TurnRequest) -> None:
        messages = request.messages
        if not messages or messages[-1].role != "user":
            raise BadRequest("the last message must be the user's", param="messages")
        parts = [part for message in messages for part in message.parts]
        if self.parts.asr is None and any(isinstance(part, Audio) for part in parts):
            raise BadRequest(f"this server speaks but does not listen ({self._named}); send text", param="messages")
        if self.parts.aura is None and any(isinstance(part, Video | Coming) for part in parts):
            raise BadRequest(f"this server does not see ({self._named}); send no image or video", param="messages")
        transcribes = self.parts.aura is None and self.parts.speech is None
        if transcribes and not any(isinstance(part, Audio) for part in messages[-1].parts):
            raise BadRequest("this server only transcribes; the last message needs an audio part", param="messages")

    def _refuse_what_does_nothing(self, request: TurnRequest) -> None:
        """Without AURA there is no conversation: one message is transcribed, or spoken."""
        named = f"in {self._named}, which has no AURA; leave it out"
        before = request.messages[:-1]
        if self.parts.asr is not None and before[:1] and before[0].role == "system":
            before = before[1:]  # words to expect, as beside the audio
        if before:
            raise BadRequest(f"a {before[0].role} message before the last one has no effect {named}", param="messages")
        if request.system_prompt is not None:
            raise BadRequest(f"{field_name('system_prompt')} has no effect {named}", param="system_prompt")
        if request.voice.pass_token_ids:
            raise BadRequest(f"{field_name('pass_token_ids')} has no effect {named}", param="pass_token_ids")
        if self.parts.speech is None:
            for option in fields(Voice):
                if option.name != "language" and getattr(request.voice, option.name) != option.default:
                    raise BadRequest(
                        f"{field_name(option.name)} has no effect {named.replace('AURA', 'voice')}", param=option.name
                    )

    # ------------------------------------------------------------ what each stage will be given

    def _hearing(
        self, request: TurnRequest, sampling: Mapping[StageName, Sampling]
    ) -> tuple[tuple[Listening, ...], ...]:
        if self.parts.asr is None:
            return ()
        asr, drawn, fixed = self.parts.asr, sampling["asr"], self._longest_transcript(request)
        context, language = "", None
        if self.parts.aura is None:
            context = "\n".join(text for message in request.messages if (text := text_of(message)))
            language = request.voice.language
            language = None if language is None or language.strip().lower() == "auto" else language_name(language)

        def listening(part: Audio) -> Listening:
            prompt = asr.prompt(part, context=context, language=language)
            budget = replace(drawn, max_tokens=fixed or asr.answer_tokens(part))
            self.parts.ar_runners["asr"].check(len(prompt.tokens), budget)
            with fields_named(_OF_STAGE["asr"]):
                self._check_least("asr", request, budget)
            return Listening(prompt, budget)

        clips = [part for message in request.messages for part in message.parts if isinstance(part, Audio)]
        return tuple(
            tuple(listening(part) for part in asr.parts(clip, context=context, max_tokens=fixed))
            if may_be_speech(clip.samples, clip.rate)
            else ()
            for clip in clips
        )

    def _longest_transcript(self, request: TurnRequest) -> int | None:
        """None: as its recording asks for."""
        given = {**self.config.stage("asr").sampling, **request.sampling.get("asr", {})}
        return given.get("max_tokens")

    def _prompt(
        self, request: TurnRequest, messages: tuple[Message, ...], sampling: Mapping[StageName, Sampling]
    ) -> AuraPrompt | None:
        """AURA's before anything was heard. Refuses impossible frames, and a prompt that is too long even so."""
        if self.parts.aura is None:
            return None
        prompt = self.parts.aura.prompt(with_transcripts(messages, None), system_prompt=request.system_prompt)
        self.parts.ar_runners["aura"].check(len(prompt.tokens), sampling["aura"])
        return prompt

    def _seen(
        self, messages: tuple[Message, ...], hearing: tuple[tuple[Listening, ...], ...], prompt: AuraPrompt | None
    ) -> Seen:
        return Seen(messages, prompt, None if prompt is None else self._draft(messages, hearing, prompt))

    def _draft(
        self, messages: tuple[Message, ...], hearing: tuple[tuple[Listening, ...], ...], prompt: AuraPrompt
    ) -> Draft | None:
        """Worth it where stages compute side by side and what precedes the first transcript fills a page."""
        if not self.parts.ahead:
            return None
        clips = iter(hearing)
        for message, known in zip(messages, prompt.before_text, strict=True):
            if any(next(clips) for part in message.parts if isinstance(part, Audio)):
                return Draft(prompt, known) if known >= PAGE_SIZE else None
        return None

    def _speaking(self, request: TurnRequest) -> Speaking | None:
        if self.parts.speech is None:
            return None
        voices = self.parts.speech.talker.voices
        if not request.speak:
            voices.check_names(request.voice)
            return None
        voice, aura = request.voice, self.parts.aura
        if voice.pass_token_ids and aura and not aura.tokenizer.agrees_with(self.parts.speech.talker.writer.tokenizer):
            raise BadRequest(
                f"{field_name('pass_token_ids')} hands AURA's token ids to the Talker, to which they mean other words: the vocabularies of this "
                "server's two checkpoints differ. Leave it out: the Talker gets the text then",
                param="pass_token_ids",
            )
        speaking = voices.resolve(voice)
        whole = self.config.speech.non_streaming
        if voice.non_streaming is None and (self.parts.aura is not None or whole) and not voice.pass_token_ids:
            return replace(speaking, non_streaming=whole)
        return speaking

    def _body(self, request: TurnRequest, speaking: Speaking | None) -> list[int] | None:
        """Ids of the text to speak, if the request brings it. Raises PromptTooLong."""
        if speaking is None or self.parts.speech is None or self.parts.asr is not None:
            return None
        text, writer = text_of(request.messages[-1]), self.parts.speech.talker.writer
        if self._normalizes(request):
            return writer.spoken(text, language=speaking.language, context=text)
        return writer.body(text) if speakable(text) else None

    def _normalizes(self, request: TurnRequest) -> bool:
        given = request.voice.normalize
        if given and request.voice.pass_token_ids:
            raise BadRequest(
                f"{field_name('normalize')} is true, but the token ids that {field_name('pass_token_ids')} hands on are spoken as they are; "
                "give one of them",
                param="normalize",
            )
        return self.config.speech.normalize if given is None else given

    def _check_speech(
        self, request: TurnRequest, speaking: Speaking, body: list[int] | None, sampling: Sampling
    ) -> int:
        """Refuse an instruct, a reference or a text that no Talker would take; the text tokens that the request brings."""
        assert self.parts.speech is not None
        writer, voice = self.parts.speech.talker.writer, request.voice
        ref_text, samples = None, 0
        if speaking.clone == "continue" and voice.ref_audio is not None:
            ref_text, samples = voice.ref_text, int(voice.ref_audio.duration_s * VOICE_RATE)
        rows = writer.least_length(
            speaking, body_ids=1 if body is None else len(body), ref_text=ref_text, reference_samples=samples
        )
        self.parts.ar_runners["talker"].check(rows, TalkerStage.bounded(sampling))
        return 0 if body is None else len(body) + len(writer.instruct(speaking.instruct))

    # ------------------------------------------------------------ checks, at start

    def check_defaults(self) -> None:
        """As Pipeline.check_defaults."""
        for stage in self.config.stages:
            where = f"stage {stage.stage_id} ({stage.name})"
            try:
                if stage.name in self.parts.ar_runners:
                    self._check_sampling(stage.name, self._sampling(stage.name, {}))
                    _check_file(checked_sampling(stage.sampling))
            except BadRequest as error:
                raise ConfigError(f"{where}: default_sampling_params: {error.message}") from error
            try:
                self._check_room(stage.name)
            except PromptTooLong as error:
                raise ConfigError(f"{where}: max_model_len is too small for any request: {error.message}") from error

    def _check_room(self, name: StageName) -> None:
        if name == "asr" and self.parts.asr is not None:
            self.parts.asr.longest_part_s()
        if name == "aura" and self.parts.aura is not None:
            prompt = self.parts.aura.prompt((Message("user", (Text("?"),)),))
            self.parts.ar_runners["aura"].check(len(prompt.tokens), Sampling())
        if name == "talker":
            self.parts.ar_runners["talker"].check(LEAST_PREFILL, Sampling())


def _check_file(given: Mapping[str, Any]) -> None:
    """Of a deploy file: where it sets both, the least number of tokens is not above the most."""
    least, most = given.get("min_tokens", 0), given.get("max_tokens")
    if most is not None and least > most:
        raise BadRequest(f"min_tokens is {least}, more than max_tokens, which is {most}; lower one, or raise the other")
