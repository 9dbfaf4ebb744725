"""Keys and values of all sequences of a stage, in pages on the device, and the one place that chooses a kernel.

kv = PagedKV(layers=28, pages=1000, page_size=16, kv_heads=8, head_dim=128, dtype=..., device=...)
hidden = decoder(x, positions, kv.step(batch))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aura_omni.engine.sequence import Batch
from aura_omni.models.layers import KeyValues


class PagedKV:
    """keys, values: [layers, pages + 1, page_size, kv_heads, head_dim]. Which rows a page holds is `kv_cache`'s business.

    The page after the last is never written and stays zero: what a shorter sequence is padded with. Rows of other
    sequences would not do, as a weight of zero times infinity is not zero.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, pages + 1, page_size, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size, self.zero_page, self.device = page_size, pages, device

    def step(self, batch: Batch) -> KeyValues:
        """Who attends to whom in one step. A kernel library for CUDA is chosen here, by `device`."""
        return _SdpaStep(self, batch)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Rows [begin, end) of the step are one sequence's, which attends to `slots` int64 [1, start + end - begin]."""

    begin: int
    end: int
    slots: Tensor
    mask: Tensor | None  # bool [rows, slots]; None when they start the sequence


class _SdpaStep:
    """PyTorch's own attention: rows of one-row sequences together, padded to the longest; the rest one by one.

    A slot is a row of the flattened pages: page * page_size + row in page. All index tensors are made once per step.
    """

    def __init__(self, kv: PagedKV, batch: Batch) -> None:
        self._keys, self._values = kv.keys.flatten(1, 2), kv.values.flatten(1, 2)
        self._stretches: list[_Stretch] = []
        singles: list[int] = []  # sequences with one row in the step
        single_rows: list[int] = []  # and which row that is
        written: list[Tensor] = []
        widest = max(len(sequence.pages) for sequence in batch.sequences)
        table = torch.tensor(
            [sequence.pages + [kv.zero_page] * (widest - len(sequence.pages)) for sequence in batch.sequences]
        )
        slots = (table[:, :, None] * kv.page_size + torch.arange(kv.page_size)).flatten(1)
        begin = 0
        for index, (start, count) in enumerate(zip(batch.starts, batch.counts, strict=True)):
            written.append(slots[index, start : start + count])
            if count == 1:
                singles.append(index)
                single_rows.append(begin)
            else:
                mask = torch.ones(count, start + count, dtype=torch.bool, device=kv.device).tril(start)
                context = slots[index : index + 1, : start + count].to(kv.device)
                self._stretches.append(_Stretch(begin, begin + count, context, mask if start else None))
            begin += count
        self._written = torch.cat(written).to(kv.device)
        self._single_rows = torch.tensor(single_rows, dtype=torch.int64, device=kv.device)
        if singles:
            lengths = torch.tensor([batch.starts[index] + 1 for index in singles])
            longest = int(lengths.max())
            inside = torch.arange(longest) < lengths[:, None]
            context = torch.where(inside, slots[singles, :longest], kv.zero_page * kv.page_size)
            self._single_slots = context.to(kv.device)
            self._single_mask = inside[:, None, None].to(kv.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `KeyValues.attend`."""
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(0, self._written, k)
        values.index_copy_(0, self._written, v)
        out = torch.empty_like(q)
        if len(self._single_rows):
            # The heads that share a key head are queries of one row: all see the same rows, and no key is copied for them.
            attended = F.scaled_dot_product_attention(
                q[self._single_rows].unflatten(1, (k.shape[1], -1)),
                _gather(keys, self._single_slots),
                _gather(values, self._single_slots),
                attn_mask=self._single_mask,
            )
            out[self._single_rows] = attended.flatten(1, 2)
        for stretch in self._stretches:
            attended = F.scaled_dot_product_attention(
                q[stretch.begin : stretch.end].transpose(0, 1).unsqueeze(0),
                _gather(keys, stretch.slots),
                _gather(values, stretch.slots),
                attn_mask=stretch.mask,
                is_causal=stretch.mask is None,
                enable_gqa=True,
            )
            out[stretch.begin : stretch.end] = attended.squeeze(0).transpose(0, 1)
        return out


def _gather(rows: Tensor, slots: Tensor) -> Tensor:
    """rows [S, kv_heads, D], slots [B, n] -> [B, kv_heads, n, D]."""
    # index_select is four times as fast as rows[slots] on a CPU.
    return rows.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2)
