"""The Talker reads AURA's text while it is written."""

import dataclasses
import itertools
import threading

import numpy as np
import pytest
import torch

from aura_omni import speaking
from aura_omni.flow import (
    AudioChunk,
    Voice,
)
from tests.family import Listener, ask, spoken

RAW = Voice(normalize=False)  # words of random weights are none
LONG = {"aura": {"max_tokens": 60}, "talker": {"max_tokens": 40, "min_tokens": 40}}


def one_talker_prompt(pipeline, monkeypatch) -> list[int]:
    """Counts the prompts that the Talker is asked for."""
    talker = type(pipeline.parts.speech.talker)
    prompts = []
    original = talker.prompt

    def counted(self, *arguments):
        prompts.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(talker, "prompt", counted)
    return prompts


def test_speech_starts_before_the_text_has_ended(pipeline, monkeypatch):
    prompts = one_talker_prompt(pipeline, monkeypatch)
    kinds = [type(event).__name__ for event in ask(pipeline, spoken(sampling=LONG, voice=RAW)).events]
    last_text = len(kinds) - 1 - kinds[::-1].index("TextDelta")
    assert kinds.index("AudioChunk") < last_text
    assert len(prompts) == 1


@pytest.mark.parametrize("pace", [1, 2, 7], ids=lambda pace: f"aura every {pace}")
def test_text_read_as_it_is_written_sounds_like_text_that_was_there(pipeline, pace, monkeypatch):
    runner = pipeline.parts.ar_runners["aura"]
    passes = itertools.count()
    launch = runner.launch
    # A slow AURA: the Talker runs out of text and has to wait for it.
    monkeypatch.setattr(runner, "launch", lambda: launch() if next(passes) % pace == 0 else runner.busy)
    written = ask(pipeline, spoken(sampling=LONG, voice=RAW))
    np.testing.assert_allclose(written.samples, spoken_whole(pipeline, written.text), atol=5e-5)


def test_what_waits_is_looked_at_while_the_talker_has_no_text_to_read(pipeline, monkeypatch):
    """Frames go out by the clock, too: here only when AURA says something, never when a frame comes."""
    chunks = []

    class Writing(speaking._Chunker):
        def add(self, frame, *, paused):
            self._frames.append(frame)
            self._pace.came(paused=paused)

        def send_due(self):
            if self._frames:
                chunks.append(len(self._frames))
                self.send()

    monkeypatch.setattr(speaking, "_Chunker", Writing)
    turn = ask(pipeline, spoken(sampling=LONG, voice=RAW))
    assert len(chunks) > 3
    np.testing.assert_allclose(turn.samples, spoken_whole(pipeline, turn.text), atol=5e-5)


def spoken_whole(pipeline, text: str) -> np.ndarray:
    """The Talker and Code2Wav on all of a text at once, in streaming order, without a Turn."""
    speech = pipeline.parts.speech
    speaking = dataclasses.replace(speech.talker.voices.resolve(Voice()), non_streaming=False)
    sampling = pipeline._planners["turn"].plan(spoken(sampling=LONG)).sampling["talker"]
    frames, done = [], threading.Event()

    def start():
        prompt = speech.talker.prompt(speaking, speech.talker.writer.body(text))
        sequence = speech.talker.sequence(
            prompt, sampling, predictor=speech.predictor, on_output=frames.append, on_end=lambda *_: done.set()
        )
        pipeline.parts.ar_runners["talker"].add(sequence)

    pipeline.engine.call(start)
    assert done.wait(30)
    codes = torch.from_numpy(np.stack(frames))[None]
    return speech.vocoder.decoder.whole(codes)[0].numpy()


@pytest.mark.parametrize("ahead", [0, 20])
def test_the_talker_starts_with_as_many_ids_in_hand_as_the_deploy_file_says(pipeline, monkeypatch, ahead):
    speech = dataclasses.replace(pipeline.config.speech, tokens_ahead=ahead)
    monkeypatch.setattr(pipeline, "config", dataclasses.replace(pipeline.config, speech=speech))
    talker, bodies = type(pipeline.parts.speech.talker), []
    prompt = talker.prompt

    def prompted(self, speaking, body, reference=None):
        bodies.append(len(body))
        return prompt(self, speaking, body, reference)

    monkeypatch.setattr(talker, "prompt", prompted)
    turn = ask(pipeline, spoken(sampling=LONG, voice=RAW))
    (body,) = bodies
    assert ahead < body <= ahead + 10  # one for the prompt, and what one delta may bring
    np.testing.assert_allclose(turn.samples, spoken_whole(pipeline, turn.text), atol=5e-5)


def test_a_talker_that_ends_early_does_not_cut_the_text(pipeline):
    turn = ask(pipeline, spoken(sampling={"aura": {"max_tokens": 60}, "talker": {"max_tokens": 3}}))
    assert turn.end.usage.text_tokens == 60
    assert turn.end.usage.audio_frames <= 3
    assert turn.end.reason == "length"


def test_cancelling_while_both_run_frees_both(pipeline):
    listener = Listener()
    turns = []

    def sink(event):
        listener(event)
        if isinstance(event, AudioChunk):
            turns[0].cancel()

    sampling = {"aura": {"max_tokens": 3000, "min_tokens": 3000}, "talker": {"max_tokens": 500, "min_tokens": 500}}
    turns.append(pipeline.submit(spoken(sampling=sampling), sink))
    assert listener.wait().end.reason == "cancelled"
    pipeline.engine.check_integrity()
    assert all(runner.counters.pages_used == 0 for runner in pipeline.parts.ar_runners.values())
