"""Keys and values of all sequences of a stage, in pages on the device, and the one place that chooses a kernel.

kv = PagedKV(layers=28, pages=1000, page_size=16, kv_heads=8, head_dim=128, most_rows=64, dtype=..., device=...)
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

from aura_omni.engine.lane import sent
from aura_omni.engine.sequence import Batch
from aura_omni.models import fp8
from aura_omni.models.layers import KeyValues


class PagedKV:
    """keys, values: [layers, pages + 1, page_size, kv_heads, head_dim]. Which rows a page holds is `kv_cache`'s business.

    In eight bits, scales is float32 [layers, pages + 1, page_size, kv_heads, 2]: of each key and of each value. Rows are rounded when
    they are stored, and all steps see them as they are stored, their own among them.

    The page after the last belongs to no sequence: a shorter one is padded with it, and padded rows of a step write there.
    Rows of other sequences would not do, as a weight of zero times infinity is not zero.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        most_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        eight_bits: bool = False,
    ) -> None:
        """most_rows: of a step of decoding; eight_bits: of keys and values, which are of `dtype` otherwise."""
        shape = (layers, pages + 1, page_size, kv_heads, head_dim)
        kept = fp8.FP8 if eight_bits else dtype
        self.keys = torch.zeros(shape, dtype=kept, device=device)
        self.values = torch.zeros(shape, dtype=kept, device=device)
        self.scales = torch.zeros(*shape[:-1], 2, dtype=torch.float32, device=device) if eight_bits else None
        self._arrived = torch.zeros(most_rows * kv_heads, dtype=torch.int32, device=device)
        self.page_size, self.spare_page, self.device = page_size, pages, device

    def step(self, batch: Batch) -> KeyValues:
        """Who attends to whom in a step of any rows."""
        slot, chunks = self.chunk_numbers(batch, rows=batch.rows, chunks=len(batch.sequences))
        return self.chunk_step(sent(slot, self.device), sent(chunks, self.device), most_rows=max(batch.counts))

    def chunk_numbers(self, batch: Batch, *, rows: int, chunks: int) -> tuple[np.ndarray, np.ndarray]:
        """For `chunk_step`: slot int64 [rows] and chunks int32 [chunks, 3 + P]; what the batch does not fill is nobody's."""
        size, widest = self.page_size, max(len(sequence.pages) for sequence in batch.sequences)
        slot = np.full(rows, self.spare_page * size, np.int64)
        numbers = np.zeros((chunks, 3 + widest), np.int32)
        numbers[:, 3:] = self.spare_page
        begin = 0
        for row, (sequence, start, count) in enumerate(zip(batch.sequences, batch.starts, batch.counts, strict=True)):
            numbers[row, :3] = begin, count, start
            numbers[row, 3 : 3 + len(sequence.pages)] = sequence.pages
            places = np.arange(start, start + count)
            slot[begin : begin + count] = numbers[row, 3 + places // size].astype(np.int64) * size + places % size
            begin += count
        return slot, numbers

    def chunk_step(self, slot: Tensor, chunks: Tensor, *, most_rows: int) -> KeyValues:
        """A step of rows of several sequences, from tensors and, on CUDA, fit for a graph. The kernels are chosen here.

        slot int64 [N]: where the rows' keys go; chunks int32 [C, 3 + P]: of each sequence its first row in the step, how many
        follow, the number of the first in the sequence, and its pages. most_rows: no chunk has more.
        """
        if self.device.type != "cpu":
            return paged().PagedStep(self.keys, self.values, slot, chunks, most_rows, scales=self.scales)
        return _SdpaStep(self, slot, chunks)

    def decode_step(self, slot: Tensor, length: Tensor, table: Tensor) -> KeyValues:
        """A step of one row per sequence, from tensors alone and so, on CUDA, fit for a graph.

        slot int64 [B]: where the rows' keys go; length int32 [B]: rows that each attends to, its own included; table int32
        [B, P]: pages of the sequences, anything beyond them.
        """
        if self.device.type != "cpu":
            return paged().DecodeStep(
                self.keys, self.values, self._arrived, slot, length, table, scales=self.scales
            )  # fmt: skip
        return _SdpaDecode(self, slot, length, table)


class Joined:
    """A `models.layers.KeyValues` of a step whose first rows are one of each sequence, as `PagedKV.decode_step` has them, and the
    others chunks, as `PagedKV.chunk_step` has them."""

    def __init__(self, single: KeyValues, chunks: KeyValues, *, singles: int) -> None:
        self._single, self._chunks, self._singles = single, chunks, singles

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [(tensor[: self._singles], tensor[self._singles :]) for tensor in (q, k, v)]
        single, chunks = zip(*parts, strict=True)
        return torch.cat((self._single.attend(layer, *single), self._chunks.attend(layer, *chunks)))


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


class _Rows:
    """Keys or values of all layers, for plain PyTorch."""

    def __init__(self, rows: Tensor, scales: Tensor | None) -> None:
        """rows [layers, pages, page_size, kv_heads, D]; scales [layers, pages, page_size, kv_heads], of eight bits."""
        self._rows, self._scales = rows.flatten(1, 2), None if scales is None else scales.flatten(1, 2)

    def store(self, layer: int, slots: Tensor, new: Tensor) -> None:
        """new [N, kv_heads, D] into slots int64 [N]."""
        rows = self._rows[layer]
        if self._scales is None:
            rows.index_copy_(0, slots, new)
            return
        values, scale = fp8.quantized(new.flatten(0, 1))
        # PyTorch moves eight bits on a CPU as integers only.
        rows.view(torch.uint8).index_copy_(0, slots, values.view(torch.uint8).view_as(new))
        self._scales[layer].index_copy_(0, slots, scale.view(new.shape[:2]))

    def gather(self, layer: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Those of slots [B, n], in the dtype of a step: [B, kv_heads, n, D]."""
        # index_select is four times as fast as rows[slots] on a CPU.
        found = self._rows[layer].index_select(0, slots.flatten())
        if self._scales is not None:
            scale = self._scales[layer].index_select(0, slots.flatten())
            found = (found.float() * scale[..., None]).to(dtype)
        return found.unflatten(0, slots.shape).transpose(1, 2)


def _rows_of(kv: PagedKV) -> tuple[_Rows, _Rows]:
    """Keys and values."""
    of_keys, of_values = (None, None) if kv.scales is None else kv.scales.unbind(-1)
    return _Rows(kv.keys, of_keys), _Rows(kv.values, of_values)


class _SdpaStep:
    """PyTorch's own attention, one sequence after another. All index tensors are made once per step."""

    def __init__(self, kv: PagedKV, slot: Tensor, chunks: Tensor) -> None:
        self._keys, self._values = _rows_of(kv)
        self._written = slot
        self._stretches: list[_Stretch] = []
        for numbers in chunks:
            begin, count, start = numbers[:3].tolist()
            if count:
                slots = _slots(numbers[None, 3:], kv.page_size)[:, : start + count]
                mask = torch.ones(count, start + count, dtype=torch.bool, device=kv.device).tril(start)
                self._stretches.append(_Stretch(begin, begin + count, slots, mask if start else None))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `KeyValues.attend`."""
        self._keys.store(layer, self._written, k)
        self._values.store(layer, self._written, v)
        out = torch.zeros_like(q)  # rows that are nobody's are written to the spare page, and must be finite there
        for stretch in self._stretches:
            attended = F.scaled_dot_product_attention(
                q[stretch.begin : stretch.end].transpose(0, 1).unsqueeze(0),
                self._keys.gather(layer, stretch.slots, q.dtype),
                self._values.gather(layer, stretch.slots, q.dtype),
                attn_mask=stretch.mask,
                is_causal=stretch.mask is None,
                enable_gqa=True,
            )
            out[stretch.begin : stretch.end] = attended.squeeze(0).transpose(0, 1)
        return out


class _SdpaDecode:
    """PyTorch's own attention for one row of each sequence, all together, padded to the longest."""

    def __init__(self, kv: PagedKV, slot: Tensor, length: Tensor, table: Tensor) -> None:
        self._keys, self._values = _rows_of(kv)
        self._written = slot
        longest = int(length.max())
        inside = torch.arange(longest, device=kv.device) < length[:, None]
        slots = _slots(table, kv.page_size)[:, :longest]
        self._slots = torch.where(inside, slots, kv.spare_page * kv.page_size)
        self._mask = inside[:, None, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `KeyValues.attend`."""
        self._keys.store(layer, self._written, k)
        self._values.store(layer, self._written, v)
        # The heads that share a key head are queries of one row: all see the same rows, and no key is copied for them.
        attended = F.scaled_dot_product_attention(
            q.unflatten(1, (k.shape[1], -1)),
            self._keys.gather(layer, self._slots, q.dtype),
            self._values.gather(layer, self._slots, q.dtype),
            attn_mask=self._mask,
        )
        return attended.flatten(1, 2)


def _slots(table: Tensor, page_size: int) -> Tensor:
    """Pages int [B, P] -> their slots int64 [B, P * page_size]. A slot is a row of the flattened pages."""
    return (table[:, :, None].long() * page_size + torch.arange(page_size, device=table.device)).flatten(1)
