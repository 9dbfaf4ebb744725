"""What a step of a stage computes: from the rows of a batch to the values of the sequences that get a next id.

Knows tensors and the stage model, not who is scheduled or listens. Nothing that the host knows of a sequence changes here.
A decoding sequence's row is in its seat, so its step is one function
of a few numbers, on CUDA one graph: decoder, head, constraints, draw, whatever the stage makes of the id, and the next row,
back into the seat. Prompts go through the decoder as their stage embeds them, and end in the same draw. A few rows of decoding can
go along with those of prompts, where that is a graph, too: reading the weights is what they take.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aura_omni.engine.attention import Joined, PagedKV
from aura_omni.engine.graphs import Graphed, GraphPool, sizes_up_to
from aura_omni.engine.lane import sent, staged
from aura_omni.engine.numbers import RowNumbers, StepNumbers, kernels
from aura_omni.engine.sampler import Filters
from aura_omni.engine.seats import Seats, Taker, constrained
from aura_omni.engine.sequence import Batch, Sequence
from aura_omni.engine.stage_model import Rows, StageModel, by_axis
from aura_omni.flow import Sampling

# Prefills of up to so many rows, of up to so many sequences, are padded and become CUDA graphs. Longer ones keep the device
# busy for longer than it takes to launch them.
PREFILL_SIZES = (16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
PREFILL_CHUNKS = 16

# Longer ones, too, where nothing else computes on the device: launching layer by layer takes the host as long as the GPU then.
LONG_PREFILL_SIZES = (640, 768, 896, 1_024, 1_280, 1_536, 1_792, 2_048)
LONG_PREFILL_CHUNKS = 32

# Those that up to so many rows of decoding go along with: fewer sizes, as it spares a step of milliseconds whatever is padded, and
# all rows together fill the tiles of a product.
JOINED_ROWS = 8
JOINED_SIZES = tuple(size - JOINED_ROWS for size in (64, 128, 256, 512))

_SLOT, _MEDIUM, _FIRST = range(3)  # of the numbers of a prompt's row

NO_ID = -1  # instead of an id, where the logits are not finite


def prefill_sizes(*, long: bool) -> tuple[int, ...]:
    """Rows of the graphs of prefills; long: of a stage that has a GPU to itself."""
    return (*PREFILL_SIZES, *LONG_PREFILL_SIZES) if long else PREFILL_SIZES


def graph_bytes(hidden: int, adds: int, dtype: torch.dtype, *, long: bool = False) -> int:
    """What graphs of prefills hold on to: rows of media that go in, with their adds, and rows that come out, for each size."""
    joined = sum(size * (2 + adds) + JOINED_ROWS for size in JOINED_SIZES)
    return (sum(prefill_sizes(long=long)) * (2 + adds) + joined) * hidden * dtype.itemsize


@dataclass(frozen=True, slots=True)
class _How:
    """What some row of a step uses: a step costs no more than that, and on CUDA each combination has its own graphs."""

    filters: Filters
    inner: Filters
    constrained: bool

    @classmethod
    def of(cls, sampling: Sampling, inner: Sampling) -> _How:
        return cls(Filters.of((sampling,)), Filters.of((inner,)), constrained(sampling))

    def __or__(self, other: _How) -> _How:
        return _How(self.filters | other.filters, self.inner | other.inner, self.constrained or other.constrained)


class Steps:
    """All of it is called in the stage's lane."""

    def __init__(
        self,
        model: StageModel,
        *,
        pages: int,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        graphs: bool,
        usual: tuple[Sampling, Sampling],
        alone: bool = False,
        kv_eight_bits: bool = False,
    ) -> None:
        """As `runner.ArRunner`."""
        self._model, config = model, model.decoder_config
        self._kv = PagedKV(
            layers=config.layers,
            pages=pages,
            page_size=page_size,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            most_rows=max_num_seqs,
            dtype=model.dtype,
            device=model.device,
            eight_bits=kv_eight_bits,
        )
        with torch.inference_mode():
            probe = torch.zeros(1, config.hidden, dtype=model.dtype, device=model.device)
            logits = model.logits(probe)[0]
        self.vocabulary = len(logits)
        self.drawable = frozenset(() if logits.is_meta else logits.isfinite().nonzero()[:, 0].tolist())
        self._seats = Seats(
            max_num_seqs,
            hidden=config.hidden,
            vocabulary=self.vocabulary,
            dtype=model.dtype,
            device=model.device,
        )
        self._axes = 1 if config.mrope_section is None else 3
        self._numbers = StepNumbers(
            axes=self._axes,
            extra=model.extra_numbers,
            seats=max_num_seqs,
            page_size=page_size,
            spare_page=self._kv.spare_page,
            most_pages=-(-max_model_len // page_size),
        )
        self._owners: list[tuple[int, int] | None] = [None] * max_num_seqs  # whom each seat is ready for
        self._usual = _How.of(usual[0], usual[1])
        self._hows = [self._usual] * max_num_seqs  # what they use
        self._decode_graph: Graphed | None = None
        self._draw_graph: Graphed | None = None
        self._prefill_graph: Graphed | None = None
        self._joined_graph: Graphed | None = None
        self._joined_rows = min(JOINED_ROWS, max_num_seqs)
        self._chunks = LONG_PREFILL_CHUNKS if alone else PREFILL_CHUNKS
        if graphs:
            self._capture(max_num_seqs, prefill_sizes(long=alone))
            model.prepare_graphs()

    def decode(self, batch: Batch, *, ahead: bool = False) -> Tensor:
        """One row of each sequence, from its seat; those that are not there yet are put there first.

        ahead: the rows are those that the step under way is about to leave in the seats.
        """
        if not ahead:
            self._carry(batch)
        numbers, how = self._pack(batch, self._decode_graph, pages=True, ahead=int(ahead))
        if self._decode_graph is None:
            return self._decoded(self._sent(numbers), how=how)
        return self._decode_graph(self._staged(numbers.T), how=how)

    def prefill(self, batch: Batch) -> Tensor:
        """Rows of prompts, and the ids of those whose last row is among them."""
        hidden = self._hidden(batch, self._model.rows(batch))
        drawn = batch.sampled()
        if not drawn:
            return hidden.new_empty(0, 1, dtype=torch.int64)
        ends = np.cumsum(batch.counts)[drawn] - 1
        return self._draw(self._picked(hidden, ends), batch.part(drawn))

    def joins(self, single: Batch, prompts: Batch) -> bool:
        """Whether `joined` can be called."""
        return (
            self._joined_graph is not None
            and 0 < len(single.sequences) <= self._joined_rows
            and 0 < prompts.rows <= JOINED_SIZES[-1]
            and len(prompts.sequences) <= self._chunks
        )

    def joined(self, single: Batch, prompts: Batch) -> Tensor:
        """What `decode` of one batch and `prefill` of another return, one after the other, in one go through the decoder."""
        graph = self._joined_graph
        assert graph is not None
        rows = self._model.rows(prompts)
        self._carry(single)
        seats = self._staged(self._packed(single, rows=self._joined_rows, pages=True).T)
        hidden = graph(*self._of_chunks(prompts, rows, graph), seats)
        drawn = prompts.sampled()
        ends = self._joined_rows - 1 + np.cumsum(prompts.counts)[drawn]
        both = Batch.of(single, prompts.part(drawn))
        return self._draw(self._picked(hidden, np.concatenate((np.arange(len(single.sequences)), ends))), both)

    # ------------------------------------------------------------ around them

    def _carry(self, batch: Batch) -> None:
        """Put the rows into the seats that are not there yet."""
        waiting = batch.part(index for index, sequence in enumerate(batch.sequences) if not sequence.carried)
        if waiting.sequences:
            rows = self._model.embedded(self._model.rows(waiting))
            assert not rows.adds, "a stage gave adds for a row of no medium"
            self._seats.rows.index_copy_(0, self._sent([sequence.seat for sequence in waiting.sequences]), rows.x)

    def _hidden(self, batch: Batch, rows: Rows) -> Tensor:
        """The rows through the decoder [N, H], final-normed; a graph may leave some that are nobody's behind them."""
        graph = self._prefill_graph
        if graph is None or batch.rows > graph.most or len(batch.sequences) > self._chunks:
            made = self._model.embedded(rows)
            return self._model.decoder(made.x, made.positions, self._kv.step(batch), made.adds, made.add_rows)
        return graph(*self._of_chunks(batch, rows, graph))

    def _of_chunks(self, batch: Batch, rows: Rows, graph: Graphed) -> tuple[Tensor | None, ...]:
        """What a graph of prefills gets."""
        size = graph.size(batch.rows)
        slot, chunks = self._kv.chunk_numbers(batch, rows=size, chunks=self._chunks)
        numbers = np.zeros((size, _FIRST + self._axes + self._model.row_ids), np.int32)
        numbers[:, _SLOT], numbers[:, _MEDIUM] = slot, -1
        if rows.places is not None:
            numbers[rows.places, _MEDIUM] = np.arange(len(rows.places))
        numbers[: batch.rows, _FIRST : _FIRST + self._axes] = rows.positions
        numbers[: batch.rows, _FIRST + self._axes :] = rows.ids
        return self._staged(numbers), rows.media, self._staged(chunks.T)

    def _draw(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The values of the sequences whose last rows have become hidden [B, H]."""
        numbers, how = self._pack(batch, self._draw_graph, pages=False)
        if self._draw_graph is None:
            return self._drawn(hidden, self._sent(numbers), how=how)
        return self._draw_graph(hidden, self._staged(numbers), how=how)

    def _picked(self, hidden: Tensor, places: np.ndarray) -> Tensor:
        """Some of its rows."""
        if len(places) == 1:
            return hidden[places[0] : places[0] + 1]
        return hidden[self._sent(places)]

    def _packed(self, batch: Batch, *, rows: int, pages: bool, ahead: int = 0) -> np.ndarray:
        """What the rows that yield an id need from the host; pages: with what attention needs; ahead: ids that are being drawn."""
        sequences = batch.sequences
        self._seat(sequences)
        last = [sequence.length - 1 + ahead for sequence in sequences]
        return self._numbers.pack(
            sequences,
            last,
            [self._model.position(sequence, row) for sequence, row in zip(sequences, last, strict=True)],
            [self._model.numbers(sequence, ahead=ahead) for sequence in sequences],
            rows=rows,
            pages=pages,
        )

    def _pack(self, batch: Batch, graphed: Graphed | None, *, pages: bool, ahead: int = 0) -> tuple[np.ndarray, _How]:
        """`_packed`, where it is needed, and what the rows use."""
        sequences = batch.sequences
        rows = len(sequences) if graphed is None else graphed.size(len(sequences))
        numbers = self._packed(batch, rows=rows, pages=pages, ahead=ahead)
        how, *others = (self._hows[sequence.seat] for sequence in sequences)
        for other in others:
            if other is not how:
                how |= other
        return numbers, how

    def _seat(self, sequences: Seq[Sequence]) -> None:
        """Make the seats ready of those that have not used theirs: with the first draw, when all else of a prompt is launched."""
        new = [one for one in sequences if self._owners[one.seat] != (one.id, one.preempted)]
        if not new:
            return
        for sequence in new:
            self._owners[sequence.seat] = None
            self._numbers.seated(sequence.seat)
        self._seats.fill([self._taker(sequence) for sequence in new])
        for sequence in new:
            self._owners[sequence.seat] = (sequence.id, sequence.preempted)
            self._hows[sequence.seat] = self._how(sequence)

    def _how(self, sequence: Sequence) -> _How:
        how = _How.of(sequence.sampling, sequence.inner)
        if self._decode_graph is not None:
            # What nobody uses does no harm, and another graph would be captured while requests wait.
            how |= self._usual
        return self._usual if how == self._usual else how

    def _taker(self, sequence: Sequence) -> Taker:
        return Taker(
            sequence.seat,
            sequence.sampling,
            inner=sequence.inner,
            seed=sequence.seed,
            prompt=sequence.tokens[: sequence.prompt_length] if self._model.penalise_prompt else (),
            outputs=sequence.outputs,
            stop_ids=sequence.stop_ids | self._model.stop_ids | set(sequence.sampling.stop_token_ids),
        )

    def _sent(self, values: np.ndarray | Seq[int]) -> Tensor:
        return sent(values, self._model.device)

    def _staged(self, values: np.ndarray) -> Tensor:
        """For a graph, which copies it to the device itself."""
        return staged([values], self._model.device)

    def _capture(self, max_num_seqs: int, sizes: Seq[int]) -> None:
        """Make graphs of prefills of these sizes, and of the two functions that end in a draw, as they are usually needed."""
        pool, steps = GraphPool(), sizes_up_to(max_num_seqs)
        self._seats.capture()
        nobody = self._sent(self._numbers.nobody())
        hidden = self._seats.rows[self._seats.spare :]
        # With the batch last, because there are as many pages as the longest sequence has: those are whole rows then.
        self._decode_graph = Graphed(self._decoded_columns, columns=(nobody.T,), sizes=steps, pool=pool)
        self._draw_graph = Graphed(self._drawn, rows=(hidden, nobody[:, : self._numbers.width]), sizes=steps, pool=pool)
        for graphed in (self._decode_graph, self._draw_graph):
            graphed.prepare(how=self._usual)
        numbers = torch.zeros(
            1, _FIRST + self._axes + self._model.row_ids, dtype=torch.int32, device=self._model.device
        )
        numbers[:, _SLOT], numbers[:, _MEDIUM] = self._kv.spare_page * self._kv.page_size, -1
        # Chunks of no rows, whose pages therefore do not matter.
        pages = nobody.shape[1] - self._numbers.width
        chunks = torch.zeros(3 + pages, self._chunks, dtype=torch.int32, device=self._model.device)
        # Rows of no medium get zeros, which costs less than as many graphs again.
        rows = (numbers, hidden.new_zeros(1, 1 + self._model.adds, hidden.shape[1]))
        self._prefill_graph = Graphed(self._computed, rows=rows, fixed=(chunks,), sizes=sizes, pool=pool)
        single = nobody.T.repeat(1, self._joined_rows)
        self._joined_graph = Graphed(self._both, rows=rows, fixed=(chunks, single), sizes=JOINED_SIZES, pool=pool)
        for graphed in (self._prefill_graph, self._joined_graph):
            graphed.prepare()

    # ------------------------------------------------------------ on the device: tensors only

    def _embedded(self, numbers: Tensor, media: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """numbers int32 [N, n]: of each row its slot, which of the media [M, 1 + adds, H] it is (-1: none), its positions and its ids;
        media that are no row's may be anything -> the rows x [N, H], cos and sin [N, D], adds to all rows [adds, N, H], slots int64 [N]."""
        model, rope, ids = self._model, self._model.decoder.rope, _FIRST + self._axes
        if not numbers.is_cpu:
            known = model.embeddings is not None
            base = model.embeddings if known else model.embed(numbers[:, ids:].long())
            where = (_SLOT, _MEDIUM, _FIRST, ids)
            return kernels().gathered(numbers, media, base, *rope.on(numbers.device), columns=where, looked_up=known)
        columns = numbers.T.long().contiguous()
        medium = columns[_MEDIUM]
        first, *adds = media[medium.clamp_min(0)].masked_fill((medium < 0)[:, None, None], 0).unbind(1)
        x = model.embed(columns[ids:].T) + first
        cos, sin = rope.tables(by_axis(columns[_FIRST:ids].T), x.dtype)
        return x, cos, sin, torch.stack(adds) if adds else x.new_empty(0, *x.shape), columns[_SLOT]

    def _computed(self, numbers: Tensor, media: Tensor, chunks: Tensor) -> Tensor:
        """numbers, media: as `_embedded` has them; chunks: as `PagedKV.chunk_step` does, turned -> hidden [N, H]."""
        x, cos, sin, adds, slot = self._embedded(numbers, media)
        kv = self._kv.chunk_step(slot, chunks.T.contiguous(), most_rows=len(numbers))
        return self._model.decoder.turned(x, cos, sin, kv, adds.unbind(0))

    def _both(self, numbers: Tensor, media: Tensor, chunks: Tensor, seated: Tensor) -> Tensor:
        """`_computed`, with the rows in some seats in front; seated [n, B]: their numbers -> hidden [B + N, H]."""
        x, cos, sin, adds, slot = self._embedded(numbers, media)
        row, *begun = self._numbers.begun(seated.T, self._seats.rows, self._model.decoder.rope)
        singles = seated.shape[1]
        kv = Joined(
            self._kv.decode_step(row.slot, row.length, row.table),
            self._kv.chunk_step(slot, chunks.T.contiguous(), most_rows=len(numbers)),
            singles=singles,
        )
        x, cos, sin = (torch.cat(parts) for parts in zip(begun, (x, cos, sin), strict=True))
        return self._model.decoder.turned(x, cos, sin, kv, F.pad(adds, (0, 0, singles, 0)).unbind(0))

    def _decoded(self, numbers: Tensor, *, how: _How) -> Tensor:
        """The rows in the seats through decoder and head, and on; values int64 [B, K]."""
        row, x, cos, sin = self._numbers.begun(numbers, self._seats.rows, self._model.decoder.rope)
        kv = self._kv.decode_step(row.slot, row.length, row.table)
        return self._drawn(self._model.decoder.turned(x, cos, sin, kv), numbers, how=how, row=row)

    def _decoded_columns(self, columns: Tensor, *, how: _How) -> Tensor:
        """`_decoded` of numbers [n, B]."""
        return self._decoded(columns.T, how=how)

    def _drawn(self, hidden: Tensor, numbers: Tensor, *, how: _How, row: RowNumbers | None = None) -> Tensor:
        """From hidden [B, H] to the next ids and whatever the stage makes of them: values int64 [B, K], -1 where there is no id.

        row: the numbers, where they are unpacked already.
        """
        model, seats, logits = self._model, self._seats, self._model.logits(hidden)
        if model.embeddings is not None and seats.ends(how.filters):
            return seats.ended(
                logits,
                *self._numbers.who(numbers),
                model.embeddings,
                constrained=how.constrained,
                random=how.filters.random,
                no_id=NO_ID,
            )
        row = row or self._numbers.unpack(numbers)
        ids, there, inner = seats.chosen(
            logits, row.seat, row.step, how.filters, how.inner, constrained=how.constrained
        )
        values, rows = model.complete(hidden, ids, inner, row.extra)
        # Last, so that a step that failed before has changed nothing.
        return seats.kept(row.seat, ids, there, rows, values, constrained=how.constrained, no_id=NO_ID)
