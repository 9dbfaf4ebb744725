"""Which rows of which sequences go into the next step.

Plain Python: knows tokens, pages and limits. Does not know tensors, text or HTTP, so its tests need no device.

Sequences wait, are admitted when there is a seat and there are pages for all their tokens, and run until they are removed;
who is preempted leaves the seat.
A step takes the next row of every sequence that is past its prompt, then rows of prompts as far as the budget reaches,
so a long prompt is computed in parts between the decode rows of others. Prompts are read in the order in which they came, but
half of the step is for those that it reads to their ends, so neither a question nor the newest frames wait for the video of
somebody else.
When pages run out, the sequence of the lowest priority and youngest age gives its pages back and waits again; its rows are
computed again later.

The known rows of an open sequence, for which nobody waits yet, go into steps without prompts of others, and it gives way to
all others. One that is only read, for a turn that has not even been asked for, comes after all of those.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from aura_omni.engine.kv_cache import KVCache
from aura_omni.engine.sequence import Batch, Sequence
from aura_omni.errors import BadRequest, ConfigError, Overloaded, PromptTooLong


class Scheduler:
    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_waiting: int,
        shared_rows: int,
    ) -> None:
        """max_num_seqs: sequences that hold pages at once; max_num_batched_tokens: rows of one step; max_model_len: tokens
        of a sequence, prompt and answer; max_waiting: sequences beyond max_num_seqs before new ones are refused;
        shared_rows: of prompts, in a step that others wait for, and half as many where somebody soon will."""
        if max_num_seqs < 1 or max_model_len < 2 or max_waiting < 0:
            raise ConfigError(
                f"max_num_seqs {max_num_seqs}, max_model_len {max_model_len}, max_waiting {max_waiting}: "
                "they must be at least 1, 2 and 0"
            )
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, less than max_num_seqs {max_num_seqs}: a step must "
                "hold one row of every sequence. Raise the first or lower the second."
            )
        self.cache = cache
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len, self.max_waiting, self.shared_rows = max_model_len, max_waiting, shared_rows
        # The last token of a sequence needs no row of its own.
        self.max_length = min(max_model_len, cache.pages * cache.page_size + 1)
        self.waiting: list[Sequence] = []  # both lists are kept in order of rank: who goes first
        self.running: list[Sequence] = []
        self.seated: list[Sequence] = []  # who got a seat in the last `schedule`
        self.preemptions = 0
        self.cached_rows = 0  # of prompts, found instead of computed
        self._closed: list[Sequence] = []  # since the last `schedule`
        self._free_seats = list(range(max_num_seqs - 1, -1, -1))
        self._next_id = 0

    @property
    def busy(self) -> bool:
        """Whether someone runs or waits who could be stepped."""
        return any(not sequence.blocked for sequence in (*self.running, *self.waiting))

    @property
    def newcomers(self) -> bool:
        """Whether someone could be stepped who has got nothing yet."""
        return any(not (one.generated or one.blocked or one.open) for one in (*self.running, *self.waiting))

    @property
    def reading(self) -> bool:
        """Whether a prompt has a seat and could be read further."""
        return any(not one.blocked and one.length - one.computed > 1 for one in self.running)

    @property
    def spare(self) -> bool:
        """Whether a seat is free that nobody waits for."""
        return len(self.running) + len(self.waiting) < self.max_num_seqs

    def add(self, sequence: Sequence) -> None:
        """Let the sequence wait for its first step. Raises PromptTooLong, Overloaded or BadRequest; then nothing changed."""
        self.check_length(sequence.prompt_length)
        present, limit_present = len(self.waiting) + len(self.running), self.max_num_seqs + self.max_waiting
        if present >= limit_present:
            raise Overloaded(
                f"{present} requests are running or waiting, the limit is {limit_present} "
                f"(max_num_seqs {self.max_num_seqs} + max_waiting {self.max_waiting}). Try again later."
            )
        assert sequence.id < 0, f"sequence {sequence.id} was added before"
        sequence.id = self._next_id
        self._next_id += 1
        insort(self.waiting, sequence, key=_rank)

    def close(self, sequence: Sequence) -> None:
        """All of the prompt of an open sequence is there."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        sequence.open = sequence.blocked = False
        insort(queue, sequence, key=_rank)
        self._closed.append(sequence)

    def check_length(self, prompt: int) -> None:
        """Raises PromptTooLong or BadRequest for a prompt of so many tokens that would not fit an empty server."""
        if prompt < 1:
            raise BadRequest("the prompt is empty; it must have at least one token")
        if prompt >= self.max_length:
            if prompt >= self.max_model_len:
                limit = f"this model takes {self.max_model_len - 1:,} and one for the answer"
                way_out = "raise max_model_len"
            else:
                limit = f"its cache of {self.cache.pages:,} pages holds {self.max_length - 1:,}"
                way_out = "raise gpu_memory_utilization of this stage"
            raise PromptTooLong(
                f"the prompt has {prompt:,} tokens, {limit}. Send less, or {way_out}.", param="messages"
            )

    def remove(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Take the sequence out, wherever it is, and free its pages. forget: its rows may be wrong, no one may reuse them."""
        if sequence.pages:
            self._unseat(sequence)
            self.cache.release(sequence, forget=forget)
        else:
            self.waiting.remove(sequence)

    def schedule(self, *, shared: bool = False) -> Batch | None:
        """The rows of the next step, decode rows first; None when there is nothing to do. `commit` follows it.

        shared: somebody else waits for its end, too.
        """
        counts: dict[Sequence, int] = {}
        self.seated = []
        self._take_over_closed()
        for sequence in list(self.running):
            # One without pages has just been preempted for the sake of an earlier one.
            if sequence.blocked or sequence.open:
                continue
            if sequence.pages and sequence.length - sequence.computed == 1 and self._room(sequence):
                counts[sequence] = 1
        while first := next((one for one in self.waiting if not one.blocked and not one.open), None):
            if not self._seat(first, counts):
                break
        decoding = len(counts)
        budget = self.max_num_batched_tokens - decoding
        prompts = [one for one in self.running if one not in counts and not one.blocked and not one.open]
        if decoding or shared or len(prompts) > 1:
            budget = min(budget, self.shared_rows)
        self._add_prompts(prompts, counts, budget)
        if not (prompts or shared):
            self._add_open(counts, min(budget, self.shared_rows))
        return self._batch(counts)

    def schedule_newcomers(self, under_way: Batch) -> Batch | None:
        """Rows of prompts of those who have got nothing yet, while a step of others is under way: nobody gives way to them."""
        if not self.newcomers:
            return None
        self.seated = []
        while self._closed:
            if self._closed[0].pages:
                self._take_over(self._closed[0])
                if not self.cache.extend(self._closed[0]):
                    return None
            self._closed.pop(0)
        for first in [one for one in self.waiting if not (one.blocked or one.open)]:
            if first.generated or not self._admit(first):
                break
        known = set(under_way.sequences)
        prompts = [one for one in self.running if not (one in known or one.generated or one.blocked or one.open)]
        counts: dict[Sequence, int] = {}
        self._add_prompts(prompts, counts, min(self.max_num_batched_tokens, self.shared_rows))
        return self._batch(counts)

    def others(self, under_way: Batch) -> bool:
        """Whether the next `schedule` could have more to do than to go on with the sequences of a batch."""
        known = set(under_way.sequences)
        if any(not sequence.blocked and sequence not in known for sequence in self.running):
            return True
        first = next((sequence for sequence in self.waiting if not sequence.blocked), None)
        if first is None:
            return False
        return len(self.running) < self.max_num_seqs or _goes_before(first, self.running[-1])

    def schedule_ahead(self, sequences: Iterable[Sequence]) -> Batch | None:
        """The rows after those whose step is under way, of those of the sequences for which there is room; None: of nobody."""
        going = [sequence for sequence in sequences if self.cache.extend(sequence, ahead=1)]
        if not going:
            return None
        return Batch(tuple(going), tuple(sequence.length for sequence in going), (1,) * len(going))

    def schedule_reading(self, under_way: Batch) -> Batch | None:
        """What follows a step under way, of a sequence that is only read, while there is nothing else to do."""
        present = sorted((one for one in (*self.running, *self.waiting) if not one.blocked), key=_rank)
        if not all(one.only_read for one in present):
            return None
        steps = zip(under_way.sequences, under_way.starts, under_way.counts, strict=True)
        ends = {sequence: start + count for sequence, start, count in steps}
        for sequence in present:
            begin = ends.get(sequence, sequence.computed)
            if begin < sequence.length and (sequence.pages or self._admit(sequence)):
                begin = max(begin, sequence.computed)
                most = min(self.max_num_batched_tokens, self.shared_rows)
                return Batch((sequence,), (begin,), (min(most, sequence.length - begin),))
        return None

    def schedule_decoding(self, under_way: Batch) -> Batch | None:
        """The rows of decoding of those who have nothing in a batch under way, where there is room for them; None: of nobody."""
        known = set(under_way.sequences)
        going = [
            one
            for one in self.running
            if one not in known
            and not (one.blocked or one.open)
            and one.generated
            and one.length - one.computed == 1
            and self.cache.extend(one)
        ]
        if not going:
            return None
        return Batch(tuple(going), tuple(one.computed for one in going), (1,) * len(going))

    def commit(self, batch: Batch) -> None:
        """The batch's rows are in their pages."""
        for sequence, start, count in zip(batch.sequences, batch.starts, batch.counts, strict=True):
            if sequence.pages:
                sequence.computed = start + count
                self.cache.commit(sequence, start)
                if sequence.open and sequence.computed == sequence.length:
                    sequence.blocked = True  # until `close`

    def check_integrity(self) -> None:
        """Raise AssertionError if a sequence or a page is lost, doubled or left over."""
        for name, sequences in (("waiting", self.waiting), ("running", self.running)):
            assert len(set(sequences)) == len(sequences), f"a sequence is twice in {name}"
            assert sequences == sorted(sequences, key=_rank), f"{name} is out of order"
            assert all(sequence.finished is None for sequence in sequences), f"a finished sequence is {name}"
        assert not set(self.waiting) & set(self.running), "a sequence both waits and runs"
        assert len(self.running) <= self.max_num_seqs, f"{len(self.running)} sequences have {self.max_num_seqs} seats"
        seats = [sequence.seat for sequence in self.running]
        assert sorted(seats + self._free_seats) == list(range(self.max_num_seqs)), f"seats {seats} are lost or shared"
        for sequence in self.waiting:
            assert sequence.seat < 0, f"sequence {sequence.id} waits in a seat"
            assert not sequence.carried, f"sequence {sequence.id} waits and has a row in a seat"
            assert not sequence.pages, f"sequence {sequence.id} waits and holds pages"
            assert not sequence.computed, f"sequence {sequence.id} waits and counts rows as computed"
        for sequence in self.running:
            assert sequence.computed < sequence.length or (sequence.open and sequence.blocked), (
                f"sequence {sequence.id} has no row left to compute"
            )
            assert len(sequence.pages) * self.cache.page_size >= sequence.computed, (
                f"sequence {sequence.id} lacks pages"
            )
            assert sequence.pages, f"sequence {sequence.id} runs without pages"
        self.cache.check_integrity(self.running)

    @staticmethod
    def _batch(counts: dict[Sequence, int]) -> Batch | None:
        if not counts:
            return None
        return Batch(tuple(counts), tuple(sequence.computed for sequence in counts), tuple(counts.values()))

    def _room(self, sequence: Sequence) -> bool:
        """Room for the sequence's newest token, at the expense of those that rank after it. False: it was itself the last."""
        while not self.cache.extend(sequence):
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _seat(self, sequence: Sequence, counts: dict[Sequence, int]) -> bool:
        """Admit the sequence; those of strictly lower priority give way, also out of the step being built."""
        while not self._admit(sequence):
            last = self.running[-1] if self.running else None
            if last is None or not _goes_before(sequence, last):
                return False
            counts.pop(last, None)
            self._preempt(last)
        return True

    def _add_prompts(self, prompts: list[Sequence], counts: dict[Sequence, int], budget: int) -> None:
        for sequence in prompts:
            untouched = sequence.computed == sequence.cached and not sequence.preempted
            if untouched and sequence not in self.seated:
                self._take_over(sequence)  # others may have read what it begins with since it was admitted
        short = budget // 2
        for sequence in prompts:
            rows = sequence.length - sequence.computed
            if rows <= short:
                counts[sequence] = rows
                short -= rows
                budget -= rows
        for sequence in prompts:
            if budget and sequence not in counts:
                counts[sequence] = min(budget, sequence.length - sequence.computed)
                budget -= counts[sequence]

    def _add_open(self, counts: dict[Sequence, int], budget: int) -> None:
        known = sorted((one for one in (*self.running, *self.waiting) if one.open and not one.blocked), key=_rank)
        if counts or (known and not known[0].only_read):
            budget = min(budget, self.shared_rows // 2)
        served: Sequence | None = None
        for sequence in known:
            if not budget or (served is not None and sequence.only_read != served.only_read):
                break
            if sequence.only_read and sequence.pages:
                self.cache.catch_up(sequence)  # the turn that it was meant for may have come
            if sequence.pages or self._admit(sequence):
                served = sequence  # who finds no pages keeps nobody from being read who has some, and gives them back at the end
                counts[sequence] = min(budget, sequence.length - sequence.computed)
                budget -= counts[sequence]

    def _take_over_closed(self) -> None:
        """Pages for the rest of the prompts that were open."""
        for sequence in self._closed:
            if sequence.pages:  # else it waits, and is admitted like any other
                self._take_over(sequence)
                self._room(sequence)
        self._closed.clear()

    def _take_over(self, sequence: Sequence) -> None:
        found = self.cache.catch_up(sequence)
        sequence.cached += found
        self.cached_rows += found

    def _admit(self, sequence: Sequence) -> bool:
        # A free page for everyone who runs: else the newcomer would be preempted as soon as one of them grows.
        if len(self.running) >= self.max_num_seqs or not self.cache.admit(sequence, headroom=len(self.running)):
            return False
        if not sequence.preempted:
            sequence.cached = sequence.computed
            self.cached_rows += 0 if sequence.only_read else sequence.cached
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_rank)
        sequence.seat = self._free_seats.pop()
        self.seated.append(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._unseat(sequence)
        self.cache.release(sequence)
        # Computed again when it is needed, and not for nobody; what is only read has lost no page that is not taken.
        sequence.blocked |= sequence.open and not sequence.only_read
        sequence.preempted += 1
        self.preemptions += 1
        insort(self.waiting, sequence, key=_rank)

    def _unseat(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_seats.append(sequence.seat)
        sequence.seat, sequence.carried = -1, False
        if sequence in self.seated:
            self.seated.remove(sequence)


def _rank(sequence: Sequence) -> tuple[bool, bool, float, int]:
    return sequence.open, sequence.only_read, sequence.priority, sequence.id


def _goes_before(one: Sequence, other: Sequence) -> bool:
    """Whatever their age."""
    return _rank(one)[:3] < _rank(other)[:3]
