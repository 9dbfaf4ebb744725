"""The causal layers of Code2Wav, each over x [B, T, C] and what its stream remembers.

Time-major activations: they are what a channels-last convolution reads, and what linear layers and norms want anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.codec_state import StatePlan, StepMemory
from aura_omni.models.weights import Prepared


@dataclass(frozen=True, slots=True)
class Taps:
    """A layer as products of what it sees, which `codec_kernels` computes: output n of a row is bias[n] plus, for each of `count` taps j
    (the last is the present), the dot product of `width` inputs and as many weights from weight[j * tap_step + n * row_step] on."""

    weight: Tensor
    bias: Tensor
    width: int
    outputs: int
    count: int = 1
    dilation: int = 1  # rows from one tap to the next
    tap_step: int = 0
    row_step: int = 0

    @classmethod
    def of_linear(cls, linear: nn.Linear) -> Taps:
        return cls(linear.weight, linear.bias, linear.in_features, linear.out_features, row_step=linear.in_features)


class CausalConv(Prepared):
    """Convolution over the present and the past, x [B, T, in] -> [B, T, out]."""

    def __init__(self, plan: StatePlan, inputs: int, outputs: int, kernel: int, *, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation)
        self.tail = plan.reserve((kernel - 1) * dilation, inputs)

    def prepare(self) -> None:
        # Same shape, memory ordered [out, kernel, in], as channels-last kernels read it.
        weight = self.conv.weight.detach().transpose(1, 2).contiguous().transpose(1, 2)
        self.conv.weight = nn.Parameter(weight, requires_grad=False)

    @property
    def taps(self) -> Taps:
        conv, (kernel,), (dilation,) = self.conv, self.conv.kernel_size, self.conv.dilation
        assert conv.bias is not None
        inputs, outputs = conv.in_channels, conv.out_channels
        return Taps(
            conv.weight, conv.bias, inputs, outputs, kernel, dilation, tap_step=inputs, row_step=kernel * inputs
        )

    def forward(self, x: Tensor, memory: StepMemory) -> Tensor:
        conv = self.conv
        if conv.kernel_size == (1,):
            # A matrix product, which needs no plan of cuDNN's for every shape and adds the bias in the same launch.
            return F.linear(x, conv.weight.squeeze(2), conv.bias)
        seen = memory.extend(self.tail, x)
        return self.as_image(seen) if seen.is_cpu else self.as_product(seen)

    def as_image(self, seen: Tensor) -> Tensor:
        """seen [B, T + what is remembered, in] -> [B, T, out]."""
        # Of height 1: [B, C, 1, T] over time-major memory is channels-last without a copy.
        image, conv = seen.transpose(1, 2).unsqueeze(2), self.conv
        out = F.conv2d(image, conv.weight.unsqueeze(2), conv.bias, dilation=(1, conv.dilation[0]))
        return out.squeeze(2).transpose(1, 2)

    def as_product(self, seen: Tensor) -> Tensor:
        """The same as one matrix product of copied windows: cuDNN's choice for these shapes took 0.7 ms a frame from 32 frames on."""
        conv = self.conv
        (kernel,), (dilation,) = conv.kernel_size, conv.dilation
        windows = seen.unfold(1, (kernel - 1) * dilation + 1, 1)[..., ::dilation]  # [B, T, in, kernel]
        weight = conv.weight.transpose(1, 2).flatten(1)  # a view, as `prepare` has ordered it
        return F.linear(windows.transpose(2, 3).flatten(2), weight, conv.bias)


class CausalDepthwise(nn.Module):
    """Convolution of each channel with itself, x [B, T, C] -> [B, T, C].

    Written out as one sum of products; how long cuDNN takes for the same has not been measured apart from other convolutions.
    """

    def __init__(self, plan: StatePlan, channels: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, kernel, groups=channels)
        self.tail = plan.reserve(kernel - 1, channels)

    def forward(self, x: Tensor, memory: StepMemory) -> Tensor:
        taps = self.conv.weight.squeeze(1)
        wide = torch.promote_types(x.dtype, torch.float32)
        windows = memory.extend(self.tail, x).unfold(1, taps.shape[1], 1)  # [B, T, C, kernel]
        out = (windows.to(wide) * taps).sum(-1)
        assert self.conv.bias is not None
        return (out + self.conv.bias).to(x.dtype)


class CausalUpsample(Prepared):
    """Transposed convolution whose kernel is `reach` strides long, cut to x [B, T, in] -> [B, T * rate, out].

    Output sample j of input t is the sum of tap m * rate + j applied to input t - m, so it is `reach` matrix products over
    the present and past inputs. Remembering inputs instead of half-summed outputs keeps the bias out of the memory.
    """

    bias: Tensor

    def __init__(self, plan: StatePlan, inputs: int, outputs: int, rate: int, *, reach: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, reach * rate, stride=rate)
        self.rate, self.outputs, self.reach = rate, outputs, reach
        self.tail = plan.reserve(reach - 1, inputs)

    def prepare(self) -> None:
        # Same shape, memory ordered [tap, out, in], so that the taps of one input are one matrix.
        weight = self.conv.weight.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0)
        self.conv.weight = nn.Parameter(weight, requires_grad=False)
        assert self.conv.bias is not None
        self.register_buffer("bias", self.conv.bias.detach().repeat(self.rate), persistent=False)

    @property
    def matrices(self) -> Tensor:
        """[reach, rate * out, in], that of the present first."""
        return self.conv.weight.permute(2, 1, 0).view(self.reach, self.rate * self.outputs, -1)

    @property
    def taps(self) -> Taps:
        matrices = self.matrices
        _, outputs, inputs = matrices.shape
        return Taps(matrices[-1], self.bias, inputs, outputs, self.reach, tap_step=-matrices.stride(0), row_step=inputs)

    def forward(self, x: Tensor, memory: StepMemory) -> Tensor:
        batch, count, _ = x.shape
        matrices = self.matrices
        seen = memory.extend(self.tail, x)
        out = F.linear(x, matrices[0], self.bias)
        for back in range(1, self.reach):
            start = self.reach - 1 - back
            out = out + F.linear(seen[:, start : start + count], matrices[back])
        return out.view(batch, count * self.rate, self.outputs)


class SnakeBeta(Prepared):
    """x + sin(x * e^alpha)^2 / e^beta, per channel of x [B, T, C]."""

    rate: Tensor
    gain: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def prepare(self) -> None:
        dtype = self.alpha.dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.register_buffer("rate", self.alpha.detach().to(wide).exp().to(dtype), persistent=False)
        gain = 1.0 / (self.beta.detach().to(wide).exp() + 1e-9)
        self.register_buffer("gain", gain.to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, (x * self.rate).sin_().square_(), self.gain)


class LayerScale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x
