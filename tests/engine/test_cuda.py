"""On a GPU: our kernels against the plain code they stand for, and steps replayed from graphs against steps as written."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_stage import GREEDY, Request, TinyStage, make_runner, prompt, run

from aura_omni.engine.sampler import Draw, pick
from aura_omni.flow import Sampling
from aura_omni.models.layers import RMSNorm, Rope, rotate

pytestmark = pytest.mark.gpu

PAGE = 16


@pytest.fixture
def paged():
    from aura_omni.engine import paged_attention

    return paged_attention


def pool(lengths: list[int], heads: int, dim: int, dtype: torch.dtype):
    """Random keys and values in shuffled pages, and each sequence's page table."""
    counts = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(counts) + 3).int()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    used = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[used : used + count]
        used += count
    slots = (sum(counts) + 3) * PAGE
    keys, values = (torch.randn(slots, heads, dim, device="cuda").to(dtype) for _ in range(2))
    return keys, values, table.cuda()


def context(table: torch.Tensor, length: int) -> torch.Tensor:
    rows = torch.arange(length, device="cuda")
    return table[rows // PAGE].long() * PAGE + rows % PAGE


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_paged_decode_equals_plain_attention(paged, dtype, limit, dim):
    lengths = [1, 16, 17, 130, 2_000]
    keys, values, table = pool(lengths, 2, dim, dtype)
    q = torch.randn(len(lengths), 8, dim, device="cuda").to(dtype)
    out = paged.decode(q, keys, values, table, torch.tensor(lengths, dtype=torch.int32, device="cuda"), PAGE)
    for row, length in enumerate(lengths):
        k, v = (x[context(table[row], length)].float().transpose(0, 1)[None] for x in (keys, values))
        plain = F.scaled_dot_product_attention(q[row].float()[None, :, None], k, v, enable_gqa=True)[0, :, 0]
        assert (out[row].float() - plain).abs().max() < limit


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_paged_prefill_equals_plain_attention(paged, dtype, limit):
    lengths, counts = [200, 700, 65], [170, 3, 65]
    keys, values, table = pool(lengths, 2, 128, dtype)
    q = torch.randn(sum(counts), 8, 128, device="cuda").to(dtype)
    starts = [length - count for length, count in zip(lengths, counts, strict=True)]
    begins = [0, *np.cumsum(counts)[:-1].tolist()]
    numbers = {
        name: torch.tensor(value, dtype=torch.int32, device="cuda")
        for name, value in {"begins": begins, "counts": counts, "starts": starts}.items()
    }
    out = torch.full_like(q, torch.nan)
    paged.prefill(q, keys, values, out, table=table, **numbers, most_rows=max(counts), page_size=PAGE)
    for row, (length, count, begin) in enumerate(zip(lengths, counts, begins, strict=True)):
        k, v = (x[context(table[row], length)].float().transpose(0, 1)[None] for x in (keys, values))
        mask = torch.ones(count, length, dtype=torch.bool, device="cuda").tril(length - count)
        rows = q[begin : begin + count].float().transpose(0, 1)[None]
        plain = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        assert (out[begin : begin + count].float() - plain).abs().max() < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layers_equal_the_plain_ones(dtype):
    from aura_omni.models import fused

    torch.manual_seed(0)
    limit = 2e-6 if dtype == torch.float32 else 0.04  # one unit in the last place at most, here and there
    x = torch.randn(37, 2_048, device="cuda").to(dtype)
    norm = RMSNorm(2_048, 1e-6).cuda().to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    assert (fused.rms_norm(x, norm.weight, 1e-6) - norm(x)).abs().max() <= limit
    q_norm, k_norm = (RMSNorm(128, 1e-6).cuda().to(dtype) for _ in range(2))
    qkv = torch.randn(37, (16 + 2 * 8) * 128, device="cuda").to(dtype)
    cos, sin = Rope(128, 1e6).tables(torch.arange(37, device="cuda"), dtype)
    q, k = fused.qk_norm_rope(qkv, q_norm.weight, k_norm.weight, cos, sin, 1e-6, heads=16, kv_heads=8)
    plain_q = rotate(q_norm(qkv[:, : 16 * 128].view(37, 16, 128)), cos, sin)
    plain_k = rotate(k_norm(qkv[:, 16 * 128 : 24 * 128].view(37, 8, 128)), cos, sin)
    assert (q - plain_q).abs().max() <= limit
    assert (k - plain_k).abs().max() <= limit
    both = torch.randn(37, 2 * 3_072, device="cuda").to(dtype)
    plain = F.silu(both[:, :3_072]) * both[:, 3_072:]
    assert (fused.silu_mul(both) - plain).abs().max() <= limit


@pytest.mark.parametrize("vocabulary", [100, 2_048, 3_072])
def test_the_fused_draw_is_the_plain_one(vocabulary):
    torch.manual_seed(0)
    rows = [Sampling(temperature=t, top_k=k) for t, k in [(0.0, 0), (0.9, 50), (1.0, 0), (0.5, 5), (1.5, 10_000)] * 20]
    logits = torch.randn(len(rows), vocabulary) * 3
    seeds, steps = [7 * row for row in range(len(rows))], list(range(len(rows)))
    plain = pick(logits, Draw.of(rows, seeds, steps, torch.device("cpu")), stream=3)
    fused = pick(logits.cuda(), Draw.of(rows, seeds, steps, torch.device("cuda")), stream=3).cpu()
    # Logarithms of CPU and GPU differ in the last bit, which may turn a draw that is a tie but for that.
    assert (plain != fused).sum() <= 1


def test_steps_from_graphs_equal_steps_as_written():
    def outputs(graphs: bool) -> list[list[int]]:
        stage = TinyStage(device="cuda")
        requests = [
            Request(
                prompt(5 + 3 * seed, seed=seed), Sampling(temperature=0.7 * (seed % 2), max_tokens=9 + seed, seed=seed)
            )
            for seed in range(7)
        ]
        run(make_runner(stage, graphs=graphs, max_num_seqs=5), *requests)
        return [request.heard for request in requests]

    assert outputs(graphs=True) == outputs(graphs=False)


def test_a_graph_step_with_positions_on_three_axes():
    def outputs(graphs: bool) -> list[int]:
        request = Request(prompt(21), GREEDY)
        run(make_runner(TinyStage(device="cuda", mrope=True), graphs=graphs), request)
        return request.heard

    assert outputs(graphs=True) == outputs(graphs=False)
