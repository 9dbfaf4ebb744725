"""Who is speaking: 24 kHz audio -> one vector in the Talker's width (ECAPA-TDNN over a log-mel spectrogram).

vector = encoder(log_mel(samples))        # samples float32 [n] in [-1, 1] -> [H]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.fields import whole, wholes
from aura_omni.models.weights import Layout

RATE = 24_000  # Hz
HOP_SAMPLES = 256
_WINDOW_SAMPLES = 1_024
_MELS = 128
_SHAPE = {  # what published configurations leave out
    "mel_dim": _MELS,
    "enc_channels": [512, 512, 512, 512, 1536],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 128,
    "enc_res2net_scale": 8,
    "enc_se_channels": 128,
    "sample_rate": RATE,
}

SPEAKER_LAYOUT = Layout(renames=(("", "speaker_encoder."),))


@dataclass(frozen=True, slots=True)
class SpeakerEncoderConfig:
    """channels, kernels and dilations: of the first convolution, of each SE-Res2Net block, of the last convolution."""

    size: int  # of the vector
    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    dilations: tuple[int, ...]
    attention_channels: int
    scale: int  # groups of a Res2Net block
    squeeze_channels: int

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> SpeakerEncoderConfig:
        """From a published config.json, whole. Raises ValueError for values we do not compute, KeyError for a gap."""
        section = {**_SHAPE, **config["speaker_encoder_config"]}
        for name in ("mel_dim", "sample_rate"):
            if section[name] != _SHAPE[name]:
                raise ValueError(
                    f"speaker_encoder_config has {name} {section[name]!r}; only {_SHAPE[name]} is known here"
                )
        return cls(
            size=whole(section, "enc_dim"),
            channels=wholes(section, "enc_channels"),
            kernels=wholes(section, "enc_kernel_sizes"),
            dilations=wholes(section, "enc_dilations"),
            attention_channels=whole(section, "enc_attention_channels"),
            scale=whole(section, "enc_res2net_scale"),
            squeeze_channels=whole(section, "enc_se_channels"),
        )

    @property
    def least_samples(self) -> int:
        """Reflection needs more frames than it pads, at the widest convolution."""
        widest = max(kernel // 2 * dilation for kernel, dilation in zip(self.kernels, self.dilations, strict=True))
        return (widest + 1) * HOP_SAMPLES


def log_mel(samples: Tensor) -> Tensor:
    """samples float32 [n] at 24 kHz, n > 384 -> natural log of mel magnitudes, float32 [n // 256, 128]."""
    edge = (_WINDOW_SAMPLES - HOP_SAMPLES) // 2
    padded = F.pad(samples[None], (edge, edge), mode="reflect")[0]
    window = torch.hann_window(_WINDOW_SAMPLES, device=samples.device)
    spectrum = torch.view_as_real(
        torch.stft(padded, _WINDOW_SAMPLES, HOP_SAMPLES, window=window, center=False, return_complex=True)
    )
    magnitude = (spectrum.square().sum(-1) + 1e-9).sqrt()
    return (mel_filters().to(samples.device) @ magnitude).clamp_min(1e-5).log().T


def mel_filters() -> Tensor:
    """Triangles of equal area on Slaney's scale, 0 to 12 kHz: float32 [128, 513].

    The scale is linear (200/3 Hz a step) up to 1 kHz and logarithmic above (a factor of 6.4 every 27 steps).
    """
    linear_hz, knee_hz, log_step = 200.0 / 3.0, 1_000.0, math.log(6.4) / 27.0
    knee = knee_hz / linear_hz
    top = knee + math.log(RATE / 2 / knee_hz) / log_step
    steps = torch.linspace(0.0, top, _MELS + 2, dtype=torch.float64)
    corners = torch.where(steps < knee, steps * linear_hz, knee_hz * torch.exp(log_step * (steps - knee)))
    bins = torch.linspace(0.0, RATE / 2, _WINDOW_SAMPLES // 2 + 1, dtype=torch.float64)
    low, centre, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    triangles = torch.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)).clamp_min(0.0)
    return (triangles * (2.0 / (high - low))).float()


def _conv(inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> nn.Conv1d:
    return nn.Conv1d(inputs, outputs, kernel, dilation=dilation, padding="same", padding_mode="reflect")


class TimeDelay(nn.Module):
    """A convolution over time and a ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = _conv(inputs, outputs, kernel, dilation)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class Res2Net(nn.Module):
    """Channels in groups; each group but the first is convolved together with what the group before it gave."""

    def __init__(self, channels: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        width = channels // scale
        self.blocks = nn.ModuleList(TimeDelay(width, width, kernel, dilation) for _ in range(scale - 1))

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = x.chunk(len(self.blocks) + 1, dim=1)
        outs = [first]
        for number, (block, group) in enumerate(zip(self.blocks, rest, strict=True)):
            outs.append(block(group + outs[-1] if number else group))
        return torch.cat(outs, dim=1)


class SqueezeExcitation(nn.Module):
    """Scales each channel by what the whole utterance says about it."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, squeezed)
        self.conv2 = _conv(squeezed, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.conv2(F.relu(self.conv1(x.mean(-1, keepdim=True)))))


class SpeakerBlock(nn.Module):
    def __init__(self, channels: int, config: SpeakerEncoderConfig, kernel: int, dilation: int) -> None:
        super().__init__()
        self.tdnn1 = TimeDelay(channels, channels)
        self.res2net_block = Res2Net(channels, config.scale, kernel, dilation)
        self.tdnn2 = TimeDelay(channels, channels)
        self.se_block = SqueezeExcitation(channels, config.squeeze_channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))


class StatisticsPooling(nn.Module):
    """Mean and deviation over time, weighted by attention that sees each frame beside the plain mean and deviation."""

    def __init__(self, channels: int, attention_channels: int) -> None:
        super().__init__()
        self.tdnn = TimeDelay(3 * channels, attention_channels)
        self.conv = _conv(attention_channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """x [1, C, T] -> [1, 2 C, 1]."""
        even = torch.full_like(x[:, :1], 1.0 / x.shape[-1])
        context = torch.cat((x, *(part.expand_as(x) for part in _statistics(x, even))), dim=1)
        weights = self.conv(torch.tanh(self.tdnn(context))).softmax(-1)
        return torch.cat(_statistics(x, weights), dim=1)


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = (weights * x).sum(-1, keepdim=True)
    return mean, (weights * (x - mean).square()).sum(-1, keepdim=True).clamp_min(1e-12).sqrt()


class SpeakerEncoder(nn.Module):
    def __init__(self, config: SpeakerEncoderConfig) -> None:
        super().__init__()
        first, *blocks, last = zip(config.channels, config.kernels, config.dilations, strict=True)
        self.config = config
        self.blocks = nn.ModuleList([TimeDelay(_MELS, *first)])
        self.blocks.extend(SpeakerBlock(channels, config, kernel, dilation) for channels, kernel, dilation in blocks)
        self.mfa = TimeDelay(sum(channels for channels, _, _ in blocks), *last)
        self.asp = StatisticsPooling(last[0], config.attention_channels)
        self.fc = _conv(2 * last[0], config.size)

    def forward(self, mel: Tensor) -> Tensor:
        """mel [frames, 128] in the weights' dtype -> vector [size], not normalised. One utterance at a time."""
        x = self.blocks[0](mel.T[None])
        outs = []
        for block in self.blocks[1:]:
            x = block(x)
            outs.append(x)
        return self.fc(self.asp(self.mfa(torch.cat(outs, dim=1))))[0, :, 0]
