"""Triton kernels against the plain code that they stand for: compiled where there is a GPU, elsewhere by Triton's interpreter."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aura_omni.engine.numbers import StepNumbers
from aura_omni.engine.sampler import Draw, Filters, pick
from aura_omni.engine.seats import Seats, Taker
from aura_omni.flow import Sampling
from aura_omni.models import fp8, layers, qwen3, qwen3_vl
from aura_omni.models.layers import DenseKV, RMSNorm, Rope, rotate
from aura_omni.models.qwen3 import Decoder
from aura_omni.models.weights import Linear, in_eight_bits
from tests.models.test_fp8 import CONFIG

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton")

from aura_omni.engine import fused_numbers, fused_sampler, fused_seats, paged_attention, paged_eight  # noqa: E402
from aura_omni.models import fused, fused_fp8, fused_linear, fused_tiles  # noqa: E402

PAGE = 16
# The interpreter takes products of bfloat16 for products of integers.
HALF = (torch.bfloat16, 2e-2) if DEVICE.type == "cuda" else (torch.float16, 3e-3)
HALF_ONLY = pytest.mark.parametrize(("dtype", "limit"), [HALF])
PRECISION = pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), HALF])


@pytest.mark.parametrize("vocabulary", [64, 100, 2_048, 3_072])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_draw_from_a_codebook_is_the_plain_one(vocabulary: int, ties: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ways = [(0.0, 0), (0.9, 50), (1.0, 0), (0.5, 5), (1.5, 10_000), (1.0, 1), (0.7, vocabulary - 1)]
    rows = [Sampling(temperature=temperature, top_k=top_k) for temperature, top_k in ways]
    logits = torch.randn(len(rows), vocabulary) * 3
    if ties:
        logits = logits.round()  # both zeros among them, which are equal
    logits[::3, vocabulary // 2 :] = -torch.inf
    logits, table = logits.to(dtype), torch.randn(vocabulary, 24)
    seeds, steps = [7 * row for row in range(len(rows))], list(range(len(rows)))
    draw = Draw.of(rows, seeds, steps, torch.device("cpu"))
    plain = pick(logits, draw, stream=3)
    ours, found = fused_sampler.pick_small(
        logits.to(DEVICE),
        draw.floats.to(DEVICE),
        draw.integers.to(DEVICE),
        top_k=True,
        stream=3,
        table=table.to(DEVICE),
    )
    ours = ours.cpu()
    assert torch.equal(found.cpu(), table[ours])
    if DEVICE.type == "cpu":
        assert torch.equal(plain, ours)
    else:  # logarithms of CPU and GPU differ in the last bit, which may turn a draw that is a tie but for that
        assert (plain != ours).sum() <= 1


def test_the_threshold_of_top_k_is_the_sorted_one() -> None:
    """Through draws: with one id left it must be the best, with two one of the best two, and equal ones all count."""
    logits = torch.tensor([[-1.0, -0.0, 0.0, -torch.inf, 3.0, 3.0, -2.5, 1e-30]] * 64)
    for top_k, kept in ((1, {4, 5}), (2, {4, 5}), (3, {4, 5, 7}), (4, {1, 2, 4, 5, 7}), (6, {0, 1, 2, 4, 5, 7})):
        draw = Draw.of([Sampling(temperature=50.0, top_k=top_k)] * 64, list(range(64)), [0] * 64, torch.device("cpu"))
        ours, _ = fused_sampler.pick_small(
            logits.to(DEVICE), draw.floats.to(DEVICE), draw.integers.to(DEVICE), top_k=True, stream=0
        )
        assert set(ours.tolist()) == kept


def takers_of(rows: list[Sampling], *, penalised: bool) -> list[Taker]:
    """One for each seat, with everything that comes between logits and a draw."""
    ways = {"repetition_penalty": 1.3, "min_tokens": 3, "presence_penalty": 0.1, "frequency_penalty": 0.2}
    more = {"prompt": [1, 2], "outputs": [5, 5], "stop_ids": [9]}
    inner = Sampling(temperature=0.6, top_k=7)
    return [
        Taker(seat, row.merged({**ways, "logit_bias": {4: 3.0}}) if penalised else row, inner=inner, seed=seat, **more)
        for seat, row in enumerate(rows)
    ]


def seats_of(takers: list[Taker], vocabulary: int) -> tuple[Seats, Seats]:
    """Those of plain code, and those of kernels."""
    both = [
        Seats(len(takers), hidden=24, vocabulary=vocabulary, dtype=torch.float32, device=device)
        for device in (torch.device("cpu"), DEVICE)
    ]
    for seats in both:
        seats.fill(takers)
    return both[0], both[1]


def assert_same_counts(plain: Seats, ours: Seats) -> None:
    assert torch.equal(ours.tables.counts.cpu(), plain.tables.counts)


@pytest.mark.parametrize("vocabulary", [97, 10_000])
def test_seats_are_given_away_as_in_plain_code(vocabulary: int) -> None:
    """All of them were others' before; two takers are nobody."""
    torch.manual_seed(0)
    ways = {"repetition_penalty": 1.3, "min_tokens": 3, "top_k": 7, "logit_bias": {0: -1.5, vocabulary - 1: 3.0}}
    seeds = [3, (1 << 32) - 1, 1 << 40]
    takers = [
        Taker(
            seat, Sampling(temperature=0.5 + seat).merged(ways), inner=Sampling(top_k=9), seed=seed,
            prompt=[1, 50, vocabulary], outputs=[5, 6, 5], stop_ids=[9, vocabulary - 1],
        )
        for seat, seed in enumerate(seeds)
    ]  # fmt: skip
    plain, ours = seats_of(takers_of([Sampling()] * 3, penalised=True), vocabulary)
    packed = []
    with patch.object(plain, "_filled", packed.append):
        plain.fill(takers)
    numbers = torch.cat((packed[0], torch.from_numpy(plain._nobody(2))))
    plain._filled(numbers)
    fused_seats.fill(numbers.to(DEVICE), ours.tables)
    for name in ("floats", "integers", "bias", "stops", "prompt", "counts"):
        assert torch.equal(getattr(ours.tables, name)[:3].cpu(), getattr(plain.tables, name)[:3]), name
    assert plain.tables.counts[0, 5] == 2


@pytest.mark.parametrize("vocabulary", [97, 1_024, 2_500, *([151_936] if DEVICE.type == "cuda" else [])])
@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_end_of_a_step_is_the_plain_one(vocabulary: int, random: bool, penalised: bool, dtype: torch.dtype) -> None:
    """Of rows with nothing to choose from, of ties, and of rows that are nobody's, all of which sit in one seat."""
    torch.manual_seed(0)
    temperatures = [0.7 if random and seat % 3 else 0.0 for seat in range(6)]
    takers = takers_of([Sampling(temperature=temperature) for temperature in temperatures], penalised=penalised)
    filters = Filters.of(taker.sampling for taker in takers)
    assert filters.random == random
    seat, step = torch.tensor([2, 1, 4, 3, 0, 5, 6, 6]), torch.arange(8)
    logits = (3 * torch.randn(len(seat), vocabulary)).round().to(dtype)
    logits[0], logits[1, vocabulary - 1], logits[2, 7] = -torch.inf, torch.nan, torch.inf
    logits[3, 20] = logits[3, vocabulary - 5] = 40
    logits[4, vocabulary - 1] = 40
    logits[5, :-1] = -torch.inf
    table = torch.randn(vocabulary, 24)
    plain, ours = seats_of(takers, vocabulary)
    ids, there, _ = plain.chosen(logits, seat, step, filters, filters, constrained=penalised)
    assert there.tolist() == [False, False, False, True, True, True, True, True]
    assert ids[:6].tolist() == [0, 0, 0, 20, vocabulary - 1, vocabulary - 1]
    expected = plain.kept(seat, ids, there, table[ids], ids[:, None], constrained=penalised, no_id=-1)
    at = torch.stack((seat, step, seat), dim=1).int().to(DEVICE)
    how = {"constrained": penalised, "random": random, "no_id": -1}
    values = ours.ended(logits.to(DEVICE), at[:, 0], at[:, 1], table.to(DEVICE), **how)
    assert torch.equal(values.cpu(), expected)
    assert torch.equal(ours.rows[:6].cpu(), plain.rows[:6])
    assert_same_counts(plain, ours)


@pytest.mark.parametrize("vocabulary", [64, 100, 3_072])
@pytest.mark.parametrize("top_k", [0, 50])
@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_code_of_a_frame_and_its_end_are_the_plain_ones(
    vocabulary: int, top_k: int, penalised: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    takers = takers_of([Sampling(temperature=0.9 * (seat % 3), top_k=top_k) for seat in range(6)], penalised=penalised)
    filters, inner = (Filters.of(getattr(taker, kind) for taker in takers) for kind in ("sampling", "inner"))
    seat, step = torch.tensor([2, 1, 4, 3, 0, 5, 6, 6]), torch.arange(8)
    logits = (3 * torch.randn(len(seat), vocabulary)).round().to(dtype)
    logits[0], logits[1, vocabulary - 1], logits[2, 7] = -torch.inf, torch.nan, torch.inf
    logits[3, 20] = logits[3, vocabulary - 5] = 40
    plain, ours = seats_of(takers, vocabulary)
    expected = plain.chosen(logits, seat, step, filters, inner, constrained=penalised)
    assert expected[0][:4].tolist() == [0, 0, 0, 20]
    how = {"constrained": penalised, "top_k": top_k > 0}
    found = fused_seats.choose(logits.to(DEVICE), seat.to(DEVICE), step.to(DEVICE), ours.tables, **how)
    draw = expected[2]
    for one, other in zip(found, (*expected[:2], draw.floats, draw.integers), strict=True):
        assert torch.equal(one.cpu(), other)
        assert one.dtype == other.dtype
    ids, there, rows, values = *expected[:2], torch.randn(8, 24), torch.randint(0, 2_048, (8, 16))
    end = {"constrained": penalised, "no_id": -1}
    kept = plain.kept(seat, ids, there, rows, values, **end)
    assert kept[0].tolist() == [-1] * 16
    given = [one.to(DEVICE) for one in (seat, ids, there, rows, values)]
    assert torch.equal(fused_seats.keep(*given, ours.tables, **end).cpu(), kept)
    assert torch.equal(ours.rows[:6].cpu(), plain.rows[:6])
    assert_same_counts(plain, ours)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whatever_the_logit_of_a_banned_id_is_draws_are_the_plain_ones(
    value: float, temperature: float, dtype: torch.dtype
) -> None:
    """It ends nobody while the id is banned, and whoever may draw it."""
    torch.manual_seed(0)
    vocabulary, banned = 100, 9
    takers = takers_of([Sampling(temperature=temperature)] * 6, penalised=True)
    filters = Filters.of(taker.sampling for taker in takers)
    seat, step = torch.arange(6), torch.tensor([0, 1, 2, 0, 3, 7])
    early, table = step < 3, torch.randn(vocabulary, 24)
    logits = (3 * torch.randn(6, vocabulary)).to(dtype)
    plain, ours = seats_of(takers, vocabulary)
    usual, _, _ = plain.chosen(logits, seat, step, filters, filters, constrained=True)
    logits[:, banned] = value
    ids, there, _ = plain.chosen(logits, seat, step, filters, filters, constrained=True)
    assert torch.equal(ids[early], usual[early])
    assert torch.equal(there, early | (value == -torch.inf))
    values = torch.where(there, ids, -1)
    logits, seat, step = (x.to(DEVICE) for x in (logits, seat, step))
    found = fused_seats.choose(logits, seat, step, ours.tables, constrained=True, top_k=False)
    assert torch.equal(torch.where(found[1], found[0], -1).cpu(), values)
    constrained = fused_seats.constrain(logits, seat, step, ours.tables).cpu()
    assert (constrained[early, banned] == -torch.inf).all()
    how = {"constrained": True, "random": temperature > 0, "no_id": -1}
    assert torch.equal(ours.ended(logits, seat, step, table.to(DEVICE), **how)[:, 0].cpu(), values)


def test_a_frame_of_codes_becomes_the_sum_of_their_rows() -> None:
    table = torch.randn(3 * 50, 200)
    codes, offsets = torch.randint(0, 50, (4, 3)), torch.tensor([0, 50, 100])
    found = fused.summed_rows(codes.to(DEVICE), offsets.to(DEVICE), table.to(DEVICE)).cpu()
    torch.testing.assert_close(found, table[codes + offsets].sum(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_what_a_step_begins_with_is_the_plain_gathering(
    axes: int, turned: bool, dtype: torch.dtype, limit: float
) -> None:
    torch.manual_seed(0)
    pages, hidden = 1_100, 1_200  # more than one program has
    rope = Rope(32, 1e6, (6, 5, 5) if axes == 3 else None)
    many = StepNumbers(axes=axes, extra=2, seats=5, page_size=PAGE, spare_page=9, most_pages=pages)
    numbers = torch.randint(0, 200_000, (3, many.width + pages), dtype=torch.int32)
    numbers[:, 0] = torch.tensor([4, 0, 5])
    rows = torch.randn(6, hidden).to(dtype)
    plain, *expected = many.begun(numbers, rows, rope)
    given = numbers.T.contiguous().to(DEVICE).T if turned else numbers.to(DEVICE)
    columns, length, table, *found = fused_numbers.begun(
        given, rows.to(DEVICE), *rope.on(DEVICE), width=many.width, columns=(0, 3, 4)
    )
    assert torch.equal(columns.cpu(), numbers[:, : many.width].T.long())
    assert torch.equal(length.cpu(), plain.length)
    assert torch.equal(table.cpu(), plain.table)
    assert (length.dtype, table.dtype, table.stride(1)) == (torch.int32, torch.int32, 1)
    assert torch.equal(found[0].cpu(), expected[0])
    for ours, by_hand in zip(found[1:], expected[1:], strict=True):
        assert ours.dtype == dtype
        assert_close(ours.cpu(), by_hand, limit)


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("adds", [0, 3])
@pytest.mark.parametrize("looked_up", [False, True])
@PRECISION
def test_rows_of_prompts_are_gathered_as_in_plain_code(
    axes: int, adds: int, looked_up: bool, dtype: torch.dtype, limit: float
) -> None:
    """Rows of ids, of media, and of both; media that are nobody's are not numbers."""
    torch.manual_seed(0)
    rows, hidden = 7, 1_200
    rope = Rope(32, 1e6, (6, 5, 5) if axes == 3 else None)
    numbers = torch.randint(0, 5_000, (rows, 3 + axes), dtype=torch.int32)
    numbers[:, 1] = torch.tensor([-1, 2, -1, 0, 1, -1, 2])
    numbers[:, -1] = torch.tensor([4, -1, 0, -1, 9, 9, 3])
    media, table = torch.randn(4, 1 + adds, hidden).to(dtype), torch.randn(10, hidden).to(dtype)
    media[3] = torch.nan
    x = table[numbers[:, -1].long().clamp_min(0)].masked_fill((numbers[:, -1] < 0)[:, None], 0)
    base = table if looked_up else x
    of_media = torch.stack([torch.zeros(1 + adds, hidden) if at < 0 else media[at] for at in numbers[:, 1]]).to(dtype)
    positions = numbers[:, 2 : 2 + axes].long().T
    expected = rope.tables(positions if axes == 3 else positions[0], dtype)
    ours, cos, sin, added, slots = fused_numbers.gathered(
        numbers.to(DEVICE), media.to(DEVICE), base.to(DEVICE), *rope.on(DEVICE), columns=(0, 1, 2, 2 + axes), looked_up=looked_up
    )  # fmt: skip
    assert torch.equal(ours.cpu(), x + of_media[:, 0])
    assert torch.equal(added.cpu(), of_media[:, 1:].transpose(0, 1))
    assert torch.equal(slots.cpu(), numbers[:, 0].long())
    for one, other in zip((cos, sin), expected, strict=True):
        assert_close(one.cpu(), other, limit)


# ------------------------------------------------------------ attention


def pool(lengths: list[int], heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random keys and values in shuffled pages, and each sequence's page table."""
    counts = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(counts) + 3).int()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    used = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[used : used + count]
        used += count
    slots = (sum(counts) + 3) * PAGE
    keys, values = (torch.randn(slots, heads, dim).to(DEVICE, dtype) for _ in range(2))
    return keys, values, table.to(DEVICE)


def context(table: Tensor, length: int) -> Tensor:
    """The slots of a sequence's rows."""
    rows = torch.arange(length, device=DEVICE)
    return table[rows // PAGE].long() * PAGE + rows % PAGE


def assert_close(ours: Tensor, plain: Tensor, limit: float) -> None:
    """To within limit, and limit of their size."""
    ours, plain = ours.float(), plain.float()
    assert ((ours - plain).abs() <= limit * (1 + plain.abs())).all(), (ours - plain).abs().max()


def norm_of(size: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, 1e-6).requires_grad_(False)
    norm.weight.data.uniform_(0.5, 1.5)
    return norm.to(DEVICE, dtype)


# Its loops take their bounds out of arrays as NumPy did before 2.4.
LOOPS = pytest.mark.skipif(
    DEVICE.type == "cpu" and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="Triton's interpreter needs NumPy < 2.4",
)


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@LOOPS
@PRECISION
@pytest.mark.parametrize(
    ("dim", "heads", "lengths"),
    [
        (128, 8, [1, 2, 16, 17, 64, 65, 66, 130, 705]),
        (64, 4, [1_000]),  # one row: as many splits as there are
        (16, 32, [129, 33]),  # more heads than a block of queries has rows at least
        (16, 4, [3] * 50),  # few splits
        (16, 4, [40] * 33),  # more rows than go without tensor cores
        (64, 2, [1, 32, 33, 34, 257, 600]),  # every query head has a key head of its own
        (64, 2, [1, 600]),  # and few of them
        (16, 4, [128, 129, 130, 2]),  # a block of few rows
        (16, 4, [256, 257, 258, 2_100]),  # the longest that is not cut, and longer ones
    ],
)
def test_paged_decode_equals_plain_attention(
    dtype: torch.dtype, limit: float, dim: int, heads: int, lengths: list[int]
) -> None:
    torch.manual_seed(0)
    keys, values, table = pool(lengths, 2, dim, dtype)
    q = torch.randn(len(lengths), heads, dim).to(DEVICE, dtype)
    slots = torch.stack([context(row, length)[-1] for row, length in zip(table, lengths, strict=True)])
    # What stands in the slots of the new rows must not matter: the step writes it.
    held = [(x[slots], x.index_fill_(0, slots, torch.nan)) for x in (keys, values)]
    k, v = (F.pad(new.flatten(1), (8, 8))[:, 8:-8].unflatten(1, (2, dim)) for new, _ in held)
    before, arrived = (keys.clone(), values.clone()), integers([0] * 2 * len(lengths))
    out = paged_attention.decode(
        q, k, v, slots, keys, values, table=table, lengths=integers(lengths), arrived=arrived, page_size=PAGE
    )
    assert not arrived.any()
    for now, old, new in zip((keys, values), before, (k, v), strict=True):
        assert torch.equal(now, old.index_copy(0, slots, new))
    for row, length in enumerate(lengths):
        past = [x[context(table[row], length)].float().transpose(0, 1)[None] for x in (keys, values)]
        plain = F.scaled_dot_product_attention(q[row].float()[None, :, None], *past, enable_gqa=True)[0, :, 0]
        assert_close(out[row], plain, limit)


@LOOPS
@PRECISION
@pytest.mark.parametrize("lengths", [[1, 64, 65, 300], [900]])
@pytest.mark.parametrize(("heads", "longest"), [(6, 0), (6, 10**9), (4, 10**9)])  # contexts may be longer, or not
def test_decode_of_raw_heads_is_that_of_normed_and_turned_ones(
    dtype: torch.dtype, limit: float, lengths: list[int], heads: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "LONG_CONTEXT", longest)
    torch.manual_seed(0)
    rows, dim, kv_heads = len(lengths), 64, 2
    keys, values, table = pool(lengths, kv_heads, dim, dtype)
    q_norm, k_norm = norm_of(dim, dtype), norm_of(dim, dtype)
    cos, sin = Rope(dim, 1e6).tables(torch.tensor(lengths, device=DEVICE) - 1, dtype)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(DEVICE, dtype)
    slots = torch.stack([context(row, length)[-1] for row, length in zip(table, lengths, strict=True)])
    arrived = integers([0] * kv_heads * rows)
    given = arrived, slots, integers(lengths), table
    step, plain = (
        paged_attention.DecodeStep(*(x.unflatten(0, (-1, PAGE))[None] for x in pages), *given)
        for pages in ((keys, values), (keys.clone(), values.clone()))
    )
    q, k, v = (x.unflatten(1, (-1, dim)) for x in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1))
    expected = plain.attend(0, rotate(q_norm(q), cos, sin), rotate(k_norm(k), cos, sin), v)
    found = step.attend_raw(0, qkv, q_norm, k_norm, cos, sin)
    assert_close(found, expected.flatten(1), limit)
    assert_close(keys[slots], rotate(k_norm(k), cos, sin), limit)
    assert torch.equal(values[slots], v)


@LOOPS
@PRECISION
def test_chunks_of_raw_heads_are_those_of_normed_and_turned_ones(dtype: torch.dtype, limit: float) -> None:
    torch.manual_seed(0)
    dim, heads, kv_heads, counts, starts = 64, 4, 2, (20, 15), (0, 40)
    rows = sum(counts)
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    keys, values, table = pool(lengths, kv_heads, dim, dtype)
    q_norm, k_norm = norm_of(dim, dtype), norm_of(dim, dtype)
    cos, sin = Rope(dim, 1e6).tables(torch.arange(rows, device=DEVICE), dtype)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(DEVICE, dtype)
    places = [context(row, length)[-count:] for row, length, count in zip(table, lengths, counts, strict=True)]
    numbers = torch.cat((integers([[0, 20, 0], [20, 15, 40]]), table), dim=1)
    given = torch.cat(places), numbers, max(counts)
    step, plain = (
        paged_attention.PagedStep(*(x.unflatten(0, (-1, PAGE))[None] for x in pages), *given)
        for pages in ((keys, values), (keys.clone(), values.clone()))
    )
    q, k, v = (x.unflatten(1, (-1, dim)) for x in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1))
    with torch.enable_grad():  # so that norms are computed as they are written
        q, k = rotate(q_norm(q), cos, sin), rotate(k_norm(k), cos, sin)
    assert_close(step.attend_raw(0, qkv, q_norm, k_norm, cos, sin), plain.attend(0, q, k, v).flatten(1), limit)


def test_contexts_are_cut_into_parts_while_that_keeps_the_device_busy() -> None:
    plan = paged_attention.SHORT_DECODE._replace(programs=1_024, least_splits=8)
    parts = {rows: paged_attention.splits_of(8 * rows, plan) for rows in (1, 2, 3, 4, 8, 16, 32, 64)}
    assert parts == {1: 64, 2: 64, 3: 32, 4: 32, 8: 16, 16: 8, 32: 8, 64: 8}


def test_contexts_of_chunks_are_cut_into_as_many_parts_as_run_at_once() -> None:
    parts = {blocks: paged_attention.chunk_splits(8 * blocks, 32_768) for blocks in (1, 2, 3, 4, 8, 9, 16, 100)}
    assert parts == {1: 16, 2: 8, 3: 4, 4: 4, 8: 2, 9: 1, 16: 1, 100: 1}
    assert paged_attention.chunk_splits(8, 8_192) == 1


@LOOPS
def test_what_is_not_finite_reaches_the_output_of_its_row_alone() -> None:
    lengths = [70, 70, 70]
    keys, values, table = pool(lengths, 2, 16, torch.float32)
    q, k, v = (torch.randn(3, heads, 16, device=DEVICE) for heads in (4, 2, 2))
    keys[context(table[0], 70)[3]] = torch.nan
    k[1] = torch.nan
    slots = torch.stack([context(row, 70)[-1] for row in table])
    out = paged_attention.decode(
        q, k, v, slots, keys, values, table=table, lengths=integers(lengths), arrived=integers([0] * 6), page_size=PAGE
    )
    assert out.isfinite().flatten(1).all(1).tolist() == [False, False, True]


@LOOPS
@PRECISION
@pytest.mark.parametrize(
    ("splits", "heads", "dim", "counts"),
    [
        (1, 8, 64, [130, 3, 65]),
        (2, 8, 128, [130, 3, 65]),
        (4, 2, 32, [130, 3, 65]),  # every query head has a key head of its own
        (2, 6, 32, [130, 3, 65]),  # three share one
        (1, 64, 32, [7, 3, 1]),  # so many heads share one that a block is few rows
        (16, 8, 32, [1, 20, 1]),
    ],
)
def test_paged_prefill_equals_plain_attention(
    dtype: torch.dtype,
    limit: float,
    splits: int,
    heads: int,
    dim: int,
    counts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_attention, "LONG_CONTEXT", 0 if splits > 1 else 10**9)
    monkeypatch.setattr(paged_attention, "MOST_CHUNK_SPLITS", splits)
    torch.manual_seed(0)
    lengths = [150, 200, 65]
    keys, values, table = pool(lengths, 2, dim, dtype)
    q = torch.randn(sum(counts), heads, dim).to(DEVICE, dtype)
    starts = [length - count for length, count in zip(lengths, counts, strict=True)]
    begins = [sum(counts[:row]) for row in range(len(counts))]
    out = torch.full_like(q, torch.nan)
    paged_attention.prefill(
        q,
        keys,
        values,
        out,
        table=table,
        begins=integers(begins),
        counts=integers(counts),
        starts=integers(starts),
        most_rows=max(counts),
        page_size=PAGE,
    )
    for row, (length, count, begin) in enumerate(zip(lengths, counts, begins, strict=True)):
        past = [x[context(table[row], length)].float().transpose(0, 1)[None] for x in (keys, values)]
        mask = torch.ones(count, length, dtype=torch.bool, device=DEVICE).tril(length - count)
        rows = q[begin : begin + count].float().transpose(0, 1)[None]
        plain = F.scaled_dot_product_attention(rows, *past, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        assert_close(out[begin : begin + count], plain, limit)


def test_keys_and_values_are_stored_in_their_slots() -> None:
    keys, values = (torch.zeros(40, 2, 64, device=DEVICE) for _ in range(2))
    k, v = (torch.randn(3, 300, device=DEVICE)[:, 8:136].unflatten(1, (2, 64)) for _ in range(2))
    slots = torch.tensor([35, 0, 17], device=DEVICE)
    paged_attention.store(k, v, slots, keys, values)
    assert torch.equal(keys[slots], k)
    assert torch.equal(values[slots], v)
    assert keys.any(-1).any(-1).sum() == 3


# ------------------------------------------------------------ attention to keys and values in eight bits

# The interpreter rounds to eight bits wrongly, so what is rounded there is what needs no rounding, or the pool has all bits and scales.
POOL = pytest.mark.parametrize("pool_of", [fp8.FP8, None])  # None: the dtype of queries


def without_rounding(*shape: int) -> Tensor:
    """Vectors that eight bits hold as they are, each times a power of two."""
    values = (torch.randn(shape) * 100).to(fp8.FP8).float().clamp(-224, 224)
    values[..., 5] = 448
    return values * torch.exp2(torch.randint(-12, -6, (*shape[:-1], 1)))


def in_pages(
    keys: Tensor, values: Tensor, kind: torch.dtype | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """A pool of what `keys`, `values` [slots, heads, D] are about, and its scales."""
    rows = [fp8.quantized(x.cpu().flatten(0, 1)) for x in (keys, values)]
    held = [row.values.float().to(kind or dtype).view(keys.shape).to(DEVICE) for row in rows]
    return held[0], held[1], torch.stack([row.scale.view(keys.shape[:2]) for row in rows], dim=-1).to(DEVICE)


def meant(pages: Tensor, scales: Tensor, number: int) -> Tensor:
    """Keys (0) or values (1) of a pool, float32."""
    return pages.float() * scales[..., number, None]


@LOOPS
@PRECISION
@POOL
@pytest.mark.parametrize(
    ("dim", "heads", "lengths"),
    [
        (128, 8, [1, 2, 16, 17, 64, 65, 66, 130, 705]),
        (16, 4, [3] * 40),
        (64, 2, [1, 33, 257, 600]),
    ],
)
def test_paged_decode_of_eight_bits_equals_plain_attention_to_what_they_stand_for(
    dtype: torch.dtype, limit: float, pool_of: torch.dtype | None, dim: int, heads: int, lengths: list[int]
) -> None:
    torch.manual_seed(0)
    keys, values, table = pool(lengths, 2, dim, torch.float32)
    keys, values, scales = in_pages(keys, values, pool_of, dtype)
    q = torch.randn(len(lengths), heads, dim).to(DEVICE, dtype)
    slots = torch.stack([context(row, length)[-1] for row, length in zip(table, lengths, strict=True)])
    k, v = (without_rounding(len(lengths), 2, dim).to(DEVICE, dtype) for _ in range(2))
    scales[slots] = torch.nan  # what stands in the slots of the new rows must not matter
    before = keys.clone(), values.clone(), scales.clone()
    arrived = integers([0] * 2 * len(lengths))
    out = paged_attention.decode(
        q, k, v, slots, keys, values, table=table, lengths=integers(lengths), arrived=arrived, page_size=PAGE, scales=scales
    )  # fmt: skip
    assert not arrived.any()
    for number, (pages, new) in enumerate(((keys, k), (values, v))):
        assert_close(meant(pages, scales, number)[slots], new, 1e-6 if pool_of or dtype == torch.float32 else limit)
    others = torch.ones(len(keys), dtype=torch.bool, device=DEVICE).index_fill_(0, slots, value=False)
    for now, old in zip((keys, values, scales), before, strict=True):
        assert torch.equal(now.float()[others], old.float()[others])
    for row, length in enumerate(lengths):
        at = context(table[row], length)
        past = [meant(pages, scales, number)[at].transpose(0, 1)[None] for number, pages in enumerate((keys, values))]
        plain = F.scaled_dot_product_attention(q[row].float()[None, :, None], *past, enable_gqa=True)[0, :, 0]
        assert_close(out[row], plain, limit)


@LOOPS
@PRECISION
@POOL
@pytest.mark.parametrize(("splits", "heads"), [(1, 8), (2, 6), (16, 2)])
def test_paged_prefill_of_eight_bits_equals_plain_attention_to_what_they_stand_for(
    dtype: torch.dtype,
    limit: float,
    pool_of: torch.dtype | None,
    splits: int,
    heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stored by the kernel in front of it."""
    monkeypatch.setattr(paged_attention, "LONG_CONTEXT", 0 if splits > 1 else 10**9)
    monkeypatch.setattr(paged_attention, "MOST_CHUNK_SPLITS", splits)
    torch.manual_seed(0)
    lengths, counts, begins, dim = [150, 200, 65], [130, 3, 65], [0, 130, 133], 32
    keys, values, table = pool(lengths, 2, dim, torch.float32)
    keys, values, scales = in_pages(keys, values, pool_of, dtype)
    q, k, v = torch.randn(198, heads, dim), without_rounding(198, 2, dim), without_rounding(198, 2, dim)
    q, k, v = (x.to(DEVICE, dtype) for x in (q, k, v))
    contexts = [context(row, length) for row, length in zip(table, lengths, strict=True)]
    slots = torch.cat([at[-count:] for at, count in zip(contexts, counts, strict=True)])
    chunks = torch.cat(
        (torch.tensor([begins, counts, [n - count for n, count in zip(lengths, counts, strict=True)]]).T.int().to(DEVICE), table), 1
    )  # fmt: skip
    paged = (x.unflatten(0, (-1, PAGE))[None] for x in (keys, values))
    step = paged_attention.PagedStep(*paged, slots, chunks, max(counts), scales=scales.unflatten(0, (-1, PAGE))[None])
    out = step.attend(0, q, k, v)
    for at, count, begin in zip(contexts, counts, begins, strict=True):
        past = [meant(pages, scales, number)[at].transpose(0, 1)[None] for number, pages in enumerate((keys, values))]
        mask = torch.ones(count, len(at), dtype=torch.bool, device=DEVICE).tril(len(at) - count)
        rows = q[begin : begin + count].float().transpose(0, 1)[None]
        plain = F.scaled_dot_product_attention(rows, *past, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        assert_close(out[begin : begin + count], plain, limit)


@POOL
@pytest.mark.parametrize("kv_heads", [2, 3])
def test_keys_and_values_are_stored_in_eight_bits(pool_of: torch.dtype | None, kv_heads: int) -> None:
    """As on a CPU; on a GPU rounded as there, too."""
    torch.manual_seed(0)
    keys, values = (torch.zeros(40, kv_heads, 64, device=DEVICE).to(pool_of or torch.float32) for _ in range(2))
    scales = torch.zeros(40, kv_heads, 2, device=DEVICE)
    make = torch.randn if DEVICE.type == "cuda" else without_rounding
    k, v = (F.pad(make(4, kv_heads, 64).flatten(1), (8, 8))[:, 8:-8].unflatten(1, (kv_heads, 64)) for _ in range(2))
    k[3] = 0
    slots = torch.tensor([35, 0, 17, 20])
    paged_eight.store(k.to(DEVICE), v.to(DEVICE), slots.to(DEVICE), keys, values, scales)
    for number, (pages, given) in enumerate(((keys, k), (values, v))):
        plain = fp8.quantized(given.flatten(0, 1))
        assert torch.equal(scales[..., number].cpu()[slots].flatten(), plain.scale)
        found = pages.cpu()[slots].float().flatten(0, 1)
        assert torch.equal(found if pool_of else found.to(fp8.FP8).float(), plain.values.float())
        assert pages.float().any(-1).any(-1).sum() == (3 if number == 0 else 4)


@LOOPS
def test_raw_heads_are_rounded_after_they_are_normed_and_turned() -> None:
    torch.manual_seed(0)
    dim, kv_heads, heads, lengths = 64, 2, 8, [1, 64, 300]
    keys, values, table = pool(lengths, kv_heads, dim, torch.float32)
    keys, values, scales = in_pages(keys, values, None, torch.float32)
    q_norm, k_norm = norm_of(dim, torch.float32), norm_of(dim, torch.float32)
    cos, sin = Rope(dim, 1e6).tables(torch.tensor(lengths, device=DEVICE) - 1, torch.float32)
    qkv = torch.randn(len(lengths), (heads + 2 * kv_heads) * dim).to(DEVICE)
    slots = torch.stack([context(row, length)[-1] for row, length in zip(table, lengths, strict=True)])
    given = integers([0] * kv_heads * len(lengths)), slots, integers(lengths), table
    step = paged_attention.DecodeStep(
        *(x.unflatten(0, (-1, PAGE))[None] for x in (keys, values)),
        *given,
        scales=scales.unflatten(0, (-1, PAGE))[None],
    )
    q, k, v = (x.unflatten(1, (-1, dim)) for x in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1))
    found = step.attend_raw(0, qkv, q_norm, k_norm, cos, sin)
    assert_close(meant(keys, scales, 0)[slots], rotate(k_norm(k), cos, sin), 1e-5)
    assert_close(meant(values, scales, 1)[slots], v, 1e-5)
    assert_close(scales[slots][..., 0], rotate(k_norm(k), cos, sin).abs().amax(-1) / fp8.LARGEST, 1e-5)
    expected = step.attend(0, rotate(q_norm(q), cos, sin), rotate(k_norm(k), cos, sin), v)
    assert_close(found, expected.flatten(1), 2e-5)


# ------------------------------------------------------------ attention of the code predictor


@PRECISION
def test_dense_attention_step_by_step_equals_plain_attention(dtype: torch.dtype, limit: float) -> None:
    torch.manual_seed(0)
    q_norm, k_norm = norm_of(64, dtype), norm_of(64, dtype)
    ours, plain = (DenseKV(1, 3, 70, 2, 64, dtype=dtype, device=DEVICE) for _ in range(2))
    tables = Rope(64, 1e6).tables(torch.arange(70, device=DEVICE), dtype)
    for steps in (2, 1, 1, 7, 1, 4, 16, 16, 8, 1, 7):  # 64 in all
        qkv = torch.randn(3 * steps, 8 * 64).to(DEVICE, dtype)
        turn = [table[plain.length : plain.length + steps].repeat(3, 1) for table in tables]
        if steps == 1:  # as the code predictor has it
            turn = [table[plain.length : plain.length + 1].expand(3, -1) for table in tables]
        q, k, v = (x.unflatten(1, (-1, 64)) for x in qkv.split([4 * 64, 2 * 64, 2 * 64], dim=1))
        expected = plain.attend(0, rotate(q_norm(q), *turn), rotate(k_norm(k), *turn), v).flatten(1)
        found = fused.dense_attend(
            qkv,
            q_norm.weight,
            k_norm.weight,
            *turn,
            q_norm.eps,
            keys=ours.keys[0],
            values=ours.values[0],
            start=plain.length,
        )
        plain.advance()
        assert_close(found, expected, limit)
        for one, other in ((ours.keys, plain.keys), (ours.values, plain.values)):
            assert_close(one[..., : plain.length, :], other[..., : plain.length, :], limit)


@PRECISION
@pytest.mark.parametrize("size", [72, 1_152])
def test_a_sum_is_normed_as_plainly(dtype: torch.dtype, limit: float, size: int) -> None:
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(size, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    norm.to(DEVICE, dtype)
    x, more = (torch.randn(2, 5, size).to(DEVICE, dtype) + 3 for _ in range(2))
    total, normed = fused.add_layer_norm(x, more, norm.weight, norm.bias, norm.eps)
    assert torch.equal(total, x + more)
    assert_close(normed, norm(x + more), limit)


@PRECISION
@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(3, 4, 2), (40, 16, 8), (33, 8, 2), (32, 6, 3)])
def test_queries_and_keys_are_normed_and_turned_as_plainly(
    dtype: torch.dtype, limit: float, rows: int, heads: int, kv_heads: int
) -> None:
    torch.manual_seed(0)
    norms = [RMSNorm(64, 1e-6).to(DEVICE, dtype) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * 64).to(DEVICE, dtype)
    turn = Rope(64, 10_000.0).tables(torch.arange(rows, device=DEVICE), dtype)
    found = fused.qk_norm_rope(qkv, norms[0].weight, norms[1].weight, *turn, 1e-6, heads=heads, kv_heads=kv_heads)
    plain = [part.unflatten(1, (-1, 64)) for part in qkv.split([heads * 64, kv_heads * 64, kv_heads * 64], dim=1)]
    for one, other, norm in zip(found, plain, norms, strict=False):
        with torch.enable_grad():  # so that it is computed as it is written
            expected = rotate(norm(other), *turn)
        assert_close(one, expected, limit)
    slots = torch.randperm(50, device=DEVICE)[:rows]
    keys, values = (torch.zeros(50, kv_heads, 64, dtype=dtype, device=DEVICE) for _ in range(2))
    weights = norms[0].weight, norms[1].weight
    q = fused.qk_norm_rope_stored(qkv, *weights, *turn, 1e-6, slots=slots, keys=keys, values=values)
    for one, other in ((q, found[0]), (keys[slots], found[1]), (values[slots], plain[2])):
        assert torch.equal(one, other)
    assert keys.any(-1).any(-1).sum() == values.any(-1).any(-1).sum() == rows


@PRECISION
def test_patches_are_turned_as_plainly(dtype: torch.dtype, limit: float) -> None:
    torch.manual_seed(0)
    groups, patches, heads, dim = 2, 12, 3, 24
    qkv = torch.randn(groups, patches, 3 * heads * dim).to(DEVICE, dtype)
    angles = torch.randn(patches, dim, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    plain = qkv.view(groups, patches, 3, heads, dim).permute(2, 0, 3, 1, 4)[:2]
    for one, other in zip(fused.turn_patches(qkv, cos, sin, heads), plain, strict=True):
        assert_close(one, qwen3_vl._turn(other, cos, sin), limit)


# ------------------------------------------------------------ eight bits


def assert_in_eight_bits(ours: tuple[Tensor, Tensor], plain: Tensor, limit: float) -> None:
    """ours: as `fp8.quantized` has plain, by kernels that compute it to within `limit`."""
    values, scale = (part.cpu() for part in ours)
    assert_close(scale, fp8.quantized(plain.cpu()).scale, limit)
    step = 1 / 16 if values.dtype == fp8.FP8 else limit  # half of what is between neighbours
    assert_close(values.float() * scale[:, None], plain.float().cpu(), step + limit)


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds to eight bits wrongly (what goes up to a power of two becomes half of it), so there it rounds nothing."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(fused_fp8, "FP8", torch.float32)


@pytest.mark.usefixtures("eight")
@PRECISION
@pytest.mark.parametrize(("rows", "size"), [(3, 48), (2, 4_096), (1, 12_288)])
def test_rows_become_eight_bits(dtype: torch.dtype, limit: float, rows: int, size: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(rows, size) * torch.rand(rows, 1) * 9).to(DEVICE, dtype)
    x[0] = 0
    assert_in_eight_bits(fused_fp8.quantized(x), x, 1e-6)
    if DEVICE.type == "cuda":
        plain = fp8.quantized(x.cpu())
        assert torch.equal(fused_fp8.quantized(x)[0].cpu().float(), plain.values.float())


@pytest.mark.usefixtures("eight")
@PRECISION
@pytest.mark.parametrize("size", [48, 300, 4_096])
def test_norms_give_eight_bits(dtype: torch.dtype, limit: float, size: int) -> None:
    torch.manual_seed(0)
    x, more = torch.randn(2, 3, size).to(DEVICE, dtype)
    norm = norm_of(size, dtype)
    for added in (None, more):
        with torch.enable_grad():  # plainly
            total, normed = norm.of_sum(x, added)
        ours, rows = fused_fp8.normed_sum(x, added, norm.weight, norm.eps)
        assert torch.equal(ours, total)
        assert_in_eight_bits(rows, normed.detach(), limit)


@LOOPS
@pytest.mark.usefixtures("eight")
@PRECISION
@pytest.mark.parametrize("size", [40, 4_096, 6_144])
def test_activations_give_eight_bits(dtype: torch.dtype, limit: float, size: int) -> None:
    torch.manual_seed(0)
    both = torch.randn(3, 2 * size).to(DEVICE, dtype)
    gate, up = both.split(size, dim=1)
    assert_in_eight_bits(fused_fp8.silu_mul(both), F.silu(gate) * up, limit)


# ------------------------------------------------------------ layers of a few rows


@LOOPS
@PRECISION
@pytest.mark.parametrize(
    ("rows", "size_in", "size_out"),
    [
        *[(1, 1_024, 48), (2, 300, 5), (1, 6_144, 16), (2, 12_288, 7)],  # one by one
        *[(3, 48, 40), (4, 2_048, 33), (8, 1_024, 40), (9, 300, 5), (16, 2_048, 50)],
        *[(5, 3_072, 20), (16, 6_144, 16), (8, 4_500, 25), (3, 4_096, 40)],  # in parts
    ],
)
def test_products_with_what_is_around_them(
    dtype: torch.dtype, limit: float, rows: int, size_in: int, size_out: int
) -> None:
    if DEVICE.type == "cuda" and dtype == torch.float32 and rows > 1:
        pytest.skip("what tensor cores do not take")
    torch.manual_seed(0)
    x, norm = torch.randn(rows, size_in).to(DEVICE, dtype), norm_of(size_in, dtype)
    weight = (torch.randn(2 * size_out, size_in) / size_in**0.5).to(DEVICE, dtype)
    half, more = weight[:size_out], torch.randn(rows, size_out).to(DEVICE, dtype)
    with torch.enable_grad():  # plainly
        product, sums = F.linear(norm(x), half), more + F.linear(x, half)
        gate, up = F.linear(norm(x), weight).split(size_out, dim=1)
    assert_close(fused_linear.linear_added(x, half, more), sums, limit)
    assert_close(fused_linear.normed_linear(x, norm.weight, norm.eps, half), product, limit)
    assert_close(fused_linear.normed_swiglu(x, norm.weight, norm.eps, weight), F.silu(gate) * up, limit)


@LOOPS
@HALF_ONLY
@pytest.mark.parametrize(
    ("rows", "size_in", "size_out"),
    [(1, 1_024, 24), (2, 300, 5), (3, 300, 5), (8, 4_096, 24), (16, 3_072, 25), (1, 12_288, 8), (8, 12_288, 16)],
)
def test_weights_of_8_bits_are_multiplied_as_what_they_stand_for(
    dtype: torch.dtype, limit: float, rows: int, size_in: int, size_out: int
) -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(rows, size_in).to(DEVICE, dtype), norm_of(size_in, dtype)
    weight = torch.randn(2 * size_out, size_in).to(torch.float8_e4m3fn).to(DEVICE)
    scale = ((torch.rand(2 * size_out) + 0.5) / size_in**0.5).to(DEVICE)
    more, half = torch.randn(rows, size_out).to(DEVICE, dtype), weight[:size_out]
    real = weight.float() * scale[:, None]
    with torch.enable_grad():
        wide = RMSNorm(size_in, norm.eps).to(DEVICE)
        wide.weight.data.copy_(norm.weight)
        gate, up = F.linear(wide(x.float()), real).split(size_out, dim=1)
    sums = more + F.linear(x.float(), real[:size_out]).to(dtype)
    assert_close(fused_linear.linear_added(x, half, more, scale=scale[:size_out]), sums, limit)
    found = fused_linear.normed_linear(x, norm.weight, norm.eps, half, scale=scale[:size_out])
    assert_close(found, gate.to(dtype), limit)
    found = fused_linear.normed_swiglu(x, norm.weight, norm.eps, weight, scale=scale)
    assert_close(found, (F.silu(gate) * up).to(dtype), limit)


@LOOPS
@HALF_ONLY
def test_tiles_may_be_of_twice_as_many_rows(dtype: torch.dtype, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(9, 1_024).to(DEVICE, dtype), norm_of(1_024, dtype)
    weight = (torch.randn(2 * 40, 1_024) / 32).to(DEVICE, dtype)
    with torch.enable_grad():
        gate, up = F.linear(norm(x), weight).split(40, dim=1)
    monkeypatch.setattr(fused_tiles, "plan", lambda *sizes, normed: fused_tiles.Plan(4, 32, 512, 2, 1))
    assert_close(fused_linear.normed_swiglu(x, norm.weight, norm.eps, weight), F.silu(gate) * up, limit)


@pytest.mark.parametrize(
    ("size_in", "lines", "itemsize", "rows", "normed", "wanted"),
    [
        (1_024, 4_096, 2, 8, True, (4, 16, 512, 2, 2)),
        (2_048, 2_048, 2, 8, False, (4, 16, 512, 4, 4)),
        (3_072, 1_024, 2, 8, False, (4, 16, 512, 6, 6)),
        (4_096, 24_576, 2, 8, True, (4, 16, 512, 8, 3)),
        (12_288, 4_096, 2, 8, False, (8, 16, 512, 24, 4)),
        (12_288, 4_096, 1, 8, False, (8, 16, 1_024, 12, 2)),
        (4_096, 6_144, 1, 16, True, (4, 16, 1_024, 4, 2)),
        (4_096, 24_576, 1, 8, True, (4, 16, 1_024, 4, 2)),
        (4_096, 24_576, 1, 9, True, (4, 32, 512, 8, 2)),
        (48, 40, 2, 2, True, (4, 16, 512, 1, 1)),
    ],
)
def test_a_product_is_shared_out_by_its_size(
    size_in: int, lines: int, itemsize: int, rows: int, normed: bool, wanted: tuple[int, ...]
) -> None:
    assert fused_tiles.plan(size_in, lines, itemsize, rows, normed=normed) == wanted


@pytest.mark.parametrize(
    ("size_out", "row_bytes", "wanted"),
    [
        (12_288, 16_384, (2, 4)),
        (4_096, 24_576, (2, 4)),
        (2_048, 12_288, (4, 8)),
        (4_096, 4_096, (8, 8)),
        (1_024, 6_144, (2, 8)),
        (256, 32_768, (1, 8)),
        (3_072, 1_024, (4, 8)),  # small
    ],
)
def test_a_single_row_is_shared_out_by_its_size(size_out: int, row_bytes: int, wanted: tuple[int, ...]) -> None:
    assert fused_linear.plan(size_out, row_bytes) == wanted


@LOOPS
@PRECISION
@pytest.mark.parametrize("batch", [1, 2])
def test_a_decoder_of_a_few_rows_is_the_plain_one(
    dtype: torch.dtype, limit: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, intermediate=40)
    torch.manual_seed(0)
    decoder = Decoder(config).to(DEVICE, dtype).requires_grad_(False)
    counts = (9, 1, 2, 8, 1)  # of each sequence; of two, nine are too many
    steps = [(torch.randn(batch * count, 48).to(DEVICE, dtype), count) for count in counts]
    adds = torch.randn(1, 48).to(DEVICE, dtype)
    taken: list[int] = []

    def outputs() -> list[Tensor]:
        kv, found = DenseKV(2, batch, sum(counts), 2, 16, dtype=dtype, device=DEVICE), []
        for x, count in steps:
            positions = torch.arange(kv.length, kv.length + count, device=DEVICE).repeat(batch)
            found.append(decoder(x, positions, kv, (adds,), torch.tensor([batch - 1], device=DEVICE)))
            kv.advance()
        return found

    with torch.enable_grad():
        plain = outputs()
    launched = fused_linear._launched
    monkeypatch.setattr(fused_linear, "_launched", lambda x, *a, **k: taken.append(len(x)) or launched(x, *a, **k))
    for module in (layers, qwen3):
        monkeypatch.setattr(module, "fusible", lambda x: True)
    for one, other in zip(outputs(), plain, strict=True):
        assert_close(one, other, 5 * limit)
    most = 1 if dtype == torch.float32 else 16
    assert Counter(taken) == Counter(batch * count for count in counts if batch * count <= most for _ in range(2 * 4))


@LOOPS
@PRECISION
def test_a_few_rows_meet_weights_in_eight_bits_as_they_are(
    dtype: torch.dtype, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is rounded to eight bits: the same as by a decoder that has what those weights stand for."""
    torch.manual_seed(0)
    eight, plain = (Decoder(CONFIG).to(DEVICE, dtype).requires_grad_(False) for _ in range(2))
    plain.load_state_dict(eight.state_dict())
    in_eight_bits(eight)
    for one, other in zip(eight.modules(), plain.modules(), strict=True):
        if isinstance(one, Linear):
            assert one.scale is not None
            other.weight.data = (one.weight.float() * one.scale[:, None]).to(dtype)

    def outputs(decoder: Decoder) -> list[Tensor]:
        kv, found = DenseKV(2, 1, 64, 2, 16, dtype=dtype, device=DEVICE), []
        for count in (1, 2, 1, 5, 16) if dtype != torch.float32 else (1, 1):
            x = torch.randn(count, 48, generator=torch.Generator().manual_seed(count)).to(DEVICE, dtype)
            found.append(decoder(x, torch.arange(kv.length, kv.length + count, device=DEVICE), kv))
            kv.advance()
        return found

    with torch.enable_grad():
        expected = outputs(plain)
    for module in (layers, qwen3):
        monkeypatch.setattr(module, "fusible", lambda x: True)
    monkeypatch.setattr(fp8, "linear", lambda *_: pytest.fail("rows were rounded"))
    for one, other in zip(outputs(eight), expected, strict=True):
        assert_close(one, other, 5 * limit)
