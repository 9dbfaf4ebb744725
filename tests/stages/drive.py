"""A stage driven without the engine: prefill in parts of any size, then steps of the whole batch, keys kept densely."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aura_omni.engine.sampler import Draw, pick
from aura_omni.engine.sequence import Batch, Sequence


class PlainKV:
    """Keys and values per sequence; attends one sequence after another."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.batch = Batch((), (), ())

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs, row = [], 0
        for sequence, start, count in zip(self.batch.sequences, self.batch.starts, self.batch.counts, strict=True):
            rows, key = slice(row, row + count), (id(sequence), layer)
            keys, values = k[rows], v[rows]
            if start:
                keys = torch.cat((self._kept[key][0][:start], keys))
                values = torch.cat((self._kept[key][1][:start], values))
            self._kept[key] = (keys, values)
            mask = torch.ones(count, start + count, dtype=torch.bool).tril(start)
            out = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=mask, enable_gqa=True
            )
            outs.append(out.transpose(0, 1))
            row += count
        return torch.cat(outs)


def sampled_ids(stage: Any, sequences: Seq[Sequence], hidden: Tensor) -> Tensor:
    logits = stage.logits(hidden)
    for row, sequence in zip(logits, sequences, strict=True):
        penalty = sequence.sampling.repetition_penalty
        for token in set(sequence.tokens if stage.penalise_prompt else sequence.outputs):
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        if sequence.generated < sequence.sampling.min_tokens:
            row[list(sequence.stop_ids)] = -torch.inf
    draw = Draw.of(
        [s.sampling for s in sequences], [s.seed for s in sequences], [s.generated for s in sequences], logits.device
    )
    return pick(logits, draw)


def completed(stage: Any, sequences: Seq[Sequence], hidden: Tensor, ids: Tensor) -> np.ndarray:
    """What the stage makes of the ids: int64 [B, K]. The rows that it makes too are left; the next step asks for them."""
    draw = Draw.of(
        [s.inner for s in sequences], [s.seed for s in sequences], [s.generated for s in sequences], hidden.device
    )
    numbers = torch.tensor([stage.numbers(s, ahead=0) for s in sequences], dtype=torch.int64)
    values, _ = stage.complete(hidden, ids, draw, numbers)
    return values.numpy()


def run(stage: Any, sequences: Seq[Sequence], *, rows_per_step: int = 10**6) -> None:
    """To the end of each sequence; every one is prefilled alone, then all are stepped together."""
    kv, waiting = PlainKV(), list(sequences)
    while waiting:
        parts = []
        for sequence in waiting:
            parts.append((sequence, sequence.computed, min(rows_per_step, sequence.length - sequence.computed)))
        batch = kv.batch = Batch(*(tuple(column) for column in zip(*parts, strict=True)))  # type: ignore[arg-type]
        hidden = stage.forward(batch, kv)
        last = torch.tensor(batch.counts).cumsum(0) - 1
        for sequence, _, count in parts:
            sequence.computed += count
        done = batch.sampled()
        if not done:
            continue
        sampled = [batch.sequences[index] for index in done]
        ids = sampled_ids(stage, sampled, hidden[last[done]])
        going = [n for n, s in enumerate(sampled) if int(ids[n]) not in s.stop_ids]
        for n, values in zip(going, completed(stage, sampled, hidden[last[done]], ids)[going], strict=True):
            sampled[n].tokens.append(int(ids[n]))
            sampled[n].on_output(stage.heard(sampled[n], values))
        for n, sequence in enumerate(sampled):
            if n not in going:
                sequence.finished = "stop"
            elif sequence.generated == sequence.sampling.max_tokens:
                sequence.finished = "length"
            if sequence.finished:
                sequence.on_end(sequence.finished, None)
        waiting = [sequence for sequence in waiting if not sequence.finished]
