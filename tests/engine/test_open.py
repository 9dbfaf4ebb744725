"""Sequences whose prompt is not all known yet: read as far as it is, behind everybody else, and then like any other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tiny_stage import GREEDY, Request, TinyStage, Whole, close, make_runner, opened, prompt, reading, run

from aura_omni.engine.runner import LEAST_KNOWN_ROWS, LEAST_ONLY_READ, SHARED_ROWS, ArRunner
from aura_omni.engine.sequence import Batch, MediaSpan, Sequence
from aura_omni.flow import Sampling
from tests.slow_lane import SlowLane

PENALISED = Sampling(max_tokens=8, seed=11, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.3)


def settle(runner: ArRunner, *, limit: int = 2000) -> None:
    runner.check_integrity()
    for _ in range(limit):
        if not runner.busy:
            return
        runner.step()
        runner.check_integrity()
    pytest.fail(f"after {limit} steps the runner is still busy")


def calm(request: Request) -> list[int]:
    run(make_runner(TinyStage()), request)
    return request.heard


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED])
@pytest.mark.parametrize("known", [1, 4, 15, 20])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_an_open_sequence_draws_nothing_and_then_goes_on_where_it_was(
    known: int, prefix_caching: bool, sampling: Sampling
) -> None:
    media = (MediaSpan(5, 10, b"clip"),)
    want = calm(Request(prompt(21), sampling, media=media))
    runner = make_runner(TinyStage(), prefix_caching=prefix_caching)
    request = Request(prompt(21), sampling, media=media)
    whole = opened(request, known)
    runner.add(request.sequence)
    settle(runner)
    assert (request.sequence.computed, request.sequence.generated) == (known, 0)
    assert runner.counters.prompt_tokens == 0
    close(runner, request.sequence, whole)
    settle(runner)
    assert request.heard == want
    assert runner.counters.computed_rows == 21 + len(want) - 1, "a row was computed twice"
    assert runner.counters.prompt_tokens == 21
    assert request.sequence.cached == runner.counters.cached_rows == 0, "what it computed itself is no cached prompt"
    assert runner.counters.pages_used == 0


def test_rows_that_others_have_computed_behind_the_known_ones_are_taken_over() -> None:
    runner = make_runner(TinyStage())
    first, second = Request(prompt(31)), Request(prompt(31))
    run(runner, first)
    whole = opened(second, 10)
    runner.add(second.sequence)
    settle(runner)
    assert second.sequence.cached == 8
    close(runner, second.sequence, whole)
    settle(runner)
    assert second.heard == first.heard
    assert second.sequence.cached == 26  # 28 are there, and two of them it had computed by then
    assert runner.counters.cached_rows == 26
    assert runner.counters.computed_rows == 2 * (31 + 8 - 1) - 26
    assert runner.counters.pages_used == 0


def test_a_sequence_closed_before_its_first_step_is_like_any_other() -> None:
    runner = make_runner(TinyStage())
    first, second = Request(prompt(31)), Request(prompt(31))
    run(runner, first)
    whole = opened(second, 10)
    runner.add(second.sequence)
    close(runner, second.sequence, whole)
    settle(runner)
    assert second.heard == first.heard
    assert second.sequence.cached == 28


def test_a_sequence_closed_while_its_known_rows_are_computed_loses_none_of_them() -> None:
    lane = SlowLane()
    runner = make_runner(TinyStage(), lane=lane)
    request = Request(prompt(21), PENALISED)
    want, whole = calm(Request(prompt(21), PENALISED)), opened(request, 14)
    runner.add(request.sequence)
    runner.step()
    close(runner, request.sequence, whole)
    while runner.busy:
        lane.arrive()
        runner.step()
        runner.check_integrity()
    assert request.heard == want
    assert runner.counters.pages_used == 0


@pytest.mark.parametrize("moment", ["waiting", "under way", "read", "closed"])
def test_an_open_sequence_can_be_ended_at_any_moment(moment: str) -> None:
    lane = SlowLane()
    runner = make_runner(TinyStage(), lane=lane)
    request = Request(prompt(21))
    whole = opened(request, 14)
    runner.add(request.sequence)
    if moment != "waiting":
        runner.step()
    if moment in ("read", "closed"):
        lane.arrive()
        runner.step()
    if moment == "closed":
        close(runner, request.sequence, whole)
    runner.abort(request.sequence)
    runner.check_integrity()
    assert request.reason == "cancelled"
    assert runner.counters.pages_used == 0
    lane.arrive()
    runner.step()
    assert not runner.busy


def test_a_prompt_that_somebody_waits_for_goes_first_and_alone() -> None:
    stage = TinyStage()
    runner = make_runner(stage, max_num_batched_tokens=16, max_model_len=512, pages=200)
    ahead, urgent = Request(prompt(200)), Request(prompt(40, seed=1))
    opened(ahead, 180)
    runner.add(ahead.sequence)
    runner.step()
    runner.add(urgent.sequence)
    before = ahead.sequence.computed
    while not urgent.heard:
        runner.step()
        assert ahead.sequence.computed == before
    while not urgent.ends:  # rows of decoding leave room
        runner.step()
    assert ahead.sequence.computed > before
    settle(runner)
    assert ahead.sequence.computed == 180
    runner.abort(ahead.sequence)


def test_a_step_has_a_bounded_number_of_rows_that_nobody_waits_for() -> None:
    runner = make_runner(TinyStage(), max_num_batched_tokens=4000, max_model_len=4000, page_size=16, pages=250)
    most = SHARED_ROWS["cpu"] // 2
    ahead = Request(prompt(most + 50))
    opened(ahead, most + 40)
    runner.add(ahead.sequence)
    runner.step()
    assert ahead.sequence.computed == most
    settle(runner)
    runner.abort(ahead.sequence)


def test_a_few_known_rows_are_left_for_when_the_prompt_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEAST_KNOWN_ROWS, "cpu", 15)
    spans = (MediaSpan(5, 4, b"clip"),)
    requests = [Request(prompt(21), media=spans), Request(prompt(22, seed=1), media=spans)]
    want = []
    for request in requests:
        want.append(calm(Request(request.sequence.tokens, media=request.sequence.media)))
    stage = TinyStage()
    runner = make_runner(stage)
    whole = [opened(request, known) for request, known in zip(requests, (14, 15), strict=True)]
    for request in requests:
        runner.add(request.sequence)
    settle(runner)
    assert [request.sequence.computed for request in requests] == [0, 15]
    stage.batches.clear()
    for request, rest in zip(requests, whole, strict=True):
        close(runner, request.sequence, rest)
    settle(runner)
    assert sorted(stage.batches[0].counts) == [7, 21]
    assert [request.heard for request in requests] == want
    assert runner.counters.pages_used == 0


def test_decoding_goes_on_before_what_nobody_waits_for() -> None:
    stage, lane = Slow(), SlowLane()
    runner = make_runner(stage, lane=lane)
    writes, ahead = Request(prompt(9)), Request(prompt(21, seed=1))
    opened(ahead, 14)
    runner.add(writes.sequence)
    runner.step()
    lane.arrive()
    runner.add(ahead.sequence)
    runner.step()
    assert len(lane.under_way) == 2, "a step of decoding and a piece"
    lane.arrive(1)
    runner.step()
    assert len(writes.heard) == 3
    assert ahead.sequence.computed == 0


class Slow(TinyStage):
    """Its media are launched in three pieces, for prompts that nobody waits for."""

    pieces = 3
    broken = False

    def prepare(self, batch: Batch) -> bool:
        if self.broken:
            raise RuntimeError("a picture that cannot be encoded")
        self.pieces -= 1
        return self.pieces >= 0


def test_what_nobody_waits_for_is_launched_piece_by_piece() -> None:
    stage, lane = Slow(), SlowLane()
    runner, request = make_runner(stage, lane=lane), Request(prompt(21))
    want, whole = calm(Request(prompt(21))), opened(request, 14)
    runner.add(request.sequence)
    for _ in range(stage.pieces):
        assert runner.launch()
        assert len(lane.under_way) == 1, "the next piece waits for the end of the last: who comes may go first"
        assert not runner.launch()
        assert not stage.batches
        lane.arrive()
        assert runner.land()
        runner.check_integrity()
    assert runner.launch()
    assert stage.batches[0].rows == 14
    close(runner, request.sequence, whole)
    while runner.busy:
        lane.arrive()
        runner.step()
    assert request.heard == want


def test_a_prompt_that_becomes_whole_between_two_pieces_waits_for_no_more_of_them() -> None:
    stage = Slow()
    runner, request = make_runner(stage), Request(prompt(21))
    want, whole = calm(Request(prompt(21))), opened(request, 14)
    runner.add(request.sequence)
    runner.step()
    close(runner, request.sequence, whole)
    runner.step()
    assert (stage.pieces, request.heard) == (2, want[:1])
    settle(runner)
    assert request.heard == want


def test_a_piece_that_fails_ends_only_whose_it_is(caplog: pytest.LogCaptureFixture) -> None:
    stage = Slow()
    stage.broken, stage.poison = True, 5
    runner, bad, good = make_runner(stage), Request([1, 5, *prompt(8)]), Request([1, 6, 7, 6, 7])
    for request in (bad, good):
        opened(request, 4)
        runner.add(request.sequence)
    settle(runner)
    assert bad.reason == "error"
    assert (good.ends, good.sequence.computed) == ([], 4)
    runner.abort(good.sequence)


class Pictured(TinyStage):
    """Media are prepared once for each sequence, and it is known for whom and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[Sequence] = []
        self.broken: Sequence | None = None
        self.urgent: Sequence | None = None

    def foresees(self, sequence: Sequence) -> bool:
        return sequence is not self.urgent

    def prepare(self, batch: Batch) -> bool:
        (sequence,) = batch.sequences
        if sequence is self.broken:
            raise RuntimeError("a picture that cannot be encoded")
        if sequence in self.prepared:
            return False
        self.prepared.append(sequence)
        return True


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is known of a prompt here is too little to be read."""
    monkeypatch.setitem(LEAST_KNOWN_ROWS, "cpu", 100)


def opened_ones(runner: ArRunner, count: int) -> tuple[list[Request], list[Whole]]:
    requests = [Request(prompt(21, seed=seed)) for seed in range(count)]
    whole = [opened(request, 14) for request in requests]
    for request in requests:
        runner.add(request.sequence)
    return requests, whole


@pytest.mark.usefixtures("few")
def test_what_a_few_known_rows_are_made_of_is_prepared_piece_by_piece_and_none_of_them_is_read() -> None:
    stage, lane = Pictured(), SlowLane()
    runner = make_runner(stage, lane=lane)
    requests, whole = opened_ones(runner, 3)
    for prepared in (1, 2, 3):
        assert runner.step()
        assert not runner.step(), "the next piece waits for the end of the last"
        assert (len(stage.prepared), len(lane.under_way)) == (prepared, 1)
        lane.arrive()
    settle(runner)
    assert not stage.batches
    assert runner.counters.computed_rows == 0
    for request, rest in zip(requests, whole, strict=True):
        close(runner, request.sequence, rest)
    while runner.busy:
        runner.step()
        lane.arrive()
    assert [request.heard for request in requests] == [calm(Request(prompt(21, seed=seed))) for seed in range(3)]
    assert len(stage.prepared) == 3
    assert runner.counters.pages_used == 0


@pytest.mark.usefixtures("few")
def test_who_is_waited_for_goes_before_pieces_that_nobody_waits_for() -> None:
    stage, lane = Pictured(), SlowLane()
    runner = make_runner(stage, lane=lane)
    requests, whole = opened_ones(runner, 3)
    runner.step()
    close(runner, requests[1].sequence, whole[1])
    runner.step()
    assert [batch.sequences for batch in stage.batches] == [(requests[1].sequence,)], "behind the piece under way"
    lane.arrive(1)
    runner.step()
    assert (len(stage.prepared), requests[1].heard) == (1, []), "a piece went before what follows from a first id"
    lane.arrive(1)
    runner.step()
    assert requests[1].heard
    assert stage.prepared == [requests[0].sequence, requests[2].sequence], (
        "the one that is whole is prepared by its step"
    )
    for request in requests:
        runner.abort(request.sequence)


@pytest.mark.usefixtures("few")
def test_decoding_and_pieces_take_turns() -> None:
    stage, lane = Pictured(), SlowLane()
    runner = make_runner(stage, lane=lane)
    writes = Request(prompt(9), replace(GREEDY, max_tokens=40))
    runner.add(writes.sequence)
    runner.step()
    lane.arrive(1)
    runner.step()
    requests, _ = opened_ones(runner, 3)
    for prepared in (1, 2, 3):
        while len(stage.prepared) < prepared:
            lane.arrive(1)
            runner.step()
        assert len(lane.under_way) == 2, "a step of decoding is in front of it"
        heard = len(writes.heard)
        lane.arrive(1)
        runner.step()
        assert len(writes.heard) == heard + 1
        assert len(lane.under_way) == 2, "and the next one behind it"
    for request in (writes, *requests):
        runner.abort(request.sequence)


@pytest.mark.usefixtures("few")
def test_behind_a_step_of_decoding_a_prompt_that_is_whole_goes_before_pieces() -> None:
    stage, lane = Pictured(), SlowLane()
    runner = make_runner(stage, lane=lane)
    writes = Request(prompt(9), replace(GREEDY, max_tokens=40))
    runner.add(writes.sequence)
    runner.step()
    lane.arrive(1)
    runner.step()
    requests, whole = opened_ones(runner, 3)
    while len(stage.prepared) < 1:
        lane.arrive(1)
        runner.step()
    lane.arrive(1)
    runner.step()
    assert len(lane.under_way) == 2, "a piece and a step of decoding"
    close(runner, requests[1].sequence, whole[1])
    lane.arrive(1)
    runner.step()
    assert stage.batches[-1].sequences == (requests[1].sequence,)
    assert len(stage.prepared) == 1
    for request in (writes, *requests):
        runner.abort(request.sequence)


@pytest.mark.usefixtures("few")
def test_a_step_that_somebody_waits_for_goes_before_pieces() -> None:
    stage, lane = Pictured(), SlowLane()
    runner = make_runner(stage, lane=lane)
    writes = Request(prompt(9), replace(GREEDY, max_tokens=40))
    stage.urgent = writes.sequence
    runner.add(writes.sequence)
    requests, _ = opened_ones(runner, 1)
    while len(writes.heard) < 5:
        runner.step()
        lane.arrive()
    assert not stage.prepared
    stage.urgent = None
    runner.step()
    assert stage.prepared == [requests[0].sequence]
    for request in (writes, *requests):
        runner.abort(request.sequence)


@pytest.mark.usefixtures("few")
def test_prompts_of_another_stage_go_before_pieces() -> None:
    stage, lane, elsewhere = Pictured(), SlowLane(), SlowLane()
    other = make_runner(TinyStage(), lane=elsewhere)
    runner = make_runner(stage, lane=lane, prompts_first=[other])
    spoken = Request(prompt(9))
    other.add(spoken.sequence)
    requests, _ = opened_ones(runner, 1)
    for _ in range(2):
        runner.step()
    assert not runner.launch(), "the prompt has not even been launched"
    other.step()
    assert not runner.launch()
    assert not stage.prepared
    elsewhere.arrive(1)
    other.step()
    assert other.flying, "it goes on decoding"
    assert runner.step()
    assert stage.prepared == [requests[0].sequence]
    runner.abort(requests[0].sequence)
    other.abort(spoken.sequence)


@pytest.mark.usefixtures("few")
def test_a_piece_goes_behind_one_step_of_decoding_and_not_behind_two() -> None:
    """Who comes then would find three launches in front. Two are under way where pieces had to wait for prompts of another stage."""
    stage, lane, elsewhere = Pictured(), SlowLane(), SlowLane()
    other = make_runner(TinyStage(), lane=elsewhere)
    runner = make_runner(stage, lane=lane, prompts_first=[other])
    writes, spoken = Request(prompt(9), replace(GREEDY, max_tokens=40)), Request(prompt(9))
    other.add(spoken.sequence)
    runner.add(writes.sequence)
    requests, _ = opened_ones(runner, 2)
    runner.step()
    while len(writes.heard) < 5:
        lane.arrive(1)
        runner.step()
    assert not stage.prepared
    assert [flight.decode for flight in runner._flights] == [True, True]
    other.abort(spoken.sequence)
    late = Request(prompt(21, seed=7))
    opened(late, 14)
    runner.add(late.sequence)  # news, for which the runner looks again
    assert not runner.launch()
    assert not stage.prepared
    lane.arrive(1)
    runner.step()
    assert [flight.piece for flight in runner._flights] == [False, True]
    assert stage.prepared == [requests[0].sequence]
    for request in (writes, late, *requests):
        runner.abort(request.sequence)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("decoding", [False, True])
def test_news_while_a_piece_is_under_way_launch_no_other(decoding: bool) -> None:
    stage, lane = Pictured(), SlowLane()
    runner = make_runner(stage, lane=lane)
    writes = Request(prompt(9), replace(GREEDY, max_tokens=40))
    if decoding:
        runner.add(writes.sequence)
        runner.step()
        lane.arrive(1)
        runner.step()
    opened_ones(runner, 3)
    while not stage.prepared:
        lane.arrive(1)
        runner.step()
    if decoding:
        lane.arrive(1)
        runner.step()
    before = list(runner._flights)
    assert [flight.piece for flight in before] == [True, False][: 1 + decoding]
    opened_ones(runner, 1)
    runner.step()
    runner.check_integrity()
    assert list(runner._flights) == before
    assert len(stage.prepared) == 1


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("moment", ["waiting", "under way", "prepared", "closed"])
def test_an_open_sequence_can_be_ended_at_any_moment_of_its_pieces(moment: str) -> None:
    stage, lane = Pictured(), SlowLane()
    runner = make_runner(stage, lane=lane)
    (first, request), (_, whole) = opened_ones(runner, 2)
    runner.step()
    if moment != "waiting":
        lane.arrive()
        runner.step()
    if moment == "prepared":
        lane.arrive()
        runner.step()
    if moment == "closed":
        close(runner, request.sequence, whole)
    runner.abort(request.sequence)
    runner.abort(first.sequence)
    runner.check_integrity()
    assert [one.reason for one in (first, request)] == ["cancelled"] * 2
    lane.arrive()
    settle(runner)
    assert len(stage.prepared) == (1 if moment == "waiting" else 2)
    assert runner.counters.pages_used == 0


@pytest.mark.usefixtures("few")
def test_a_piece_of_a_few_rows_that_fails_is_left_to_the_step_that_needs_it(caplog: pytest.LogCaptureFixture) -> None:
    stage = Pictured()
    runner = make_runner(stage)
    (bad, good), whole = opened_ones(runner, 2)
    stage.broken = bad.sequence
    settle(runner)
    assert "could not be prepared" in caplog.text
    assert stage.prepared == [good.sequence]
    for request, rest in zip((bad, good), whole, strict=True):
        close(runner, request.sequence, rest)
    settle(runner)
    assert [one.heard for one in (bad, good)] == [calm(Request(prompt(21, seed=seed))) for seed in range(2)]


@pytest.mark.parametrize("rows", [8, 64])
def test_an_open_sequence_gives_its_seat_and_its_pages_to_who_is_waited_for(rows: int) -> None:
    runner = make_runner(TinyStage(), max_num_seqs=1, pages=8, max_num_batched_tokens=rows)
    ahead, urgent = Request(prompt(21)), Request(prompt(20, seed=1))
    want, whole = calm(Request(prompt(21))), opened(ahead, 18)
    assert runner.spare
    runner.add(ahead.sequence)
    runner.step()
    assert ahead.sequence.computed == min(rows, 18)
    assert not runner.spare
    runner.add(urgent.sequence)
    settle(runner)
    assert urgent.ends
    assert ahead.sequence.preempted == 1
    assert not ahead.sequence.computed, "it was computed again for nobody"
    assert not runner.spare, "somebody waits"
    close(runner, ahead.sequence, whole)
    settle(runner)
    assert ahead.heard == want
    assert runner.counters.pages_used == 0


@pytest.mark.parametrize("seed", range(12))
def test_whenever_prompts_become_known_and_pages_run_out_everyone_says_the_same(seed: int) -> None:
    dice, lane = random.Random(seed), SlowLane()
    samplings = [GREEDY, replace(PENALISED, seed=seed), replace(GREEDY, presence_penalty=0.7)]

    def make(index: int) -> Request:
        tokens = prompt(9, seed=99) * (index % 2) + prompt(2 + 7 * index % 23, seed=index % 6)
        media = (MediaSpan(len(tokens) // 3, 1 + index % 2, bytes([index % 3])),)
        return Request(tokens, replace(samplings[index % 3], max_tokens=4 + index % 17), media=media)

    want = [calm(make(index)) for index in range(18)]
    crowd = [make(index) for index in range(18)]
    doomed = [make(index) for index in range(6)]
    runner = make_runner(TinyStage(), lane=lane, pages=16, max_num_batched_tokens=8, max_num_seqs=4)
    coming, unknown = [*crowd, *doomed], {}
    dice.shuffle(coming)
    while coming or unknown or runner.busy:
        if coming and dice.random() < 0.5:
            request = coming.pop()
            if dice.random() < 0.6:
                (span,) = request.sequence.media
                whole = range(1, len(request.sequence.tokens))
                inside = range(span.start + 1, span.start + span.length)
                unknown[request] = opened(request, dice.choice([known for known in whole if known not in inside]))
            runner.add(request.sequence)
        runner.step()
        runner.check_integrity()
        if dice.random() < 0.5:
            lane.arrive(dice.choice([1, None]))
        for request in list(unknown):
            if dice.random() < 0.2:
                if request in doomed:
                    del unknown[request]
                    runner.abort(request.sequence)
                else:
                    close(runner, request.sequence, unknown.pop(request))
    assert [request.heard for request in crowd] == want
    assert runner.counters.pages_used == 0
    assert runner.counters.preemptions > 0
    assert runner.counters.cached_rows > 0


# ---------------------------------------------------------------- what is only read


def test_what_is_only_read_ends_when_its_rows_can_be_found() -> None:
    media = (MediaSpan(5, 10, b"clip"),)
    want, runner = calm(Request(prompt(21), media=media)), make_runner(TinyStage())
    ahead, later = reading(prompt(20), media=media), Request(prompt(21), media=media)
    run(runner, ahead)
    assert (ahead.reason, ahead.heard) == ("stop", [])
    assert runner.counters.computed_rows == 20
    run(runner, later)
    assert later.heard == want
    assert later.sequence.cached == 20
    run(runner, reading(prompt(20), media=media))
    assert runner.counters.cached_rows == 20, "only prompts count"
    assert runner.counters.prompt_tokens == 21
    assert runner.counters.computed_rows == 20 + len(want) + 4, "of what is there the last page is read again"


def test_a_few_rows_are_not_worth_being_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEAST_ONLY_READ, "cpu", 15)
    runner, ahead = make_runner(TinyStage()), reading(prompt(14))
    run(runner, ahead)
    assert ahead.reason == "stop"
    assert runner.counters.computed_rows == 0


def test_what_is_only_read_goes_behind_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHARED_ROWS, "cpu", 16)
    runner = make_runner(TinyStage(), max_model_len=512, pages=200)
    background, ahead = reading(prompt(60, seed=2)), Request(prompt(60))
    opened(ahead, 40)
    runner.add(background.sequence)
    runner.step()
    assert background.sequence.computed == 16, "where nobody comes, a whole step"
    runner.add(ahead.sequence)
    for computed in (8, 16, 24, 32, 40):
        runner.step()
        assert (ahead.sequence.computed, background.sequence.computed) == (computed, 16)
    writes = Request(prompt(20, seed=3), replace(GREEDY, max_tokens=3))
    runner.add(writes.sequence)
    while not writes.heard:
        runner.step()
        assert background.sequence.computed == 16
    runner.step()
    assert background.sequence.computed == 24, "beside decoding half a step"
    runner.abort(ahead.sequence)
    settle(runner)
    assert background.reason == "stop"
    assert runner.counters.pages_used == 0


def test_who_comes_takes_seat_and_pages_of_what_is_only_read_and_it_goes_on_afterwards() -> None:
    runner = make_runner(TinyStage(), max_num_seqs=1, max_num_batched_tokens=8, pages=16)
    background, comes = reading(prompt(40, seed=2)), Request(prompt(30))
    want = calm(Request(prompt(30)))
    runner.add(background.sequence)
    runner.step()
    runner.add(comes.sequence)
    settle(runner)
    assert comes.heard == want
    assert background.reason == "stop"
    assert background.sequence.preempted == 1
    assert runner.counters.pages_used == 0


@pytest.mark.parametrize("moment", ["waiting", "under way", "between"])
def test_what_is_only_read_can_be_ended_at_any_moment(moment: str) -> None:
    lane = SlowLane()
    runner = make_runner(TinyStage(), lane=lane, max_num_batched_tokens=8)
    background = reading(prompt(40))
    runner.add(background.sequence)
    if moment != "waiting":
        runner.step()
    if moment == "between":
        lane.arrive()
        runner.land()
    runner.abort(background.sequence)
    runner.check_integrity()
    assert background.reason == "cancelled"
    assert runner.counters.pages_used == 0
    lane.arrive()
    runner.step()
    assert not runner.busy


def test_who_comes_is_launched_behind_what_is_only_read_and_waits_for_no_more_of_it() -> None:
    lane = SlowLane()
    runner = make_runner(TinyStage(), lane=lane, max_num_batched_tokens=8)
    background, comes = reading(prompt(40)), Request(prompt(6, seed=1))
    want = calm(Request(prompt(6, seed=1)))
    runner.add(background.sequence)
    runner.step()
    runner.step()
    assert len(lane.under_way) == 2, "the device does not wait for the host"
    runner.add(comes.sequence)
    runner.step()
    assert len(lane.under_way) == 2
    lane.arrive(1)
    runner.step()
    assert len(lane.under_way) == 2
    lane.arrive(1)
    runner.step()
    assert len(lane.under_way) == 1, "nothing more of it is put in front of who waits"
    lane.arrive()
    runner.step()
    assert comes.heard == want[:1]
    while runner.busy:
        lane.arrive()
        runner.step()
        runner.check_integrity()
    assert (comes.heard, background.reason) == (want, "stop")


def test_several_that_are_only_read_are_read_one_after_the_other_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SHARED_ROWS, "cpu", 16)
    stage, lane = TinyStage(), SlowLane()
    runner = make_runner(stage, lane=lane, pages=200)
    requests = [reading(prompt(length, seed=length)) for length in (40, 24, 17)]
    for request in requests:
        runner.add(request.sequence)
    while runner.busy:
        runner.step()
        runner.check_integrity()
        assert len(lane.under_way) == 2 or sum(batch.rows for batch in stage.batches) == 40 + 24 + 17
        lane.arrive(1)
    assert [request.reason for request in requests] == ["stop"] * 3
    assert max(batch.rows for batch in stage.batches) == 16
    for length in (40, 24, 17):
        later, alone = (Request([*prompt(length, seed=length), 3]) for _ in range(2))
        runner.add(later.sequence)
        while runner.busy:
            runner.step()
            lane.arrive()
        assert later.sequence.cached == length // 4 * 4
        run(make_runner(TinyStage()), alone)
        assert later.heard == alone.heard


def test_of_what_is_only_read_what_is_needed_first_goes_first() -> None:
    lane = SlowLane()
    runner = make_runner(TinyStage(), lane=lane, max_num_batched_tokens=8)
    late, soon = reading(prompt(40)), reading(prompt(24, seed=1))
    late.sequence.priority, soon.sequence.priority = 9.0, 5.0
    runner.add(late.sequence)
    runner.step()
    runner.add(soon.sequence)
    while not soon.ends:
        lane.arrive(1)
        runner.step()
        runner.check_integrity()
    assert late.sequence.computed == 16, "two steps of it were under way"
    while runner.busy:
        lane.arrive()
        runner.step()
    assert (late.reason, soon.reason) == ("stop", "stop")


def test_who_finds_no_pages_and_is_not_waited_for_keeps_nothing_from_being_read() -> None:
    runner = make_runner(TinyStage(), pages=20, max_num_batched_tokens=8)
    read, ahead = reading(prompt(60)), Request(prompt(31, seed=1))
    want = calm(Request(prompt(31, seed=1)))
    runner.add(read.sequence)
    runner.step()
    whole = opened(ahead, 30)
    runner.add(ahead.sequence)
    for _ in range(20):
        runner.step()
        runner.check_integrity()
    assert [reason for reason, _ in read.ends] == ["stop"]
    assert ahead.sequence.computed == 30
    close(runner, ahead.sequence, whole)
    settle(runner)
    assert ahead.heard == want
