"""From clean clips to what microphones give: rooms, noise, sounds behind, other voices, narrow bands, gain, clipping, few bits.

    waves = augment(waves, samples, background, torch.Generator(device))

Everything is drawn for each clip by itself, and all of it runs on the device over the whole batch.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

RATE = 16_000
ROOM_SAMPLES = 8_000


def augment(waves: Tensor, samples: Tensor, background: Tensor, generator: Generator) -> Tensor:
    """waves float32 [B, L] clean, silence elsewhere; background [B, L]; the result has its noise up to the last sample."""
    draw = _Draw(len(waves), waves.device, generator)
    loud = _rms(waves)
    waves = _filtered(waves, draw)
    silent = loud < 1e-6
    reference = torch.where(silent, draw.between(0.001, 0.1), _rms(waves))
    # Several voices at once, sounds, and noise of some colour; in clips without speech the noise is all there is.
    waves = waves + draw.maybe(0.12, _level(waves.roll(1, 0), reference, draw.between(12, 30))) * ~silent
    waves = waves + draw.maybe(0.15, _level(background, reference, draw.between(5, 30))) * ~silent
    waves = waves + draw.maybe(
        0.75, _level(_coloured(waves.shape, draw), reference, draw.between(3, 50) - silent * 20.0)
    )
    peak = waves.abs().amax(1, keepdim=True).clamp_min(1e-6)
    waves = waves / peak
    waves = _pick(draw.chance(0.1), (waves * draw.between(1.0, 4.0)).clamp(-1, 1), waves)
    waves = waves * 10 ** (draw.between(-45, 0) / 20)
    waves = _pick(draw.chance(0.1), _mu_law(waves), waves)
    waves = _pick(draw.chance(0.6), (waves * 32768).round() / 32768, waves)
    there = torch.arange(waves.shape[1], device=waves.device) < samples[:, None]
    return waves * there


class _Draw:
    def __init__(self, batch: int, device: torch.device, generator: Generator) -> None:
        self.batch, self.device, self.generator = batch, device, generator

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(self.batch, *shape, device=self.device, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, *shape, device=self.device, generator=self.generator)

    def between(self, low: float, high: float) -> Tensor:
        """[B, 1]"""
        return low + (high - low) * self.uniform(1)

    def chance(self, share: float) -> Tensor:
        """bool [B, 1]"""
        return self.uniform(1) < share

    def maybe(self, share: float, what: Tensor) -> Tensor:
        return what * self.chance(share)


def _pick(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(condition, yes, no)


def _rms(waves: Tensor) -> Tensor:
    return waves.pow(2).mean(1, keepdim=True).sqrt()


def _level(waves: Tensor, reference: Tensor, below_db: Tensor) -> Tensor:
    """waves brought to so many dB below the reference."""
    return waves * (reference / _rms(waves).clamp_min(1e-6) * 10 ** (-below_db / 20))


def _filtered(waves: Tensor, draw: _Draw) -> Tensor:
    """Through a room, a coloured microphone and a band."""
    length = 1 << (waves.shape[1] + ROOM_SAMPLES - 1).bit_length()
    spectrum = torch.fft.rfft(waves, length)
    hz = torch.linspace(0, RATE / 2, spectrum.shape[1], device=waves.device)
    # The room: the direct sound, and behind it noise that dies away.
    time = torch.arange(ROOM_SAMPLES, device=waves.device) / RATE
    tail = (
        draw.normal(ROOM_SAMPLES) * torch.exp(-6.9 * time / draw.between(0.1, 0.7)) * (time > draw.between(0.002, 0.02))
    )
    tail = tail / tail.norm(dim=1, keepdim=True).clamp_min(1e-6) * 10 ** (draw.between(-25, 1) / 20)
    response = torch.fft.rfft(draw.maybe(0.5, tail), length) + 1.0
    # The colour: a few gains in dB over the logarithm of frequency, straight lines between them.
    gains = draw.maybe(0.6, draw.normal(9) * 5.0)
    at = (hz.clamp_min(60) / 60).log2() / 7.06 * 8
    left = at.floor().clamp(0, 7).long()
    colour = torch.lerp(gains[:, left], gains[:, left + 1], at - left)
    low = torch.where(draw.chance(0.25), draw.between(3_000, 7_500), 16_000.0)
    high = torch.where(draw.chance(0.3), draw.between(60, 350), 1.0)
    band = torch.sigmoid((low - hz) / 120) * torch.sigmoid((hz - high) / (0.2 * high))
    out = torch.fft.irfft(spectrum * response * 10 ** (colour / 20) * band, length)[:, : waves.shape[1]]
    return out


def _coloured(shape: torch.Size, draw: _Draw) -> Tensor:
    """Noise whose power falls with a random slope: white to brown."""
    length = 1 << (shape[1] - 1).bit_length()
    bins = length // 2 + 1
    hz = torch.arange(1, bins + 1, device=draw.device, dtype=torch.float32)
    spectrum = torch.complex(draw.normal(bins), draw.normal(bins)) * hz ** -draw.between(0.0, 1.1)
    return torch.fft.irfft(spectrum, length)[:, : shape[1]]


def _mu_law(waves: Tensor) -> Tensor:
    coded = waves.sign() * torch.log1p(255 * waves.abs()) / math.log(256)
    coded = (coded * 127).round() / 127
    return coded.sign() * ((256.0 ** coded.abs()) - 1) / 255
