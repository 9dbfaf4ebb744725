"""What a step of decoding gets from the host, and what it begins with: at the borders of pages, for seats that change hands, padded."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
import torch

from aura_omni.engine.numbers import StepNumbers
from aura_omni.engine.sequence import Sequence
from aura_omni.flow import Sampling
from aura_omni.models.layers import Rope

PAGE, MOST, SEATS, SPARE = 4, 5, 5, 90
ROPE = Rope(16, 1e4, (4, 2, 2))
KERNEL = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def numbers() -> StepNumbers:
    return StepNumbers(axes=3, extra=1, seats=SEATS, page_size=PAGE, spare_page=SPARE, most_pages=MOST)


def seated(seat: int, length: int, pages: Seq[int], *, prompt: int = 1) -> Sequence:
    sequence = Sequence([7] * length, Sampling(), lambda _: None, lambda *_: None)
    sequence.seat, sequence.pages, sequence.prompt_length = seat, list(pages), prompt
    return sequence


def begun(packed: torch.Tensor, rows: torch.Tensor, *, kernel: bool) -> tuple[torch.Tensor, ...]:
    """seat, step, positions [3, B], extra, slot, length, table; x, cos, sin."""
    many = numbers()
    if kernel:
        pytest.importorskip("triton")
        from aura_omni.engine import fused_numbers  # needs Triton

        columns, length, table, *made = fused_numbers.begun(
            packed.to(KERNEL), rows.to(KERNEL), *ROPE.on(KERNEL), width=many.width, columns=(0, 3, 4)
        )
        row = many._named(columns, length, table)
    else:
        row, *made = many.begun(packed, rows, ROPE)
    found = (row.seat, row.step, row.positions, row.extra, row.slot, row.length, row.table, *made)
    return tuple(one.cpu() for one in found)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
def test_rows_at_the_borders_of_pages_begin_where_they_are_and_rows_of_nobody_at_the_spare(
    kernel: bool, turned: bool
) -> None:
    torch.manual_seed(0)
    sequences = [
        seated(3, 1, [40]),
        seated(0, PAGE, [12], prompt=2),
        seated(4, PAGE + 1, [13, 0]),
        seated(1, MOST * PAGE, [21, 22, 23, 24, 25], prompt=5),
    ]
    starts = [sequence.length - 1 for sequence in sequences]
    positions = [(start, 2 * start, 262_143) for start in starts]
    packed = torch.from_numpy(numbers().pack(sequences, starts, positions, [(index,) for index in range(4)], rows=6))
    packed = packed.T.contiguous().T if turned else packed
    rows = torch.randn(SEATS + 1, 24)
    seat, step, at, extra, slot, length, table, x, cos, sin = begun(packed, rows, kernel=kernel)
    assert seat.tolist() == [3, 0, 4, 1, SEATS, SEATS]
    assert step[:4].tolist() == [0, 2, 4, 15], "ids that it has said"
    assert length.tolist() == [1, 4, 5, 20, 1, 1]
    assert slot.tolist() == [160, 12 * 4 + 3, 0, 25 * 4 + 3, SPARE * PAGE, SPARE * PAGE]
    assert extra[:4, 0].tolist() == [0, 1, 2, 3]
    for row, sequence in zip(table.tolist(), sequences, strict=False):
        assert row[: len(sequence.pages)] == sequence.pages
    assert table[4:].tolist() == [[SPARE] * MOST] * 2
    assert torch.equal(x, rows[seat])
    assert at[:, :4].T.tolist() == [list(row) for row in positions]
    for found, plain in zip((cos, sin), ROPE.tables(at, torch.float32), strict=True):
        torch.testing.assert_close(found, plain, atol=1e-6, rtol=0)


def test_who_takes_a_seat_is_given_no_page_of_whoever_had_it() -> None:
    many = numbers()

    def table(sequence: Sequence) -> list[int]:
        packed = many.pack([sequence], [sequence.length - 1], [(0, 0, 0)], [(0,)], rows=1)
        return packed[0, many.width :].tolist()

    first = seated(2, 2 * PAGE, [5, 6])
    assert table(first) == [5, 6]
    first.pages.append(7)
    assert table(first) == [5, 6, 7], "it has grown"
    many.seated(2)
    assert table(seated(2, PAGE, [8])) == [8]
    assert table(seated(2, PAGE + 1, [8, 9])) == [8, 9]
