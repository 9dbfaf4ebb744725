"""While the voice of a recording is built, everybody else is served."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from aura_omni.errors import EngineError, Overloaded, Unavailable
from aura_omni.flow import FRAME_SAMPLES, Audio, Text, TurnRequest, Voice
from aura_omni.pipeline import Pipeline
from tests.family import Listener, ask, config, recording, running, spoken

TIMEOUT_S = 30
FRAMES = 3


class Held:
    """Builds of references that wait to be let go; `started` has the thread of each."""

    def __init__(self, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: queue.Queue[threading.Thread] = queue.Queue()
        self.threads: list[int] = []
        self.error: Exception | None = None
        self._go = threading.Event()
        talker = type(pipeline.parts.speech.talker)
        speaker = talker.speaker

        def held(stage, samples):
            self.started.put(threading.current_thread())
            self.threads.append(torch.get_num_threads())
            assert self._go.wait(TIMEOUT_S)
            if self.error is not None:
                raise self.error
            return speaker(stage, samples)

        monkeypatch.setattr(talker, "speaker", held)

    def one_has_started(self) -> None:
        assert self.started.get(timeout=TIMEOUT_S).name.startswith("references")

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with running(config("tts_base", code2wav={"max_num_seqs": 1})) as pipeline:
        ask(pipeline, request(b"known"))
        yield pipeline


@pytest.fixture
def held(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(pipeline, monkeypatch)
    yield held
    held.let_go()


def request(key: bytes, *, whole: bool = False, **fields) -> TurnRequest:
    """A turn with a voice of its own. whole: the Talker waits for all of the text."""
    audio = Audio(recording().samples[:32_000], recording().rate, key)
    voice = Voice(ref_audio=audio, ref_text="It was the best", max_frames=FRAMES, non_streaming=whole)
    return spoken(Text("Say something."), voice=voice, **fields)


def begun(pipeline: Pipeline, request: TurnRequest) -> tuple[Listener, object]:
    listener = Listener()
    turn = pipeline.submit(request, listener)
    return listener, turn


def count_kept(pipeline: Pipeline) -> int:
    return pipeline.engine.call(lambda: len(pipeline.parts.speech.references._kept))


@pytest.mark.parametrize("whole", [False, True], ids=["word by word", "whole"])
@pytest.mark.parametrize("part", ["turn", "speech"])
def test_others_are_served_to_their_ends_while_a_voice_is_built(pipeline, held, part, whole):
    key = f"{part} {whole}".encode()
    waiting, _ = begun(pipeline, request(key, whole=whole, part=part))
    held.one_has_started()
    for _ in range(2):
        other = ask(pipeline, request(b"known", part=part))
        assert len(other.samples) == FRAMES * FRAME_SAMPLES
    assert not len(waiting.samples)
    held.let_go()
    waiting.wait()
    assert waiting.end.error is None
    # As when the voice was there before any text was.
    np.testing.assert_array_equal(waiting.samples, ask(pipeline, request(key, whole=whole, part=part)).samples)
    assert held.threads == [1], "as the tests set it"


def test_a_cancelled_turn_ends_while_its_voice_is_built(pipeline, held):
    waiting, turn = begun(pipeline, request(b"cancelled", part="speech"))
    held.one_has_started()
    turn.cancel()
    assert waiting.wait().end.reason == "cancelled"
    pipeline.engine.check_integrity()
    events = list(waiting.events)
    held.let_go()
    assert ask(pipeline, request(b"after it", part="speech")).end.error is None  # so the build has ended
    pipeline.engine.check_integrity()
    assert waiting.events == events


def test_the_voice_of_a_cancelled_turn_is_not_begun(pipeline, held):
    first, _ = begun(pipeline, request(b"first", part="speech"))
    held.one_has_started()
    turns = [begun(pipeline, request(b"never %d" % number, part="speech")) for number in range(6)]
    for listener, turn in turns:
        turn.cancel()
        assert listener.wait().end.reason == "cancelled"
    pipeline.engine.check_integrity()
    held.let_go()
    assert first.wait().end.error is None
    assert ask(pipeline, request(b"last", part="speech")).end.error is None
    held.one_has_started()
    assert held.started.empty()


def test_two_turns_with_the_same_recording_build_it_once(pipeline, held):
    both = [begun(pipeline, request(b"same", part="speech"))[0] for _ in range(2)]
    held.one_has_started()
    before = count_kept(pipeline)
    held.let_go()
    one, other = (listener.wait() for listener in both)
    np.testing.assert_array_equal(one.samples, other.samples)
    assert len(one.samples) == FRAMES * FRAME_SAMPLES
    assert held.started.empty()
    assert count_kept(pipeline) == before + 1


@pytest.mark.parametrize("part", ["turn", "speech"])
def test_an_error_of_the_build_is_its_turns_and_no_other_ones(pipeline, held, part):
    held.error, key = RuntimeError("out of memory"), f"wrong {part}".encode()
    waiting, _ = begun(pipeline, request(key, part=part))
    held.one_has_started()
    held.let_go()
    assert waiting.wait().end.reason == "error"
    assert isinstance(waiting.end.error, EngineError)
    assert str(waiting.end.error) == "the turn failed inside the server: RuntimeError"
    pipeline.engine.check_integrity()
    held.error = None
    assert ask(pipeline, request(key, part=part)).end.error is None


def test_more_than_may_wait_are_refused(pipeline, held, monkeypatch):
    monkeypatch.setattr(pipeline.parts.speech.references, "_max_waiting", 1)
    waiting, _ = begun(pipeline, request(b"one", part="speech"))
    held.one_has_started()
    assert isinstance(ask(pipeline, request(b"two", part="speech")).end.error, Overloaded)
    held.let_go()
    assert waiting.wait().end.error is None


def test_closing_ends_turns_that_wait_and_does_not_wait_for_the_build(monkeypatch):
    pipeline = Pipeline.load(config("tts_base", pipeline="qwen3_tts.yaml"))
    held = Held(pipeline, monkeypatch)
    turns = [begun(pipeline, request(key))[0] for key in (b"built", b"waits")]
    held.one_has_started()
    pipeline.close()
    for listener in turns:
        assert isinstance(listener.wait().end.error, Unavailable)
    held.let_go()
    assert held.started.empty()


def test_what_was_written_while_its_voice_was_built_is_spoken(pipeline, held):
    """All of it, read in one prompt when the voice is there, and the voice is built once however often text came."""
    waiting, _ = begun(pipeline, request(b"text first"))
    held.one_has_started()
    written = ask(pipeline, dataclasses.replace(request(b"known"), speak=False))
    held.let_go()
    waiting.wait()
    assert waiting.end.error is None
    assert waiting.text == written.text
    assert len(waiting.samples) == FRAMES * FRAME_SAMPLES
    assert held.started.empty()
