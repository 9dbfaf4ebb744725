"""Keys and values of all sequences of a stage, in pages on the device, and the one place that chooses a kernel.

kv = PagedKV(layers=28, pages=1000, page_size=16, kv_heads=8, head_dim=128, dtype=..., device=...)
hidden = decoder(x, positions, kv.step(batch))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
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
        """Who attends to whom in one step. The kernels are chosen here, by `device`."""
        if self.device.type == "cuda":
            return paged().PagedStep(self.keys, self.values, batch, self.zero_page)
        return _SdpaStep(self, batch)

    def decode_step(self, numbers: Tensor) -> KeyValues:
        """A step of one row per sequence, from a tensor alone and so fit for a CUDA graph: numbers as `decode_numbers`."""
        return paged().DecodeStep(self.keys, self.values, numbers)

    def decode_numbers(self, batch: Batch) -> np.ndarray:
        """int32 [B, 2 + P] of a batch of one row per sequence: slot of the row, rows to attend to, pages of the sequence."""
        widest = max(len(sequence.pages) for sequence in batch.sequences)
        numbers = np.full((len(batch.sequences), 2 + widest), self.zero_page, np.int32)
        for row, (sequence, start) in enumerate(zip(batch.sequences, batch.starts, strict=True)):
            pages = sequence.pages
            numbers[row, 0] = pages[start // self.page_size] * self.page_size + start % self.page_size
            numbers[row, 1] = start + 1
            numbers[row, 2 : 2 + len(pages)] = pages
        return numbers

    @property
    def idle_numbers(self) -> np.ndarray:
        """int32 [1, 2]: a row that belongs to nobody. On CUDA the zero page is only what padded rows write to."""
        return np.array([[self.zero_page * self.page_size, 1]], np.int32)


@cache
def paged() -> ModuleType:
    """`engine.paged_attention`, imported on first use: Triton only exists where CUDA does."""
    from aura_omni.engine import paged_attention

    return paged_attention


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
