"""One real inference of every stage before the server says that it is ready, so that the first user waits for none of it.

    warm_up(pipeline.submit, stages=pipeline.stages, voice_task=pipeline.voice_task, report=report)

Knows turns and their requests. Does not know models: what it asks for is what a user could ask for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from aura_omni.errors import BadRequest, EngineError
from aura_omni.flow import (
    SPEECH_RATE,
    Audio,
    Ended,
    Event,
    Message,
    Part,
    Report,
    StageName,
    Text,
    TurnRequest,
    Video,
    Voice,
    VoiceTask,
)
from aura_omni.media.noise import swelling_noise

log = logging.getLogger(__name__)

_TOKENS = 4  # of each stage
_PICTURE = 64  # pixels each way
_HELLO = Text("Hello.")


def warm_up(
    submit: Callable[[TurnRequest, Callable[[Event], None]], object],
    *,
    stages: Sequence[StageName],
    voice_task: VoiceTask | None,
    report: Report,
) -> None:
    """Run each stage once and report it as ready. Raises EngineError with the reason of the first that fails."""
    for ready, requests in _requests(stages, voice_task):
        began_s = time.monotonic()
        for request in requests:
            try:
                ended = _run(submit, request)
            except BadRequest:
                if request is requests[-1]:
                    raise
                continue  # no room for a picture in a context this small
            if ended.reason == "error":
                raise EngineError(
                    f"the first inference of {' and '.join(ready)} failed: {ended.error}"
                ) from ended.error
            break
        log.info("%s: first inference in %.1f s", " and ".join(ready), time.monotonic() - began_s)
        for name in ready:
            report(name, "ready")


def _run(submit: Callable[[TurnRequest, Callable[[Event], None]], object], request: TurnRequest) -> Ended:
    over = threading.Event()
    last: list[Ended] = []

    def sink(event: Event) -> None:
        if isinstance(event, Ended):
            last.append(event)
            over.set()

    submit(request, sink)
    over.wait()
    return last[0]


def _requests(
    stages: Sequence[StageName], voice_task: VoiceTask | None
) -> Iterator[tuple[tuple[StageName, ...], list[TurnRequest]]]:
    """Stages, and what runs them: the first of several requests that the contexts have room for."""
    few: dict[StageName, Mapping[str, int]] = {name: {"max_tokens": _TOKENS} for name in stages}
    if "asr" in stages:
        heard = Message("user", (_sound(),))
        yield ("asr",), [TurnRequest((heard,), part="transcript", sampling=few)]
    if "aura" in stages:
        contents: tuple[tuple[Part, ...], ...] = ((_picture(), _HELLO), (_HELLO,))
        yield ("aura",), [TurnRequest((Message("user", parts),), speak=False, sampling=few) for parts in contents]
    if "talker" in stages:
        voice = Voice()
        if voice_task == "Base":
            voice = Voice(ref_audio=_sound(), x_vector_only=True)
        elif voice_task == "VoiceDesign":
            voice = Voice(instruct="A calm voice.")
        yield (
            ("talker", "code2wav"),
            [TurnRequest((Message("user", (_HELLO,)),), part="speech", voice=voice, sampling=few)],
        )


def _sound() -> Audio:
    """A second that is listened to."""
    return Audio(swelling_noise(np.random.default_rng(0), 1.0, SPEECH_RATE), SPEECH_RATE, b"warm-up sound")


def _picture() -> Video:
    frame = np.linspace(0, 255, _PICTURE, dtype=np.uint8)
    frames = np.broadcast_to(frame[None, None, :, None], (1, _PICTURE, _PICTURE, 3))
    return Video(np.ascontiguousarray(frames), (0.0,), 2.0, b"warm-up picture", still=True)
