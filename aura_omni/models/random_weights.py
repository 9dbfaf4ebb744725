"""Weights that nobody trained: for tests, for benchmarks, and for `load_format: dummy`."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor


class RandomWeights:
    def __init__(self, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        """dtype: of all that are not integers. The same seed gives the same values in the same order on the same kind of device."""
        self._dtype, self._device = dtype, device
        self._random = torch.Generator(device).manual_seed(seed)

    def value(self, name: str, shape: torch.Size, kind: torch.dtype) -> Tensor:
        """Of a published tensor, by its name. Random, but such that every branch matters: norms near 1, scales far from 0, books of unit spread."""
        if not kind.is_floating_point or name.endswith("initialized"):
            return torch.ones(shape, dtype=kind, device="cpu")

        def normal(mean: float, spread: float) -> Tensor:
            return torch.randn(shape, generator=self._random, device=self._device) * spread + mean

        if name.endswith(("cluster_usage", "embedding_sum", "embed_sum")):
            value = normal(0.0, 1.0) if not name.endswith("cluster_usage") else normal(1.0, 0.1).abs() + 0.1
        elif name.endswith("gamma") or re.search(r"(norm\d?|layernorm|ln_post|layer_norm)\.weight$", name):
            value = normal(1.0, 0.1)
        elif name.endswith(("scale", "alpha", "beta")):
            value = normal(0.3, 0.1)
        elif name.endswith("bias") or len(shape) < 2:
            value = normal(0.0, 0.02)
        else:
            fan_in = math.prod(shape[1:])
            value = normal(0.0, 1.0 if "embed_tokens" in name else min(0.3, fan_in**-0.5))
        if name == "decoder.decoder.6.conv.weight":
            value *= 0.02  # the last convolution of Code2Wav: sound within full scale
        return value.to(self._dtype).contiguous()
