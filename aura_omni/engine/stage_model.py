"""What the runner asks of an autoregressive stage, and what the engine asks of any stage."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from aura_omni.counters import Counters
from aura_omni.engine.sequence import Batch, Sequence
from aura_omni.models.layers import KeyValues
from aura_omni.models.qwen3 import Decoder, DecoderConfig


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What the decoder reads in one step: x [N, H]; positions int64 [N] or [3, N]; adds as `Decoder.forward` has them."""

    x: Tensor
    positions: Tensor
    adds: tuple[Tensor, ...] = ()
    add_rows: Tensor | None = None


class StageModel(Protocol):
    """The networks of one autoregressive stage. Lives on one device; used on the engine thread only."""

    decoder: Decoder
    decoder_config: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    stop_ids: frozenset[int]
    penalise_prompt: bool  # repetition penalty counts prompt tokens too (language models: yes, Talker: no)

    def rows(self, batch: Batch) -> Rows:
        """Embed the batch's rows: text, media, codes are the stage's business.

        May be asked for the same rows again (after preemption, or when a step failed), so whatever makes a row stays with
        the sequence.
        """
        ...

    def forward(self, batch: Batch, kv: KeyValues) -> Tensor:
        """The batch's rows through the decoder: hidden [rows, H], final-normed."""
        rows = self.rows(batch)
        return self.decoder(rows.x, rows.positions, kv, rows.adds, rows.add_rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, H] -> float32 [B, V], with what the stage never allows already at -inf.

        V, the number of ids that the head knows, does not change.
        """
        ...

    def advance(self, sequences: Seq[Sequence], hidden: Tensor, ids: Tensor) -> list[Any]:
        """After sampling: hidden [B, H] and ids int64 [B] of the sequences that go on (not of those that just stopped).

        Returns what each sequence's on_output gets. The Talker runs its code predictor here and prepares the next row.
        """
        ...


class Runner(Protocol):
    """A stage as the engine's loop sees it. All calls but `counters` come from the engine thread."""

    def step(self) -> bool:
        """Do one step if there is work. Returns whether there was. Errors of one request end that request only.

        What is raised nevertheless means that the device or the runner can no longer be trusted, and stops the engine.
        """
        ...

    def abort_all(self, error: Exception) -> None:
        """End every request with reason "error"."""
        ...

    @property
    def counters(self) -> Counters:
        """From any thread; the numbers may be of two neighbouring steps."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if pages, slots or states are lost, shared wrongly or left over."""
        ...
