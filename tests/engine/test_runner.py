from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_stage import GREEDY, STOP, VOCABULARY, Request, TinyStage, make_runner, prompt, run

from aura_omni.engine.runner import LONGEST_ROWS, SHARED_ROWS
from aura_omni.engine.seats import Seats, Taker
from aura_omni.engine.sequence import Batch, MediaSpan, Sequence
from aura_omni.errors import BadRequest, EngineError, Overloaded, PromptTooLong, Unavailable
from aura_omni.flow import Sampling

SEEDED = Sampling(max_tokens=8, seed=11, temperature=0.9, top_k=20, top_p=0.95)
CLIP = MediaSpan(5, 6, b"clip")


def expected(request: Request) -> list[int]:
    return TinyStage().dense_outputs(request.sequence)


# ---------------------------------------------------------------- the same tokens, however they are computed


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_a_request_says_what_dense_attention_says(sampling: Sampling) -> None:
    request = Request(prompt(21), sampling, media=(CLIP,))
    want = expected(request)
    run(make_runner(TinyStage()), request)
    assert request.heard == want
    assert request.reason == "length"


@pytest.mark.parametrize("mrope", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 5, 16, 20])
def test_chunked_prefill_equals_whole_prefill(budget: int, mrope: bool) -> None:
    stage = TinyStage(mrope=mrope)
    request = Request(prompt(21), media=(CLIP,))
    want = stage.dense_outputs(request.sequence)
    run(make_runner(stage, max_num_seqs=1, max_num_batched_tokens=budget), request)
    assert request.heard == want
    assert max(batch.rows for batch in stage.batches) == budget


@pytest.mark.parametrize("mrope", [False, True])
def test_a_cached_prefix_equals_a_fresh_one(mrope: bool) -> None:
    stage = TinyStage(mrope=mrope)
    runner = make_runner(stage)
    one = replace(GREEDY, max_tokens=1)
    fresh, cached = (Request(prompt(21), one, media=(CLIP,)) for _ in range(2))
    run(runner, fresh)
    fresh_logits = stage.last_logits
    run(runner, cached)
    assert cached.sequence.cached == 20
    assert stage.batches[-1].rows == 1
    assert cached.heard == fresh.heard
    torch.testing.assert_close(stage.last_logits, fresh_logits, atol=1e-5, rtol=0)
    assert runner.counters.cached_rows == 20
    assert runner.counters.computed_rows == 22


def test_another_medium_under_the_same_tokens_is_computed_afresh() -> None:
    stage = TinyStage()
    runner = make_runner(stage)
    one, other = Request(prompt(21), media=(CLIP,)), Request(prompt(21), media=(replace(CLIP, key=b"other"),))
    want = expected(other)
    run(runner, one)
    run(runner, other)
    assert other.sequence.cached == 4  # the page before the clip
    assert other.heard == want
    assert other.heard != one.heard


def test_the_next_round_finds_the_answer_of_the_last_one() -> None:
    stage = TinyStage()
    runner = make_runner(stage)
    first = Request(prompt(10))
    run(runner, first)
    second = Request([*first.sequence.tokens, 1, 2, 3])
    want = expected(second)
    run(runner, second)
    assert second.sequence.cached == 16  # 10 + 7 rows were computed: four full pages
    assert second.heard == want


def test_without_prefix_caching_everything_is_computed() -> None:
    stage = TinyStage()
    runner = make_runner(stage, prefix_caching=False)
    one, two = Request(prompt(21)), Request(prompt(21))
    run(runner, one)
    run(runner, two)
    assert two.sequence.cached == 0
    assert one.heard == two.heard


def test_uncacheable_sequences_share_nothing() -> None:
    runner = make_runner(TinyStage())
    run(runner, Request(prompt(21)))
    request = Request(prompt(21), cacheable=False)
    run(runner, request)
    assert request.sequence.cached == 0


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.4)])
def test_preempted_sequences_say_the_same_as_undisturbed_ones(sampling: Sampling, prefix_caching: bool) -> None:
    sampling = replace(sampling, max_tokens=24)
    calm, crowded = (
        [Request(prompt(9, seed=seed), replace(sampling, seed=seed)) for seed in range(4)] for _ in range(2)
    )
    for request in calm:
        run(make_runner(TinyStage()), request)
    runner = make_runner(TinyStage(), pages=16, prefix_caching=prefix_caching)
    run(runner, *crowded)
    assert runner.counters.preemptions > 0
    assert [request.heard for request in crowded] == [request.heard for request in calm]
    assert all(len(request.heard) == 24 for request in crowded)


def test_64_interleaved_requests_each_equal_their_solo_run() -> None:
    samplings = [
        GREEDY,
        SEEDED,
        replace(SEEDED, repetition_penalty=1.2, temperature=1.5),
        replace(GREEDY, max_tokens=3),
    ]
    system = prompt(13, seed=99)

    def make(index: int) -> Request:
        sampling = replace(samplings[index % 4], seed=index)
        tokens = (system if index % 3 else []) + prompt(1 + 7 * index % 31, seed=index % 20)
        media = (MediaSpan(len(tokens) - 1, 1, bytes([index % 5])),) if index % 2 else ()
        return Request(tokens, sampling, media=media, priority=index % 3)

    solo, crowd = [make(index) for index in range(64)], [make(index) for index in range(64)]
    for request in solo:
        run(make_runner(TinyStage(), max_num_batched_tokens=100), request)
    assert sum(len(set(request.heard)) for request in solo) > 200  # answers worth comparing
    runner = make_runner(TinyStage(), pages=48, max_num_batched_tokens=24)
    waiting = list(crowd)
    while waiting or runner.busy:  # they arrive while others run
        for request in waiting[:3]:
            runner.add(request.sequence)
        del waiting[:3]
        runner.step()
        runner.check_integrity()
    assert [request.heard for request in crowd] == [request.heard for request in solo]
    assert runner.counters.pages_used == 0
    assert runner.counters.preemptions > 0
    assert runner.counters.cached_rows > 0


def test_requests_without_a_seed_differ() -> None:
    requests = [Request(prompt(5), Sampling(max_tokens=20)) for _ in range(2)]
    run(make_runner(TinyStage()), *requests)
    assert requests[0].heard != requests[1].heard


# ---------------------------------------------------------------- how a request ends


def test_a_stop_id_ends_the_request_and_is_not_heard() -> None:
    free = Request(prompt(9))
    run(make_runner(TinyStage()), free)
    stop = free.heard[3]
    for sampling, stop_ids in (
        (replace(GREEDY, stop_token_ids=(stop,)), frozenset[int]()),
        (replace(GREEDY, stop_token_ids=(stop,), ignore_eos=True), frozenset[int]()),
        (GREEDY, frozenset({stop})),
    ):
        request = Request(prompt(9), sampling)
        request.sequence.stop_ids = stop_ids
        run(make_runner(TinyStage()), request)
        assert request.heard == free.heard[: free.heard.index(stop)]
        assert request.sequence.outputs == [*request.heard, stop]
        assert request.reason == "stop"


def test_the_stages_own_stop_ids_can_be_ignored_but_not_the_requests() -> None:
    wants_stop = replace(GREEDY, logit_bias={STOP: 100.0}, max_tokens=4)
    for sampling, heard, reason in (
        (wants_stop, [], "stop"),
        (replace(wants_stop, ignore_eos=True), [STOP] * 4, "length"),
        (replace(wants_stop, ignore_eos=True, stop_token_ids=(STOP,)), [], "stop"),
    ):
        request = Request(prompt(9), sampling)
        run(make_runner(TinyStage()), request)
        assert (request.heard, request.reason) == (heard, reason)


def test_min_tokens_holds_the_stop_back() -> None:
    request = Request(prompt(9), replace(GREEDY, logit_bias={STOP: 100.0}, min_tokens=3))
    run(make_runner(TinyStage()), request)
    assert len(request.heard) == 3
    assert STOP not in request.heard
    assert request.reason == "stop"


def test_stops_that_leave_nothing_to_say_are_refused() -> None:
    runner = make_runner(TinyStage())
    all_ids = tuple(range(STOP))
    with pytest.raises(BadRequest, match="min_tokens is 2 and stop_token_ids are 96 ids"):
        runner.add(Request(prompt(9), replace(GREEDY, min_tokens=2, stop_token_ids=all_ids)).sequence)
    assert not runner.busy
    run(runner, one := Request(prompt(9), replace(GREEDY, min_tokens=2, stop_token_ids=all_ids[1:])))
    assert (one.heard, one.reason) == ([0, 0], "stop")
    run(runner, none := Request(prompt(9), replace(GREEDY, stop_token_ids=all_ids)))
    assert (none.heard, none.reason) == ([], "stop")


def test_a_sequence_ends_at_max_model_len() -> None:
    request = Request(prompt(9), replace(GREEDY, max_tokens=100))
    run(make_runner(TinyStage(), max_model_len=14), request)
    assert (len(request.heard), request.reason) == (5, "length")


def test_a_sequence_that_fills_the_whole_cache_ends_with_length() -> None:
    request, other = Request(prompt(9), replace(GREEDY, max_tokens=100)), Request(prompt(9, seed=1))
    run(make_runner(TinyStage(), pages=5), request, other)
    assert (request.sequence.length, request.reason) == (21, "length")
    assert other.heard == expected(Request(prompt(9, seed=1)))


def test_penalties_count_the_prompt_only_where_the_stage_says_so() -> None:
    sampling = replace(GREEDY, repetition_penalty=100.0, max_tokens=1)
    tokens = [*range(1, 90)]
    heard = []
    for penalise_prompt in (True, False):
        stage = TinyStage()
        stage.penalise_prompt = penalise_prompt
        request = Request(tokens, sampling)
        run(make_runner(stage, max_num_batched_tokens=128), request)
        heard.append(request.heard[0])
    unpenalised = Request(tokens, replace(GREEDY, max_tokens=1))
    run(make_runner(TinyStage(), max_num_batched_tokens=128), unpenalised)
    assert heard[1] == unpenalised.heard[0]
    assert heard[0] not in tokens
    assert heard[1] in tokens


def test_refused_requests_leave_nothing_behind() -> None:
    runner = make_runner(TinyStage(), max_num_seqs=1, max_waiting=0, max_model_len=32)
    long, biased = Request(prompt(32)), Request(prompt(3), replace(GREEDY, logit_bias={VOCABULARY: 1.0}))
    stopped = Request(prompt(3), replace(GREEDY, stop_token_ids=(5, VOCABULARY)))
    with pytest.raises(PromptTooLong, match="32 tokens, this model takes 31"):
        runner.add(long.sequence)
    with pytest.raises(BadRequest, match="logit_bias has the token id 97; this model's ids are from 0 to 96"):
        runner.add(biased.sequence)
    with pytest.raises(BadRequest, match="stop_token_ids has the token id 97; this model's ids are from 0 to 96"):
        runner.add(stopped.sequence)
    first, second = Request(prompt(3)), Request(prompt(3))
    runner.add(first.sequence)
    with pytest.raises(Overloaded):
        runner.add(second.sequence)
    runner.abort(second.sequence)  # as a caller may do that did not wait for the answer
    runner.check_integrity()
    run(runner)
    assert [request.ends for request in (long, biased, stopped, second)] == [[], [], [], []]
    assert first.reason == "length"


@pytest.mark.parametrize("after", range(14))
def test_aborting_at_any_point_frees_every_page_and_disturbs_nobody(after: int) -> None:
    runner = make_runner(TinyStage(), max_num_batched_tokens=8, max_num_seqs=2)
    victim = Request(prompt(30), replace(SEEDED, repetition_penalty=1.1))
    others = [Request(prompt(7, seed=seed)) for seed in (1, 2)]
    want = [expected(other) for other in others]
    for request in (others[0], victim, others[1]):
        runner.add(request.sequence)
    for _ in range(after):
        runner.step()
    heard = list(victim.heard)
    runner.abort(victim.sequence)
    runner.abort(victim.sequence)
    runner.check_integrity()
    assert victim.sequence.pages == []
    run(runner)
    assert victim.reason == "cancelled" or len(victim.heard) == 8
    assert victim.heard == heard
    assert [other.heard for other in others] == want


def test_a_preempted_sequence_can_be_aborted() -> None:
    runner = make_runner(TinyStage(), pages=9)
    requests = [Request(prompt(9, seed=seed), replace(GREEDY, max_tokens=20)) for seed in range(2)]
    for request in requests:
        runner.add(request.sequence)
    while not requests[1].sequence.preempted:
        runner.step()
    runner.abort(requests[1].sequence)
    assert requests[1].reason == "cancelled"
    run(runner)
    assert len(requests[0].heard) == 20


# ---------------------------------------------------------------- listeners and failures


def test_pages_are_free_before_the_end_is_told() -> None:
    runner = make_runner(TinyStage())
    used: list[int] = []
    request = Request(prompt(9))
    request.sequence.on_end = lambda reason, error: used.append(runner.counters.pages_used)
    run(runner, request)
    assert used == [0]


def test_a_listener_may_end_itself_and_others_and_start_new_requests() -> None:
    runner = make_runner(TinyStage())
    one, two, three = Request(prompt(9)), Request(prompt(9, seed=1)), Request(prompt(9, seed=2))

    def hear(token: int) -> None:
        one.heard.append(token)
        if len(one.heard) == 2:
            runner.abort(two.sequence)
            runner.abort(one.sequence)
            runner.add(three.sequence)

    one.sequence.on_output = hear
    run(runner, one, two)
    assert (one.reason, two.reason, three.reason) == ("cancelled", "cancelled", "length")
    assert (len(one.heard), len(two.heard), len(three.heard)) == (2, 1, 8)


def test_the_end_of_one_may_end_another_of_the_same_step() -> None:
    runner = make_runner(TinyStage())
    one, two = Request(prompt(9), replace(GREEDY, logit_bias={STOP: 100.0})), Request(prompt(9, seed=1))
    one.sequence.on_end = lambda reason, error: runner.abort(two.sequence)
    run(runner, one, two)
    assert two.heard == []
    assert two.reason == "cancelled"


def test_a_listener_that_raises_ends_only_its_own_request() -> None:
    one, two = Request(prompt(9)), Request(prompt(9, seed=1))
    want = expected(two)

    def hear(token: int) -> None:
        raise ValueError("no ears")

    one.sequence.on_output = hear
    run(make_runner(TinyStage()), one, two)
    assert one.reason == "error"
    assert isinstance(one.error, EngineError)
    assert "no ears" in str(one.error)
    assert isinstance(one.error.__cause__, ValueError)
    assert two.heard == want


def test_an_error_of_our_own_tree_reaches_the_listener_as_it_is() -> None:
    request = Request(prompt(9))
    failure = Unavailable("no loudspeaker")

    def hear(token: int) -> None:
        raise failure

    request.sequence.on_output = hear
    run(make_runner(TinyStage()), request)
    assert request.error is failure


def test_an_end_listener_that_raises_hurts_nobody_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    one, two = Request(prompt(9)), Request(prompt(9, seed=1))

    def end(reason: str, error: Exception | None) -> None:
        raise ValueError("no ears")

    one.sequence.on_end = end
    run(make_runner(TinyStage()), one, two)
    assert two.reason == "length"
    assert "no ears" in caplog.text


def test_a_request_that_makes_the_forward_fail_ends_alone() -> None:
    stage = TinyStage()
    runner = make_runner(stage)
    bad, good = Request([1, 2, STOP, 4, 5, 6, 7]), [Request(prompt(9, seed=seed)) for seed in range(3)]
    want = [expected(request) for request in good]
    stage.poison = STOP
    run(runner, good[0], bad, good[1])
    run(runner, good[2])
    assert bad.reason == "error"
    assert isinstance(bad.error, EngineError)
    assert "poisoned" in str(bad.error)
    assert [request.heard for request in good] == want


def test_a_request_that_is_ended_by_the_failure_of_another_is_not_computed_again() -> None:
    stage = TinyStage()
    stage.poison = STOP
    bad, other = Request([1, STOP]), Request(prompt(9))
    runner = make_runner(stage)
    bad.sequence.on_end = lambda reason, error: runner.abort(other.sequence)
    run(runner, bad, other)
    assert other.reason == "cancelled"
    assert [batch.sequences for batch in stage.batches] == [(bad.sequence, other.sequence), (bad.sequence,)]
    assert runner.counters.step_s == runner.counters.step_s  # no step is under way any more


def test_a_request_whose_rows_are_not_finite_ends_alone_and_its_pages_are_not_reused() -> None:
    stage = TinyStage()
    stage.not_a_number = STOP
    runner = make_runner(stage, max_num_batched_tokens=8)
    bad, good = Request([1, 2, STOP, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]), Request(prompt(9, seed=3))
    want = expected(good)
    run(runner, good, bad)
    assert bad.reason == "error"
    assert "not finite" in str(bad.error)
    assert good.heard == want
    stage.not_a_number = None
    again = Request(bad.sequence.tokens)
    run(runner, again)
    assert again.sequence.cached == 0
    assert again.reason == "length"


def test_nothing_left_to_choose_from_is_an_error_not_a_token() -> None:
    class Mute(TinyStage):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.full((len(hidden), VOCABULARY), -torch.inf)

    request = Request(prompt(9))
    run(make_runner(Mute()), request)
    assert request.reason == "error"
    assert request.heard == []


def test_a_step_that_cannot_be_completed_ends_only_those_at_fault() -> None:
    free = Request(prompt(9))
    run(make_runner(TinyStage()), free)
    bad_id = free.heard[2]

    class Stumbling(TinyStage):
        def complete(self, hidden: torch.Tensor, ids: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if bad_id in ids.tolist():
                raise RuntimeError("stumbled")
            return super().complete(hidden, ids, *rest)

    sampling = replace(SEEDED, logit_bias={bad_id: -100.0}, presence_penalty=0.3)
    one, two, alone = Request(prompt(9)), Request(prompt(9, seed=1), sampling), Request(prompt(9, seed=1), sampling)
    run(make_runner(TinyStage()), alone)
    run(make_runner(Stumbling()), one, two)
    assert (one.reason, one.heard) == ("error", free.heard[: free.heard.index(bad_id)])
    assert (two.reason, two.heard) == ("length", alone.heard)


def test_a_stage_that_cannot_hear_a_step_ends_the_sequence_it_was_of() -> None:
    class Deaf(TinyStage):
        def heard(self, sequence: Sequence, values: Any) -> int:
            if sequence is one.sequence and sequence.generated == 3:
                raise RuntimeError("stumbled")
            return super().heard(sequence, values)

    one, two = Request(prompt(9)), Request(prompt(9, seed=1))
    run(make_runner(Deaf()), one, two)
    assert [(request.reason, len(request.heard)) for request in (one, two)] == [("error", 2), ("length", 8)]


def test_an_id_is_completed_from_the_row_it_was_drawn_from_and_heard_unless_it_ends_the_sequence() -> None:
    heard: list[Sequence] = []

    class Watched(TinyStage):
        def complete(self, hidden: torch.Tensor, ids: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            best = self.logits(hidden).argmax(-1)
            assert torch.where(ids == STOP, STOP, best).tolist() == ids.tolist()
            return super().complete(hidden, ids, *rest)

        def heard(self, sequence: Sequence, values: Any) -> int:
            heard.append(sequence)
            return super().heard(sequence, values)

    one = Request(prompt(9), replace(GREEDY, max_tokens=2))
    stopping = Request(prompt(9, seed=1), replace(GREEDY, logit_bias={STOP: 100.0}))
    two = Request(prompt(9, seed=2), replace(GREEDY, max_tokens=1))
    run(make_runner(Watched()), one, stopping, two)
    assert heard == [one.sequence, two.sequence, one.sequence]


def test_a_seat_that_cannot_be_filled_ends_only_the_request_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Seats.fill

    def stumbling(seats: Seats, takers: list[Taker]) -> None:
        if any(taker.sampling.seed == 13 for taker in takers):
            raise RuntimeError("no memory")
        fill(seats, takers)

    monkeypatch.setattr(Seats, "fill", stumbling)
    bad, good, ended = Request(prompt(9), replace(GREEDY, seed=13)), Request(prompt(9)), Request(prompt(9, seed=1))
    runner = make_runner(TinyStage())
    bad.sequence.on_end = lambda *_: runner.abort(ended.sequence)
    want = expected(good)
    run(runner, bad, good, ended)
    assert bad.sequence.finished == "error"
    assert ended.reason == "cancelled"
    assert good.heard == want


def test_a_seat_is_made_ready_once_and_after_what_the_device_can_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    rows, fill = TinyStage.rows, Seats.fill

    def watched(stage: TinyStage, batch: Batch) -> Any:
        launched.append("rows")
        return rows(stage, batch)

    def filled(*of: Any, **rest: Any) -> None:
        launched.append("seat")
        fill(*of, **rest)

    monkeypatch.setattr(TinyStage, "rows", watched)
    monkeypatch.setattr(Seats, "fill", filled)
    run(make_runner(TinyStage(), max_num_batched_tokens=8), Request(prompt(20), replace(GREEDY, max_tokens=4)))
    assert launched == ["rows", "rows", "rows", "seat"]


def test_a_seat_keeps_nothing_of_its_former_owner() -> None:
    runner = make_runner(TinyStage(), max_num_seqs=1)
    wild = replace(
        GREEDY, logit_bias={3: 50.0}, repetition_penalty=1.9, presence_penalty=2.0, frequency_penalty=2.0, min_tokens=4
    )
    mild = replace(GREEDY, repetition_penalty=1.1, presence_penalty=0.1, min_tokens=2)
    for sampling in (GREEDY, SEEDED, mild):
        run(runner, Request(prompt(9, seed=5), wild))
        after, fresh = (Request(prompt(9), sampling) for _ in range(2))
        run(runner, after)
        run(make_runner(TinyStage()), fresh)
        assert after.heard == fresh.heard


def test_rows_of_decoding_in_one_step_with_prompts_equal_each_alone() -> None:
    """Some decode, one is in the middle of its prompt, and one ends its prompt, with and without penalties."""
    samplings = [GREEDY, replace(SEEDED, repetition_penalty=1.2), replace(GREEDY, frequency_penalty=0.6), SEEDED]

    def make(index: int) -> Request:
        media = (MediaSpan(7, 5, b"m"),) if index == 2 else ()
        return Request(prompt(5 + 9 * index, seed=index), replace(samplings[index], max_tokens=12), media=media)

    alone, together = [make(index) for index in range(4)], [make(index) for index in range(4)]
    for request in alone:
        run(make_runner(TinyStage()), request)
    stage = TinyStage()
    runner = make_runner(stage, max_num_batched_tokens=14)
    for request in together:  # each prompt comes while the former ones decode
        runner.add(request.sequence)
        runner.step()
        runner.check_integrity()
    run(runner)
    assert [request.heard for request in together] == [request.heard for request in alone]


def test_a_dead_device_is_not_a_failed_request() -> None:
    class Dead(TinyStage):
        def rows(self, batch: Any) -> Any:
            raise torch.AcceleratorError("illegal memory access")

    runner = make_runner(Dead())
    runner.add(Request(prompt(9)).sequence)
    with pytest.raises(torch.AcceleratorError):
        runner.step()


def test_abort_all_ends_everyone_with_the_error() -> None:
    runner = make_runner(TinyStage(), max_num_seqs=1)
    requests = [Request(prompt(9, seed=seed)) for seed in range(3)]
    for request in requests:
        runner.add(request.sequence)
    runner.step()
    error = Unavailable("stopping")
    runner.abort_all(error)
    assert [(request.reason, request.error) for request in requests] == [("error", error)] * 3
    assert not runner.busy
    assert runner.counters.pages_used == 0
    runner.check_integrity()


def test_counters_tell_what_happens() -> None:
    runner = make_runner(TinyStage(), max_num_seqs=1)
    for seed in range(2):
        runner.add(Request(prompt(9, seed=seed)).sequence)
    assert (runner.counters.running, runner.counters.waiting, runner.counters.steps) == (0, 2, 0)
    runner.step()
    counters = runner.counters
    assert (counters.running, counters.waiting, counters.steps, counters.computed_rows) == (1, 1, 1, 9)
    assert (counters.pages, counters.pages_used, counters.pages_kept) == (64, 3, 2)


def test_a_long_prompt_that_is_alone_is_read_in_steps_that_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    calm, request = Request(prompt(50)), Request(prompt(50))
    run(make_runner(TinyStage()), calm)
    monkeypatch.setitem(LONGEST_ROWS, "cpu", 20)
    stage = TinyStage()
    run(make_runner(stage), request)
    assert [batch.rows for batch in stage.batches[:3]] == [20, 20, 10]
    assert request.heard == calm.heard
    assert make_runner(stage, max_num_seqs=24)._scheduler.max_num_batched_tokens == 24, "a row of every sequence"


def test_a_runner_that_is_alone_reads_as_many_rows_beside_decoding_as_without() -> None:
    options = {"max_num_batched_tokens": 1000, "max_model_len": 1000, "pages": 500}
    rows = {}
    for alone in (False, True):
        stage = TinyStage()
        requests = [Request(prompt(5)), *(Request(prompt(300, seed=seed)) for seed in range(1, 4))]
        runner = make_runner(stage, alone=alone, **options)
        runner.add(requests[0].sequence)
        runner.step()
        for request in requests[1:]:
            runner.add(request.sequence)
        run(runner)
        rows[alone] = max(batch.rows for batch in stage.batches)
        assert [len(request.heard) for request in requests] == [GREEDY.max_tokens] * 4
    assert rows == {False: SHARED_ROWS["cpu"], True: 900}


def test_while_a_more_urgent_runner_has_work_prompts_are_read_in_short_steps() -> None:
    stage, speaks = TinyStage(), make_runner(TinyStage(seed=1))
    options = {"max_num_batched_tokens": 1000, "max_model_len": 1000, "pages": 250}
    calm, other = Request(prompt(500)), Request(prompt(500))
    run(make_runner(stage, **options), calm)
    assert stage.batches[0].rows == 500
    stage.batches.clear()
    reads = make_runner(stage, before=[speaks], **options)
    speaks.add(Request(prompt(5)).sequence)
    reads.add(other.sequence)
    reads.step()
    reads.step()
    while speaks.busy:
        speaks.step()
    run(reads)
    assert [batch.rows for batch in stage.batches[:3]] == [SHARED_ROWS["cpu"]] * 2 + [500 - 2 * SHARED_ROWS["cpu"]]
    assert other.heard == calm.heard
