from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_omni.engine.kv_cache import KVCache
from aura_omni.engine.scheduler import Scheduler
from aura_omni.engine.sequence import Batch, Sequence
from aura_omni.errors import BadRequest, ConfigError, Overloaded, PromptTooLong
from aura_omni.flow import Sampling


def make(pages: int = 100, size: int = 4, **changes: int) -> Scheduler:
    limits = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 1000,
        "max_waiting": 100,
        "shared_rows": 16,
    }
    return Scheduler(KVCache(pages, size), **(limits | changes))


def sequence(length: int, *, priority: int = 0, first: int = 0) -> Sequence:
    return Sequence(list(range(first, first + length)), Sampling(), print, print, priority=priority)


def step(scheduler: Scheduler) -> Batch | None:
    """One step as the runner does it: every sequence whose last row was in it says one more token."""
    batch = scheduler.schedule()
    if batch is not None:
        scheduler.commit(batch)
        for index in batch.sampled():
            batch.sequences[index].tokens.append(7)
    scheduler.check_integrity()
    return batch


def rows(batch: Batch | None) -> dict[int, tuple[int, int]]:
    """Sequence id -> (start, count)."""
    assert batch is not None
    return {
        sequence.id: (start, count)
        for sequence, start, count in zip(batch.sequences, batch.starts, batch.counts, strict=True)
    }


def test_nothing_to_do_gives_no_batch() -> None:
    assert make().schedule() is None


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    scheduler = make()
    scheduler.add(sequence(40))
    assert [rows(step(scheduler))[0] for _ in range(4)] == [(0, 16), (16, 16), (32, 8), (40, 1)]


def test_decode_rows_come_first_and_prompts_get_the_rest_of_the_budget() -> None:
    scheduler = make()
    scheduler.add(sequence(3))
    step(scheduler)
    scheduler.add(sequence(40, first=100))
    batch = step(scheduler)
    assert rows(batch) == {0: (3, 1), 1: (0, 15)}
    assert batch is not None
    assert batch.sequences[0].id == 0


def test_a_step_that_others_wait_for_reads_few_rows_of_prompts() -> None:
    scheduler = make(max_num_batched_tokens=100, shared_rows=8)
    scheduler.add(sequence(150))
    assert scheduler.schedule(shared=True).rows == 8  # type: ignore[union-attr]
    assert rows(step(scheduler)) == {0: (0, 100)}
    assert rows(step(scheduler)) == {0: (100, 50)}
    scheduler.add(sequence(20, first=500))
    assert rows(step(scheduler)) == {0: (150, 1), 1: (0, 8)}, "who decodes waits for the whole step"


def test_of_several_prompts_the_first_is_read_without_waiting_for_all() -> None:
    scheduler = make(max_num_batched_tokens=100, shared_rows=16)
    for number in range(3):
        scheduler.add(sequence(12, first=500 * number))
    assert rows(step(scheduler)) == {0: (0, 12), 1: (0, 4)}


def test_a_short_prompt_does_not_wait_for_the_long_one_before_it() -> None:
    scheduler = make()
    for number, length in enumerate((40, 40, 9, 8, 3)):
        scheduler.add(sequence(length, first=1000 * number))
    assert rows(step(scheduler)) == {0: (0, 8), 3: (0, 8)}, "half of the step is for prompts that end in it"
    assert rows(step(scheduler)) == {3: (8, 1), 0: (8, 15)}, "and nobody's, if there is none"
    scheduler.remove(next(one for one in scheduler.running if one.id == 3))
    assert rows(step(scheduler)) == {0: (23, 13), 4: (0, 3)}, "the seat is the last one's"
    assert rows(step(scheduler)) == {4: (3, 1), 0: (36, 4), 1: (0, 11)}, (
        "of those that are too long for that, the second follows the first"
    )


def test_a_prompt_that_waits_for_a_long_one_takes_over_what_that_one_has_read_meanwhile() -> None:
    scheduler = make()
    first, second = sequence(44), sequence(48)
    scheduler.add(first)
    scheduler.add(second)
    for start in (0, 16):
        assert rows(step(scheduler)) == {0: (start, 16)}
        assert second.seat >= 0
    assert rows(step(scheduler)) == {0: (32, 12), 1: (32, 4)}
    assert second.cached == scheduler.cached_rows == 32


def test_sequences_join_and_leave_between_any_two_steps() -> None:
    scheduler = make()
    one, two, three = sequence(2), sequence(3, first=10), sequence(4, first=20)
    scheduler.add(one)
    scheduler.add(two)
    assert rows(step(scheduler)) == {0: (0, 2), 1: (0, 3)}
    scheduler.remove(one)
    scheduler.add(three)
    assert rows(step(scheduler)) == {1: (3, 1), 2: (0, 4)}


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make(max_num_seqs=2)
    for first in (0, 10, 20):
        scheduler.add(sequence(2, first=first))
    assert rows(step(scheduler)).keys() == {0, 1}
    scheduler.remove(scheduler.running[0])
    assert rows(step(scheduler)).keys() == {1, 2}


def test_priority_goes_before_age() -> None:
    scheduler = make(max_num_seqs=1)
    scheduler.add(sequence(2, priority=5))
    scheduler.add(sequence(2, priority=1, first=10))
    scheduler.add(sequence(2, priority=1, first=20))
    assert rows(step(scheduler)).keys() == {1}


def test_cached_rows_are_skipped_and_counted() -> None:
    scheduler = make()
    one = sequence(10)
    scheduler.add(one)
    step(scheduler)
    scheduler.remove(one)
    two = sequence(10)
    scheduler.add(two)
    assert rows(step(scheduler)) == {1: (8, 2)}
    assert two.cached == 8


def test_when_pages_run_out_the_youngest_gives_its_pages_back_and_comes_again() -> None:
    scheduler = make(pages=5)
    old, young = sequence(8), sequence(4, first=50)
    scheduler.add(old)
    scheduler.add(young)  # three pages, and one more free for the older one: it fits
    step(scheduler)
    for _ in range(4):
        step(scheduler)
    assert young.preempted == 0
    while not young.preempted:
        step(scheduler)
    assert old.pages
    assert not young.pages
    assert scheduler.waiting == [young]
    assert scheduler.preemptions == 1
    scheduler.remove(old)
    start, count = rows(step(scheduler))[young.id]
    assert start + count == young.length - 1
    assert young.cached == 0  # what it found of itself is no cached prompt


def test_the_lower_priority_is_preempted_even_if_it_is_older() -> None:
    scheduler = make(pages=6)
    humble, urgent = sequence(7, priority=1), sequence(7, first=50)
    scheduler.add(humble)
    scheduler.add(urgent)
    while not (humble.preempted or urgent.preempted):
        step(scheduler)
    assert humble.preempted == 1
    assert not urgent.preempted


def test_an_urgent_request_takes_the_seat_of_a_humble_one_but_not_of_an_equal_one() -> None:
    scheduler = make(max_num_seqs=1)
    humble, equal, urgent = sequence(4, priority=1), sequence(4, priority=1, first=20), sequence(4, first=40)
    scheduler.add(humble)
    step(scheduler)
    scheduler.add(equal)
    assert rows(step(scheduler)).keys() == {humble.id}
    scheduler.add(urgent)
    assert rows(step(scheduler)).keys() == {urgent.id}
    assert humble.preempted == 1
    assert scheduler.waiting == [humble, equal]


def test_a_newcomer_leaves_a_free_page_for_each_that_runs() -> None:
    scheduler = make(pages=4)
    scheduler.add(sequence(8))
    step(scheduler)
    scheduler.add(sequence(4, first=50))  # the first one has taken its third page by now
    assert rows(step(scheduler)).keys() == {0}


def test_a_prompt_longer_than_the_model_is_refused_with_the_numbers() -> None:
    scheduler = make(max_model_len=20)
    with pytest.raises(PromptTooLong, match=r"20 tokens, this model takes 19 .*max_model_len"):
        scheduler.add(sequence(20))
    scheduler.add(sequence(19))


def test_a_prompt_longer_than_the_cache_is_refused_with_the_numbers() -> None:
    scheduler = make(pages=3)
    with pytest.raises(PromptTooLong, match=r"13 tokens, its cache of 3 pages holds 12.*gpu_memory_utilization"):
        scheduler.add(sequence(13))
    one = sequence(12)
    scheduler.add(one)
    assert rows(step(scheduler)) == {one.id: (0, 12)}
    assert one.length == scheduler.max_length


def test_too_many_waiting_is_overloaded() -> None:
    scheduler = make(max_num_seqs=2, max_waiting=1)
    for _ in range(3):
        scheduler.add(sequence(2))
    with pytest.raises(Overloaded, match="3 requests are running or waiting, the limit is 3"):
        scheduler.add(sequence(2))
    scheduler.remove(scheduler.waiting[0])
    scheduler.add(sequence(2))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BadRequest, match="empty"):
        make().add(sequence(0))


@pytest.mark.parametrize(
    "limits",
    [{"max_num_seqs": 0}, {"max_model_len": 1}, {"max_waiting": -1}, {"max_num_batched_tokens": 3}],
)
def test_limits_that_cannot_work_are_refused_at_start(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        make(**limits)


operations = st.one_of(
    st.tuples(st.just("add"), st.tuples(st.integers(1, 20), st.integers(0, 2), st.integers(0, 1))),
    st.tuples(st.just("step"), st.just((0, 0, 0))),
    st.tuples(st.just("abort"), st.tuples(st.integers(0, 20), st.just(0), st.just(0))),
)


@settings(max_examples=300, deadline=None)
@given(
    pages=st.integers(2, 10),
    size=st.integers(1, 4),
    seats=st.integers(1, 4),
    budget=st.integers(4, 12),
    answer=st.integers(1, 9),
    script=st.lists(operations, max_size=50),
)
def test_every_sequence_is_computed_row_by_row_without_gaps_and_ends(
    pages: int, size: int, seats: int, budget: int, answer: int, script: list[tuple[str, tuple[int, int, int]]]
) -> None:
    scheduler = make(pages=pages, size=size, max_num_seqs=seats, max_num_batched_tokens=budget, max_waiting=8)
    alive: list[Sequence] = []

    def one_step() -> bool:
        batch = scheduler.schedule()
        if batch is None:
            assert not scheduler.busy
            return False
        assert 0 < batch.rows <= budget
        assert len(set(batch.sequences)) == len(batch.sequences)
        for one, start, count in zip(batch.sequences, batch.starts, batch.counts, strict=True):
            assert count >= 1
            assert start == one.computed
            assert start + count <= one.length
            assert len(one.pages) * size >= start + count
        scheduler.commit(batch)
        for index in batch.sampled():
            one = batch.sequences[index]
            one.tokens.append(index % 2)
            if one.generated >= answer or one.length >= scheduler.max_length:
                one.finished = "length"
                scheduler.remove(one)
                alive.remove(one)
        scheduler.check_integrity()
        return True

    for name, (first, second, third) in script:
        if name == "add":
            one = Sequence([third] * first, Sampling(), print, print, priority=second)
            try:
                scheduler.add(one)
                alive.append(one)
            except (PromptTooLong, Overloaded):
                assert one.id < 0
        elif name == "step":
            one_step()
        elif alive:
            one = alive.pop(first % len(alive))
            one.finished = "cancelled"
            scheduler.remove(one)
        scheduler.check_integrity()
    for _ in range(5000):
        if not one_step():
            break
    assert not alive
    assert scheduler.cache.used == 0
