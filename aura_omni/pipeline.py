"""The stages joined for one Turn, and the server's only door to them.

    pipeline = Pipeline.load(config)
    turn = pipeline.submit(request, sink)     # any thread; what can be refused is refused here, before the engine
    turn.cancel()                             # any thread, any time

`sink` gets flow events on the engine thread and must return at once: any number, then exactly one Ended. Whatever a Turn
holds in the engine (pages, slots, states) is free before its Ended is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from aura_omni.assembly import Stages, assemble
from aura_omni.config import Config
from aura_omni.engine.engine import Engine
from aura_omni.errors import BadRequest, Unavailable
from aura_omni.flow import (
    VOICE_RATE,
    Audio,
    Sampling,
    StageName,
    TurnRequest,
    Video,
)
from aura_omni.media.audio import resample
from aura_omni.stages.asr import AsrPrompt
from aura_omni.stages.clips import has_energy, split_long
from aura_omni.stages.voices import Speaking
from aura_omni.turn import Plan, Sink, Turn, with_transcripts

log = logging.getLogger(__name__)


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
        turn = Turn(self._plan(request), sink, engine=self.engine, parts=self.parts, chunks=self.config.audio_chunks)
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
            self.parts.aura.prompt(with_transcripts(request.messages, None), system_prompt=request.system_prompt)
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
