"""One autoregressive stage at work: schedule, forward, draw, hand on.

Knows sequences, tensors and the stage model. Does not know text or HTTP. Everything runs on the engine's thread.

    runner = ArRunner(model, pages=1000, page_size=16, ...)
    runner.add(sequence)
    while runner.busy:
        runner.step()          # calls on_output and on_end of the sequences
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aura_omni.counters import Counters
from aura_omni.engine.attention import PagedKV
from aura_omni.engine.graphs import Graphed, sizes_up_to
from aura_omni.engine.kv_cache import KVCache
from aura_omni.engine.sampler import Constraints, Draw, constrain, pick
from aura_omni.engine.scheduler import Scheduler
from aura_omni.engine.sequence import Batch, FinishReason, Sequence
from aura_omni.engine.stage_model import StageModel
from aura_omni.errors import AuraError, BadRequest, EngineError
from aura_omni.flow import Sampling

logger = logging.getLogger(__name__)

_NO_ID = -1  # drawn from logits that are not finite


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What came of one batch: its sequences that got a next id, their hidden rows [B, H], the ids int64 [B] and on the host."""

    batch: Batch
    sequences: list[Sequence]
    hidden: Tensor
    ids: Tensor
    tokens: list[int]


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
    ) -> None:
        """pages of page_size rows are taken on the model's device at once; the limits are `Scheduler`'s.

        graphs: steps of decoding are CUDA graphs, captured here; without, and in prefill, they run as they are written.
        """
        self._model = model
        self._cache = KVCache(pages, page_size, prefix_caching=prefix_caching)
        self._scheduler = Scheduler(
            self._cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
        )
        config = model.decoder_config
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
            self._drawable = frozenset(model.logits(probe)[0].isfinite().nonzero()[:, 0].tolist())
            self._vocabulary = model.logits(probe).shape[-1]
        self._graph = self._decode_graph(max_num_seqs, max_model_len) if graphs else None
        if self._graph is not None:
            self._graph.prepare()
        self._constraints: dict[Sequence, Constraints] = {}
        self._steps = self._computed_rows = self._cached_rows = 0
        self._prompt_tokens = self._generated_tokens = 0

    @property
    def busy(self) -> bool:
        """Whether a step would find something to do."""
        return self._scheduler.busy

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
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
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
        self._prompt_tokens += sequence.prompt_length
        sequence.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        if Constraints.needed(sampling):
            prompt = sequence.tokens if self._model.penalise_prompt else ()
            stop_ids = sequence.stop_ids | self._model.stop_ids | set(sampling.stop_token_ids)
            self._constraints[sequence] = Constraints(sampling, prompt=prompt, stop_ids=stop_ids)

    def abort(self, sequence: Sequence) -> None:
        """End the sequence with reason "cancelled", at any point. Nothing happens if it has ended or was refused by `add`."""
        if sequence.id >= 0:
            self._finish(sequence, "cancelled")

    def abort_all(self, error: Exception) -> None:
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            self._finish(sequence, "error", error)

    @torch.inference_mode()
    def step(self) -> bool:
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
        for drawn in self._compute_safely(batch):
            self._settle(drawn)
        return True

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()
        alive = {*self._scheduler.running, *self._scheduler.waiting}
        assert self._constraints.keys() <= alive, "penalties of an ended sequence are left over"

    def _compute_safely(self, batch: Batch) -> list[_Drawn]:
        """Compute the batch. If that fails, compute its sequences one by one, so that only those at fault end."""
        try:
            return [self._compute(batch)]
        except torch.AcceleratorError:
            raise  # the device itself has failed: no later step can succeed
        except Exception as error:
            # Whatever it is, it is one request's until shown otherwise.
            if len(batch.sequences) == 1:
                self._fail(batch.sequences[0], error)
                return []
            logger.warning("a step of %d sequences failed; they go on one by one", len(batch.sequences), exc_info=error)
        # A listener to the end of one may have ended another.
        return [
            drawn for alone in batch.split() if not alone.sequences[0].finished for drawn in self._compute_safely(alone)
        ]

    def _compute(self, batch: Batch) -> _Drawn:
        """From the rows of the batch to its next ids. Changes nothing but the rows of the pages."""
        sampled = batch.sampled()
        sequences = [batch.sequences[index] for index in sampled]
        hidden, logits = self._forward(batch, sampled)
        if not sampled:
            return _Drawn(batch, [], hidden, torch.empty(0, dtype=torch.int64), [])
        logits = constrain(logits, [self._constraints.get(sequence) for sequence in sequences])
        draw = Draw.of(
            [sequence.sampling for sequence in sequences],
            [sequence.seed for sequence in sequences],
            [sequence.generated for sequence in sequences],
            logits.device,
        )
        # No number, +inf, or every id banned: there is nothing to choose from.
        ids = torch.where(logits.amax(-1).isfinite(), pick(logits, draw), _NO_ID)
        return _Drawn(batch, sequences, hidden, ids, ids.tolist())

    def _forward(self, batch: Batch, sampled: list[int]) -> tuple[Tensor, Tensor]:
        """Hidden [B, H] and logits [B, V] of the last rows of the sequences that get a next id."""
        rows = self._model.rows(batch)
        if self._graph is not None and not rows.adds and max(batch.counts) == 1:
            numbers = torch.from_numpy(self._kv.decode_numbers(batch)).to(rows.x.device, non_blocking=True)
            positions = rows.positions[:, None] if rows.positions.dim() == 1 else rows.positions.T
            hidden, logits = self._graph(rows.x, positions, numbers)
            return (hidden, logits) if len(sampled) == len(batch.sequences) else (hidden[sampled], logits[sampled])
        hidden = self._model.decoder(rows.x, rows.positions, self._kv.step(batch), rows.adds, rows.add_rows)
        if not sampled:
            return hidden[:0], hidden[:0]
        ends = torch.tensor(batch.counts).cumsum(0) - 1
        hidden = hidden[ends[sampled].to(hidden.device)]
        return hidden, self._model.logits(hidden)

    def _decode_graph(self, max_num_seqs: int, max_model_len: int) -> Graphed:
        """Decoder and head of a step of one row per sequence."""
        config, device = self._model.decoder_config, self._model.device

        def decode(x: Tensor, positions: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
            where = positions[:, 0] if positions.shape[1] == 1 else positions.T
            hidden = self._model.decoder(x, where, self._kv.decode_step(numbers))
            return hidden, self._model.logits(hidden)

        widest = -(-max_model_len // self._kv.page_size)
        numbers = np.full((1, 2 + widest), self._kv.zero_page, np.int32)
        numbers[:, :2] = self._kv.idle_numbers
        axes = 3 if config.mrope_section is not None else 1
        pads = (
            torch.zeros(1, config.hidden, dtype=self._model.dtype, device=device),
            torch.zeros(1, axes, dtype=torch.int64, device=device),
            torch.from_numpy(numbers).to(device),
        )
        return Graphed(decode, pads=pads, sizes=sizes_up_to(max_num_seqs))

    def _settle(self, drawn: _Drawn) -> None:
        """Write the ids down, end who has stopped, and hand on what the others said.

        Any listener may end any sequence, so each is looked at again before something is done for it.
        """
        self._scheduler.commit(drawn.batch)
        going: list[int] = []
        for index, (sequence, token) in enumerate(zip(drawn.sequences, drawn.tokens, strict=True)):
            if sequence.finished:
                continue
            if token == _NO_ID:
                self._fail(sequence, EngineError("the logits of a step are not finite"))
                continue
            sequence.tokens.append(token)
            self._generated_tokens += 1
            if sequence in self._constraints:
                self._constraints[sequence].add(token)
            if self._stops(sequence, token):
                self._finish(sequence, "stop")
            else:
                going.append(index)
        going = [index for index in going if not drawn.sequences[index].finished]
        if going:
            self._hand_on(
                [drawn.sequences[index] for index in going],
                drawn.hidden if len(going) == len(drawn.tokens) else drawn.hidden[going],
                drawn.ids if len(going) == len(drawn.tokens) else drawn.ids[going],
            )

    def _hand_on(self, sequences: Seq[Sequence], hidden: Tensor, ids: Tensor) -> None:
        try:
            outputs = self._model.advance(sequences, hidden, ids)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            # Their states may have moved on or not, so there is no second try.
            for sequence in sequences:
                self._fail(sequence, error)
            return
        for sequence, output in zip(sequences, outputs, strict=True):
            if sequence.finished:
                continue
            try:
                sequence.on_output(output)
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
        self._constraints.pop(sequence, None)
        sequence.finished = reason
        try:
            sequence.on_end(reason, error)
        except Exception:
            # It has ended and nobody else may suffer: all that can be done is to say so.
            logger.exception("the listener to the end of a sequence failed")
