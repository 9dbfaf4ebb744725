"""Triton kernels of what `seats` does in a step, from logits to the next rows: constraints, the draw, and what is kept of it.

One launch for a codebook and one for what its stage makes of the code; two for any vocabulary, where a row of a table is all that
follows from an id. Same results as the plain code, whose tens of launches they replace.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aura_omni.engine import seats
from aura_omni.engine.fused_sampler import gumbel, picked
from aura_omni.engine.seats import Tables
from aura_omni.models.fused import starts_early

PART = 1_024  # ids of a row that one program looks at

# Columns of the tables of numbers, and how many there are.
_FLOATS, _TEMPERATURE, _INNER = (tl.constexpr(n) for n in (seats.FLOATS, seats.OWN.start, seats.INNER.start))
_REPETITION, _PRESENCE, _FREQUENCY = (tl.constexpr(n) for n in (seats.REPETITION, seats.PRESENCE, seats.FREQUENCY))
_INTEGERS, _TOP_K, _INNER_TOP_K = (tl.constexpr(n) for n in (seats.INTEGERS, seats.TOP_K, seats.INNER_TOP_K))
_SEED, _MIN_TOKENS = (tl.constexpr(n) for n in (seats.SEED, seats.MIN_TOKENS))


@triton.jit
def _fill_kernel(
    numbers_ptr, width, floats_ptr, integers_ptr, bias_ptr, stops_ptr, prompt_ptr, counts_ptr, vocabulary,
    INTEGERS_AT: tl.constexpr, MARKED: tl.constexpr, MARKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (taker, part): BLOCK ids of its seat; the first part also the numbers."""
    numbers = numbers_ptr + tl.program_id(0) * width
    begin = tl.program_id(1) * BLOCK
    tokens, mark, column = begin + tl.arange(0, BLOCK), tl.arange(0, MARKS), tl.arange(0, 16)
    seat = tl.load(numbers).to(tl.int64)
    if begin == 0:
        value = tl.load(numbers + 1 + column, mask=column < _FLOATS, other=0).to(tl.float32, bitcast=True)
        tl.store(floats_ptr + seat * _FLOATS + column, value, mask=column < _FLOATS)
        value = tl.load(numbers + INTEGERS_AT + column, mask=column < _INTEGERS, other=0).to(tl.uint32, bitcast=True)
        tl.store(integers_ptr + seat * _INTEGERS + column, value.to(tl.int64), mask=column < _INTEGERS)
    inside, at = tokens < vocabulary, seat * vocabulary + tokens
    tl.store(bias_ptr + at, tl.zeros([BLOCK], tl.float32), mask=inside)
    tl.store(stops_ptr + at, tl.zeros([BLOCK], tl.uint8), mask=inside)
    tl.store(prompt_ptr + at, tl.zeros([BLOCK], tl.uint8), mask=inside)
    tl.store(counts_ptr + at, tl.zeros([BLOCK], tl.int32), mask=inside)
    marks = numbers + MARKED + mark
    biased, bias = tl.load(marks), tl.load(marks + MARKS).to(tl.float32, bitcast=True)
    stops, prompt = tl.load(marks + 2 * MARKS), tl.load(marks + 3 * MARKS)
    said, count = tl.load(marks + 4 * MARKS), tl.load(marks + 5 * MARKS)
    one = tl.full([MARKS], 1, tl.uint8)
    tl.debug_barrier()  # no thread's zeros come after another's marks
    end = begin + BLOCK
    here = seat * vocabulary
    tl.store(bias_ptr + here + biased, bias, mask=(biased >= begin) & (biased < end))
    tl.store(stops_ptr + here + stops, one, mask=(stops >= begin) & (stops < end))
    tl.store(prompt_ptr + here + prompt, one, mask=(prompt >= begin) & (prompt < end))
    tl.store(counts_ptr + here + said, count, mask=(said >= begin) & (said < end))


def fill(numbers: Tensor, tables: Tables) -> None:
    """As `seats.Seats._filled`."""
    takers, width = numbers.shape
    vocabulary, block = tables.bias.shape[1], 4 * PART
    _fill_kernel[(takers, triton.cdiv(vocabulary, block))](
        numbers.contiguous(), width, *_given(tables), vocabulary, INTEGERS_AT=1 + seats.FLOATS, MARKED=seats.MARKED,
        MARKS=seats.MARKS, BLOCK=block,
    )  # fmt: skip


@triton.jit
def _constrained(
    value, tokens, inside, vocabulary, seat, step, floats_ptr, integers_ptr, bias_ptr, stops_ptr, prompt_ptr, counts_ptr
):
    """Logits float32 of some ids, with what the tables of their seat do to them."""
    floats, at = floats_ptr + seat * _FLOATS, seat * vocabulary + tokens
    value += tl.load(bias_ptr + at, mask=inside, other=0.0)
    early = step < tl.load(integers_ptr + seat * _INTEGERS + _MIN_TOKENS)
    value = tl.where((tl.load(stops_ptr + at, mask=inside, other=0) != 0) & early, float("-inf"), value)
    count = tl.load(counts_ptr + at, mask=inside, other=0)
    seen = (count > 0) | (tl.load(prompt_ptr + at, mask=inside, other=0) != 0)
    repetition = tl.where(seen, tl.load(floats + _REPETITION), 1.0)
    value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    value -= tl.where(count > 0, tl.load(floats + _PRESENCE), 0.0) + tl.load(floats + _FREQUENCY) * count.to(tl.float32)
    return tl.where(inside, value, float("-inf"))


@triton.jit
def _top(value):
    """The largest; infinite where one is not a number."""
    return tl.max(tl.where(value == value, value, float("inf")), 0)


@triton.jit
def _sound(top):
    """Of the largest of all: `seats.sound`."""
    return (top > float("-inf")) & (top < float("inf"))


@triton.jit
def _constrain_kernel(
    logits_ptr, seat_ptr, step_ptr, floats_ptr, integers_ptr, bias_ptr, stops_ptr, prompt_ptr, counts_ptr, out_ptr,
    vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part): BLOCK ids of a row, with the tables of its seat."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    seat, step = tl.load(seat_ptr + row), tl.load(step_ptr + row)
    value = tl.load(logits_ptr + row * vocabulary + tokens, mask=inside, other=0.0).to(tl.float32)
    value = _constrained(
        value,
        tokens,
        inside,
        vocabulary,
        seat,
        step,
        floats_ptr,
        integers_ptr,
        bias_ptr,
        stops_ptr,
        prompt_ptr,
        counts_ptr,
    )
    tl.store(out_ptr + row * vocabulary + tokens, value, mask=inside)


def constrain(logits: Tensor, seat: Tensor, step: Tensor, tables: Tables) -> Tensor:
    """As `seats.Seats.constrain`."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    _constrain_kernel[(rows, triton.cdiv(vocabulary, PART))](
        logits.contiguous(), seat, step, *_given(tables), out, vocabulary, BLOCK=PART
    )
    return out


@triton.jit
def _choose_kernel(
    logits_ptr, seat_ptr, step_ptr, floats_ptr, integers_ptr, bias_ptr, stops_ptr, prompt_ptr, counts_ptr,
    ids_ptr, sound_ptr, inner_floats_ptr, inner_integers_ptr, vocabulary,
    CONSTRAINED: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program: a row, with the tables of its seat. Also says what the stage draws with besides.

    EARLY: it begins before the kernel in front of it has ended, with what is older than that.
    """
    row, tokens = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    seat, step = tl.load(seat_ptr + row), tl.load(step_ptr + row)
    floats, integers = floats_ptr + seat * _FLOATS, integers_ptr + seat * _INTEGERS
    seed, column = tl.load(integers + _SEED), tl.arange(0, 4)
    inner = tl.load(floats + _INNER + column, mask=column < 3, other=0.0)
    inner_integers = tl.where(column == 0, tl.load(integers + _INNER_TOP_K), tl.where(column == 1, seed, step))
    noise = gumbel(seed, step, 0, tokens)
    temperature, top_k = tl.load(floats + _TEMPERATURE), tl.load(integers + _TOP_K)
    if EARLY:
        gdc_wait()
    tl.store(inner_floats_ptr + row * 3 + column, inner, mask=column < 3)
    tl.store(inner_integers_ptr + row * 3 + column, inner_integers, mask=column < 3)
    value = tl.load(logits_ptr + row * vocabulary + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    BITS: tl.constexpr = 16 if logits_ptr.dtype.element_ty == tl.bfloat16 and not CONSTRAINED else 32
    if CONSTRAINED:
        value = _constrained(
            value, tokens, inside, vocabulary, seat, step, floats_ptr, integers_ptr, bias_ptr, stops_ptr, prompt_ptr,
            counts_ptr,
        )  # fmt: skip
    sound = _sound(_top(value))
    token = picked(value, inside, vocabulary, temperature, top_k, noise, TOP_K, BITS)
    tl.store(ids_ptr + row, tl.where(sound, token, 0))
    tl.store(sound_ptr + row, sound.to(tl.uint8))


def choose(
    logits: Tensor, seat: Tensor, step: Tensor, tables: Tables, *, constrained: bool, top_k: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `seats.Seats.chosen`, of up to `fused_sampler.MOST_VOCABULARY` ids without other filters: the ids int64 [B], which of them are
    sound bool [B], and floats and integers [B, 3] of the inner `Draw`."""
    rows, vocabulary = logits.shape
    ids, sound = torch.empty_like(seat), torch.empty_like(seat, dtype=torch.bool)
    floats, integers = tables.floats.new_empty(rows, 3), tables.integers.new_empty(rows, 3)
    early = starts_early(logits.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    _choose_kernel[(rows,)](
        logits.contiguous(), seat, step, *_given(tables), ids, sound.view(torch.uint8), floats, integers, vocabulary,
        CONSTRAINED=constrained, TOP_K=top_k, BLOCK=triton.next_power_of_2(vocabulary), EARLY=early, **options,
    )  # fmt: skip
    return ids, sound, floats, integers


@triton.jit
def _keep_kernel(
    seat_ptr, ids_ptr, sound_ptr, given_ptr, rows_ptr, values_ptr, counts_ptr, out_ptr, vocabulary, width, kinds, no_id,
    CONSTRAINED: tl.constexpr, WIDE: tl.constexpr, KINDS: tl.constexpr,
):  # fmt: skip
    """Program: a row."""
    row, dims, kind = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE), tl.arange(0, KINDS)
    seat = tl.load(seat_ptr + row)
    given = tl.load(given_ptr + row * width + dims, mask=dims < width)
    tl.store(rows_ptr + seat * width + dims, given, mask=dims < width)
    if CONSTRAINED:
        # Atomic, because the spare seat may occur several times.
        tl.atomic_add(counts_ptr + seat * vocabulary + tl.load(ids_ptr + row), 1)
    value = tl.load(values_ptr + row * kinds + kind, mask=kind < kinds, other=0)
    tl.store(out_ptr + row * kinds + kind, tl.where(tl.load(sound_ptr + row) != 0, value, no_id), mask=kind < kinds)


def keep(
    seat: Tensor,
    ids: Tensor,
    sound: Tensor,
    rows: Tensor,
    values: Tensor,
    tables: Tables,
    *,
    constrained: bool,
    no_id: int,
) -> Tensor:
    """As `seats.Seats.kept`."""
    out = torch.empty_like(values)
    width, kinds = rows.shape[1], values.shape[1]
    _keep_kernel[(len(seat),)](
        seat, ids, sound.view(torch.uint8), rows.contiguous(), tables.rows, values.contiguous(), tables.counts, out,
        tables.counts.shape[1], width, kinds, no_id, CONSTRAINED=constrained, WIDE=triton.next_power_of_2(width),
        KINDS=triton.next_power_of_2(kinds),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["number_stride"])
def _part_kernel(
    logits_ptr, seat_ptr, step_ptr, number_stride, floats_ptr, integers_ptr, bias_ptr, stops_ptr, prompt_ptr, counts_ptr,
    top_ptr, high_ptr, at_ptr, vocabulary, parts,
    CONSTRAINED: tl.constexpr, RANDOM: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (row, part): which of BLOCK ids is drawn if all others are worse, how good it is, and their `_top`.

    EARLY: it begins before the kernel in front of it has ended, with what no kernel of the step has written.
    """
    if EARLY:
        gdc_launch_dependents()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    seat = tl.load(seat_ptr + row * number_stride).to(tl.int64)
    step = tl.load(step_ptr + row * number_stride).to(tl.int64)
    if RANDOM:
        temperature = tl.load(floats_ptr + seat * _FLOATS + _TEMPERATURE)
        noise = gumbel(tl.load(integers_ptr + seat * _INTEGERS + _SEED), step, 0, tokens)
    if EARLY:
        gdc_wait()
    value = tl.load(logits_ptr + row * vocabulary + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    if CONSTRAINED:
        value = _constrained(
            value, tokens, inside, vocabulary, seat, step, floats_ptr, integers_ptr, bias_ptr, stops_ptr, prompt_ptr,
            counts_ptr,
        )  # fmt: skip
    tl.store(top_ptr + row * parts + part, _top(value))
    if RANDOM:
        value = tl.where(temperature > 0, value / tl.maximum(temperature, 1e-6) + noise, value)
        tl.store(high_ptr + row * parts + part, tl.max(value, 0))
    tl.store(at_ptr + row * parts + part, part * BLOCK + tl.argmax(value, 0))


@triton.jit(do_not_specialize=["number_stride"])
def _end_kernel(
    top_ptr, high_ptr, at_ptr, seat_ptr, number_stride, counts_ptr, table_ptr, rows_ptr, values_ptr, vocabulary, parts, width,
    no_id,
    CONSTRAINED: tl.constexpr, RANDOM: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program: a row. From the parts to the id, and what follows from it."""
    row = tl.program_id(0).to(tl.int64)
    part, dims = tl.arange(0, PARTS), tl.arange(0, WIDE)
    seat = tl.load(seat_ptr + row * number_stride).to(tl.int64)
    if EARLY:
        gdc_wait()
    top = tl.load(top_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    high = tl.load(high_ptr + row * parts + part, mask=part < parts, other=float("-inf")) if RANDOM else top
    sound = _sound(tl.max(top, 0))
    # Where nothing is a number the best one may be beyond the parts, or the vocabulary, and an index must not be.
    token = tl.load(at_ptr + row * parts + tl.minimum(tl.argmax(high, 0), parts - 1))
    token = tl.where(sound, tl.minimum(token, vocabulary - 1), 0).to(tl.int64)
    held = tl.load(table_ptr + token * width + dims, mask=dims < width)
    tl.store(rows_ptr + seat * width + dims, held, mask=dims < width)
    if CONSTRAINED:
        tl.atomic_add(counts_ptr + seat * vocabulary + token, 1)  # as in `_keep_kernel`
    tl.store(values_ptr + row, tl.where(sound, token, no_id))


def ended(
    logits: Tensor,
    seat: Tensor,
    step: Tensor,
    tables: Tables,
    table: Tensor,
    *,
    constrained: bool,
    random: bool,
    no_id: int,
) -> Tensor:
    """As `seats.Seats.ended`; table [V, H] contiguous."""
    rows, vocabulary = logits.shape
    width, parts = table.shape[1], triton.cdiv(vocabulary, PART)
    assert table.is_contiguous()
    assert seat.stride() == step.stride()
    top = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    high = torch.empty_like(top) if random else top
    at = torch.empty_like(top, dtype=torch.int32)
    values = torch.empty(rows, 1, dtype=torch.int64, device=logits.device)
    early = starts_early(logits.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    _part_kernel[(rows, parts)](
        logits.contiguous(), seat, step, seat.stride(0), *_given(tables), top, high, at, vocabulary, parts,
        CONSTRAINED=constrained, RANDOM=random, BLOCK=PART, EARLY=early, **options,
    )  # fmt: skip
    _end_kernel[(rows,)](
        top, high, at, seat, seat.stride(0), tables.counts, table, tables.rows, values, vocabulary, parts, width, no_id,
        CONSTRAINED=constrained, RANDOM=random, PARTS=triton.next_power_of_2(parts), WIDE=triton.next_power_of_2(width),
        EARLY=early, **options,
    )  # fmt: skip
    return values


def _given(tables: Tables) -> tuple[Tensor, ...]:
    """What `_constrained` reads, and the numbers of a draw."""
    stops, prompt = tables.stops.view(torch.uint8), tables.prompt.view(torch.uint8)
    return tables.floats, tables.integers, tables.bias, stops, prompt, tables.counts
