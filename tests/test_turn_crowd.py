"""Turns that end in every way, at once: each once, as it does alone, and nothing of them stays."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from aura_omni.flow import Event, Playback, TurnRequest
from aura_omni.pipeline import Pipeline
from aura_omni.turn import Turn
from tests.family import Listener, ask, spoken

MOMENTS = ("at once", "Transcript", "TextDelta", "AudioChunk", None, None, None, None)  # to cancel at


@dataclass(frozen=True)
class Way:
    """How AURA is asked, how that ends alone, how many ids it takes, and what is said where that is known."""

    sampling: dict[str, Any]
    reason: str
    tokens: range
    text: str | None = None


def ways(pipeline: Pipeline, dice: random.Random) -> list[Way]:
    """Budgets of one token or more, stop strings and stop tokens, and silence."""
    assert pipeline.parts.aura is not None
    controls, tokenizer = pipeline.parts.aura.controls, pipeline.parts.aura.tokenizer
    end, dot, half = tokenizer.id("<|im_end|>"), tokenizer.encode(".")[0], tokenizer.encode("\U0001f389")[0]
    whole = ask(pipeline, spoken(speak=False, sampling={"aura": {"max_tokens": 40}})).text
    # Where all bytes of its characters came: the last of a budget may be half of one.
    at = dice.choice([at for at in range(3, len(whole) - 8) if "\ufffd" not in whole[at : at + 3]])
    stop, several = whole[at : at + 3], list(whole[at : at + 16])
    until = whole[: whole.index(stop)]
    first = whole[: min(map(whole.index, several))]
    cut = ask(
        pipeline, spoken(speak=False, sampling={"aura": {"max_tokens": 40, "stop": [stop]}})
    ).end.usage.text_tokens
    return [
        Way({"max_tokens": 1}, "length", range(1, 2)),
        Way({"max_tokens": 2, "min_tokens": 2}, "length", range(2, 3)),
        Way({"max_tokens": 12, "min_tokens": 3, "logit_bias": {end: 100.0}}, "stop", range(4, 5)),
        Way({"max_tokens": 40, "stop": [stop, "never said"]}, "stop", range(1, 40), until),
        Way({"max_tokens": cut, "stop": [stop]}, "stop", range(cut, cut + 1), until),
        Way({"max_tokens": cut - 1, "stop": [stop]}, "length", range(cut - 1, cut)),
        Way({"max_tokens": 40, "stop": several}, "stop", range(1, 40), first),
        Way({"max_tokens": 40, "stop": [whole[0]]}, "stop", range(1, 4), ""),
        Way({"max_tokens": 12, "logit_bias": {dot: 100.0}, "stop_token_ids": [dot]}, "stop", range(1, 2), ""),
        Way({"max_tokens": 12, "logit_bias": {dot: 100.0}, "stop": ["..."]}, "stop", range(3, 4), ""),
        Way({"max_tokens": 1, "logit_bias": {half: 100.0}, "stop": ["\ufffd"]}, "stop", range(1, 2), ""),
        Way({"max_tokens": 12, "logit_bias": {controls.silent: 100.0}}, "silent", range(1, 2), ""),
    ]


def request_of(way: Way, number: int, dice: random.Random) -> TurnRequest:
    frames = dice.choice([1, 2, 9])
    talker = {"max_tokens": frames, "min_tokens": frames * (number % 2), "seed": number}
    playback = Playback(live=dice.random() < 0.6)
    return spoken(speak=number % 4 != 2, sampling={"aura": way.sampling, "talker": talker}, playback=playback)


def sent(pipeline: Pipeline, request: TurnRequest, moment: str | None) -> Listener:
    """Cancelled at that moment, if it comes."""
    listener, turns = Listener(), list[Turn]()

    def sink(event: Event) -> None:
        listener(event)
        if turns and type(event).__name__ == moment:
            turns[0].cancel()

    turns.append(pipeline.submit(request, sink))
    if moment == "at once":
        turns[0].cancel()
    return listener


@pytest.mark.parametrize("seed", range(2))
def test_turns_that_end_in_every_way_end_once_and_as_they_do_alone(pipeline: Pipeline, seed: int) -> None:
    dice = random.Random(seed)
    asked_ways = ways(pipeline, dice)
    asked = [request_of(way, number, dice) for number, way in enumerate(asked_ways)]
    alone = [ask(pipeline, request) for request in asked]
    for way, turn in zip(asked_ways, alone, strict=True):
        assert turn.end.reason == way.reason, way
        assert turn.end.usage.text_tokens in way.tokens, way
        assert way.text in (None, turn.text), way
    crowd = [(number, dice.choice(MOMENTS)) for number in [*range(len(asked))] * 3]
    dice.shuffle(crowd)
    sent_ones = [(alone[number], moment, sent(pipeline, asked[number], moment)) for number, moment in crowd]
    for one, moment, other in sent_ones:
        end = other.wait().end
        assert end.error is None
        if end.reason == "cancelled":
            assert moment is not None
            assert one.text.startswith(other.text)
            np.testing.assert_allclose(other.samples, one.samples[: len(other.samples)], atol=5e-5)
            continue
        assert (other.heard, other.text, end.reason) == (one.heard, one.text, one.end.reason)
        assert replace(end, usage=replace(end.usage, cached_tokens=0)) == replace(
            one.end, usage=replace(one.end.usage, cached_tokens=0)
        )
        np.testing.assert_allclose(other.samples, one.samples, atol=5e-5)
    pipeline.engine.check_integrity()
    runners = pipeline.parts.ar_runners
    assert {name: runner.counters.pages_used for name, runner in runners.items()} == dict.fromkeys(runners, 0)
