"""AURA reads what precedes the first transcript while ASR hears: sooner, and with the same answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import aura_omni.assembly
import aura_omni.pipeline
from aura_omni.assembly import PAGE_SIZE
from aura_omni.engine.runner import LEAST_KNOWN_ROWS
from aura_omni.engine.sequence import Batch, Sequence
from aura_omni.engine.stage_model import Rows
from aura_omni.errors import EngineError
from aura_omni.flow import SILENT_TEXT, Audio, Ended, Message, Part, Text, TextDelta, Transcript, TurnRequest, Video
from aura_omni.pipeline import Pipeline
from aura_omni.stages.aura import AuraStage
from tests.family import WORDS, Listener, ask, clip, config, recording, running, spoken
from tests.test_turn_hearing import slices


@contextmanager
def ahead(**stages: Any) -> Iterator[Pipeline]:
    """As a GPU has it: on a CPU nothing is read ahead."""
    assemble = aura_omni.pipeline.assemble
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(aura_omni.pipeline, "assemble", lambda *args: replace(assemble(*args), ahead=True))
            pipeline = stack.enter_context(running(config(**stages)))
        yield pipeline


@pytest.fixture(scope="module")
def eager() -> Iterator[Pipeline]:
    with ahead() as pipeline:
        yield pipeline


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each prompt that was read ahead, the rows that AURA had read when all was heard."""
    rows: list[int] = []
    close = AuraStage.close

    def closed(self: AuraStage, sequence: Sequence, *args: Any) -> None:
        rows.append(sequence.computed)
        close(self, sequence, *args)

    monkeypatch.setattr(AuraStage, "close", closed)
    return rows


def still(name: bytes) -> Video:
    return Video(clip().frames[:1], (0.0,), 2.0, name, still=True)


def said(role: Any, *parts: Part | str) -> Message:
    return Message(role, tuple(Text(part) if isinstance(part, str) else part for part in parts))


SOUND = slices(6)
QUIET = Audio(np.zeros(16_000, np.float32), 16_000, b"quiet")
TURNS = {
    "a question": (said("user", recording(), clip(), "What do you see?"),),
    "text first": (said("user", "Look:", clip(), recording()),),
    "many clips": (said("user", *SOUND, clip(), still(b"one"), "and this?"),),
    "history": (
        said("system", "Answer in one word."),
        said("user", clip(), "what is it?"),
        said("assistant", SILENT_TEXT),
        said("user", still(b"two"), SOUND[0]),
    ),
    "spoken history": (
        said("user", SOUND[0], still(b"one")),
        said("assistant", "A red circle."),
        said("user", clip(), SOUND[1]),
    ),
    "silence, then speech": (said("user", QUIET, clip()), said("assistant", "Yes."), said("user", clip(), SOUND[2])),
    "nothing spoken": (said("user", clip(), "What do you see?"),),
    "spoken instructions": (said("system", SOUND[3]), said("user", clip(), SOUND[0])),
}
READ_AHEAD = TURNS.keys() - {"nothing spoken", "spoken instructions"}


def same(early: Listener, plain: Listener) -> None:
    assert early.end.error is plain.end.error is None
    assert (early.heard, early.text, early.end.reason) == (plain.heard, plain.text, plain.end.reason)
    np.testing.assert_allclose(early.samples, plain.samples, atol=5e-5)
    # Rows of a page that it found only when it had computed them are none that it found.
    found, found_plainly = early.end.usage.cached_tokens, plain.end.usage.cached_tokens
    assert found_plainly - PAGE_SIZE < found <= found_plainly
    assert replace(early.end.usage, cached_tokens=0) == replace(plain.end.usage, cached_tokens=0)


def all_twice(pipeline: Pipeline) -> list[Listener]:
    """Every turn, then all of them again with what is in the prefix cache by then."""
    requests = [TurnRequest(messages, speak=name == "a question", sampling=WORDS) for name, messages in TURNS.items()]
    return [ask(pipeline, request) for request in [*requests, *requests]]


@pytest.fixture(scope="module")
def plain() -> list[Listener]:
    """Without reading ahead."""
    with running(config()) as pipeline:
        return all_twice(pipeline)


def test_nothing_is_read_ahead_on_a_cpu(pipeline: Pipeline, read: list[int]) -> None:
    assert not pipeline.parts.ahead
    ask(pipeline, spoken(speak=False))
    assert read == []


def test_answers_and_usage_are_those_without_reading_ahead(
    eager: Pipeline, plain: list[Listener], read: list[int]
) -> None:
    for one, other in zip(all_twice(eager), plain, strict=True):
        same(one, other)
    assert len(read) == 2 * len(READ_AHEAD)
    assert min(read) > 0
    assert read[list(TURNS).index("silence, then speech")] > 2 * 320, "a clip without sound holds nothing up"


def test_answers_are_those_without_encoding_ahead_where_too_little_is_known_to_be_read(
    plain: list[Listener], read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LEAST_KNOWN_ROWS, "cpu", 100_000)
    held: list[int] = []
    close = AuraStage.close

    def closed(self: AuraStage, sequence: Sequence, *args: Any) -> None:
        held.append(len(sequence.state.features))
        close(self, sequence, *args)

    monkeypatch.setattr(AuraStage, "close", closed)
    with ahead() as pipeline:
        for one, other in zip(all_twice(pipeline), plain, strict=True):
            same(one, other)
        assert all(runner.counters.pages_used == 0 for runner in pipeline.parts.ar_runners.values())
        pipeline.engine.check_integrity()
    assert len(read) == 2 * len(READ_AHEAD)
    assert held[0], "nothing was encoded before the transcript"
    assert min(held) == 0, "rows that are in the prefix cache need no pictures"


def test_turns_at_once_say_what_each_says_alone_with_the_same_seed(pipeline: Pipeline, read: list[int]) -> None:
    requests = [
        TurnRequest(messages, speak=False, sampling={"aura": {"max_tokens": 12, "temperature": 1.0, "seed": seed}})
        for seed, messages in enumerate(TURNS.values())
    ]
    alone = [ask(pipeline, request) for request in requests]
    with ahead(aura={"max_num_seqs": len(TURNS)}) as eager:
        together, there = [Listener() for _ in requests], threading.Event()
        held = eager.engine.post(lambda: there.wait(60))
        for request, listener in zip(requests, together, strict=True):
            eager.submit(request, listener)
        there.set()
        assert held.result()
        for listener in together:
            listener.wait()
    assert [(one.heard, one.text) for one in together] == [(one.heard, one.text) for one in alone]
    assert len(read) == len(READ_AHEAD), "not all were read ahead though there was a seat for each"
    assert min(read) > 0


def test_a_transcript_that_comes_before_all_is_read_changes_nothing(pipeline: Pipeline, read: list[int]) -> None:
    def hasty(tokens: int) -> TurnRequest:
        return spoken(still(bytes([tokens])), SOUND[0], speak=False, sampling=WORDS | {"asr": {"max_tokens": tokens}})

    with ahead(aura={"max_num_batched_tokens": 16}) as eager:
        for tokens in (1, 2, 4, 8, 16):
            same(ask(eager, hasty(tokens)), ask(pipeline, hasty(tokens)))
    assert len(read) == 4, "the first transcript came before anything was read"
    assert read == sorted(set(read)), "the later the transcript, the more had been read"


def test_turns_that_push_each_other_out_say_the_same(plain: list[Listener], monkeypatch: pytest.MonkeyPatch) -> None:
    """The only seat is that of a prompt that is read ahead when one comes that somebody waits for."""
    monkeypatch.setattr(aura_omni.assembly, "_enough_pages", lambda site: 80)
    names = ["a question", "nothing spoken", *TURNS, *TURNS]
    with ahead(aura={"max_model_len": 1200, "max_num_seqs": 1, "max_num_batched_tokens": 64}) as pipeline:
        runner, opened, there = pipeline.parts.ar_runners["aura"], threading.Event(), threading.Event()
        add = runner.add

        def added(sequence: Sequence) -> None:
            add(sequence)
            if sequence.open:
                pipeline.engine.post(there.wait)  # after a step
                opened.set()

        monkeypatch.setattr(runner, "add", added)
        turns = [(name, Listener()) for name in names]
        for name, listener in turns:
            pipeline.submit(TurnRequest(TURNS[name], speak=False, sampling=WORDS), listener)
            assert opened.wait(60)
        there.set()
        for name, listener in turns:
            listener.wait()
            other = plain[list(TURNS).index(name)]
            assert (listener.heard, listener.text, listener.end.reason) == (other.heard, other.text, other.end.reason)
        assert runner.counters.preemptions > 0


def test_nothing_heard_ends_in_silence_and_frees_what_was_read(eager: Pipeline, read: list[int]) -> None:
    nothing = {"asr": {"logit_bias": dict.fromkeys(eager.parts.asr.stop_ids, 100.0)}}  # type: ignore[union-attr]
    before = eager.parts.ar_runners["aura"].counters.generated_tokens
    messages = (said("user", clip(), "hello"), said("assistant", "Hello."), said("user", SOUND[0]))
    turn = ask(eager, TurnRequest(messages, sampling=WORDS | nothing))
    assert (turn.heard, turn.end.reason, read) == ([""], "silent", [])
    counters = eager.parts.ar_runners["aura"].counters
    assert (counters.generated_tokens, counters.pages_used) == (before, 0)
    assert turn.end.usage.prompt_tokens == turn.end.usage.prompt_audio_tokens


def test_an_answer_of_silence_frees_what_was_read(eager: Pipeline, read: list[int]) -> None:
    aura = eager.parts.aura
    assert aura is not None
    assert aura.controls.silent is not None
    chosen = {"aura": {"logit_bias": {aura.controls.silent: 100.0}}}
    turn = ask(eager, TurnRequest(TURNS["spoken history"], sampling=chosen))
    assert (turn.text, turn.end.reason, len(turn.samples)) == ("", "silent", 0)
    assert read[0] > 0
    eager.engine.check_integrity()
    assert all(runner.counters.pages_used == 0 for runner in eager.parts.ar_runners.values())


def test_a_failure_of_asr_frees_what_is_read(eager: Pipeline, read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    asr, aura = eager.parts.asr, eager.parts.ar_runners["aura"]
    assert asr is not None
    opened, rows = list[Sequence](), asr.rows

    def broken(batch: Batch) -> Rows:
        if not opened or not opened[0].computed:  # not before AURA has read something
            return rows(batch)
        raise RuntimeError("the ear is broken")

    def watched(sequence: Sequence) -> None:
        opened.append(sequence)
        type(aura).add(aura, sequence)

    with monkeypatch.context() as patch:
        patch.setattr(asr, "rows", broken)
        # The second clip is taken up when the first has been heard.
        patch.setattr(aura, "add", watched)
        turn = ask(eager, TurnRequest((said("user", clip(), *SOUND),), sampling=WORDS))
    assert isinstance(turn.end.error, EngineError)
    assert (turn.end.reason, read, len(opened)) == ("error", [], 1)
    assert opened[0].finished == "cancelled"
    assert not opened[0].state.features
    eager.engine.check_integrity()
    assert aura.counters.pages_used == 0


@pytest.mark.parametrize("moment", ["at once", "while it is read", "when all is heard"])
def test_cancelling_leaves_nothing_behind(eager: Pipeline, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, opened = Listener(), list[Sequence]()
    sequence = AuraStage.sequence

    def watched(*args: Any, **more: Any) -> Sequence:
        opened.append(sequence(*args, **more))
        if moment == "while it is read":
            turn.cancel()
        return opened[-1]

    def sink(event: Any) -> None:
        listener(event)
        if isinstance(event, Transcript) and moment == "when all is heard":
            turn.cancel()

    monkeypatch.setattr(AuraStage, "sequence", watched)
    held = eager.engine.post(lambda: listener._ended.wait(0.05))  # the turn is not begun before `turn` is known
    turn = eager.submit(TurnRequest(TURNS["spoken history"], sampling={"aura": {"max_tokens": 100}}), sink)
    if moment == "at once":
        turn.cancel()
    held.result()
    assert listener.wait().end.reason == "cancelled"
    eager.engine.check_integrity()
    assert all(runner.counters.pages_used == 0 for runner in eager.parts.ar_runners.values())
    assert not any(one.state.features for one in opened)
    assert len(opened) == (moment != "at once")


@pytest.mark.parametrize("name", ["pipeline", "eager"])
def test_a_listener_that_fails_at_the_transcript_gets_no_answer(name: str, request: pytest.FixtureRequest) -> None:
    served, listener = request.getfixturevalue(name), Listener()

    def sink(event: Any) -> None:
        listener(event)
        if isinstance(event, Transcript):
            raise RuntimeError("gone")

    before = served.parts.ar_runners["aura"].counters
    served.submit(spoken(), sink)
    assert listener.wait().end.reason == "cancelled"
    assert [type(event) for event in listener.events] == [Transcript, Ended]
    served.engine.check_integrity()
    after = served.parts.ar_runners["aura"].counters
    assert after.pages_used == 0
    assert after.prompt_tokens == before.prompt_tokens or served.parts.ahead  # whose answer is begun first


def test_an_answer_is_begun_before_its_transcript_is_told(eager: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """And told in order all the same, also where the answer is there at once."""
    aura, seen, listener = eager.parts.aura, list[str](), Listener()
    assert aura is not None
    rows = aura.rows

    def watched(batch: Batch) -> Rows:
        if not any(sequence.open for sequence in batch.sequences):
            seen.append("rows")
        return rows(batch)

    def sink(event: Any) -> None:
        seen.append(type(event).__name__)
        listener(event)

    monkeypatch.setattr(aura, "rows", watched)
    eager.submit(spoken(speak=False, sampling=WORDS), sink)
    assert listener.wait().end.error is None
    assert seen[:3] == ["rows", "Transcript", "TextDelta"]


def test_the_first_word_does_not_wait_for_what_is_launched_next(
    eager: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, listener = list[str](), Listener()

    def sink(event: Any) -> None:
        seen.append(type(event).__name__)
        listener(event)

    monkeypatch.setattr(eager.engine, "after_launches", lambda function: seen.append("later"))
    eager.submit(spoken(speak=False, sampling=WORDS), sink)
    assert listener.wait().end.error is None
    assert seen[:4] == ["later", "Transcript", "TextDelta", "later"]
    assert seen.count("TextDelta") > 1
    assert seen[-1] == "Ended"


def test_nothing_is_read_ahead_while_all_seats_are_taken(read: list[int]) -> None:
    with ahead(aura={"max_num_seqs": 1}) as pipeline:
        long, late = Listener(), Listener()

        def sink(event: Any) -> None:
            if isinstance(event, TextDelta) and not long.text:
                pipeline.submit(spoken(clip(), recording(), speak=False, sampling=WORDS), late)
            long(event)

        answer = {"aura": {"max_tokens": 200, "min_tokens": 200}}
        pipeline.submit(spoken(Text("What is red?"), speak=False, sampling=answer), sink)
        assert long.wait().end.error is late.wait().end.error is None
        assert read == []


def test_nobody_is_kept_out_by_what_is_read_ahead(read: list[int]) -> None:
    with ahead(aura={"max_num_seqs": 1}) as pipeline:
        listeners = [Listener() for _ in range(12)]
        for listener in listeners:
            pipeline.submit(spoken(speak=False), listener)
        assert {listener.wait().end.error for listener in listeners} == {None}
        assert len({listener.text for listener in listeners}) == 1
    assert read
