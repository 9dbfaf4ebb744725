"""What the runner asks of an autoregressive stage, and what the engine asks of any stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aura_omni.counters import Counters
from aura_omni.engine.lane import sent_together
from aura_omni.engine.sampler import Draw
from aura_omni.engine.sequence import Batch, Sequence
from aura_omni.models.layers import KeyValues
from aura_omni.models.qwen3 import Decoder, DecoderConfig


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What the decoder reads in one step of N rows, as the host knows it: numbers that go to the device together and become
    embeddings there, because launching those one by one takes longer than computing them.

    ids int [N, k]: for `StageModel.embed`; positions int [N, 1] or [N, 3].
    media [M, 1 + adds, H], on the device: of rows `places` int [M], in any order. The first is added to their embeddings, the
    others to the residual stream, as `Decoder.forward` has it.
    """

    ids: np.ndarray
    positions: np.ndarray
    media: Tensor | None = None
    places: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """The same on the device: x [N, H]; positions int [N] or [3, N]; adds as `Decoder.forward` has them."""

    x: Tensor
    positions: Tensor
    adds: tuple[Tensor, ...] = ()
    add_rows: Tensor | None = None


def by_axis(positions: Tensor) -> Tensor:
    """Positions [N, axes] as a decoder has them."""
    return positions[:, 0] if positions.shape[1] == 1 else positions.T


class StageModel(Protocol):
    """The networks of one autoregressive stage. Lives on one device; used on the engine thread only."""

    decoder: Decoder
    decoder_config: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    stop_ids: frozenset[int]
    penalise_prompt: bool  # repetition penalty counts prompt tokens too (language models: yes, Talker: no)
    extra_numbers: int = 0  # how many `numbers` gives
    row_ids: int = 1  # how many ids of a row `rows` gives
    adds: int = 0  # how many adds rows of media have
    # [V, H], contiguous: the rows of ids, where those are all that `embed` and `complete` make of them.
    embeddings: Tensor | None = None

    def rows(self, batch: Batch) -> Rows:
        """What the batch's rows are made of: text, media, codes are the stage's business.

        Not asked for rows that `complete` has made. May be asked for the same rows again (after preemption, or when a step
        failed), so whatever makes a row stays with the sequence.
        """
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """ids int64 [N, row_ids] of `rows` -> [N, H], without media. Tensors only: on CUDA it becomes part of a graph."""
        ...

    def embedded(self, rows: Rows) -> Embedded:
        """The rows on the device, where no graph sees to it."""
        places = np.empty(0, np.int64) if rows.places is None else rows.places
        ids, positions, where = sent_together([rows.ids, rows.positions, places], self.device)
        x = self.embed(ids)
        if rows.media is None:
            return Embedded(x, by_axis(positions))
        first, *adds = rows.media.unbind(1)
        return Embedded(x.index_add(0, where, first), by_axis(positions), tuple(adds), where)

    def prepare(self, batch: Batch) -> bool:
        """Launch a part of what `rows` will need for a batch that nobody waits for yet; False: nothing is missing.

        Asked again and again, so that a batch whose media take long to launch is launched in pieces.
        """
        return False

    def prepare_graphs(self) -> None:
        """Capture CUDA graphs of what `rows` computes. Called once, in the stage's lane, if at all."""

    def forward(self, batch: Batch, kv: KeyValues) -> Tensor:
        """The batch's rows through the decoder: hidden [rows, H], final-normed."""
        rows = self.embedded(self.rows(batch))
        return self.decoder(rows.x, rows.positions, kv, rows.adds, rows.add_rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, H] -> [B, V], float32 or as the head computes it, with what the stage never allows already at -inf.

        V, the number of ids that the head knows, does not change.
        """
        ...

    def complete(self, hidden: Tensor, ids: Tensor, draw: Draw, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """What follows from the ids that were drawn: values int64 [B, K] for `heard`, and the next input rows [B, H].

        hidden [B, H] the ids int64 [B] were drawn from; draw: of whatever else is drawn (`Sequence.inner`); numbers int64
        [B, extra_numbers]. Tensors only, every shape known beforehand and no host round trip: on CUDA it becomes part of a
        graph. Runs also for a sequence that turns out to end with its id, so any id that the head knows must be harmless.

        Without a method of its own a stage says the id, and reads its row of `embeddings`.
        """
        assert self.embeddings is not None
        return ids[:, None], F.embedding(ids, self.embeddings)

    def position(self, sequence: Sequence, row: int) -> tuple[int, ...]:
        """Of one row of a sequence, on one axis, or on three where `decoder_config` has an mrope_section."""
        return (row,) * (1 if self.decoder_config.mrope_section is None else 3)

    def numbers(self, sequence: Sequence, *, ahead: int) -> tuple[int, ...]:
        """What `complete` needs from the host for the next step, or, ahead 1, for the one after it.

        Asked when the step is launched, more than once if that fails; ahead only if the stage foresees it.
        """
        return ()

    @property
    def in_step(self) -> bool:
        """Whether a step is launched behind the one under way for all of its sequences or for none: one that is not foreseen would
        wait for two."""
        return False

    def foresees(self, sequence: Sequence) -> bool:
        """Whether the step after the one under way can be launched already: `complete` will make its row as it has to be, and
        `numbers` knows what it needs."""
        return True

    def heard(self, sequence: Sequence, values: np.ndarray) -> Any:
        """Take note of what a step made, values int64 [K] of `complete`, and turn it into what on_output gets.

        Not called for the id that ends a sequence by itself. Clear `Sequence.carried` when the next row is not the one
        that `complete` made, and set `blocked` when it is not known yet.
        """
        ...


class Runner(Protocol):
    """A stage as the engine's loop sees it. All calls but `counters` come from the engine thread."""

    @property
    def flying(self) -> bool:
        """Whether a step is under way on the device, whose end a later call of `land` will find."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step is under way or would find something to do."""
        ...

    @property
    def awaited(self) -> bool:
        """Whether somebody who has got nothing of this stage yet waits for what is under way."""
        ...

    @property
    def reads(self) -> bool:
        """Whether the device computes rows of prompts, or will next."""
        return False

    @property
    def holds(self) -> bool:
        """Whether the last `launch` left something to do for later, for the sake of another runner: time alone may change that."""
        return False

    def land(self) -> bool:
        """Take in what has been computed, if it is there, and hand it on. Returns whether it was.

        Errors of one request end that request only, here and in `launch`. What is raised nevertheless means that the device or
        the runner can no longer be trusted, and stops the engine.
        """
        ...

    def launch(self) -> bool:
        """Start what can be computed next, without waiting. Returns whether there was anything.

        Asked thousands of times a second while the device computes: the answer that there is nothing to do must be quick.
        """
        ...

    def step(self) -> bool:
        """Both, for who drives one runner alone. Returns whether there was either to do."""
        landed = self.land()
        return self.launch() or landed

    def abort_all(self, error: Exception) -> None:
        """End every request with reason "error"; then wait until the device has no more work of this runner."""
        ...

    @property
    def counters(self) -> Counters:
        """From any thread; the numbers may be of two neighbouring steps."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if pages, slots or states are lost, shared wrongly or left over."""
        ...
