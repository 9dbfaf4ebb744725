"""All that a step of one row per sequence gets from the host, as one array: one copy to the device, whatever the stage.

numbers = StepNumbers(axes=1, extra=1, seats=8, page_size=16, spare_page=1000, most_pages=256)
array = numbers.pack(sequences, starts, positions, extras, rows=4)     # int32 [4, n]
row = numbers.unpack(tensor)                                           # on the device
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
from torch import Tensor

from aura_omni.engine.sequence import Sequence
from aura_omni.models.layers import Rope

_SEAT, _STEP, _SLOT, _LENGTH, _FIRST = range(5)


@cache
def kernels() -> ModuleType:
    """`engine.fused_numbers`, imported on first use: Triton only exists where CUDA does."""
    from aura_omni.engine import fused_numbers

    return fused_numbers


@dataclass(frozen=True, slots=True, eq=False)
class RowNumbers:
    """seat, step int64 [B]: ids said before this one; positions int64 [B] or [3, B]; extra int64 [B, k] of the stage.

    slot int64 [B]: where the row's keys go; length int32 [B]: rows to attend to; table int32 [B, P]: pages.
    """

    seat: Tensor
    step: Tensor
    positions: Tensor
    extra: Tensor
    slot: Tensor
    length: Tensor
    table: Tensor


class StepNumbers:
    def __init__(self, *, axes: int, extra: int, seats: int, page_size: int, spare_page: int, most_pages: int) -> None:
        """axes: positions of a row, 1 or 3; extra: numbers that the stage adds; most_pages: of a sequence."""
        self._axes = axes
        self.width = _FIRST + axes + extra  # of a row without its pages
        self._page_size, self._spare_page = page_size, spare_page
        # Pages of the sequence in each seat, and how many of them are written here: they only grow while it sits.
        self._pages = np.full((seats, most_pages), spare_page, np.int32)
        self._known = [0] * seats
        self._nobody = np.zeros(self.width, np.int32)
        self._nobody[[_SEAT, _SLOT, _LENGTH]] = seats, spare_page * page_size, 1

    def seated(self, seat: int) -> None:
        """Someone new sits here."""
        self._known[seat] = 0

    def nobody(self) -> np.ndarray:
        """int32 [1, n]: a row of full width that belongs to no sequence. It writes to the spare page and the spare seat."""
        pages = np.full(self._pages.shape[1], self._spare_page, np.int32)
        return np.concatenate((self._nobody, pages))[None]

    def pack(
        self,
        sequences: Seq[Sequence],
        starts: Seq[int],
        positions: Seq[Seq[int]],
        extras: Seq[Seq[int]],
        *,
        rows: int,
        pages: bool = True,
    ) -> np.ndarray:
        """int32 [rows, n] of row starts[i] of sequences[i], at positions[i]; rows beyond them are nobody's.

        pages: with what attention needs.
        """
        size, count = self._page_size, len(sequences)
        widest = max(len(sequence.pages) for sequence in sequences) if pages else 0
        array = np.empty((rows, self.width + widest), np.int32)
        array[count:, : self.width] = self._nobody
        array[count:, self.width :] = self._spare_page
        array[:count, : self.width] = [
            (
                sequence.seat,
                start + 1 - sequence.prompt_length,
                sequence.pages[start // size] * size + start % size,
                start + 1,
                *position,
                *extra,
            )
            for sequence, start, position, extra in zip(sequences, starts, positions, extras, strict=True)
        ]
        if pages:
            self._write_pages(sequences)
            array[:count, self.width :] = self._pages[[sequence.seat for sequence in sequences], :widest]
        return array

    def unpack(self, numbers: Tensor) -> RowNumbers:
        """numbers int32 [B, n] as packed. Tensors only: it may be recorded in a CUDA graph."""
        columns = numbers[:, : self.width].T.long().contiguous()
        return self._named(columns, numbers[:, _LENGTH].contiguous(), numbers[:, self.width :])

    def begun(self, numbers: Tensor, rows: Tensor, rope: Rope) -> tuple[RowNumbers, Tensor, Tensor, Tensor]:
        """`unpack`, and what else a step begins with: x [B, H], the rows [seats + 1, H] of its seats, and cos, sin [B, D] of its positions.

        On CUDA in one launch.
        """
        if numbers.is_cpu:
            row = self.unpack(numbers)
            return row, rows[row.seat], *rope.tables(row.positions, rows.dtype)
        columns, length, table, x, cos, sin = kernels().begun(
            numbers, rows, *rope.on(numbers.device), width=self.width, columns=(_SEAT, _LENGTH, _FIRST)
        )
        return self._named(columns, length, table), x, cos, sin

    @staticmethod
    def who(numbers: Tensor) -> tuple[Tensor, Tensor]:
        """seat, step int32 [B], of equal strides, without a launch."""
        return numbers[:, _SEAT], numbers[:, _STEP]

    def _named(self, columns: Tensor, length: Tensor, table: Tensor) -> RowNumbers:
        """columns int64 [width, B]."""
        positions = columns[_FIRST : _FIRST + self._axes]
        return RowNumbers(
            seat=columns[_SEAT],
            step=columns[_STEP],
            positions=positions[0] if self._axes == 1 else positions,
            extra=columns[_FIRST + self._axes :].T,
            slot=columns[_SLOT],
            length=length,
            table=table,
        )

    def _write_pages(self, sequences: Seq[Sequence]) -> None:
        """Behind the pages of a sequence there stay those of a former owner of the seat, which belong to no one."""
        for sequence in sequences:
            known, held = self._known[sequence.seat], len(sequence.pages)
            if known < held:
                self._pages[sequence.seat, known:held] = sequence.pages[known:]
                self._known[sequence.seat] = held
