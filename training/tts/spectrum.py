"""Log-mel spectrograms for training and judging, and the way back to sound without a vocoder (Griffin-Lim)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

RATE = 24_000
HOP_SAMPLES = 240
WINDOW_SAMPLES = 1_024
MELS = 80
FRAMES_A_CODE = 8  # mel frames of one 80 ms frame
FLOOR = 0.05  # of a mel magnitude: some 55 dB below the loudest; hiss below it must not cost bits
_TOP_HZ = 11_500.0


def _filters() -> Tensor:
    """Triangles on the mel scale (2595 log10(1 + f / 700)), of unit height: float32 [80, 513]."""
    top = 2595.0 * np.log10(1 + _TOP_HZ / 700.0)
    corners = 700.0 * (10 ** (np.linspace(0.0, top, MELS + 2) / 2595.0) - 1)
    bins = np.linspace(0.0, RATE / 2, WINDOW_SAMPLES // 2 + 1)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    triangles = np.maximum(0.0, np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)))
    # A low triangle may miss every bin; it then takes the nearest one.
    for row in np.flatnonzero(triangles.sum(1) == 0):
        triangles[row, np.abs(bins - corners[row + 1]).argmin()] = 1.0
    return torch.tensor(triangles / np.maximum(1.0, triangles.sum(1, keepdims=True)) ** 0.5, dtype=torch.float32)


class Mel(torch.nn.Module):
    """samples float32 [B, n] (n a multiple of 240) -> log-mel [B, n / 240, 80]; frame i is centred on sample 240 i + 120."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filters", _filters())
        self.register_buffer("window", torch.hann_window(WINDOW_SAMPLES))

    def magnitude(self, samples: Tensor) -> Tensor:
        edge = (WINDOW_SAMPLES - HOP_SAMPLES) // 2
        padded = F.pad(samples, (edge, edge))
        found = torch.stft(padded, WINDOW_SAMPLES, HOP_SAMPLES, window=self.window, center=False, return_complex=True)
        return (found.real.square() + found.imag.square() + 1e-7).sqrt()

    def forward(self, samples: Tensor) -> Tensor:
        return (self.filters @ self.magnitude(samples)).clamp_min(FLOOR).log().transpose(1, 2)


@torch.no_grad()
def griffin_lim(mel: Tensor, *, rounds: int = 32) -> Tensor:
    """Log-mel [T, 80] -> samples [T * 240]."""
    spectrum = Mel().to(mel.device)
    inverse = torch.linalg.pinv(spectrum.filters)
    energy = mel.T.exp()
    magnitude = (inverse @ energy).clamp_min(1e-4)
    for _ in range(30):  # multiplicative updates: the non-negative magnitudes whose mel is nearest
        magnitude = (
            magnitude * (spectrum.filters.T @ energy) / (spectrum.filters.T @ (spectrum.filters @ magnitude) + 1e-8)
        )
    generator = torch.Generator(mel.device).manual_seed(0)
    phase = torch.polar(
        torch.ones_like(magnitude), torch.rand(magnitude.shape, generator=generator, device=mel.device) * 6.2832
    )
    edge = (WINDOW_SAMPLES - HOP_SAMPLES) // 2
    length = mel.shape[0] * HOP_SAMPLES
    samples = torch.zeros(length)
    for _ in range(rounds):
        frames = torch.fft.irfft((magnitude * phase).T, n=WINDOW_SAMPLES) * spectrum.window
        total = (frames.shape[0] - 1) * HOP_SAMPLES + WINDOW_SAMPLES
        fold = {"output_size": (1, total), "kernel_size": (1, WINDOW_SAMPLES), "stride": (1, HOP_SAMPLES)}
        weight = F.fold((spectrum.window**2).expand(frames.shape).T[None], **fold).flatten()
        samples = F.fold(frames.T[None], **fold).flatten() / weight.clamp_min(1e-3)
        samples = samples[edge : edge + length]
        found = torch.stft(
            F.pad(samples[None], (edge, edge)),
            WINDOW_SAMPLES,
            HOP_SAMPLES,
            window=spectrum.window,
            center=False,
            return_complex=True,
        )[0]
        phase = found / found.abs().clamp_min(1e-8)
    return samples
