"""Code2Wav in kernels against Code2Wav as written: compiled where there is a GPU, elsewhere by Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from aura_omni.models import codec
from aura_omni.models.codec import CodecDecoder
from aura_omni.models.codec_layers import CausalConv, SnakeBeta
from aura_omni.models.codec_state import CodecState, StatePlan, StepMemory
from tests.models.codec_reference import TINY, random_codes, random_decoder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton")

from aura_omni.models import codec_fused, codec_kernels  # noqa: E402
from aura_omni.models.codec_kernels import Led, Tile  # noqa: E402

# Its loops take their bounds out of arrays as NumPy did before 2.4.
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="Triton's interpreter needs NumPy < 2.4",
)


# Of 96 samples a frame: a step of one frame is shorter than what some layers remember, a step of two is longer.
SMALL = {
    **TINY,
    "decode_upsample_rate": 96,
    "decoder_config": {**TINY["decoder_config"], "upsample_rates": [2, 3, 2, 2]},
}


# The interpreter takes products of bfloat16 for products of integers.
HALF = (torch.bfloat16, 3e-2) if DEVICE.type == "cuda" else (torch.float16, 4e-3)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), HALF])
@pytest.mark.parametrize("count", [5, 40])  # fewer and more than are remembered
@pytest.mark.parametrize("tile", [None, Tile(64, 16, 16, warps=4, stages=2), Tile(32, 32, 16, 4, 2, parts=3)])
def test_a_convolution_with_what_follows_it(dtype: torch.dtype, limit: float, count: int, tile: Tile | None) -> None:
    torch.manual_seed(0)
    plan = StatePlan()
    plan.reserve(3, 10)  # somebody else's
    layer, snake, following = CausalConv(plan, 24, 20, 7, dilation=3), SnakeBeta(20), plan.reserve(18, 20)
    for part in (layer, snake):
        part.requires_grad_(False).to(DEVICE, dtype)
    snake.alpha.uniform_(-0.5, 5.0 if dtype == torch.float32 else 0.5)  # large arguments too, of what is not rounded
    snake.beta.uniform_(0.0, 1.0)
    for part in (layer, snake):
        part.prepare()
    state = CodecState(4, plan.size, dtype=dtype, device=DEVICE)
    state.rows.normal_()
    memory = StepMemory(state, torch.tensor([2, 0, 3], device=DEVICE))
    x, more = (torch.randn(3, count, width, device=DEVICE, dtype=dtype) for width in (24, 20))
    gamma = torch.rand(20, device=DEVICE, dtype=dtype)
    scratch, before = codec_kernels.Scratch(memory, 30), state.rows.clone()
    tail = layer.tail
    led = Led(torch.cat((before[memory.slots, tail.start : tail.stop].view(3, -1, 24), x), dim=1), tail.rows)
    y, ahead = codec_kernels.conv(
        led, layer.taps, memory=memory, scratch=scratch, tail=following, more=more, gamma=gamma,
        snake=(snake.rate, snake.gain), out=True, tile=tile,
    )  # fmt: skip
    assert torch.equal(state.rows, before)
    layer, snake = layer.float(), snake.float()
    layer.prepare()
    plain = more.float() + gamma.float() * layer.as_image(led.x.float())
    assert y is not None
    torch.testing.assert_close(y.float(), plain, rtol=limit, atol=limit)
    wave = (y.double() * snake.rate).sin() ** 2
    torch.testing.assert_close(ahead.x[:, 18:].double(), y + wave * snake.gain, rtol=limit, atol=limit)
    assert torch.equal(ahead.x[:, :18], before[memory.slots, following.start : following.stop].view(3, 18, 20))
    assert torch.equal(scratch.rows[:, following.start - 30 :], ahead.x[:, -18:].flatten(1))


@pytest.fixture(scope="module")
def decoder() -> CodecDecoder:
    return random_decoder(SMALL).to(DEVICE)


def steps(decoder: CodecDecoder, codes: Tensor, counts: list[int], *, primed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Samples of streams in slots 3 and 1 of 4, cut into steps of so many frames after some that are primed; the state after them."""
    state, slots = decoder.new_state(4), torch.tensor([3, 1], device=DEVICE)
    first, *parts = codes.to(DEVICE).split([primed, *counts], dim=1)
    if primed:
        decoder.prime(first, state, slots)
    return torch.cat([decoder.step(part, state, slots) for part in parts], dim=1), state.rows, state.frames


@pytest.mark.parametrize(("primed", "counts"), [(0, [1, 1, 2, 1]), (6, [3])])
def test_steps_in_kernels_are_those_as_written(
    decoder: CodecDecoder, primed: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = random_codes(primed + sum(counts), batch=2, seed=9)
    with monkeypatch.context() as patched:
        patched.setattr(codec, "fusible", lambda x: False)
        plain = steps(decoder, codes, counts, primed=primed)
    monkeypatch.setattr(codec, "fusible", lambda x: True)
    monkeypatch.setattr(codec_fused, "few", lambda x: len(x) <= 2)
    monkeypatch.setattr(codec_kernels, "MOST_FRAMES", 4)  # what is primed is attended to as written
    samples, rows, frames = steps(decoder, codes, counts, primed=primed)
    torch.testing.assert_close(samples, plain[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(rows, plain[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(frames, plain[2])


@pytest.mark.parametrize("count", [1, 5, 32])
def test_attention_of_streams_of_any_age(decoder: CodecDecoder, count: int) -> None:
    torch.manual_seed(0)
    transformer = decoder.pre_transformer
    attention, rope = transformer.layers[1].self_attn, transformer.rope
    assert isinstance(attention, codec._Attention)
    ours, plain = decoder.new_state(4), decoder.new_state(4)
    ours.rows.normal_()
    ours.frames.copy_(torch.tensor([70, 1_000, 0, 3]))
    plain.rows.copy_(ours.rows)
    slots = torch.tensor([2, 0, 1, 3], device=DEVICE)
    x = torch.randn(4, count, decoder.config.hidden, device=DEVICE)
    expected = attention(x, StepMemory(plain, slots), transformer._reach(x, ours.frames[slots]))
    out = codec_kernels.attend(
        attention.qkv_proj(x), rope.on(x.device)[0], heads=attention.heads, keys=attention.keys, values=attention.values,
        memory=StepMemory(ours, slots),
    )  # fmt: skip
    torch.testing.assert_close(attention.o_proj(out), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.rows, plain.rows, rtol=1e-5, atol=1e-5)
