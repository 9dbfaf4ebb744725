"""While a step is under way on the device, the host goes on: whatever happens then, everyone gets what is theirs."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_stage import GREEDY, STOP, Request, TinyStage, close, make_runner, opened, prompt, reading, run

from aura_omni.engine import runner as runners
from aura_omni.engine.engine import Engine
from aura_omni.engine.holding import HOLD_S, IN_HAND_S
from aura_omni.engine.runner import ArRunner
from aura_omni.engine.sequence import Batch, MediaSpan, Sequence
from aura_omni.errors import Unavailable
from aura_omni.flow import Sampling
from tests.replayed import without_cuda
from tests.slow_lane import SlowLane

SEEDED = Sampling(max_tokens=8, seed=11, temperature=0.9, repetition_penalty=1.1)


@pytest.fixture
def lane() -> SlowLane:
    return SlowLane()


def expected(request: Request) -> list[int]:
    return TinyStage().dense_outputs(request.sequence)


def test_a_step_never_waits_and_the_next_one_is_launched_behind_it(lane: SlowLane) -> None:
    stage = TinyStage()
    runner = make_runner(stage, lane=lane)
    request = Request(prompt(9), replace(GREEDY, max_tokens=2))
    runner.add(request.sequence)
    assert runner.step()
    assert runner.flying
    assert [runner.step() for _ in range(3)] == [False] * 3
    assert (request.heard, runner.counters.steps) == ([], 2), "the prompt, and the row behind it"
    lane.arrive(1)
    assert runner.step()
    assert (len(request.heard), runner.counters.steps) == (1, 2), "the second id is the last"
    lane.arrive()
    assert runner.step()
    assert request.reason == "length"
    assert not runner.flying
    assert not runner.busy
    assert not runner.step()


def test_a_step_is_under_way_until_its_end_is_found(lane: SlowLane) -> None:
    runner = make_runner(TinyStage(), lane=lane)
    request = Request(prompt(9), replace(GREEDY, max_tokens=1))
    assert runner.counters.step_s == 0.0
    runner.add(request.sequence)
    assert runner.counters.step_s == 0.0  # waiting is not computing
    runner.step()
    before = runner.counters.step_s
    time.sleep(0.002)
    assert runner.counters.step_s >= before + 0.002
    lane.arrive()
    runner.step()
    ended = runner.counters.step_s
    time.sleep(0.002)
    assert runner.counters.step_s == ended
    assert runner.counters.computed_rows == 9


def test_decoding_goes_one_step_ahead_of_what_has_arrived(lane: SlowLane) -> None:
    runner = make_runner(TinyStage(), lane=lane)
    request = Request(prompt(9), replace(GREEDY, max_tokens=5))
    want = expected(request)[:5]
    runner.add(request.sequence)
    under_way, heard = [], []
    while runner.busy:
        runner.step()
        runner.check_integrity()
        under_way.append(len(lane.under_way))
        heard.append(len(request.heard))
        if lane.under_way:
            lane.arrive(1)
    # Two steps are under way until the last id is being drawn.
    assert under_way == [2, 2, 2, 2, 1, 0]
    assert heard == [0, 1, 2, 3, 4, 5]
    assert request.heard == want


def test_what_was_drawn_ahead_for_a_sequence_that_has_ended_is_dropped(lane: SlowLane) -> None:
    free = Request(prompt(9))
    run(make_runner(TinyStage()), free)
    stop = free.heard[3]
    runner = make_runner(TinyStage(), lane=lane)
    ending, other = Request(prompt(9), replace(GREEDY, stop_token_ids=(stop,))), Request(prompt(9, seed=1))
    want = expected(other)
    for request in (ending, other):
        runner.add(request.sequence)
    while not ending.ends:
        runner.step()
        if lane.under_way:
            lane.arrive(1)
    assert runner.flying  # and it is among those that are drawn for
    assert ending.reason == "stop"
    assert ending.heard == free.heard[: free.heard.index(stop)]
    while runner.busy:
        lane.arrive()
        runner.step()
        runner.check_integrity()
    assert ending.sequence.outputs == [*ending.heard, stop]
    assert other.heard == want
    assert runner.counters.pages_used == 0


def test_who_comes_into_a_free_seat_is_computed_right_behind_the_step_under_way(lane: SlowLane) -> None:
    stage = TinyStage()
    runner = make_runner(stage, lane=lane, max_num_seqs=2)
    first, second, third = (Request(prompt(9, seed=seed)) for seed in range(3))
    want = expected(second)
    runner.add(first.sequence)
    runner.step()
    lane.arrive()
    runner.step()
    assert len(lane.under_way) == 2
    runner.add(second.sequence)
    assert not runner.launch(), "what is launched ahead is not overtaken"
    lane.arrive(1)
    runner.step()
    assert len(lane.under_way) == 2
    assert stage.batches[-1].sequences == (second.sequence,)
    lane.arrive(1)
    runner.step()
    assert (len(first.heard), len(second.heard)) == (4, 0)
    assert len(lane.under_way) == 1, "nobody decodes ahead of it"
    lane.arrive(1)
    runner.step()
    assert len(second.heard) == 1
    runner.add(third.sequence)  # all seats are taken: it has to wait anyway
    lane.arrive(1)
    runner.step()
    assert (len(first.heard), len(second.heard)) == (5, 2)
    assert len(lane.under_way) == 2
    while runner.busy:
        lane.arrive()
        runner.step()
        runner.check_integrity()
    assert second.heard == want


def test_who_decodes_goes_on_behind_prompts_that_are_under_way_where_nothing_else_computes(lane: SlowLane) -> None:
    stage = TinyStage()
    runner = make_runner(stage, lane=lane, alone=True, max_num_seqs=3)
    first, second, *more = (Request(prompt(9, seed=seed), replace(GREEDY, max_tokens=6 + seed)) for seed in range(9))
    want = [expected(request)[: request.sequence.sampling.max_tokens] for request in (first, second, *more)]
    runner.add(first.sequence)
    while len(first.heard) < 2:
        runner.step()
        lane.arrive(1)
    runner.add(second.sequence)
    while stage.batches[-1].sequences != (second.sequence,):
        runner.step()
        assert not second.heard
        lane.arrive(1)
    runner.step()
    assert [flight.batch.sequences for flight in runner._flights] == [(second.sequence,), (first.sequence,)]
    for request in more:
        runner.add(request.sequence)
    while runner.busy:
        lane.arrive(1)
        runner.step()
        runner.check_integrity()
    assert [request.heard for request in (first, second, *more)] == want


def test_behind_a_step_under_way_nobody_gives_way_to_who_comes(lane: SlowLane) -> None:
    runner = make_runner(TinyStage(), lane=lane, pages=4, max_num_seqs=2)
    first, second = Request(prompt(9)), Request(prompt(9, seed=1), priority=-1)
    want = [expected(request) for request in (first, second)]
    runner.add(first.sequence)
    runner.step()
    lane.arrive()
    runner.step()
    runner.add(second.sequence)
    lane.arrive(1)
    runner.step()
    assert first.sequence.pages
    assert len(lane.under_way) == 1
    while runner.busy:
        lane.arrive()
        runner.step()
        runner.check_integrity()
    assert first.sequence.preempted > 0
    assert [first.heard, second.heard] == want


@pytest.mark.parametrize(("rows", "heard"), [(30, (2, 1)), (100, (3, 0))])
def test_a_step_computes_prompts_first_if_that_gives_somebody_a_first_id(
    lane: SlowLane, rows: int, heard: tuple[int, int]
) -> None:
    runner = make_runner(TinyStage(), lane=lane)
    first, second = Request(prompt(9)), Request(prompt(rows, seed=1))
    runner.add(first.sequence)
    runner.step()
    lane.arrive()
    runner.add(second.sequence)
    runner.step()
    assert len(lane.under_way) == 2
    lane.arrive(1)
    assert runner.step()
    assert (len(first.heard), len(second.heard)) == heard
    assert runner.flying


def test_a_request_that_is_aborted_under_way_hears_no_more_and_its_pages_and_seat_serve_the_next(
    lane: SlowLane,
) -> None:
    runner = make_runner(TinyStage(), lane=lane, max_num_seqs=1, pages=6, prefix_caching=True)
    victim, heir = Request(prompt(17), SEEDED), Request(prompt(17, seed=1), replace(SEEDED, seed=5))
    want = expected(Request(prompt(17, seed=1), replace(GREEDY)))
    heir.sequence.sampling = GREEDY
    for request in (victim, heir):
        runner.add(request.sequence)
    for _ in range(3):
        runner.step()
        lane.arrive()
    runner.step()
    heard = list(victim.heard)
    runner.abort(victim.sequence)
    assert victim.reason == "cancelled"
    assert runner.counters.pages_used == 0
    runner.check_integrity()
    assert not runner.step()  # still under way: nobody is seated before it has arrived
    while runner.busy:
        lane.arrive()
        runner.step()
        runner.check_integrity()
    assert victim.heard == heard
    assert heir.heard == want


def test_rows_of_a_step_that_was_never_taken_in_are_found_by_nobody(lane: SlowLane) -> None:
    runner = make_runner(TinyStage(), lane=lane)
    one = Request(prompt(21))
    runner.add(one.sequence)
    runner.step()
    assert runner.counters.pages_kept == 0
    runner.abort(one.sequence)
    lane.arrive()
    again = Request(prompt(21))
    runner.add(again.sequence)
    runner.step()
    assert again.sequence.cached == 0


@pytest.mark.parametrize("seed", range(12))
def test_whatever_falls_between_launch_and_arrival_everyone_says_the_same(seed: int, lane: SlowLane) -> None:
    dice = random.Random(seed)
    samplings = [
        GREEDY,
        replace(SEEDED, seed=seed),
        replace(GREEDY, presence_penalty=0.7, logit_bias={7: 1.5}),
        replace(GREEDY, logit_bias={STOP: 3.0}, min_tokens=3),
    ]

    def make(index: int) -> Request:
        tokens = prompt(4, seed=99) * (index % 2) + prompt(1 + 7 * index % 23, seed=index)
        return Request(tokens, replace(samplings[index % 4], max_tokens=6 + index % 17), priority=index % 3)

    calm = [make(index) for index in range(16)]
    for request in calm:
        runner = make_runner(TinyStage())
        runner.add(request.sequence)
        while runner.busy:
            runner.step()
    crowd, doomed = [make(index) for index in range(16)], [make(index) for index in range(8)]
    runner = make_runner(TinyStage(), lane=lane, pages=16, max_num_batched_tokens=16, max_num_seqs=4)
    coming = [*crowd, *doomed]
    dice.shuffle(coming)
    living = set(doomed)
    while coming or runner.busy:
        for _ in range(dice.randrange(3)):
            if coming:
                runner.add(coming.pop().sequence)
        runner.step()
        runner.check_integrity()
        if dice.random() < 0.4:
            lane.arrive(dice.choice([1, None]))
        for request in list(living):
            if request.sequence.id >= 0 and dice.random() < 0.05:
                living.remove(request)
                runner.abort(request.sequence)
                runner.check_integrity()
    assert [request.heard for request in crowd] == [request.heard for request in calm]
    for request, whole in zip(doomed, calm, strict=False):
        assert request.heard == whole.heard[: len(request.heard)]
    assert runner.counters.pages_used == 0
    assert runner.counters.preemptions > 0


class InStep(TinyStage):
    """It does not foresee one sequence."""

    lost: Sequence | None = None

    @property
    def in_step(self) -> bool:
        return True

    def foresees(self, sequence: Sequence) -> bool:
        return sequence is not self.lost


def test_a_stage_in_step_goes_ahead_for_all_or_for_nobody(lane: SlowLane) -> None:
    stage = InStep()
    runner = make_runner(stage, lane=lane)
    requests = [Request(prompt(9, seed=seed)) for seed in range(2)]
    stage.lost = requests[1].sequence
    for request in requests:
        runner.add(request.sequence)
    runner.step()
    for heard in (1, 2):
        assert len(lane.under_way) == 1, "nothing behind it, in which one of them would be missing"
        lane.arrive()
        runner.step()
        assert [len(request.heard) for request in requests] == [heard, heard]
    stage.lost = None
    lane.arrive()
    runner.step()
    assert len(lane.under_way) == 2
    lane.arrive()
    runner.step()
    assert [len(request.heard) for request in requests] == [5, 5]
    for request in requests:
        runner.abort(request.sequence)


class Unforeseen(TinyStage):
    """A stage that often does not know its next row, and whose media are prepared in pieces, as the dice fall."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(mrope=True)
        self._dice, self._known, self._pieces = dice, dice.choice([0.0, 0.5, 1.0]), dice.choice([0.0, 0.3])
        self._in_step = dice.choice([False, True])

    @property
    def in_step(self) -> bool:
        return self._in_step

    def foresees(self, sequence: Sequence) -> bool:
        return self._dice.random() < self._known

    def prepare(self, batch: Batch) -> bool:
        return self._dice.random() < self._pieces


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_however_steps_are_launched_and_put_together_everyone_says_the_same(
    seed: int, *, alone: bool, graphs: bool, lane: SlowLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that are whole, that become so, and that are only read; some end in the middle, also because of what others hear."""
    dice = random.Random(repr((seed, alone, graphs)))
    samplings = [
        GREEDY,
        replace(SEEDED, seed=seed),
        replace(GREEDY, presence_penalty=0.7),
        replace(GREEDY, logit_bias={STOP: 3.0}, min_tokens=3),
    ]

    def make(index: int) -> Request:
        tokens = prompt(9, seed=99) * (index % 2) + prompt(2 + 7 * index % 23 + 60 * (index % 5 == 4), seed=index % 6)
        media = (MediaSpan(len(tokens) // 3, 1 + index % 2, bytes([index])),) * (index % 3 > 0)
        sampling = replace(samplings[index % 4], max_tokens=1 + 5 * index % 17)
        return Request(tokens, sampling, media=media, priority=index % 3)

    calm = [make(index) for index in range(14)]
    for request in calm:
        run(make_runner(TinyStage(mrope=True)), request)
    crowd, doomed = [make(index) for index in range(14)], [make(index) for index in range(6)]
    reads = [reading(one.sequence.tokens, media=one.sequence.media) for one in map(make, range(6))]
    monkeypatch.setattr(runners, "SHARED_ROWS", {"cpu": dice.choice([3, 8, 128])})
    monkeypatch.setattr(runners, "LEAST_KNOWN_ROWS", {"cpu": dice.choice([1, 8, 20])})
    if graphs:
        without_cuda(monkeypatch)
    runner = make_runner(
        Unforeseen(dice), lane=lane, pages=28, max_num_batched_tokens=dice.choice([8, 16, 64]),
        max_num_seqs=dice.choice([2, 4, 8]), alone=alone, graphs=graphs,
    )  # fmt: skip
    coming, unknown = [*crowd, *doomed, *reads], {}
    living = [*doomed, *reads[:2]]

    def end_somebody() -> None:
        there = [one for one in living if one.sequence.id >= 0 and one not in unknown]
        if there and dice.random() < 0.05:
            living.remove(one := dice.choice(there))
            runner.abort(one.sequence)

    def heard(request: Request, value: int) -> None:
        request.heard.append(value)
        end_somebody()

    for request in crowd:
        request.sequence.on_output = partial(heard, request)
    dice.shuffle(coming)
    while coming or unknown or runner.busy:
        if coming and dice.random() < 0.4:
            request = coming.pop()
            if request not in reads and dice.random() < 0.5:
                spans, length = request.sequence.media, request.sequence.length
                inside = {row for span in spans for row in range(span.start + 1, span.start + span.length)}
                unknown[request] = opened(
                    request, dice.choice([known for known in range(1, length) if known not in inside])
                )
            runner.add(request.sequence)
        runner.step()
        runner.check_integrity()
        assert len(runner._flights) <= 2, "who comes finds more than two launches in front"
        if dice.random() < 0.5:
            lane.arrive(dice.choice([1, None]))
        end_somebody()
        for request in list(unknown):
            if dice.random() < 0.15:
                close(runner, request.sequence, unknown.pop(request))
    assert [request.heard for request in crowd] == [request.heard for request in calm]
    for request, whole in zip(doomed, calm, strict=False):
        assert request.heard == whole.heard[: len(request.heard)]
    for request in reads:
        assert request.heard == []
        assert request.reason == "stop" or request not in living
    assert runner.counters.pages_used == 0


@pytest.mark.parametrize("seed", range(12, 20))
def test_who_makes_room_for_prompts_always_goes_on(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read, and whether it can be: the engine's thread never sleeps while somebody is to be spoken to."""
    dice, now_s = random.Random(seed), 0.0
    monkeypatch.setattr(runners, "SHARED_ROWS", {"cpu": dice.choice([3, 8, 128])})
    reads, speaks = SlowLane(), SlowLane()
    talker = make_runner(TinyStage(seed=1), lane=speaks, clock=lambda: now_s, max_num_seqs=4, pages=40)
    aura = make_runner(
        TinyStage(), lane=reads, before=[talker], clock=lambda: now_s, max_num_batched_tokens=8, max_num_seqs=4,
        pages=26,
    )  # fmt: skip
    talker._at_once = aura._at_once = False  # a GPU, where one does not wait for a step of the other
    talker.make_room_for(aura)
    engine = Engine({"talker": talker, "aura": aura})

    def hear(sequence: Sequence, value: int) -> None:
        sequence.lasts_until_s = max(sequence.lasts_until_s, now_s) + 0.3

    coming: list[tuple[ArRunner, Request]] = []
    for index in range(10):
        speech = Request(prompt(5 + index, seed=index), replace(GREEDY, max_tokens=30))
        if index % 4:
            speech.sequence.on_output = partial(hear, speech.sequence)
        asked, read = Request(prompt(20 + 5 * index, seed=index % 5)), reading(prompt(30 + 5 * index, seed=index))
        coming += [(talker, speech), (aura, asked), (aura, read)]
    requests = [request for _, request in coming]
    dice.shuffle(coming)
    unknown = {}
    while coming or unknown or talker.busy or aura.busy:
        if coming and dice.random() < 0.2:
            runner, request = coming.pop()
            if runner is aura and not request.sequence.open and dice.random() < 0.5:
                unknown[request] = opened(request, dice.randrange(1, request.sequence.length))
            runner.add(request.sequence)
        worked = engine._pass()
        assert worked or talker.flying or aura.flying or not talker.busy
        talker.check_integrity()
        aura.check_integrity()
        for lane in (reads, speaks):
            if dice.random() < 0.5:
                lane.arrive(dice.choice([1, None]))
        for request in list(unknown):
            if dice.random() < 0.03:
                close(aura, request.sequence, unknown.pop(request))
        now_s += 0.005
        for sequence in talker._scheduler.running:
            assert sequence.lasts_until_s > now_s - 0.1 or sequence.lasts_until_s < 0, "silence"
    assert all(len(request.ends) == 1 for request in requests)


def test_who_makes_room_goes_on_in_time_even_where_nothing_else_happens() -> None:
    """What is read may be put off, and then nothing that arrives would wake the engine's thread."""

    class Reads:
        reads = True

    talker = make_runner(TinyStage())
    talker.make_room_for(Reads())  # type: ignore[arg-type]
    one, want, done = Request(prompt(9)), expected(Request(prompt(9))), threading.Event()

    def hear(value: int) -> None:
        one.heard.append(value)
        one.sequence.lasts_until_s = time.monotonic() + IN_HAND_S + 0.01

    one.sequence.on_output, one.sequence.on_end = hear, lambda *_: done.set()
    with Engine({"talker": talker}) as engine:
        engine.call(lambda: talker.add(one.sequence))
        assert done.wait(20)
    assert one.heard == want


def test_a_failed_device_is_found_when_its_step_should_arrive(lane: SlowLane) -> None:
    class Dead:
        @property
        def there(self) -> bool:
            raise torch.AcceleratorError("illegal memory access")

    lane.home = lambda values: Dead()  # type: ignore[method-assign, assignment]
    runner = make_runner(TinyStage(), lane=lane)
    runner.add(Request(prompt(9)).sequence)
    with pytest.raises(torch.AcceleratorError):
        runner.step()


def test_all_requests_end_and_the_device_is_waited_for_when_the_runner_is_closed(lane: SlowLane) -> None:
    runner = make_runner(TinyStage(), lane=lane)
    requests = [Request(prompt(9, seed=seed)) for seed in range(3)]
    for request in requests:
        runner.add(request.sequence)
    runner.step()
    runner.abort_all(Unavailable("stopping"))
    assert [request.reason for request in requests] == ["error"] * 3
    assert lane.waited == 1
    assert not runner.busy
    assert not runner.step()


def test_the_engine_serves_posts_and_other_stages_while_a_step_is_under_way(lane: SlowLane) -> None:
    slow, quick = make_runner(TinyStage(), lane=lane), make_runner(TinyStage(seed=1))
    late, prompt_one = Request(prompt(9)), Request(prompt(9))
    done = threading.Event()
    prompt_one.sequence.on_end = lambda *_: done.set()
    with Engine({"slow": slow, "quick": quick}) as engine:
        engine.call(lambda: slow.add(late.sequence))
        engine.call(lambda: quick.add(prompt_one.sequence))
        assert done.wait(20)
        assert late.heard == []
        while engine.call(lambda: slow.busy):
            engine.call(lane.arrive)
    assert late.heard == expected(Request(prompt(9)))


def test_decoding_waits_for_what_somebody_else_gets_first_but_not_for_long(lane: SlowLane) -> None:
    ours, now_s = SlowLane(), 0.0
    speaks = make_runner(TinyStage(seed=1), lane=lane)
    writes = make_runner(TinyStage(), lane=ours, before=[speaks], clock=lambda: now_s)
    old, new, late = Request(prompt(9)), Request(prompt(9, seed=1)), Request(prompt(9, seed=2))
    want = [expected(request) for request in (old, late)]
    writes.add(old.sequence)
    writes.step()
    ours.arrive()
    assert not speaks.awaited
    speaks.add(new.sequence)
    speaks.step()
    assert speaks.awaited
    assert writes.land()
    assert not writes.launch()
    assert not writes.flying
    now_s = 2 * HOLD_S
    assert writes.launch(), "a stream of newcomers would stop it"
    ours.arrive()
    assert writes.land()
    assert not writes.launch()
    writes.add(late.sequence)
    assert writes.launch(), "this is a first result, too"
    assert writes.awaited
    ours.arrive()
    assert writes.land()
    assert not writes.launch()
    lane.arrive()
    speaks.step()
    assert speaks.flying
    assert not speaks.awaited, "it has its first id"
    assert writes.launch()
    while writes.busy:
        ours.arrive()
        writes.step()
    assert [old.heard, late.heard] == want


def test_decoding_makes_room_for_prompts_while_its_listeners_have_enough_in_hand() -> None:
    now_s, lane, ours = 100.0, SlowLane(), SlowLane()
    writes = make_runner(TinyStage(), lane=lane, max_num_batched_tokens=8)
    speaks = make_runner(TinyStage(), lane=ours, clock=lambda: now_s)
    speaks.make_room_for(writes)
    one, two = (Request(prompt(5, seed=seed), replace(GREEDY, max_tokens=12)) for seed in (1, 2))
    want = [expected(one), expected(two)]
    for request in (one, two):
        speaks.add(request.sequence)
    assert speaks.launch()
    writes.add(Request(prompt(30)).sequence)
    assert writes.launch()
    ours.arrive()
    assert speaks.land()
    one.sequence.lasts_until_s = now_s + 3 * IN_HAND_S
    assert speaks.launch(), "the other one has nothing in hand"
    ours.arrive()
    assert speaks.land()
    two.sequence.lasts_until_s = now_s + 2 * IN_HAND_S
    for _ in range(4):
        assert writes.reads
        assert not speaks.launch()
        lane.arrive()
        assert writes.land()
        assert writes.reads == (not writes.counters.generated_tokens)
        writes.launch()
    assert one.sequence.paused
    assert two.sequence.paused
    assert speaks.launch(), "nothing is being read"
    ours.arrive()
    assert speaks.land()
    writes.add(Request(prompt(30, seed=5)).sequence)
    lane.arrive()
    writes.step()
    assert writes.reads
    assert not speaks.launch()
    now_s += 1.5 * IN_HAND_S
    assert speaks.launch(), "soon one will have heard what there is"
    while speaks.busy:
        ours.arrive()
        speaks.step()
    assert [one.heard, two.heard] == want
