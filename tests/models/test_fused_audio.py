"""The audio encoder's kernels against the encoder as written: compiled where there is a GPU, elsewhere by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aura_omni.models import layers, qwen3_asr
from aura_omni.models.qwen3_asr import AudioEncoder, EncoderConfig
from aura_omni.models.weights import Prepared

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton")

from aura_omni.models import fused_audio, fused_mel  # noqa: E402

# The interpreter takes products of bfloat16 for products of integers.
HALF = (torch.bfloat16, 2e-2) if DEVICE.type == "cuda" else (torch.float16, 3e-3)
PRECISION = pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), HALF])


def assert_close(found: torch.Tensor, plain: torch.Tensor, limit: float) -> None:
    assert found.shape == plain.shape
    torch.testing.assert_close(found.float(), plain.float(), atol=limit, rtol=limit)


@PRECISION
@pytest.mark.parametrize(("width", "size"), [(104, 64), (128, 16), (13, 24)])
def test_rows_attend_to_what_is_inside_their_window(dtype: torch.dtype, limit: float, width: int, size: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, width, 3 * 2 * size).to(DEVICE, dtype)
    counts = torch.tensor([width, width - 5, 1], device=DEVICE)
    inside = torch.arange(width, device=DEVICE) < counts[:, None]
    q, k, v = qkv.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).float()
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=inside[:, None, None]).transpose(1, 2).flatten(2)
    assert_close(fused_audio.window_attention(qkv, 2, inside[:, None, None]), plain, limit)


def test_a_window_that_is_nobodys_stays_finite() -> None:
    qkv, inside = torch.randn(1, 13, 96, device=DEVICE), torch.zeros(1, 1, 1, 13, dtype=torch.bool, device=DEVICE)
    assert fused_audio.window_attention(qkv, 2, inside).isfinite().all()


@PRECISION
@pytest.mark.parametrize(("high", "wide", "channels"), [(128, 100, 480), (16, 7, 24), (9, 1, 3)])
def test_the_first_convolution_is_the_plain_one(
    dtype: torch.dtype, limit: float, high: int, wide: int, channels: int
) -> None:
    torch.manual_seed(0)
    images = torch.randn(high, 2, wide, device=DEVICE).transpose(0, 1)  # as they lie in a mel
    weight, bias = torch.randn(channels, 1, 3, 3).to(DEVICE, dtype), torch.randn(channels).to(DEVICE, dtype)
    out = fused_audio.first_convolution(images, F.pad(weight[:, 0], (0, 1, 0, 1)).flatten(1), bias)
    plain = F.gelu(F.conv2d(images[:, None].to(dtype).float(), weight.float(), bias.float(), stride=2, padding=1))
    assert_close(out, plain, limit)


@PRECISION
def test_what_a_convolution_makes_is_biased_and_gated_as_plainly(dtype: torch.dtype, limit: float) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(2, 24, 5, 13).to(DEVICE, dtype), torch.randn(24).to(DEVICE, dtype)
    plain = F.gelu(x + bias[:, None, None])
    for one in (x, x.contiguous(memory_format=torch.channels_last)):
        assert_close(fused_audio.bias_gelu(one, bias), plain, limit)
        assert_close(fused_audio.bias_gelu(one, bias, rows=True), plain.permute(0, 3, 1, 2).flatten(2), limit)


@pytest.mark.parametrize("longest", [160 * 101, 160 * 37 + 150])
def test_the_mel_of_kernels_is_the_mel_as_written(longest: int) -> None:
    torch.manual_seed(0)
    encoder = AudioEncoder(EncoderConfig(80, 1, 32, 2, 64, 8, 24, 100, 800)).to(DEVICE).requires_grad_(False)
    encoder.prepare()
    loud = torch.tensor([[1.0], [1e-3], [0.0]], device=DEVICE)
    waves = loud * torch.randn(3, 1 + longest, device=DEVICE)[:, 1:]
    lengths = torch.tensor([longest, longest - 777, 401], device=DEVICE)
    with torch.enable_grad():
        plain = encoder.log_mels(waves, lengths)
    found = fused_mel.log_mels(waves, lengths, encoder._hann, encoder._filters, 160)
    assert_close(found, plain, 1e-4)


@pytest.mark.parametrize("more", [0, 159])
def test_the_last_frame_of_a_clip_decides_how_low_a_mel_goes_and_what_is_behind_it_does_not(more: int) -> None:
    torch.manual_seed(0)
    encoder = AudioEncoder(EncoderConfig(80, 1, 32, 2, 64, 8, 24, 100, 800)).to(DEVICE).requires_grad_(False)
    encoder.prepare()
    length = 160 * 20 + more
    waves = torch.zeros(1, length + 400, device=DEVICE)
    waves[:, length - 100 - more : length] = torch.randn(100 + more)
    waves[:, length:] = 1e4
    lengths = torch.tensor([length], device=DEVICE)
    with torch.enable_grad():
        plain = encoder.log_mels(waves, lengths)
    found = fused_mel.log_mels(waves, lengths, encoder._hann, encoder._filters, 160)
    assert_close(found, plain, 1e-4)
    assert_close(plain[0, :, :20], encoder.log_mel(waves[0, :length]), 1e-4)


@pytest.mark.parametrize("more", [0, 159])  # samples, which are no frame
@pytest.mark.parametrize("frames", [100, 101, 108, 109, 195, 800, 801, 1_599, 1_600])
def test_places_of_windows_are_inside_where_a_clip_has_rows(
    frames: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EncoderConfig(16, 1, 32, 2, 64, 8, 24, 100, 800)
    encoder = AudioEncoder(config).to(DEVICE).requires_grad_(False)
    encoder.prepare()
    taken: list[torch.Tensor] = []

    def windows(images: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        taken.append(inside)
        return images.new_zeros(*inside.shape, 1)

    monkeypatch.setattr(encoder, "windows", windows)
    count = -(-frames // 800)
    encoder.heard(
        torch.zeros(1, 160 * (800 * count + 1), device=DEVICE), torch.tensor([160 * frames + more], device=DEVICE)
    )
    wanted = torch.arange(104 * count, device=DEVICE) < config.tokens_of(frames)
    assert torch.equal(taken[0].flatten(), wanted)


def hears(window_frames: int, dtype: torch.dtype = torch.float32) -> AudioEncoder:
    torch.manual_seed(0)
    config = EncoderConfig(16, 2, 32, 2, 64, 8, 24, 100, window_frames)
    encoder = AudioEncoder(config).to(DEVICE, dtype).requires_grad_(False)
    for part in encoder.modules():
        if isinstance(part, Prepared):
            part.prepare()
    return encoder


@PRECISION
@pytest.mark.parametrize("heard", [(800, 300), (1_600, 1_111)])
def test_an_encoder_of_kernels_is_the_encoder_as_written(
    dtype: torch.dtype, limit: float, heard: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = hears(800, dtype)
    lengths = torch.tensor([160 * frames + 7 for frames in heard], device=DEVICE)
    waves = torch.randn(2, 160 * (heard[0] + 1), device=DEVICE)
    with torch.enable_grad():
        plain = encoder.heard(waves, lengths)
    for module in (layers, qwen3_asr):
        monkeypatch.setattr(module, "fusible", lambda x: True)
    found = encoder.heard(waves, lengths)
    for one, other, count in zip(found, plain, encoder.config.tokens_of(lengths // 160).tolist(), strict=True):
        assert_close(one[:count], other[:count], 5 * limit)


SECOND = 16_000
# Of windows of so many frames: samples around the least that is heard, a chunk, a window, and two of them.
BORDERS = {
    200: [
        (400, 401, 560),
        (SECOND - 160, SECOND - 1),
        (SECOND, SECOND + 1, SECOND + 160),
        (2 * SECOND - 160, 2 * SECOND - 1, 2 * SECOND, 2 * SECOND + 1),
        (2 * SECOND + 160, 4 * SECOND - 160, 4 * SECOND - 1, 4 * SECOND),
    ],
    800: [(8 * SECOND - 1, 8 * SECOND), (8 * SECOND + 160,)],
}


@pytest.mark.parametrize(("window", "samples"), [(window, some) for window, rows in BORDERS.items() for some in rows])
def test_sound_that_ends_at_a_border_is_heard_by_kernels_as_written(
    window: int, samples: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As written each clip is alone and no longer than it is; by kernels they are together, with noise behind their ends."""
    encoder = hears(window)
    config, lengths = encoder.config, torch.tensor(samples, device=DEVICE)
    windows = -(-(max(samples) // 160) // window) if min(samples) >= SECOND else 0
    waves = torch.randn(len(samples), 160 * (windows * window + 1) if windows else max(samples), device=DEVICE)
    for wave, count in zip(waves, samples, strict=True):
        wave[: count // 2] = 0  # as low as the loudest lets it be
        wave[count - 40 : count] *= 100  # what is mirrored at the end is heard
    with torch.enable_grad():
        plain = [encoder([encoder.log_mel(wave[:count])])[0] for wave, count in zip(waves, samples, strict=True)]
    for module in (layers, qwen3_asr):
        monkeypatch.setattr(module, "fusible", lambda x: True)
    if windows:
        found = list(encoder.heard(waves, lengths))
    else:
        mels = encoder.log_mels(waves, lengths)
        found = encoder([mel[:, : count // 160] for mel, count in zip(mels, samples, strict=True)])
    for one, other, count in zip(found, plain, samples, strict=True):
        assert len(other) == config.tokens(count)
        assert_close(one[: len(other)], other, 1e-4)
