"""Attention over pieces that lie one after another: conversations in the decoder, pictures in the tower.

Nothing is padded to the longest, and a batch has one shape whatever it is made of, so that a step can be one CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pieces:
    """starts int32 [S + 1]: where each piece begins, and the end of all; pieces may be empty. longest: no piece has more rows."""

    starts: Tensor
    longest: int

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        """q, k, v [N, heads, D] -> [N, heads, D]; every row sees its own piece, with causal only what is not after it."""
        if q.is_cuda:
            half = v.dtype if v.dtype.itemsize == 2 else torch.bfloat16
            out: Tensor = torch.ops.aten._flash_attention_forward(
                q.to(half), k.to(half), v.to(half), self.starts, self.starts, self.longest, self.longest, 0.0, causal, False
            )[0]  # fmt: skip
            return out
        return self.one_by_one(q, k, v, causal=causal)

    def one_by_one(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        """The same in plain operations, one piece after another."""

        def of(x: Tensor, start: int, stop: int) -> Tensor:
            return x[None, start:stop].to(q.dtype).transpose(1, 2)

        seen = [
            F.scaled_dot_product_attention(of(q, *piece), of(k, *piece), of(v, *piece), is_causal=causal)
            for piece in pairwise(self.starts.tolist())
            if piece[0] < piece[1]
        ]
        return torch.cat(seen, dim=2).transpose(1, 2).squeeze(0)


class PackedKV:
    """What the decoder attends to: every row, the rows of its own conversation up to itself. Nothing is kept."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return self._pieces.attention(q, k, v, causal=True)
