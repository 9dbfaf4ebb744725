"""What the device knows of every running sequence, so that a step needs no more from the host than a few numbers.

A running sequence has a seat, a row of these tables: its next input row, how it samples, what is forced, forbidden or
penalised, and how often it has said each id. A seat is filled when a sequence takes it and then kept up by the steps
themselves. One more seat is nobody's: padded rows of a step may do with it what they like.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aura_omni.engine.graphs import Graphed, GraphPool
from aura_omni.engine.lane import sent, sent_together, staged
from aura_omni.engine.sampler import MASK, Draw, Filters, fused, pick
from aura_omni.flow import Sampling

# Columns of the two tables of numbers. What a stage draws besides the id has a sampling of its own, the inner one.
OWN, REPETITION, PRESENCE, FREQUENCY, INNER, FLOATS = slice(0, 3), 3, 4, 5, slice(6, 9), 9
TOP_K, SEED, MIN_TOKENS, INNER_TOP_K, INTEGERS = range(5)

# Ids of each kind that go along with a taker: a few biases and bans, whatever else of a sequence that has said nothing. With more, or
# more takers at once, seats are filled by as many operations as there are tables.
MARKS = 16
TAKERS = (1, 2, 4, 8)
_ITS_FLOATS, _ITS_INTEGERS, MARKED = slice(1, 10), slice(10, 14), 14  # columns of a taker's numbers, behind the seat
_KINDS, _IDS = 6, (0, 2, 3, 4)  # of marks, as `Seats._marks` has them, and which of them are ids


@dataclass(frozen=True, slots=True)
class Taker:
    """A sequence that takes a seat.

    prompt: the ids that the repetition penalty counts besides the outputs (none for the Talker). outputs: what the sequence
    has said already, when it was preempted. Ids that the head does not have (a prompt may hold some) are no matter.
    """

    seat: int
    sampling: Sampling
    inner: Sampling
    seed: int
    prompt: Iterable[int] = ()
    outputs: Seq[int] = ()
    stop_ids: Iterable[int] = ()

    @property
    def floats(self) -> tuple[float, ...]:
        """A row of the table of them, and below of integers."""
        own = self.sampling
        penalties = (own.repetition_penalty, own.presence_penalty, own.frequency_penalty)
        return *_floats(own), *penalties, *_floats(self.inner)

    @property
    def integers(self) -> tuple[int, ...]:
        return max(self.sampling.top_k, 0), self.seed & MASK, self.sampling.min_tokens, max(self.inner.top_k, 0)


class Tables(NamedTuple):
    """What a `Seats` holds, for kernels: all contiguous [seats + 1, ...]."""

    rows: Tensor  # [.., H]
    floats: Tensor  # float32
    integers: Tensor  # int64
    bias: Tensor  # float32 [.., V]
    stops: Tensor  # bool [.., V]
    prompt: Tensor  # bool [.., V]: ids that repetition counts besides the outputs
    counts: Tensor  # int32 [.., V]: of each id in the outputs


class Seats:
    """rows [seats + 1, H]: the next input row of each. All tables are changed in place, so CUDA graphs may hold on to them."""

    def __init__(self, seats: int, *, hidden: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spare = seats
        self._vocabulary, self._device = vocabulary, device
        count, wide = seats + 1, (seats + 1, vocabulary)
        self.rows = torch.zeros(count, hidden, dtype=dtype, device=device)
        self._floats = torch.ones(count, FLOATS, device=device)
        self._integers = torch.zeros(count, INTEGERS, dtype=torch.int64, device=device)
        self._bias = torch.zeros(wide, device=device)
        self._stops = torch.zeros(wide, dtype=torch.bool, device=device)
        self._prompt = torch.zeros(wide, dtype=torch.bool, device=device)
        self._counts = torch.zeros(wide, dtype=torch.int32, device=device)
        self.tables = Tables(
            self.rows, self._floats, self._integers, self._bias, self._stops, self._prompt, self._counts
        )
        self._graph: Graphed | None = None

    def capture(self) -> None:
        """Make graphs of filling them, whose memory is their own: a prefill's result waits for its draw meanwhile."""
        nobody = sent(self._nobody(1), self._device)
        self._graph = Graphed(self._filled, rows=(nobody,), sizes=TAKERS, pool=GraphPool())
        self._graph.prepare()

    @staticmethod
    def bytes(seats: int, *, hidden: int, vocabulary: int, dtype: torch.dtype) -> int:
        """Memory of the tables."""
        return (seats + 1) * (hidden * dtype.itemsize + FLOATS * 4 + INTEGERS * 8 + vocabulary * (4 + 1 + 1 + 4))

    def fill(self, takers: Seq[Taker]) -> None:
        """Give seats away; nothing of their former owners stays, but their rows until the next ones are written.

        From one array, on CUDA by a graph: launching its operations takes longer than computing them, and a step waits meanwhile.
        """
        marks = [self._marks(taker) if constrained(taker.sampling) else () for taker in takers]
        if len(takers) > TAKERS[-1] or any(len(ids) > MARKS for found in marks for ids in found):
            self._fill_any(takers, marks)
            return
        numbers = self._nobody(len(takers) if self._graph is None else self._graph.size(len(takers)))
        for row, taker, found in zip(numbers, takers, marks, strict=False):
            row[0] = taker.seat
            row[_ITS_FLOATS].view(np.float32)[:] = taker.floats
            row[_ITS_INTEGERS].view(np.uint32)[:] = taker.integers
            for number, values in enumerate(found):
                begin = MARKED + number * MARKS
                row[begin : begin + len(values)] = values.view(np.int32)
        if self._graph is None:
            self._filled(sent(numbers, self._device))
        else:
            self._graph(staged([numbers], self._device))

    def _nobody(self, rows: int) -> np.ndarray:
        """int32 [rows, n] for `_filled` of takers that are nobody: of the spare seat, without any id."""
        row = np.zeros(MARKED + _KINDS * MARKS, np.int32)
        row[0] = self.spare
        row[_ITS_FLOATS].view(np.float32)[:] = 1
        row[MARKED:].reshape(_KINDS, MARKS)[_IDS, :] = -1
        return np.tile(row, (rows, 1))

    def _filled(self, numbers: Tensor) -> Tensor:
        """numbers int32 [T, n]: of each taker the seat, a row of each table of numbers (as bits), and its marks, -1 instead of ids
        that it has not. Tensors only. Returns the seats."""
        if not numbers.is_cpu:
            kernels().fill(numbers, self.tables)
            return numbers[:, 0]
        seats = numbers[:, 0].long()
        self._floats.index_copy_(0, seats, numbers[:, _ITS_FLOATS].contiguous().view(torch.float32))
        self._integers.index_copy_(0, seats, numbers[:, _ITS_INTEGERS].long() & MASK)
        for table in (self._bias, self._stops, self._prompt, self._counts):
            table.index_fill_(0, seats, 0)
        biased, bias, stops, prompt, said, counts = numbers[:, MARKED:].unflatten(1, (_KINDS, MARKS)).unbind(1)
        self._bias.view(-1).index_copy_(0, self._places(seats, biased), bias.contiguous().view(torch.float32).flatten())
        self._stops.view(-1).index_fill_(0, self._places(seats, stops), True)
        self._prompt.view(-1).index_fill_(0, self._places(seats, prompt), True)
        self._counts.view(-1).index_copy_(0, self._places(seats, said), counts.flatten())
        return seats

    def _places(self, seats: Tensor, ids: Tensor) -> Tensor:
        """Where ids int32 [T, n] of takers are in the flat tables; for -1 somewhere in the spare seat's."""
        places = seats[:, None] * self._vocabulary + ids
        return torch.where(ids >= 0, places, self.spare * self._vocabulary).flatten()

    def _fill_any(self, takers: Seq[Taker], marks: Seq[tuple[np.ndarray, ...]]) -> None:
        """However many there are."""
        placed = []
        for taker, found in zip(takers, marks, strict=True):
            if found:
                begin = np.int64(taker.seat * self._vocabulary)
                placed.append([begin + values if kind in _IDS else values for kind, values in enumerate(found)])
        arrays: list[np.ndarray] = [
            np.array([taker.seat for taker in takers], np.int64),
            np.array([taker.floats for taker in takers], np.float32),
            np.array([taker.integers for taker in takers], np.int64),
            *(np.concatenate(found) for found in zip(*placed, strict=True)),
        ]
        seats, floats, integers, *marked = sent_together(arrays, self._device)
        self._floats.index_copy_(0, seats, floats)
        self._integers.index_copy_(0, seats, integers)
        for table in (self._bias, self._stops, self._prompt, self._counts):
            table.index_fill_(0, seats, 0)
        if marked:
            biased, bias, stops, prompt, said, counts = marked
            self._bias.view(-1).index_copy_(0, biased, bias)
            self._stops.view(-1).index_fill_(0, stops, True)
            self._prompt.view(-1).index_fill_(0, prompt, True)
            self._counts.view(-1).index_copy_(0, said, counts)

    def _marks(self, taker: Taker) -> tuple[np.ndarray, ...]:
        """What comes between its logits and its draw: the ids of its biases and what they are, its bans, the ids of its prompt, the
        ids it has said and how often. Ids and numbers are int32, biases float32."""
        sampling = taker.sampling
        said, counts = np.unique(np.array(taker.outputs, np.int32), return_counts=True)
        return (
            np.array(list(sampling.logit_bias), np.int32),
            np.array(list(sampling.logit_bias.values()), np.float32),
            self._known(taker.stop_ids if sampling.min_tokens > 0 else ()),
            self._known(taker.prompt if sampling.repetition_penalty != 1 else ()),
            said,
            counts.astype(np.int32),
        )

    def _known(self, ids: Iterable[int]) -> np.ndarray:
        return np.array([token for token in set(ids) if 0 <= token < self._vocabulary], np.int32)

    def constrain(self, logits: Tensor, seat: Tensor, step: Tensor) -> Tensor:
        """logits [B, V] -> the same, float32, with bias, bans and penalties of each row's seat, int64 [B]; step int64 [B]: ids said.

        Order as in vLLM: bias, bans, repetition (positive logits divided, negative multiplied), presence and frequency.
        """
        if not logits.is_cpu:
            return kernels().constrain(logits, seat, step, self.tables)
        floats, counts = self._floats[seat], self._counts[seat]
        early = step < self._integers[seat, MIN_TOKENS]
        logits = (logits + self._bias[seat]).masked_fill(self._stops[seat] & early[:, None], -torch.inf)
        said = counts > 0
        repetition = torch.where(said | self._prompt[seat], floats[:, REPETITION, None], 1.0)
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        return logits - (floats[:, PRESENCE, None] * said + floats[:, FREQUENCY, None] * counts)

    def draw(self, seat: Tensor, step: Tensor, filters: Filters) -> Draw:
        """How the ids of a step are drawn; seat, step int64 [B]."""
        integers = self._integers[seat]
        own = torch.stack((integers[:, TOP_K], integers[:, SEED], step), dim=1)
        return Draw(self._floats[seat, OWN].contiguous(), own, filters)

    def inner_draw(self, seat: Tensor, step: Tensor, filters: Filters) -> Draw:
        """The same for what the stage draws besides."""
        integers = self._integers[seat]
        inner = torch.stack((integers[:, INNER_TOP_K], integers[:, SEED], step), dim=1)
        return Draw(self._floats[seat, INNER].contiguous(), inner, filters)

    def chosen(
        self, logits: Tensor, seat: Tensor, step: Tensor, filters: Filters, inner: Filters, *, constrained: bool
    ) -> tuple[Tensor, Tensor, Draw]:
        """logits [B, V] -> the ids that come next int64 [B], which are 0 where nothing is `sound`; that, bool [B]; and the inner draw.

        On CUDA in one launch, from a codebook.
        """
        plain = logits.is_cpu or filters.top_p or filters.min_p
        if not plain and self._vocabulary <= fused().MOST_VOCABULARY:
            top_k = filters.top_k > 0
            ids, there, floats, integers = kernels().choose(
                logits, seat, step, self.tables, constrained=constrained, top_k=top_k
            )
            return ids, there, Draw(floats, integers, inner)
        if constrained:
            logits = self.constrain(logits, seat, step)
        there = sound(logits)
        ids = torch.where(there, pick(logits, self.draw(seat, step, filters)), 0)
        return ids, there, self.inner_draw(seat, step, inner)

    def kept(
        self, seat: Tensor, ids: Tensor, sound: Tensor, rows: Tensor, values: Tensor, *, constrained: bool, no_id: int
    ) -> Tensor:
        """What `chosen` and the stage have made is kept: rows [B, H] in the seats, the ids int64 [B] counted.

        Returns the values int64 [B, K], no_id where nothing is sound.
        """
        if not rows.is_cpu:
            return kernels().keep(seat, ids, sound, rows, values, self.tables, constrained=constrained, no_id=no_id)
        self.rows.index_copy_(0, seat, rows)
        if constrained:
            self.count(seat, ids)
        return torch.where(sound[:, None], values, no_id)

    def ends(self, filters: Filters) -> bool:
        """Whether `ended` can be called."""
        return self._device.type != "cpu" and not (filters.top_k or filters.top_p or filters.min_p)

    def ended(
        self, logits: Tensor, seat: Tensor, step: Tensor, table: Tensor, *, constrained: bool, random: bool, no_id: int
    ) -> Tensor:
        """`chosen` and `kept` where nothing follows from an id but its row of table [V, H], in two launches.

        seat, step: also int32, of equal strides. Returns the ids int64 [B, 1], no_id where nothing is sound.
        """
        return kernels().ended(
            logits, seat, step, self.tables, table, constrained=constrained, random=random, no_id=no_id
        )

    def count(self, seat: Tensor, ids: Tensor) -> None:
        """The sequences have said ids int64 [B]."""
        # A sum, because the spare seat may occur several times.
        one = torch.ones_like(ids, dtype=torch.int32)
        self._counts.view(-1).index_add_(0, seat * self._vocabulary + ids, one)


@cache
def kernels() -> ModuleType:
    """`engine.fused_seats`, imported on first use: Triton only exists where CUDA does."""
    from aura_omni.engine import fused_seats

    return fused_seats


def sound(logits: Tensor) -> Tensor:
    """Whether there is something to choose from, bool [B]: not where there is no number, or +inf, or every id is banned."""
    return logits.amax(-1).isfinite()


def constrained(sampling: Sampling) -> bool:
    """Whether anything comes between a sequence's logits and its draw."""
    return bool(
        sampling.logit_bias
        or sampling.min_tokens > 0
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


def _floats(sampling: Sampling) -> tuple[float, float, float]:
    return sampling.temperature, sampling.top_p, sampling.min_p
