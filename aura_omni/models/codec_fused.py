"""A step of Code2Wav in the kernels of `codec_kernels`: the same network as `codec` writes down, each convolution one launch.

What comes between two convolutions, activation and memory, is done by the first for the second; so every call here names what follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from aura_omni.models import codec_kernels as kernels
from aura_omni.models.codec_kernels import Led
from aura_omni.models.codec_layers import SnakeBeta, Taps
from aura_omni.models.codec_state import CodecState, StepMemory, Tail
from aura_omni.models.layers import few, fused, fused_linear

if TYPE_CHECKING:
    from aura_omni.models.codec import CodecDecoder


@dataclass(frozen=True, slots=True)
class _Next:
    """Of the layer that reads a convolution's outputs: what it remembers, and the activation in front of it."""

    tail: Tail | None = None
    snake: SnakeBeta | None = None


class FusedStep:
    """Of the streams in `slots` of `state`, as `CodecDecoder.step`."""

    def __init__(self, decoder: CodecDecoder, state: CodecState, slots: Tensor) -> None:
        self._decoder, self._memory = decoder, StepMemory(state, slots)
        self._scratch = kernels.Scratch(self._memory, decoder.first_tail)

    def latents(self, codes: Tensor) -> Tensor:
        """codes int64 [B, T, Q], a stream's contiguous -> [B, T, latent]."""
        decoder, memory = self._decoder, self._memory
        quantizer, enter = decoder.quantizer, decoder.pre_conv
        led = kernels.quantize(
            codes, quantizer.table, quantizer.size, tail=enter.tail, memory=memory, scratch=self._scratch
        )
        x = self._conv(led, enter.taps).x
        if codes.shape[1] > kernels.MOST_FRAMES:  # a reference, once
            return decoder.pre_transformer(x, memory, memory.state.frames.index_select(0, memory.slots))
        return self._transformed(x)

    def _transformed(self, x: Tensor) -> Tensor:
        """[B, T, latent] -> [B, T, latent]"""
        transformer, shape = self._decoder.pre_transformer, x.shape[:2]
        layers: list[Any] = list(transformer.layers)
        rates, _ = transformer.rope.on(x.device)
        rows = transformer.input_proj(x).flatten(0, 1)

        def attended(layer: Any, qkv: Tensor) -> Tensor:
            of, qkv = layer.self_attn, qkv.unflatten(0, shape)
            out = kernels.attend(qkv, rates, heads=of.heads, keys=of.keys, values=of.values, memory=self._memory)
            return out.flatten(0, 1)

        if few(rows):
            products = fused_linear()
            for layer in layers:
                norm, after = layer.input_layernorm, layer.post_attention_layernorm
                qkv = products.normed_linear(rows, norm.weight, norm.eps, layer.self_attn.qkv_proj.weight)
                rows = products.linear_added(attended(layer, qkv), layer.scaled_o, rows)
                inner = products.normed_swiglu(rows, after.weight, after.eps, layer.mlp.gate_up_proj.weight)
                rows = products.linear_added(inner, layer.scaled_down, rows)
            normed = transformer.norm(rows)
        else:
            normed = layers[0].input_layernorm(rows)
            for layer, norm in zip(
                layers, [*(layer.input_layernorm for layer in layers[1:]), transformer.norm], strict=True
            ):
                more = F.linear(attended(layer, layer.self_attn.qkv_proj(normed)), layer.scaled_o)
                rows, normed = layer.post_attention_layernorm.of_sum(rows, more)
                inner = fused().silu_mul(layer.mlp.gate_up_proj(normed))
                rows, normed = norm.of_sum(rows, F.linear(inner, layer.scaled_down))
        return transformer.output_proj(normed).unflatten(0, shape)

    def samples(self, latents: Tensor) -> Tensor:
        """latents [B, T, latent] -> float32 [B, T * 1920]."""
        layers: list[Any] = list(self._decoder.decoder)
        upsamplings: list[Any] = list(self._decoder.upsample)
        enter, *blocks, activate, leave = layers
        x = Led(latents, 0)
        for number, (upsample, refine) in enumerate(upsamplings, 1):
            x = self._refined(x, upsample, refine, _Next(enter.tail if number == len(upsamplings) else None))
        entries = [_Next(block.block[1].tail, block.block[0]) for block in blocks] + [_Next(leave.tail, activate)]
        x = self._conv(x, enter.taps, then=entries[0])
        for block, following in zip(blocks, entries[1:], strict=True):
            _, upsample, *units = block.block
            nexts = [_Next(unit.conv1.tail, unit.act1) for unit in units] + [following]
            more, x = self._both(x, upsample.taps, then=nexts[0], rate=upsample.rate)
            for unit, then in zip(units, nexts[1:], strict=True):
                inner = self._conv(x, unit.conv1.taps, then=_Next(None, unit.act2))
                if then is following:
                    x = self._conv(inner, unit.conv2.taps, then=then, more=more)
                else:
                    more, x = self._both(inner, unit.conv2.taps, then=then, more=more)
        return kernels.last_conv(x, leave.taps)

    def end(self, frames: int) -> None:
        """The streams have decoded so many frames more."""
        kernels.remember(self._memory, self._scratch, frames)

    def _refined(self, x: Led, upsample: Any, refine: Any, then: _Next) -> Led:
        more, led = self._both(x, upsample.taps, then=_Next(refine.dwconv.tail), rate=upsample.rate)
        normed = kernels.depthwise_norm(led, refine.dwconv.conv.weight, refine.dwconv.conv.bias, refine.norm)
        inner = self._conv(normed, Taps.of_linear(refine.pwconv1), gelu=True)
        return self._conv(inner, Taps.of_linear(refine.pwconv2), more=more, gamma=refine.gamma, then=then)

    def _conv(self, x: Led, taps: Taps, *, then: _Next = _Next(), **options: Any) -> Led:
        return self._launched(x, taps, then, out=False, **options)[1]

    def _both(self, x: Led, taps: Taps, *, then: _Next, **options: Any) -> tuple[Tensor, Led]:
        """The outputs themselves, and as inputs of what follows."""
        out, led = self._launched(x, taps, then, out=True, **options)
        assert out is not None
        return out, led

    def _launched(self, x: Led, taps: Taps, then: _Next, **options: Any) -> tuple[Tensor | None, Led]:
        snake = None if then.snake is None else (then.snake.rate, then.snake.gain)
        return kernels.conv(x, taps, snake=snake, tail=then.tail, memory=self._memory, scratch=self._scratch, **options)
