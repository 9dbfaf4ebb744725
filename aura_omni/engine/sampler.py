"""From logits to tokens, on the device, without a host round trip.

The random numbers are a hash of (seed, step, stream, token id), so a request's tokens do not depend on who shares its
batch or on the device, and there is no generator state to carry. A draw is the argmax of logits plus Gumbel noise.

    ids = pick(constrain(logits, constraints), Draw.of(samplings, seeds, steps, device))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from aura_omni.flow import Sampling

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Filters:
    """What some row of a batch uses. Known on the host, so that what nobody uses costs nothing and no draw waits for the device."""

    random: bool  # some temperature is above 0
    top_k: int  # the largest; 0: none
    top_p: bool
    min_p: bool


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
        random = [row for row in sampling if row.temperature > 0]
        return cls(
            floats=torch.tensor([(row.temperature, row.top_p, row.min_p) for row in sampling]).to(
                device, torch.float32
            ),
            integers=torch.tensor(
                [
                    (max(row.top_k, 0), seed & _MASK, step)
                    for row, seed, step in zip(sampling, seeds, steps, strict=True)
                ]
            ).to(device),
            filters=Filters(
                random=bool(random),
                top_k=max((max(row.top_k, 0) for row in random), default=0),
                top_p=any(row.top_p < 1 for row in random),
                min_p=any(row.min_p > 0 for row in random),
            ),
        )


class Constraints:
    """What bias, bans and penalties do to one request's logits, given what it has said so far. Plain Python."""

    def __init__(self, sampling: Sampling, *, prompt: Iterable[int], stop_ids: Iterable[int]) -> None:
        """prompt: the ids that the repetition penalty counts besides the outputs (none for the Talker)."""
        self.sampling = sampling
        self.stop_ids = frozenset(stop_ids)
        self.outputs: Counter[int] = Counter()
        self.seen = set(prompt) if sampling.repetition_penalty != 1 else set()
        self._generated = 0

    @staticmethod
    def needed(sampling: Sampling) -> bool:
        return bool(
            sampling.logit_bias
            or sampling.min_tokens > 0
            or sampling.repetition_penalty != 1
            or sampling.presence_penalty
            or sampling.frequency_penalty
        )

    def add(self, token: int) -> None:
        """The request has said `token`."""
        self._generated += 1
        self.outputs[token] += 1
        if self.sampling.repetition_penalty != 1:
            self.seen.add(token)

    def banned(self) -> frozenset[int]:
        """Ids that may not come next."""
        return self.stop_ids if self._generated < self.sampling.min_tokens else frozenset()

    def repeated(self) -> dict[int, float]:
        """Repetition penalty of each id that was seen."""
        return dict.fromkeys(self.seen, self.sampling.repetition_penalty)

    def repelled(self) -> dict[int, float]:
        """What presence and frequency penalties take from the logit of each id that was said."""
        presence, frequency = self.sampling.presence_penalty, self.sampling.frequency_penalty
        if not (presence or frequency):
            return {}
        return {token: presence + frequency * count for token, count in self.outputs.items()}


def constrain(logits: Tensor, constraints: Seq[Constraints | None]) -> Tensor:
    """logits float32 [B, V] -> the same with each row's constraints, None being none; the input is not changed.

    Order as in vLLM: bias, bans, repetition (positive logits divided, negative multiplied), presence and frequency.
    """
    if all(row is None for row in constraints):
        return logits
    logits = logits.clone()

    def entries(of: Callable[[Constraints], Mapping[int, float]]) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
        """(row, id) of every entry, and its value. Ids that the head does not have (a prompt may hold some) drop out."""
        found = [
            (row, token, value)
            for row, applied in enumerate(constraints)
            if applied is not None
            for token, value in of(applied).items()
            if 0 <= token < logits.shape[-1]
        ]
        if not found:
            return None
        rows, tokens, values = zip(*found, strict=True)
        where = torch.tensor((rows, tokens), device=logits.device)
        return (where[0], where[1]), torch.tensor(values, dtype=torch.float32, device=logits.device)

    if bias := entries(lambda row: row.sampling.logit_bias):
        logits[bias[0]] += bias[1]
    if bans := entries(lambda row: dict.fromkeys(row.banned(), -torch.inf)):
        logits[bans[0]] = bans[1]
    if repeated := entries(Constraints.repeated):
        old = logits[repeated[0]]
        logits[repeated[0]] = torch.where(old > 0, old / repeated[1], old * repeated[1])
    if repelled := entries(Constraints.repelled):
        logits[repelled[0]] -= repelled[1]
    return logits


def pick(logits: Tensor, draw: Draw, *, stream: int = 0) -> Tensor:
    """logits float32 [B, V] (penalties and bans already applied) -> token ids int64 [B].

    Order: temperature, min-p, top-k (ties at the threshold stay), top-p; rows of temperature 0 take the first maximum.
    `stream` keeps draws of the same step apart (the code predictor's codebooks).
    """
    filters = draw.filters
    if not filters.random:
        return logits.argmax(-1)
    if logits.is_cuda and not filters.top_p and not filters.min_p:
        kernels = fused()
        if logits.shape[-1] <= kernels.MOST_VOCABULARY:
            return kernels.pick_small(logits, draw.floats, draw.integers, top_k=filters.top_k > 0, stream=stream)
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
        beyond = weights.cumsum(-1) - weights >= top_p[:, None]
        beyond[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    chosen = (scores + _gumbel(seed, step, stream, scores.shape[-1])).argmax(-1)
    return torch.where(temperature > 0, chosen, greedy)


@cache
def fused() -> ModuleType:
    """`engine.fused_sampler`, imported on first use: Triton only exists where CUDA does."""
    from aura_omni.engine import fused_sampler

    return fused_sampler


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (multiply-xorshift, constants of "lowbias32" by C. Wellons, public domain) in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _gumbel(seed: Tensor, step: Tensor, stream: int, size: int) -> Tensor:
    """Standard Gumbel noise float32 [B, size]."""
    row = _mix(_mix((seed + 0x9E3779B9) & _MASK) ^ _mix((step * 64 + stream + 1) & _MASK))
    bits = _mix(row[:, None] ^ _mix(torch.arange(size, device=seed.device) + 0x51ED270B)) >> 9
    uniform = (bits.float() + 0.5) * 2.0**-23  # inside (0, 1): 23 bits plus a half are exact in float32
    return -(-uniform.log()).log()
