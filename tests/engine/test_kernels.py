"""Triton kernels against the plain code that they stand for: compiled where there is a GPU, elsewhere by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from aura_omni.engine.sampler import Draw, pick
from aura_omni.flow import Sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton")

from aura_omni.engine import fused_sampler  # noqa: E402


@pytest.mark.parametrize("vocabulary", [64, 100, 2_048, 3_072])
@pytest.mark.parametrize("ties", [False, True])
def test_the_draw_from_a_codebook_is_the_plain_one(vocabulary: int, ties: bool) -> None:
    torch.manual_seed(0)
    ways = [(0.0, 0), (0.9, 50), (1.0, 0), (0.5, 5), (1.5, 10_000), (1.0, 1), (0.7, vocabulary - 1)]
    rows = [Sampling(temperature=temperature, top_k=top_k) for temperature, top_k in ways]
    logits = torch.randn(len(rows), vocabulary) * 3
    if ties:
        logits = logits.round()  # both zeros among them, which are equal
    logits[::3, vocabulary // 2 :] = -torch.inf
    seeds, steps = [7 * row for row in range(len(rows))], list(range(len(rows)))
    draw = Draw.of(rows, seeds, steps, torch.device("cpu"))
    plain = pick(logits, draw, stream=3)
    ours = fused_sampler.pick_small(
        logits.to(DEVICE), draw.floats.to(DEVICE), draw.integers.to(DEVICE), top_k=True, stream=3
    ).cpu()
    if DEVICE.type == "cpu":
        assert torch.equal(plain, ours)
    else:  # logarithms of CPU and GPU differ in the last bit, which may turn a draw that is a tie but for that
        assert (plain != ours).sum() <= 1


def test_the_threshold_of_top_k_is_the_sorted_one() -> None:
    """Through draws: with one id left it must be the best, with two one of the best two, and equal ones all count."""
    logits = torch.tensor([[-1.0, -0.0, 0.0, -torch.inf, 3.0, 3.0, -2.5, 1e-30]] * 64)
    for top_k, kept in ((1, {4, 5}), (2, {4, 5}), (3, {4, 5, 7}), (4, {1, 2, 4, 5, 7}), (6, {0, 1, 2, 4, 5, 7})):
        draw = Draw.of([Sampling(temperature=50.0, top_k=top_k)] * 64, list(range(64)), [0] * 64, torch.device("cpu"))
        ours = fused_sampler.pick_small(
            logits.to(DEVICE), draw.floats.to(DEVICE), draw.integers.to(DEVICE), top_k=True, stream=0
        )
        assert set(ours.tolist()) == kept
