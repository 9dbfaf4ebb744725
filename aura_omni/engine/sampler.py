"""From logits to tokens, on the device, without a host round trip.

The random numbers are a hash of (seed, step, stream, token id), so a request's tokens do not depend on who shares its
batch or on the device, and there is no generator state to carry. A draw is the argmax of logits plus Gumbel noise.

    ids = pick(logits, Draw.of(samplings, seeds, steps, device))
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from aura_omni.flow import Sampling

MASK = 0xFFFFFFFF  # of a seed: the hash is of 32 bits
_LEAST_TOP_K = 64


@dataclass(frozen=True, slots=True)
class Filters:
    """What some row of a batch uses. Known on the host, so that what nobody uses costs nothing and no draw waits for the device."""

    random: bool  # some temperature is above 0
    top_k: int  # at least the largest; 0: none
    top_p: bool
    min_p: bool

    @classmethod
    def of(cls, sampling: Iterable[Sampling]) -> Filters:
        random = [row for row in sampling if row.temperature > 0]
        largest = max((max(row.top_k, 0) for row in random), default=0)
        return cls(
            random=bool(random),
            # Few values, since steps that differ in it are different CUDA graphs.
            top_k=max(_LEAST_TOP_K, 1 << (largest - 1).bit_length()) if largest else 0,
            top_p=any(row.top_p < 1 for row in random),
            min_p=any(row.min_p > 0 for row in random),
        )

    def __or__(self, other: Filters) -> Filters:
        """What either uses; a row does not notice filters that only others use."""
        return Filters(
            self.random or other.random,
            max(self.top_k, other.top_k),
            self.top_p or other.top_p,
            self.min_p or other.min_p,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """How each row of a batch is drawn.

    floats    float32 [B, 3]: temperature (0: greedy), top_p, min_p
    integers  int64 [B, 3]: top_k (0: off), seed, step
    """

    floats: Tensor
    integers: Tensor
    filters: Filters

    @classmethod
    def of(cls, sampling: Seq[Sampling], seeds: Seq[int], steps: Seq[int], device: torch.device) -> Draw:
        integers = [
            (max(row.top_k, 0), seed & MASK, step) for row, seed, step in zip(sampling, seeds, steps, strict=True)
        ]
        return cls(
            floats=torch.tensor([(row.temperature, row.top_p, row.min_p) for row in sampling]).to(
                device, torch.float32
            ),
            integers=torch.tensor(integers).to(device),
            filters=Filters.of(sampling),
        )


def pick(logits: Tensor, draw: Draw, *, stream: int = 0) -> Tensor:
    """logits [B, V] (penalties and bans already applied) -> token ids int64 [B].

    Order: temperature, min-p, top-k (ties at the threshold stay), top-p; rows of temperature 0 take the first maximum.
    `stream` keeps draws of the same step apart (the code predictor's codebooks).
    """
    filters = draw.filters
    if not filters.random:
        return logits.argmax(-1)
    if not logits.is_cpu and not filters.top_p and not filters.min_p:
        kernels = fused()
        if logits.shape[-1] <= kernels.MOST_VOCABULARY:
            return kernels.pick_small(logits, draw.floats, draw.integers, top_k=filters.top_k > 0, stream=stream)[0]
    logits = logits.float()
    greedy = logits.argmax(-1)
    temperature, top_p, min_p = draw.floats.unbind(-1)
    top_k, seed, step = draw.integers.unbind(-1)
    scores = logits / temperature.clamp_min(1e-6)[:, None]
    if filters.min_p:
        floor = scores.max(-1, keepdim=True).values + min_p.log()[:, None]  # log 0 is -inf: keeps everything
        scores = scores.masked_fill(scores < floor, -torch.inf)
    if filters.top_k:
        width = min(scores.shape[-1], filters.top_k)
        best = scores.topk(width, dim=-1).values
        last = (top_k.clamp(1, width) - 1)[:, None]
        threshold = best.gather(-1, last).masked_fill((top_k <= 0)[:, None], -torch.inf)
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if filters.top_p:
        ordered, order = scores.sort(dim=-1, descending=True)
        weights = ordered.softmax(-1)
        # A token stays while the weight before it is short of top_p; the best one does even when top_p is 0.
        beyond = (weights.cumsum(-1) - weights >= top_p[:, None]) & (top_p[:, None] < 1)
        beyond[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    chosen = (scores + _gumbel(seed, step, stream, scores.shape[-1])).argmax(-1)
    return torch.where(temperature > 0, chosen, greedy)


def pick_row(logits: Tensor, draw: Draw, table: Tensor, *, stream: int = 0) -> tuple[Tensor, Tensor]:
    """`pick`, and the rows [B, W] of table [V, W] that the ids name."""
    filters = draw.filters
    small = not logits.is_cpu and filters.random and not filters.top_p and not filters.min_p
    if small and logits.shape[-1] <= fused().MOST_VOCABULARY:
        return fused().pick_small(
            logits, draw.floats, draw.integers, top_k=filters.top_k > 0, stream=stream, table=table
        )
    ids = pick(logits, draw, stream=stream)
    return ids, F.embedding(ids, table)


@cache
def fused() -> ModuleType:
    """`engine.fused_sampler`, imported on first use: Triton only exists where CUDA does."""
    from aura_omni.engine import fused_sampler

    return fused_sampler


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (multiply-xorshift, constants of "lowbias32" by C. Wellons, public domain) in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def _gumbel(seed: Tensor, step: Tensor, stream: int, size: int) -> Tensor:
    """Standard Gumbel noise float32 [B, size]."""
    row = _mix(_mix((seed + 0x9E3779B9) & MASK) ^ _mix((step * 64 + stream + 1) & MASK))
    bits = _mix(row[:, None] ^ _mix(torch.arange(size, device=seed.device) + 0x51ED270B)) >> 9
    uniform = (bits.float() + 0.5) * 2.0**-23  # inside (0, 1): 23 bits plus a half are exact in float32
    return -(-uniform.log()).log()
