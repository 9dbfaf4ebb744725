from __future__ import annotations

import pytest
import torch
from tiny_stage import STOP, TinyStage, prompt

from aura_omni.engine.attention import PagedKV
from aura_omni.engine.kv_cache import KVCache
from aura_omni.engine.sequence import Batch, MediaSpan, Sequence
from aura_omni.flow import Sampling
from aura_omni.models.layers import KeyValues


def assert_same(ours: torch.Tensor, reference: torch.Tensor) -> None:
    """Up to the order of float32 sums."""
    torch.testing.assert_close(ours, reference, atol=5e-6, rtol=5e-6)


def sequence(length: int, *, seed: int = 0, media: tuple[MediaSpan, ...] = ()) -> Sequence:
    return Sequence(prompt(length, seed=seed), Sampling(), print, print, media=media)


class Paged:
    """The stage on pages, driven by hand: which rows are computed together is the test's choice."""

    def __init__(self, stage: TinyStage, *, pages: int = 64, page_size: int = 4, eight_bits: bool = False) -> None:
        config = stage.decoder_config
        self.stage = stage
        self.cache = KVCache(pages, page_size)
        self.kv = PagedKV(
            layers=config.layers,
            pages=pages,
            page_size=page_size,
            kv_heads=config.kv_heads,
            most_rows=8,
            head_dim=config.head_dim,
            dtype=stage.dtype,
            device=stage.device,
            eight_bits=eight_bits,
        )

    def compute(self, *rows: tuple[Sequence, int]) -> list[torch.Tensor]:
        """The next `count` rows of each sequence in one step: hidden [count, H] of each."""
        for one, _ in rows:
            assert one.pages or self.cache.admit(one)
        counts = tuple(count for _, count in rows)
        batch = Batch(tuple(one for one, _ in rows), tuple(one.computed for one, _ in rows), counts)
        hidden = self.stage.forward(batch, self.kv.step(batch) if max(counts) > 1 else self.decode_step(batch))
        for one, count in rows:
            one.computed += count
        return list(hidden.split(counts))

    def decode_step(self, batch: Batch) -> KeyValues:
        """From tensors; beyond a sequence's own pages the table names those of others."""
        size, widest = self.cache.page_size, max(len(one.pages) for one in batch.sequences) + 1
        table = torch.full((len(batch.sequences), widest), batch.sequences[0].pages[0], dtype=torch.int32)
        for row, one in enumerate(batch.sequences):
            table[row, : len(one.pages)] = torch.tensor(one.pages)
        rows = list(zip(batch.sequences, batch.starts, strict=True))
        slot = torch.tensor([one.pages[start // size] * size + start % size for one, start in rows])
        return self.kv.decode_step(slot, torch.tensor(batch.starts, dtype=torch.int32) + 1, table)


@pytest.mark.parametrize("mrope", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_paged_attention_equals_dense_attention(page_size: int, mrope: bool) -> None:
    stage = TinyStage(mrope=mrope)
    paged = Paged(stage, page_size=page_size)
    one = sequence(23, media=(MediaSpan(5, 6, b"clip"),))
    assert_same(paged.compute((one, 23))[0], stage.dense(one))


@pytest.mark.parametrize("mrope", [False, True])
@pytest.mark.parametrize("chunks", [[1] * 23, [22, 1], [1, 22], [5, 5, 5, 5, 3], [7, 1, 1, 14]])
def test_a_prompt_in_chunks_equals_the_whole_prompt(chunks: list[int], mrope: bool) -> None:
    stage = TinyStage(mrope=mrope)
    paged = Paged(stage)
    one = sequence(23, media=(MediaSpan(5, 6, b"clip"), MediaSpan(11, 4, b"other")))
    parts = [paged.compute((one, count))[0] for count in chunks]
    assert_same(torch.cat(parts), stage.dense(one))


def test_sequences_in_a_batch_equal_each_alone() -> None:
    stage = TinyStage()
    paged = Paged(stage)
    some = [sequence(length, seed=length) for length in (3, 17, 30, 9, 1)]
    parts: list[list[torch.Tensor]] = [[] for _ in some]
    # Decode rows of different lengths, chunks that start and chunks that go on, in different company each time.
    for counts in ((2, 0, 10, 8, 1), (1, 9, 1, 0, 0), (0, 7, 18, 1, 0), (0, 1, 1, 0, 0)):
        going = [index for index, count in enumerate(counts) if count]
        for index, hidden in zip(going, paged.compute(*[(some[i], counts[i]) for i in going]), strict=True):
            parts[index].append(hidden)
    for one, hidden in zip(some, parts, strict=True):
        assert_same(torch.cat(hidden), stage.dense(one))


def test_what_other_sequences_left_in_a_page_is_not_seen() -> None:
    stage = TinyStage()
    paged = Paged(stage)
    paged.kv.keys[:, :-1] = torch.nan
    paged.kv.values[:, :-1] = torch.inf
    short, long = sequence(2), sequence(19, seed=1)
    parts = [paged.compute((short, 1), (long, 18)), paged.compute((short, 1), (long, 1))]
    assert_same(torch.cat([parts[0][0], parts[1][0]]), stage.dense(short))
    assert_same(torch.cat([parts[0][1], parts[1][1]]), stage.dense(long))


def test_a_row_that_is_not_finite_stays_in_its_own_sequence() -> None:
    stage = TinyStage()
    stage.not_a_number = STOP
    paged = Paged(stage)
    bad, good = sequence(13), sequence(9, seed=1)
    bad.tokens[0] = STOP
    # In the second step the good one is padded to the length of the bad one, which owns the first page of all.
    hidden = torch.cat([paged.compute((bad, 12), (good, 8))[1], paged.compute((bad, 1), (good, 1))[1]])
    assert bad.pages[0] == 0
    assert_same(hidden, stage.dense(good))


def test_the_padding_page_stays_zero() -> None:
    stage = TinyStage()
    paged = Paged(stage, pages=8)
    one, two = sequence(16), sequence(16, seed=1)
    paged.compute((one, 15), (two, 1))
    paged.compute((one, 1), (two, 15))
    assert paged.cache.free == 0
    assert not paged.kv.keys[:, -1].any()
    assert not paged.kv.values[:, -1].any()
    assert paged.kv.keys[:, :-1].all()


# ---------------------------------------------------------------- keys and values in eight bits


@pytest.mark.parametrize("chunks", [[1] * 23, [22, 1], [1, 22], [5, 5, 5, 5, 3], [7, 1, 1, 14]])
def test_rounded_keys_and_values_are_the_same_however_a_prompt_is_cut(chunks: list[int]) -> None:
    """And are not those of all bits: a step sees its own rows as later ones will."""
    stage = TinyStage(mrope=True)
    whole, cut = (Paged(stage, eight_bits=True) for _ in range(2))
    one, other = (sequence(23, media=(MediaSpan(5, 6, b"clip"),)) for _ in range(2))
    expected = whole.compute((one, 23))[0]
    assert_same(torch.cat([cut.compute((other, count))[0] for count in chunks]), expected)
    difference = (expected - stage.dense(one)).abs()
    assert difference.mean() < 0.1 * expected.std()
    assert difference[0].max() > 1e-4  # which only attends to itself


def test_rounded_rows_of_a_batch_equal_each_alone() -> None:
    stage = TinyStage()
    together, some = Paged(stage, eight_bits=True), [sequence(length, seed=length) for length in (3, 17, 9)]
    steps = [together.compute((some[0], 2), (some[1], 16)), together.compute((some[0], 1), (some[1], 1), (some[2], 9))]
    found = [torch.cat((steps[0][row], steps[1][row])) for row in range(2)] + [steps[1][2]]
    for one, hidden in zip(some, found, strict=True):
        alone = Paged(stage, eight_bits=True).compute((sequence(one.length, seed=one.length), one.length))[0]
        assert_same(hidden, alone)


def test_each_vector_is_within_a_sixteenth_of_what_it_was() -> None:
    """However large it is, and without regard to those beside it."""
    kv = PagedKV(
        layers=1, pages=3, page_size=4, kv_heads=3, head_dim=16, most_rows=1, dtype=torch.float32,
        device=torch.device("cpu"), eight_bits=True,
    )  # fmt: skip
    torch.manual_seed(0)
    size = torch.tensor([1e-12, 1.0, 1e12])
    k, v = torch.randn(8, 3, 16) * size[:, None], torch.randn(8, 3, 16) * size.flip(0)[:, None]
    k[3] = 0
    slot, chunks = torch.tensor([9, 0, 4, 11, 2, 7, 5, 1]), torch.zeros(0, 4, dtype=torch.int32)
    kv.chunk_step(slot, chunks, most_rows=0).attend(0, torch.zeros(8, 3, 16), k, v)
    assert kv.scales is not None
    for number, (pages, given) in enumerate(((kv.keys, k), (kv.values, v))):
        scale = kv.scales[0, ..., number].flatten(0, 1)[slot][..., None]
        found = pages[0].flatten(0, 1).float()[slot] * scale
        bound = (given.abs() / 16).maximum(scale * 2.0**-10)
        assert ((found - given).abs() <= bound * (1 + 1e-6)).all()
        assert (found.abs().amax(-1) / given.abs().amax(-1).clamp_min(1e-30) - 1).abs()[given.any(-1)].max() < 1e-6


def test_what_other_sequences_left_in_a_page_of_eight_bits_is_not_seen() -> None:
    stage = TinyStage()
    dirty, clean = (Paged(stage, eight_bits=True) for _ in range(2))
    dirty.kv.keys.view(torch.uint8)[:, :-1] = 0x7F  # not a number
    dirty.kv.values.view(torch.uint8)[:, :-1] = 0x7F
    assert dirty.kv.scales is not None
    dirty.kv.scales[:, :-1] = torch.nan
    found = []
    for paged in (dirty, clean):
        short, long = sequence(2), sequence(19, seed=1)
        steps = [paged.compute((short, 1), (long, 18)), paged.compute((short, 1), (long, 1))]
        found.append(torch.cat([*steps[0], *steps[1]]))
    assert torch.equal(*found)
