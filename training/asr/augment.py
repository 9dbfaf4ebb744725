"""From clean clips to what microphones give: rooms, noise, sounds behind, other voices, narrow bands, gain, clipping, few bits.

    waves = augment(waves, samples, background, torch.Generator(device))
    mel = masked(warped(mel, generator), frames, generator)

Everything is drawn for each clip by itself, and all of it runs on the device over the whole batch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

RATE = 16_000
ROOM_SAMPLES = 8_000
ROBOTS = 4  # one clip in so many gets another larynx
_FFT, _HOP = 512, 128


def augment(waves: Tensor, samples: Tensor, background: Tensor, generator: Generator) -> Tensor:
    """waves float32 [B, L] clean, silence elsewhere; background [B, L]; the result has its noise up to the last sample."""
    draw = _Draw(len(waves), waves.device, generator)
    loud = _rms(waves)
    robots = len(waves) // ROBOTS
    waves = torch.cat((revoiced(waves[:robots], samples[:robots], generator), waves[robots:])) if robots else waves
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


def revoiced(waves: Tensor, samples: Tensor, generator: Generator) -> Tensor:
    """The same mouth with another larynx: a train of pulses at a pitch of its own, level or gliding, or whisper.

    The envelope of the spectrum is kept (smoothed over quefrencies below those of the pitch), what excites it is replaced: what
    synthesizers that code speech as filter and pulse do, and what makes voices of one accent differ most.
    """
    draw = _Draw(len(waves), waves.device, generator)
    window = torch.hann_window(_FFT, device=waves.device)
    spectrum = torch.stft(waves, _FFT, _HOP, window=window, return_complex=True)
    log = spectrum.abs().clamp_min(1e-5).log()
    cepstrum = torch.fft.irfft(log.to(torch.complex64), _FFT, dim=1)
    kept = torch.arange(_FFT, device=waves.device)
    kept = torch.minimum(kept, _FFT - kept)[None, :, None]
    sharpness = draw.between(24, 48)[:, :, None]
    envelope = torch.fft.rfft(cepstrum * torch.sigmoid((sharpness - kept) / 2), _FFT, dim=1).real
    time = torch.arange(waves.shape[1], device=waves.device) / RATE
    pitch = 70 * 4.5 ** draw.uniform(1)  # Hz, 70 to 315
    glide, pace = draw.maybe(0.7, draw.between(0.02, 0.25)), draw.between(2, 9)
    phase = pitch * (time + glide * torch.sin(pace * time + 6.3 * draw.uniform(1)) / pace)
    turns = phase.floor()
    pulses = (turns != turns.roll(1, 1)).float()
    hiss = draw.normal(waves.shape[1])
    voice, breath = (torch.stft(x, _FFT, _HOP, window=window, return_complex=True) for x in (pulses, hiss))
    voice = voice / voice.abs().pow(2).mean((1, 2), keepdim=True).sqrt().clamp_min(1e-6)
    breath = breath / breath.abs().pow(2).mean((1, 2), keepdim=True).sqrt().clamp_min(1e-6)
    # Hiss where the sound is in the upper bands, and above some frequency everywhere.
    power = spectrum.abs().pow(2)
    edge = _FFT // 2 * 2_500 // (RATE // 2)
    upper = power[:, edge:].sum(1, keepdim=True) / power.sum(1, keepdim=True).clamp_min(1e-9)
    hz = torch.linspace(0, RATE / 2, _FFT // 2 + 1, device=waves.device)[:, None]
    hissing = torch.sigmoid((upper - 0.5) * 12)
    hissing = torch.maximum(hissing, torch.sigmoid((hz - draw.between(2_500, 8_000)[:, :, None]) / 300))
    hissing = torch.maximum(hissing, draw.chance(0.1).float()[:, :, None])
    excited = voice * (1 - hissing).sqrt() + breath * hissing.sqrt()
    pieces = torch.fft.irfft(excited * envelope.exp(), _FFT, dim=1).transpose(1, 2) * window
    parts = pieces.unflatten(2, (_FFT // _HOP, _HOP)).unbind(2)  # torch.istft would wait for the device
    made = torch.stack([F.pad(part, (0, 0, n, len(parts) - 1 - n)) for n, part in enumerate(parts)]).sum(0)
    made = made.flatten(1)[:, _FFT // 2 : _FFT // 2 + waves.shape[1]]
    made = made * (_rms(waves) / _rms(made).clamp_min(1e-6))
    return made * (torch.arange(waves.shape[1], device=waves.device) < samples[:, None]) * (_rms(waves) > 1e-6)


def warped(mel: Tensor, generator: Generator) -> Tensor:
    """mel [B, bins, F], each clip from another throat: its bins moved, all by up to 12 %, and parts of them by some more."""
    batch, bins, _ = mel.shape
    draw = _Draw(batch, mel.device, generator)
    at = torch.arange(bins, device=mel.device)
    knots = draw.maybe(0.6, draw.normal(7) * bins / 40)
    where = at / (bins - 1) * 5.999
    left = where.floor().long()
    bend = torch.lerp(knots[:, left], knots[:, left + 1], where - left)
    moved = (at * draw.between(0.88, 1.12) + bend).clamp(0, bins - 1)
    low = moved.floor().long()
    lower, upper = (mel.gather(1, place[:, :, None].expand_as(mel)) for place in (low, (low + 1).clamp_max(bins - 1)))
    return torch.lerp(lower, upper, (moved - low)[:, :, None])


def masked(mel: Tensor, frames: Tensor, generator: Generator) -> Tensor:
    """Some stretches of time and of frequency silenced (to the clip's own floor)."""
    batch, bins, length = mel.shape
    floor = mel.amin((1, 2), keepdim=True)
    draw = _Draw(batch, mel.device, generator)

    def stripes(size: int, limit: Tensor, widest: int, count: int) -> Tensor:
        width = (draw.uniform(count) * (widest + 1)).floor()
        first = draw.uniform(count) * (limit[:, None] - width).clamp_min(1)
        place = torch.arange(size, device=mel.device)[:, None]
        return ((place >= first[:, None]) & (place < (first + width)[:, None])).any(-1)

    hidden = stripes(bins, torch.full_like(frames, bins), 18, 2)[:, :, None] | stripes(length, frames, 16, 2)[:, None]
    return torch.where(hidden & (torch.arange(length, device=mel.device) < frames[:, None])[:, None], floor, mel)


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
