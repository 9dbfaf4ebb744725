"""Triton kernels for what comes between logits and ids: constraints, and `sampler.pick` in its common cases.

One for a small vocabulary (codebooks), which a Talker frame draws from 16 times, and two for any without filters, which go on to the
next row in the seat. Same order, same random numbers, same ties as the plain code, whose tens of launches they replace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aura_omni.models.fused import starts_early

if TYPE_CHECKING:
    from aura_omni.engine.seats import Tables

MOST_VOCABULARY = 4_096  # one program holds a row of logits


@triton.jit
def _mix(x):
    """`sampler._mix` in unsigned 32-bit arithmetic, which wraps by itself."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(seed, step, stream, tokens):
    """`sampler._gumbel`."""
    first = _mix((seed + 0x9E3779B9).to(tl.uint32))
    second = _mix((step * 64 + stream + 1).to(tl.uint32))
    bits = _mix(_mix(first ^ second) ^ _mix((tokens.to(tl.int64) + 0x51ED270B).to(tl.uint32))) >> 9
    uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
    return -tl.log(-tl.log(uniform))


@triton.jit
def _threshold(values, rank, BITS: tl.constexpr):
    """Of float32 [N], whose bits after the first BITS are zero: a number that `rank` values are not below (1: only the largest), and as
    few others as ties allow. NaN where that would be minus infinity.

    Found two bits at a time, as the largest number that so many reach: 16 times counting or fewer, where one sort takes 66 steps.
    """
    bits = values.to(tl.uint32, bitcast=True)
    # Unsigned numbers in the order of the floats.
    keys = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    found = tl.full([], 0, tl.uint32)
    one = tl.full([], 1, tl.uint32)
    shift = tl.full([], 30, tl.int32)
    count = tl.full([], -1, tl.int64)
    while (shift >= 32 - BITS) & (count != rank):
        low, middle, high = found | (one << shift), found | (one << (shift + 1)), found | ((one + 2) << shift)
        # Three counts in one sum.
        reached = (
            (keys >= low).to(tl.int64) + ((keys >= middle).to(tl.int64) << 20) + ((keys >= high).to(tl.int64) << 40)
        )
        counts = tl.sum(reached, 0)
        lows, middles, highs = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
        found = tl.where(highs >= rank, high, tl.where(middles >= rank, middle, tl.where(lows >= rank, low, found)))
        count = tl.where(highs >= rank, highs, tl.where(middles >= rank, middles, tl.where(lows >= rank, lows, count)))
        shift -= 2
    return tl.where(found >= 0x80000000, found ^ 0x80000000, found ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _picked(logits, inside, vocabulary, temperature, top_k, noise, TOP_K: tl.constexpr, BITS: tl.constexpr):
    """The id that is drawn from a whole row of logits float32, whose bits after the first BITS are zero."""
    scores = logits / tl.maximum(temperature, 1e-6)
    if TOP_K:
        rank = tl.minimum(tl.maximum(top_k, 1), vocabulary)
        if BITS == 16:
            beyond = logits < _threshold(logits, rank, 16)  # their quotients are in the same order, and as different
        else:
            beyond = scores < _threshold(scores, rank, 32)
        scores = tl.where(beyond & (top_k > 0), float("-inf"), scores)
    noisy = tl.where(temperature > 0, scores + noise, logits)
    token = tl.argmax(tl.where(inside, noisy, float("-inf")), 0)
    # Where nothing is a number the best one may be beyond the vocabulary, and an index must not be.
    return tl.minimum(token, vocabulary - 1).to(tl.int64)


@triton.jit(do_not_specialize=["stream"])
def _pick_kernel(
    logits_ptr, floats_ptr, integers_ptr, out_ptr, table_ptr, rows_ptr, stream, vocabulary, width,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program: a row. EARLY: it begins before the kernel in front of it has ended, and draws its noise meanwhile."""
    row = tl.program_id(0)
    tokens = tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    if EARLY:
        gdc_launch_dependents()
    temperature = tl.load(floats_ptr + row * 3)
    top_k = tl.load(integers_ptr + row * 3)
    seed = tl.load(integers_ptr + row * 3 + 1)
    step = tl.load(integers_ptr + row * 3 + 2)
    noise = _gumbel(seed, step, stream, tokens)
    if EARLY:
        gdc_wait()
    logits = tl.load(logits_ptr + row * vocabulary + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    BITS: tl.constexpr = 16 if logits_ptr.dtype.element_ty == tl.bfloat16 else 32
    token = _picked(logits, inside, vocabulary, temperature, top_k, noise, TOP_K, BITS)
    tl.store(out_ptr + row, token)
    if ROWS:
        dims = tl.arange(0, WIDE)
        held = tl.load(table_ptr + token * width + dims, mask=dims < width)
        tl.store(rows_ptr + row * width + dims, held, mask=dims < width)


def pick_small(
    logits: Tensor, floats: Tensor, integers: Tensor, *, top_k: bool, stream: int, table: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits float32 or bfloat16 [B, V], V at most MOST_VOCABULARY; floats, integers [B, 3] of a `Draw` -> ids int64 [B], and their rows
    [B, W] of table [V, W] contiguous; without one the ids again."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    width = 1 if table is None else table.shape[1]
    found = out if table is None else table.new_empty(rows, width)
    early = starts_early(logits.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    _pick_kernel[(rows,)](
        logits.contiguous(), floats.contiguous(), integers.contiguous(), out, out if table is None else table, found, stream,
        vocabulary, width, TOP_K=top_k, ROWS=table is not None, BLOCK=triton.next_power_of_2(vocabulary),
        WIDE=triton.next_power_of_2(width), EARLY=early, **options,
    )  # fmt: skip
    return out, found


@triton.jit
def _constrained(
    value, tokens, inside, vocabulary, seat, step, floats_ptr, floats_width, integers_ptr, integers_width,
    bias_ptr, stops_ptr, prompt_ptr, counts_ptr,
    REPETITION: tl.constexpr, PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr, MIN_TOKENS: tl.constexpr,
):  # fmt: skip
    """Logits float32 of some ids, with what the tables of their seat do to them."""
    floats, at = floats_ptr + seat * floats_width, seat * vocabulary + tokens
    value += tl.load(bias_ptr + at, mask=inside, other=0.0)
    early = step < tl.load(integers_ptr + seat * integers_width + MIN_TOKENS)
    value = tl.where((tl.load(stops_ptr + at, mask=inside, other=0) != 0) & early, float("-inf"), value)
    count = tl.load(counts_ptr + at, mask=inside, other=0)
    seen = (count > 0) | (tl.load(prompt_ptr + at, mask=inside, other=0) != 0)
    repetition = tl.where(seen, tl.load(floats + REPETITION), 1.0)
    value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    value -= tl.where(count > 0, tl.load(floats + PRESENCE), 0.0) + tl.load(floats + FREQUENCY) * count.to(tl.float32)
    return value


@triton.jit
def _constrain_kernel(
    logits_ptr, seat_ptr, step_ptr, floats_ptr, floats_width, integers_ptr, integers_width, bias_ptr, stops_ptr, prompt_ptr,
    counts_ptr, out_ptr, vocabulary,
    REPETITION: tl.constexpr, PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr, MIN_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part): BLOCK ids of a row, with the tables of its seat."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    seat, step = tl.load(seat_ptr + row), tl.load(step_ptr + row)
    value = tl.load(logits_ptr + row * vocabulary + tokens, mask=inside, other=0.0).to(tl.float32)
    value = _constrained(
        value, tokens, inside, vocabulary, seat, step, floats_ptr, floats_width, integers_ptr, integers_width,
        bias_ptr, stops_ptr, prompt_ptr, counts_ptr, REPETITION, PRESENCE, FREQUENCY, MIN_TOKENS,
    )  # fmt: skip
    tl.store(out_ptr + row * vocabulary + tokens, value, mask=inside)


def constrain(logits: Tensor, seat: Tensor, step: Tensor, tables: Tables) -> Tensor:
    """As `seats.Seats.constrain`."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    columns = tables.columns
    _constrain_kernel[(rows, triton.cdiv(vocabulary, 1_024))](
        logits.contiguous(), seat, step, tables.floats, tables.floats.shape[1], tables.integers, tables.integers.shape[1],
        tables.bias, tables.stops.view(torch.uint8), tables.prompt.view(torch.uint8), tables.counts, out, vocabulary,
        REPETITION=columns.repetition, PRESENCE=columns.presence, FREQUENCY=columns.frequency,
        MIN_TOKENS=columns.min_tokens, BLOCK=1_024,
    )  # fmt: skip
    return out


@triton.jit
def _choose_kernel(
    logits_ptr, seat_ptr, step_ptr, floats_ptr, floats_width, integers_ptr, integers_width, bias_ptr, stops_ptr, prompt_ptr,
    counts_ptr, ids_ptr, sound_ptr, inner_floats_ptr, inner_integers_ptr, vocabulary,
    CONSTRAINED: tl.constexpr, TOP_K: tl.constexpr, REPETITION: tl.constexpr, PRESENCE: tl.constexpr,
    FREQUENCY: tl.constexpr, MIN_TOKENS: tl.constexpr, RANK: tl.constexpr, SEED: tl.constexpr, INNER: tl.constexpr,
    INNER_RANK: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program: a row, with the tables of its seat. Also says what the stage draws with besides.

    EARLY: it begins before the kernel in front of it has ended, with what is older than that.
    """
    row, tokens = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    seat, step = tl.load(seat_ptr + row), tl.load(step_ptr + row)
    floats, integers = floats_ptr + seat * floats_width, integers_ptr + seat * integers_width
    seed, column = tl.load(integers + SEED), tl.arange(0, 4)
    inner = tl.load(floats + INNER + column, mask=column < 3, other=0.0)
    inner_integers = tl.where(column == 0, tl.load(integers + INNER_RANK), tl.where(column == 1, seed, step))
    noise = _gumbel(seed, step, 0, tokens)
    temperature = tl.load(floats)
    if EARLY:
        gdc_wait()
    tl.store(inner_floats_ptr + row * 3 + column, inner, mask=column < 3)
    tl.store(inner_integers_ptr + row * 3 + column, inner_integers, mask=column < 3)
    value = tl.load(logits_ptr + row * vocabulary + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    if CONSTRAINED:
        value = _constrained(
            value, tokens, inside, vocabulary, seat, step, floats_ptr, floats_width, integers_ptr, integers_width,
            bias_ptr, stops_ptr, prompt_ptr, counts_ptr, REPETITION, PRESENCE, FREQUENCY, MIN_TOKENS,
        )  # fmt: skip
        value = tl.where(inside, value, float("-inf"))
    top = tl.max(tl.where(value == value, value, float("inf")), 0)
    sound = (top > float("-inf")) & (top < float("inf"))
    BITS: tl.constexpr = 16 if logits_ptr.dtype.element_ty == tl.bfloat16 and not CONSTRAINED else 32
    token = _picked(value, inside, vocabulary, temperature, tl.load(integers + RANK), noise, TOP_K, BITS)
    tl.store(ids_ptr + row, tl.where(sound, token, 0))
    tl.store(sound_ptr + row, sound.to(tl.uint8))


def choose(
    logits: Tensor, seat: Tensor, step: Tensor, tables: Tables, *, constrained: bool, top_k: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `seats.Seats.chosen`, of up to MOST_VOCABULARY ids without other filters: the ids int64 [B], which of them are sound bool [B],
    and floats and integers [B, 3] of the inner `Draw`."""
    rows, vocabulary = logits.shape
    ids, sound = torch.empty_like(seat), torch.empty_like(seat, dtype=torch.bool)
    floats, integers = tables.floats.new_empty(rows, 3), tables.integers.new_empty(rows, 3)
    columns = tables.columns
    early = starts_early(logits.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    _choose_kernel[(rows,)](
        logits.contiguous(), seat, step, tables.floats, tables.floats.shape[1], tables.integers, tables.integers.shape[1],
        tables.bias, tables.stops.view(torch.uint8), tables.prompt.view(torch.uint8), tables.counts, ids,
        sound.view(torch.uint8), floats, integers, vocabulary, CONSTRAINED=constrained, TOP_K=top_k,
        REPETITION=columns.repetition, PRESENCE=columns.presence, FREQUENCY=columns.frequency,
        MIN_TOKENS=columns.min_tokens, RANK=columns.top_k, SEED=columns.seed, INNER=columns.inner,
        INNER_RANK=columns.inner_top_k, BLOCK=triton.next_power_of_2(vocabulary), EARLY=early, **options,
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
    logits_ptr, seat_ptr, step_ptr, number_stride, floats_ptr, floats_width, integers_ptr, integers_width,
    bias_ptr, stops_ptr, prompt_ptr, counts_ptr, top_ptr, high_ptr, at_ptr, vocabulary, parts,
    CONSTRAINED: tl.constexpr, RANDOM: tl.constexpr, TEMPERATURE: tl.constexpr, SEED: tl.constexpr,
    REPETITION: tl.constexpr, PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr, MIN_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (row, part): of BLOCK ids the one that is drawn if all others are worse, how good it is, and the largest logit: infinite
    where one is not a number.

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
        temperature = tl.load(floats_ptr + seat * floats_width + TEMPERATURE)
        seed = tl.load(integers_ptr + seat * integers_width + SEED)
        noise = _gumbel(seed, step, 0, tokens)
    if EARLY:
        gdc_wait()
    value = tl.load(logits_ptr + row * vocabulary + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    if CONSTRAINED:
        value = _constrained(
            value, tokens, inside, vocabulary, seat, step, floats_ptr, floats_width, integers_ptr, integers_width,
            bias_ptr, stops_ptr, prompt_ptr, counts_ptr, REPETITION, PRESENCE, FREQUENCY, MIN_TOKENS,
        )  # fmt: skip
        value = tl.where(inside, value, float("-inf"))
    tl.store(top_ptr + row * parts + part, tl.max(tl.where(value == value, value, float("inf")), 0))
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
    there = part < parts
    top = tl.load(top_ptr + row * parts + part, mask=there, other=float("-inf"))
    high = tl.load(high_ptr + row * parts + part, mask=there, other=float("-inf")) if RANDOM else top
    best = tl.max(top, 0)
    sound = (best > float("-inf")) & (best < float("inf"))
    # Where nothing is a number the best one may be beyond the parts, or the vocabulary, and an index must not be.
    token = tl.load(at_ptr + row * parts + tl.minimum(tl.argmax(high, 0), parts - 1))
    token = tl.where(sound, tl.minimum(token, vocabulary - 1), 0).to(tl.int64)
    held = tl.load(table_ptr + token * width + dims, mask=dims < width)
    tl.store(rows_ptr + seat * width + dims, held, mask=dims < width)
    if CONSTRAINED:
        tl.atomic_add(counts_ptr + seat * vocabulary + token, 1)  # the spare seat may occur several times
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
    """As `seats.Seats.ended`, for draws without filters."""
    rows, vocabulary = logits.shape
    width = table.shape[1]
    assert table.is_contiguous()
    assert seat.stride() == step.stride()
    block = 1_024
    parts = triton.cdiv(vocabulary, block)
    top = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    high = torch.empty_like(top) if random else top
    at = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, 1, dtype=torch.int64, device=logits.device)
    columns = tables.columns
    early = starts_early(logits.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    _part_kernel[(rows, parts)](
        logits.contiguous(), seat, step, seat.stride(0), tables.floats, tables.floats.shape[1], tables.integers,
        tables.integers.shape[1], tables.bias, tables.stops.view(torch.uint8), tables.prompt.view(torch.uint8),
        tables.counts, top, high, at, vocabulary, parts, CONSTRAINED=constrained, RANDOM=random,
        TEMPERATURE=columns.temperature, SEED=columns.seed, REPETITION=columns.repetition, PRESENCE=columns.presence,
        FREQUENCY=columns.frequency, MIN_TOKENS=columns.min_tokens, BLOCK=block, EARLY=early, **options,
    )  # fmt: skip
    _end_kernel[(rows,)](
        top, high, at, seat, seat.stride(0), tables.counts, table, tables.rows, values, vocabulary, parts, width, no_id,
        CONSTRAINED=constrained, RANDOM=random, PARTS=triton.next_power_of_2(parts), WIDE=triton.next_power_of_2(width),
        EARLY=early, **options,
    )  # fmt: skip
    return values
