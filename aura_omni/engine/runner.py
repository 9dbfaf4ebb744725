"""One autoregressive stage at work: schedule, launch, and hand on what comes back.

Knows sequences, tensors and the stage model. Does not know text or HTTP. Everything runs on the engine's thread.

    runner = ArRunner(model, pages=1000, page_size=16, ...)
    runner.add(sequence)
    while runner.busy:
        runner.step()          # calls on_output and on_end of the sequences

A step never waits for the device: it launches, and a later call finds the result. Rows of decoding and rows of prompts are
launched apart. A decoding sequence's row is in its seat, so its step is one function of a few numbers, on CUDA one graph:
decoder, head, constraints, draw, whatever the stage makes of the id, and the next row, back into the seat.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aura_omni.engine.attention import PagedKV
from aura_omni.engine.graphs import Graphed, GraphPool, sizes_up_to
from aura_omni.engine.kv_cache import KVCache
from aura_omni.engine.lane import Arrival, Lane, sent
from aura_omni.engine.numbers import RowNumbers, StepNumbers
from aura_omni.engine.sampler import Filters, pick
from aura_omni.engine.scheduler import Scheduler
from aura_omni.engine.seats import Seats, constrained
from aura_omni.engine.sequence import Batch, FinishReason, Sequence
from aura_omni.engine.stage_model import Rows, StageModel
from aura_omni.errors import AuraError, BadRequest, EngineError
from aura_omni.flow import Sampling

logger = logging.getLogger(__name__)

# Prefills of up to so many rows, of up to so many sequences, are padded and become CUDA graphs. Longer ones keep the device
# busy for longer than it takes to launch them.
PREFILL_SIZES = (16, 32, 64, 96, 128)
PREFILL_CHUNKS = 8

_NO_ID = -1  # of logits that are not finite


@dataclass(frozen=True, slots=True)
class Counters:
    """For metrics. steps, rows, prompt rows and preemptions since the start; the rest now."""

    running: int
    waiting: int
    pages: int
    pages_used: int
    pages_kept: int  # that a new request could find
    steps: int
    computed_rows: int
    cached_rows: int  # rows of prompts that were found instead of computed
    preemptions: int


@dataclass(frozen=True, slots=True)
class _How:
    """What some row of a step uses: a step costs no more than that, and on CUDA each combination has its own graphs."""

    filters: Filters
    inner: Filters
    constrained: bool

    @classmethod
    def of(cls, sampling: Seq[Sampling], inner: Seq[Sampling]) -> _How:
        return cls(Filters.of(sampling), Filters.of(inner), any(map(constrained, sampling)))

    def __or__(self, other: _How) -> _How:
        return _How(self.filters | other.filters, self.inner | other.inner, self.constrained or other.constrained)


@dataclass(frozen=True, slots=True)
class _Flight:
    """Rows that are being computed. drawn: those of their sequences that get a next id; arrival: its values [drawn, K]."""

    batch: Batch
    drawn: tuple[Sequence, ...]
    arrival: Arrival


class ArRunner:
    """A `stage_model.Runner` of an autoregressive stage."""

    def __init__(
        self,
        model: StageModel,
        *,
        pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_waiting: int,
        prefix_caching: bool,
        graphs: bool = False,
        usual: tuple[Sampling, Sampling] = (Sampling(), Sampling(temperature=0.0)),
        lane: Lane | None = None,
    ) -> None:
        """pages of page_size rows are taken on the model's device at once; the limits are `Scheduler`'s.

        graphs: steps of decoding and short prefills are CUDA graphs; without, they run as they are written. Those that the
        usual sampling needs, a sequence's own and its inner one, are captured here, others when they are first needed.
        lane: where steps are computed; None: a new one.
        """
        self._model, self._lane = model, lane or Lane(model.device)
        self._flights: deque[_Flight] = deque()  # in the order of their launch
        self._cache = KVCache(pages, page_size, prefix_caching=prefix_caching)
        self._scheduler = Scheduler(
            self._cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
        )
        self._steps = self._computed_rows = self._cached_rows = 0
        with self._lane.active():
            self._build(pages, page_size, max_num_seqs, max_model_len)
            self._usual = _How.of(usual[:1], usual[1:])
            self._decode_graph: Graphed | None = None
            self._draw_graph: Graphed | None = None
            self._prefill_graph: Graphed | None = None
            if graphs:
                self._capture(max_num_seqs)

    def _build(self, pages: int, page_size: int, max_num_seqs: int, max_model_len: int) -> None:
        """All that stays on the device."""
        model, config = self._model, self._model.decoder_config
        self._kv = PagedKV(
            layers=config.layers,
            pages=pages,
            page_size=page_size,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        with torch.inference_mode():
            probe = torch.zeros(1, config.hidden, dtype=model.dtype, device=model.device)
            logits = model.logits(probe)[0]
        self._drawable, self._vocabulary = frozenset(logits.isfinite().nonzero()[:, 0].tolist()), len(logits)
        self._seats = Seats(
            max_num_seqs,
            hidden=config.hidden,
            vocabulary=self._vocabulary,
            dtype=model.dtype,
            device=model.device,
        )
        self._numbers = StepNumbers(
            axes=1 if config.mrope_section is None else 3,
            extra=model.extra_numbers,
            seats=max_num_seqs,
            page_size=page_size,
            spare_page=self._kv.spare_page,
            most_pages=-(-max_model_len // page_size),
        )

    def _capture(self, max_num_seqs: int) -> None:
        """Make graphs of short prefills, and of the two functions that end in a draw, as they are usually needed."""
        pool, sizes = GraphPool(), sizes_up_to(max_num_seqs)
        nobody = self._sent(self._numbers.nobody())
        hidden = self._seats.rows[self._seats.spare :]
        self._decode_graph = Graphed(self._decoded, rows=(nobody,), sizes=sizes, pool=pool)
        self._draw_graph = Graphed(self._drawn, rows=(hidden, nobody[:, : self._numbers.width]), sizes=sizes, pool=pool)
        for graphed in (self._decode_graph, self._draw_graph):
            graphed.prepare(how=self._usual)
        integer = torch.zeros(1, 1, dtype=torch.int64, device=self._model.device)
        positions = integer.expand(1, 1 if self._model.decoder_config.mrope_section is None else 3)
        slot = integer + self._kv.spare_page * self._kv.page_size
        # Chunks of no rows, whose pages therefore do not matter.
        chunks = torch.zeros(PREFILL_CHUNKS, 3 + nobody.shape[1], dtype=torch.int32, device=self._model.device)
        rows, fixed = (hidden, positions, slot), (chunks,)
        self._prefill_graph = Graphed(self._computed, rows=rows, fixed=fixed, sizes=PREFILL_SIZES, pool=pool)
        self._prefill_graph.prepare()

    @property
    def busy(self) -> bool:
        """Whether a step is under way or would find something to do."""
        return self.flying or self._scheduler.busy

    @property
    def flying(self) -> bool:
        return bool(self._flights)

    @property
    def counters(self) -> Counters:
        """From any thread; the numbers may be of two neighbouring steps."""
        return Counters(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages=self._cache.pages,
            pages_used=self._cache.used,
            pages_kept=self._cache.kept,
            steps=self._steps,
            computed_rows=self._computed_rows,
            cached_rows=self._cached_rows,
            preemptions=self._scheduler.preemptions,
        )

    def check(self, prompt_length: int, sampling: Sampling) -> None:
        """Raises PromptTooLong or BadRequest for what no server of this kind would ever take. From any thread."""
        self._scheduler.check_length(prompt_length)
        unknown = [token for token in sampling.logit_bias if not 0 <= token < self._vocabulary]
        if unknown:
            raise BadRequest(
                f"logit_bias names token {unknown[0]}; this model's ids are 0 to {self._vocabulary - 1}",
                param="logit_bias",
            )
        stops = self._model.stop_ids.union(sampling.stop_token_ids)
        if sampling.min_tokens > 0 and len(stops) >= len(self._drawable) and stops >= self._drawable:
            raise BadRequest(
                f"min_tokens is {sampling.min_tokens} and stop_token_ids are {len(sampling.stop_token_ids)} ids, all that this "
                f"model can say: until then nothing could be chosen. Leave some of its {len(self._drawable)} ids, or set min_tokens 0.",
                param="stop_token_ids",
            )

    def add(self, sequence: Sequence) -> None:
        """Start a sequence. Raises Overloaded or as `check`; then neither of its listeners is ever called."""
        sampling = sequence.sampling
        self.check(sequence.prompt_length, sampling)
        self._scheduler.add(sequence)
        sequence.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed

    def abort(self, sequence: Sequence) -> None:
        """End the sequence with reason "cancelled", at any point. Nothing happens if it has ended or was refused by `add`."""
        if sequence.id >= 0:
            self._finish(sequence, "cancelled")

    def abort_all(self, error: Exception) -> None:
        self._flights.clear()
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            self._finish(sequence, "error", error)
        self._lane.wait()

    @torch.inference_mode()
    def step(self) -> bool:
        with self._lane.active():
            worked = self._land()
            if not self._flights and self._launch():
                self._land()  # a CPU has computed it already
                worked = True
        return worked

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    # ------------------------------------------------------------ launch

    def _launch(self) -> bool:
        """Start the next step. Changes nothing that the host knows of its sequences: that follows when it has arrived."""
        batch = self._scheduler.schedule()
        if batch is None:
            return False
        self._steps += 1
        self._computed_rows += batch.rows
        self._cached_rows += sum(
            sequence.cached
            for sequence, start in zip(batch.sequences, batch.starts, strict=True)
            if start == sequence.cached and not sequence.preempted
        )
        for sequence in self._scheduler.seated:
            self._seat(sequence)
        decoding = [index for index in range(len(batch.sequences)) if _decodes(batch, index)]
        others = [index for index in range(len(batch.sequences)) if index not in decoding]
        self._launch_safely(batch.part(decoding), self._decode)
        self._launch_safely(batch.part(others), self._prefill)
        return True

    def _seat(self, sequence: Sequence) -> None:
        sampling = sequence.sampling
        self._numbers.seated(sequence.seat)
        self._seats.fill(
            sequence.seat,
            sampling,
            inner=sequence.inner,
            seed=sequence.seed,
            prompt=sequence.tokens[: sequence.prompt_length] if self._model.penalise_prompt else (),
            outputs=sequence.outputs,
            stop_ids=sequence.stop_ids | self._model.stop_ids | set(sampling.stop_token_ids),
        )

    def _launch_safely(self, batch: Batch, compute: Callable[[Batch], Tensor]) -> None:
        """Launch rows. If that fails, launch their sequences one by one, so that only those at fault end."""
        # A listener to the end of one may have ended another.
        batch = batch.part(index for index, sequence in enumerate(batch.sequences) if not sequence.finished)
        if not batch.sequences:
            return
        try:
            drawn = tuple(batch.sequences[index] for index in batch.sampled())
            self._flights.append(_Flight(batch, drawn, self._lane.home(compute(batch)[: len(drawn)])))
        except torch.AcceleratorError:
            raise  # the device itself has failed: no later step can succeed
        except Exception as error:
            # Whatever it is, it is one request's until shown otherwise.
            if len(batch.sequences) == 1:
                self._fail(batch.sequences[0], error)
                return
            logger.warning("a step of %d sequences failed; they go on one by one", len(batch.sequences), exc_info=error)
            for alone in batch.split():
                self._launch_safely(alone, compute)

    def _decode(self, batch: Batch) -> Tensor:
        """One row of each sequence, from its seat; those that are not there yet are put there first."""
        waiting = batch.part(index for index, sequence in enumerate(batch.sequences) if not sequence.carried)
        if waiting.sequences:
            rows = self._model.rows(waiting)
            assert not rows.adds, "a stage gave adds for a row of no medium"
            self._seats.rows.index_copy_(0, self._sent([sequence.seat for sequence in waiting.sequences]), rows.x)
        numbers, how = self._pack(batch, self._decode_graph, pages=True)
        return (self._decode_graph or self._decoded)(numbers, how=how)

    def _prefill(self, batch: Batch) -> Tensor:
        """Rows of prompts, and the ids of those whose last row is among them."""
        hidden = self._hidden(batch, self._model.rows(batch))
        drawn = batch.sampled()
        if not drawn:
            return hidden.new_empty(0, 1, dtype=torch.int64)
        ends = np.cumsum(batch.counts)[drawn] - 1
        numbers, how = self._pack(batch.part(drawn), self._draw_graph, pages=False)
        return (self._draw_graph or self._drawn)(hidden[self._sent(ends)], numbers, how=how)

    def _hidden(self, batch: Batch, rows: Rows) -> Tensor:
        """The rows [N, H] through the decoder, final-normed; a graph may leave some that are nobody's behind them."""
        graph = self._prefill_graph
        if graph is None or rows.adds or batch.rows > PREFILL_SIZES[-1] or len(batch.sequences) > PREFILL_CHUNKS:
            return self._model.decoder(rows.x, rows.positions, self._kv.step(batch), rows.adds, rows.add_rows)
        slot, chunks = self._kv.chunk_numbers(batch, rows=graph.size(batch.rows), chunks=PREFILL_CHUNKS)
        positions = rows.positions[:, None] if rows.positions.dim() == 1 else rows.positions.T
        return graph(rows.x, positions, self._sent(slot[:, None]), self._sent(chunks))

    def _pack(self, batch: Batch, graphed: Graphed | None, *, pages: bool) -> tuple[Tensor, _How]:
        """What the rows that yield an id need from the host; pages: with what attention needs."""
        sequences = batch.sequences
        last = [sequence.length - 1 for sequence in sequences]
        numbers = self._numbers.pack(
            sequences,
            last,
            [self._model.position(sequence, row) for sequence, row in zip(sequences, last, strict=True)],
            [self._model.numbers(sequence) for sequence in sequences],
            rows=len(sequences) if graphed is None else graphed.size(len(sequences)),
            pages=pages,
        )
        how = _How.of([sequence.sampling for sequence in sequences], [sequence.inner for sequence in sequences])
        if graphed is not None:
            how |= self._usual  # what nobody uses does no harm, and another graph would be captured while requests wait
        return self._sent(numbers), how

    def _sent(self, values: np.ndarray | Seq[int]) -> Tensor:
        return sent(values, self._model.device)

    # ------------------------------------------------------------ on the device: tensors only

    def _computed(self, x: Tensor, positions: Tensor, slot: Tensor, chunks: Tensor) -> Tensor:
        """x [N, H], positions int64 [N, axes], slot int64 [N, 1] and chunks as `PagedKV.chunk_step` has them -> hidden [N, H]."""
        where = positions[:, 0] if positions.shape[1] == 1 else positions.T
        return self._model.decoder(x, where, self._kv.chunk_step(slot[:, 0], chunks, most_rows=len(x)))

    def _decoded(self, numbers: Tensor, *, how: _How) -> Tensor:
        """The rows in the seats through decoder and head, and on; values int64 [B, K]."""
        row = self._numbers.unpack(numbers)
        kv = self._kv.decode_step(row.slot, row.length, row.table)
        return self._completed(self._model.decoder(self._seats.rows[row.seat], row.positions, kv), row, how)

    def _drawn(self, hidden: Tensor, numbers: Tensor, *, how: _How) -> Tensor:
        return self._completed(hidden, self._numbers.unpack(numbers), how)

    def _completed(self, hidden: Tensor, row: RowNumbers, how: _How) -> Tensor:
        """From hidden [B, H] to the next ids and whatever the stage makes of them: values int64 [B, K], -1 where there is no id."""
        seats, logits = self._seats, self._model.logits(hidden)
        if how.constrained:
            logits = seats.constrain(logits, row.seat, row.step)
        # No number, +inf, or every id banned: there is nothing to choose from.
        sound = logits.amax(-1).isfinite()
        ids = torch.where(sound, pick(logits, seats.draw(row.seat, row.step, how.filters)), 0)
        values, rows = self._model.complete(hidden, ids, seats.inner_draw(row.seat, row.step, how.inner), row.extra)
        # Last, so that a step that failed before has changed nothing.
        seats.rows.index_copy_(0, row.seat, rows)
        if how.constrained:
            seats.count(row.seat, ids)
        return torch.where(sound[:, None], values, _NO_ID)

    # ------------------------------------------------------------ what has been computed

    def _land(self) -> bool:
        """Take in the flights that have arrived."""
        landed = False
        while self._flights and self._flights[0].arrival.there:
            self._settle(self._flights.popleft())
            landed = True
        return landed

    def _settle(self, flight: _Flight) -> None:
        """Write the ids down, end who has stopped, and hand on what the others said.

        Anyone may have ended since the launch, and any listener may end any sequence, so each is looked at before something is
        done for it.
        """
        self._scheduler.commit(flight.batch)
        for sequence, values in zip(flight.drawn, flight.arrival.numpy(), strict=True):
            if sequence.finished:
                continue
            token = int(values[0])
            if token == _NO_ID:
                self._fail(sequence, EngineError("the logits of a step are not finite"))
                continue
            sequence.tokens.append(token)
            if self._stops(sequence, token):
                self._finish(sequence, "stop")
                continue
            sequence.carried = True
            try:
                sequence.on_output(self._model.heard(sequence, values))
            except torch.AcceleratorError:
                raise
            except Exception as error:
                # A listener's mistake ends its own request.
                self._fail(sequence, error)
                continue
            limit = min(self._scheduler.max_length, sequence.prompt_length + sequence.sampling.max_tokens)
            if sequence.length >= limit:
                self._finish(sequence, "length")

    def _stops(self, sequence: Sequence, token: int) -> bool:
        if token in sequence.sampling.stop_token_ids:
            return True
        return not sequence.sampling.ignore_eos and (token in sequence.stop_ids or token in self._model.stop_ids)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if sequence.finished:
            return
        if not isinstance(error, AuraError):
            logger.error("a request failed", exc_info=error)
            cause = error
            error = EngineError(f"a stage failed while it computed this request: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        self._finish(sequence, "error", error)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: Exception | None = None) -> None:
        if sequence.finished:
            return
        self._scheduler.remove(sequence, forget=reason == "error")
        sequence.finished = reason
        try:
            sequence.on_end(reason, error)
        except Exception:
            # It has ended and nobody else may suffer: all that can be done is to say so.
            logger.exception("the listener to the end of a sequence failed")


def _decodes(batch: Batch, index: int) -> bool:
    """Whether the sequence's part of the batch is one row that yields an id and can be taken from a seat."""
    sequence, start = batch.sequences[index], batch.starts[index]
    if batch.counts[index] != 1 or start + 1 != sequence.length:
        return False
    # A row of a medium may come with adds, for which a seat has no room.
    return sequence.carried or not any(span.start <= start < span.start + span.length for span in sequence.media)
