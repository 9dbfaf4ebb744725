"""Code2Wav: frames of 16 codes to 24 kHz samples, step by step and exactly.

Every layer is causal and none looks ahead, so a step needs only the last inputs of each convolution and the last 71 keys
and values of each attention layer. One row of a `CodecState` holds them for one stream; the streams of a step may be of
any age. Streamed audio equals whole audio up to the rounding of the dtype, however the frames are cut into steps.

    state = decoder.new_state(8)                     # 8 slots
    samples = decoder.step(codes, state, slots)      # int64 [B, T, 16], int64 [B] -> float32 [B, T * 1920]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.codec_layers import CausalConv, CausalDepthwise, CausalUpsample, LayerScale, SnakeBeta
from aura_omni.models.codec_state import CodecState, StatePlan, StepMemory
from aura_omni.models.fields import positive, rope_theta, whole, wholes
from aura_omni.models.layers import RMSNorm, Rope, SwiGLU, fusible, rotate
from aura_omni.models.weights import Layout, Prepared, StackedLinear

DECODER_LAYOUT = Layout(
    renames=(("", "decoder."),),
    # The way from sound to codes, which only training of the quantizer used.
    ignore=(r"decoder\.quantizer\.rvq_(first|rest)\.input_proj\.weight",),
)

_EPSILON = 1e-5  # least cluster usage a codebook row is divided by
_RESIDUAL_DILATIONS = (1, 3, 9)


def require(section: Mapping[str, Any], name: str, *, value: Any) -> None:
    """Raise ValueError when `name` is given and is not the one value that is implemented."""
    if section.get(name, value) != value:
        raise ValueError(f"{name} is {section[name]!r}; only {value!r} is implemented")


@dataclass(frozen=True, slots=True)
class CodecConfig:
    codebooks: int
    codebook_size: int
    codebook_dim: int
    latent: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    window: int  # frames that attention sees, the present one included
    rms_eps: float
    rope_theta: float
    width: int  # channels at the start of the waveform half; halved by every upsampling block
    latent_rates: tuple[int, ...]  # upsampling of latents
    wave_rates: tuple[int, ...]  # upsampling of the waveform half
    sample_rate: int  # Hz

    @property
    def frame_samples(self) -> int:
        return math.prod(self.latent_rates) * math.prod(self.wave_rates)

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> CodecConfig:
        """config: speech_tokenizer/config.json. Raises KeyError for a missing field, ValueError for one we cannot honour."""
        part = config["decoder_config"]
        require(part, "hidden_act", value="silu")
        require(part, "attention_bias", value=False)
        require(part, "rope_scaling", value=None)
        require(part, "num_semantic_quantizers", value=1)
        require(part, "num_key_value_heads", value=part["num_attention_heads"])
        rope = part.get("rope_parameters") or {}
        require(rope, "rope_type", value="default")
        made = cls(
            codebooks=whole(part, "num_quantizers"),
            codebook_size=whole(part, "codebook_size"),
            codebook_dim=whole(part, "codebook_dim"),
            latent=whole(part, "latent_dim"),
            layers=whole(part, "num_hidden_layers"),
            hidden=whole(part, "hidden_size"),
            intermediate=whole(part, "intermediate_size"),
            heads=whole(part, "num_attention_heads"),
            head_dim=whole(part, "head_dim"),
            window=whole(part, "sliding_window"),
            rms_eps=positive(part, "rms_norm_eps"),
            rope_theta=rope_theta(part, rope),
            width=whole(part, "decoder_dim"),
            latent_rates=wholes(part, "upsampling_ratios"),
            wave_rates=wholes(part, "upsample_rates"),
            sample_rate=whole(config, "output_sample_rate"),
        )
        require(config, "decode_upsample_rate", value=made.frame_samples)
        return made


@dataclass(frozen=True, slots=True)
class _Reach:
    """What attention needs of one step: cos, sin [B*T, D]; mask bool [B, 1, T, window - 1 + T]."""

    cos: Tensor
    sin: Tensor
    mask: Tensor


@cache
def codec_fused() -> ModuleType:
    """`models.codec_fused`, imported on first use: Triton only exists where CUDA does."""
    from aura_omni.models import codec_fused as fused

    return fused


# ---------------------------------------------------------------- layers


class _Codebook(nn.Module):
    """Published as running sums: row = embedding_sum / cluster_usage."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(size))
        self.embedding_sum = nn.Parameter(torch.zeros(size, width))

    def rows(self, dtype: torch.dtype) -> Tensor:
        usage = self.cluster_usage.detach().to(dtype).clamp(min=_EPSILON)
        return self.embedding_sum.detach().to(dtype) / usage[:, None]


class _Books(nn.Module):
    """Codebooks that share one projection. Published names: vq.layers.N._codebook, output_proj."""

    def __init__(self, count: int, size: int, width: int, outputs: int) -> None:
        super().__init__()
        layers = nn.ModuleList(nn.ModuleDict({"_codebook": _Codebook(size, width)}) for _ in range(count))
        self.vq = nn.ModuleDict({"layers": layers})
        self.output_proj = nn.Conv1d(width, outputs, 1, bias=False)

    def tables(self, dtype: torch.dtype) -> list[Tensor]:
        """Each book's rows, projected: [size, outputs]."""
        project = self.output_proj.weight.detach()[:, :, 0].to(dtype)
        return [F.linear(book.rows(dtype), project) for book in self.modules() if isinstance(book, _Codebook)]


class Quantizer(Prepared):
    """codes int64 [B, T, Q] -> [B, T, codebook_dim]: the sum of one table row per codebook."""

    table: Tensor
    first: Tensor

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        size, width, outputs = config.codebook_size, config.codebook_dim // 2, config.codebook_dim
        self.size = size
        self.rvq_first = _Books(1, size, width, outputs)
        self.rvq_rest = _Books(config.codebooks - 1, size, width, outputs)

    def prepare(self) -> None:
        # The projection is linear, so it is applied once to the tables and never to frames.
        weight = self.rvq_first.output_proj.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        tables = self.rvq_first.tables(wide) + self.rvq_rest.tables(wide)
        self.register_buffer("table", torch.cat(tables).to(weight.dtype), persistent=False)
        first = torch.arange(len(tables), device=weight.device) * self.size
        self.register_buffer("first", first, persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        return F.embedding(codes + self.first, self.table).sum(dim=2)


class _Attention(nn.Module):
    def __init__(self, plan: StatePlan, config: CodecConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        width = config.heads * config.head_dim
        self.qkv_proj = StackedLinear(config.hidden, {"q_proj": width, "k_proj": width, "v_proj": width})
        self.o_proj = nn.Linear(width, config.hidden, bias=False)
        self.keys = plan.reserve(config.window - 1, width)
        self.values = plan.reserve(config.window - 1, width)

    def forward(self, x: Tensor, memory: StepMemory, reach: _Reach) -> Tensor:
        batch, count, _ = x.shape
        q, k, v = self.qkv_proj.split(self.qkv_proj(x))
        by_row = (batch * count, self.heads, self.head_dim)
        q = rotate(q.reshape(by_row), reach.cos, reach.sin)
        k = rotate(k.reshape(by_row), reach.cos, reach.sin)
        out = F.scaled_dot_product_attention(
            self._by_head(q.view(batch, count, -1)),
            self._by_head(memory.extend(self.keys, k.view(batch, count, -1))),
            self._by_head(memory.extend(self.values, v)),
            attn_mask=reach.mask,
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, count, -1))

    def _by_head(self, x: Tensor) -> Tensor:
        """[B, S, heads * D] -> [B, heads, S, D]"""
        return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)


class _TransformerLayer(Prepared):
    scaled_o: Tensor
    scaled_down: Tensor

    def __init__(self, plan: StatePlan, config: CodecConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.self_attn = _Attention(plan, config)
        self.self_attn_layer_scale = LayerScale(config.hidden)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.mlp = SwiGLU(config.hidden, config.intermediate)
        self.mlp_layer_scale = LayerScale(config.hidden)

    def prepare(self) -> None:
        """The last matrices of both halves with the scales in them: for `codec_fused`, which adds their products to x at once."""
        for name, linear, scale in (
            ("scaled_o", self.self_attn.o_proj, self.self_attn_layer_scale),
            ("scaled_down", self.mlp.down_proj, self.mlp_layer_scale),
        ):
            self.register_buffer(name, scale.scale.detach()[:, None] * linear.weight.detach(), persistent=False)

    def forward(self, x: Tensor, memory: StepMemory, reach: _Reach) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), memory, reach))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class _Transformer(nn.Module):
    def __init__(self, plan: StatePlan, config: CodecConfig) -> None:
        super().__init__()
        self.window = config.window
        self.rope = Rope(config.head_dim, config.rope_theta)
        self.input_proj = nn.Linear(config.latent, config.hidden)
        self.layers = nn.ModuleList(_TransformerLayer(plan, config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.rms_eps)
        self.output_proj = nn.Linear(config.hidden, config.latent)

    def forward(self, x: Tensor, memory: StepMemory, first: Tensor) -> Tensor:
        """x [B, T, latent]; first int64 [B]: the position of each stream's first row."""
        x = self.input_proj(x)
        reach = self._reach(x, first)
        for layer in self.layers:
            x = layer(x, memory, reach)
        return self.output_proj(self.norm(x))

    def _reach(self, x: Tensor, first: Tensor) -> _Reach:
        count, past = x.shape[1], self.window - 1
        query = torch.arange(count, device=x.device)
        cos, sin = self.rope.tables((first[:, None] + query).flatten(), x.dtype)
        key = torch.arange(past + count, device=x.device)  # key j is of position first - past + j
        near = (key >= query[:, None]) & (key <= query[:, None] + past)
        real = key >= past - first[:, None]
        return _Reach(cos, sin, near & real[:, None, None])


class _ConvNeXt(nn.Module):
    def __init__(self, plan: StatePlan, channels: int) -> None:
        super().__init__()
        self.dwconv = CausalDepthwise(plan, channels, 7)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor, memory: StepMemory) -> Tensor:
        inner = self.pwconv1(self.norm(self.dwconv(x, memory)))
        return x + self.gamma * self.pwconv2(F.gelu(inner))


class _LatentBlock(nn.ModuleList):
    """Published as a list of two: the upsampling and the refinement."""

    def __init__(self, plan: StatePlan, channels: int, rate: int) -> None:
        super().__init__([CausalUpsample(plan, channels, channels, rate, reach=1), _ConvNeXt(plan, channels)])

    def forward(self, x: Tensor, memory: StepMemory) -> Tensor:
        for layer in self:
            x = layer(x, memory)
        return x


class _ResidualUnit(nn.Module):
    def __init__(self, plan: StatePlan, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv(plan, channels, channels, 7, dilation=dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = CausalConv(plan, channels, channels, 1)

    def forward(self, x: Tensor, memory: StepMemory) -> Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x), memory)), memory)


class _WaveBlock(nn.Module):
    def __init__(self, plan: StatePlan, inputs: int, rate: int) -> None:
        super().__init__()
        outputs = inputs // 2
        units = (_ResidualUnit(plan, outputs, dilation) for dilation in _RESIDUAL_DILATIONS)
        self.block = nn.ModuleList([SnakeBeta(inputs), CausalUpsample(plan, inputs, outputs, rate, reach=2), *units])

    def forward(self, x: Tensor, memory: StepMemory) -> Tensor:
        activate, upsample, *units = self.block
        x = upsample(activate(x), memory)
        for unit in units:
            x = unit(x, memory)
        return x


# ---------------------------------------------------------------- the network


class CodecDecoder(nn.Module):
    """16 codes every 80 ms in, 1920 samples each out. Lives on one device; the state is an argument, never its own."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        plan = StatePlan()
        latent, width = config.latent, config.width
        self.quantizer = Quantizer(config)
        transformer = _Transformer(plan, config)
        self.first_tail = plan.size  # in the state: behind keys and values are the inputs of convolutions
        self.pre_conv = CausalConv(plan, config.codebook_dim, latent, 3)
        self.pre_transformer = transformer
        self.upsample = nn.ModuleList(_LatentBlock(plan, latent, rate) for rate in config.latent_rates)
        blocks = [_WaveBlock(plan, width >> n, rate) for n, rate in enumerate(config.wave_rates)]
        last = width >> len(blocks)
        self.decoder = nn.ModuleList(
            [CausalConv(plan, latent, width, 7), *blocks, SnakeBeta(last), CausalConv(plan, last, 1, 7)]
        )
        self._state_size = plan.size

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Memory of one stream."""
        return self._state_size * dtype.itemsize + torch.int64.itemsize

    def new_state(self, slots: int) -> CodecState:
        """Memory of `slots` streams that have decoded nothing, on the network's device."""
        weight = self.pre_conv.conv.weight
        return CodecState(slots, self._state_size, dtype=weight.dtype, device=weight.device)

    @torch.inference_mode()
    def step(self, codes: Tensor, state: CodecState, slots: Tensor) -> Tensor:
        """The next T frames of B streams.

        codes  int64 [B, T, Q] in [0, codebook_size), T >= 1; the caller has checked the range
        slots  int64 [B], each at most once: where in `state` the streams are, of any age
        returns float32 [B, T * 1920] mono in [-1, 1] at 24 kHz: a delta, of exactly these frames
        """
        if fusible(self.quantizer.table):
            fused = codec_fused().FusedStep(self, state, slots)
            samples = fused.samples(fused.latents(codes))
            fused.end(codes.shape[1])
            return samples
        memory = StepMemory(state, slots)
        return self._samples(self._latents(codes, memory), memory)

    @torch.inference_mode()
    def prime(self, codes: Tensor, state: CodecState, slots: Tensor) -> None:
        """What `step` does to streams that are at their start, without making the samples (they were never wanted).

        Only the last frames go through the waveform half, which remembers no more than those.
        """
        if fusible(self.quantizer.table):
            fused = codec_fused().FusedStep(self, state, slots)
            fused.samples(fused.latents(codes)[:, -self.memory_frames :].contiguous())
            fused.end(codes.shape[1])
            return
        memory = StepMemory(state, slots)
        latents = self._latents(codes, memory)
        self._samples(latents[:, -self.memory_frames :], memory)

    def whole(self, codes: Tensor) -> Tensor:
        """All frames of B utterances at once: codes int64 [B, T, Q] -> float32 [B, T * 1920]."""
        slots = torch.arange(codes.shape[0], device=codes.device)
        return self.step(codes, self.new_state(codes.shape[0]), slots)

    @property
    def memory_frames(self) -> int:
        """How many frames of latents the waveform half remembers (10 at published rates)."""
        kernel = 7 - 1
        back = kernel  # of the last convolution, in samples; from here on to ever lower rates
        for rate in reversed(self.config.wave_rates):
            back = math.ceil((back + kernel * sum(_RESIDUAL_DILATIONS)) / rate) + 1
        back += kernel
        for rate in reversed(self.config.latent_rates):
            back = math.ceil((back + kernel) / rate)
        return back

    def _latents(self, codes: Tensor, memory: StepMemory) -> Tensor:
        state, slots = memory.state, memory.slots
        first = state.frames.index_select(0, slots)
        state.frames.index_copy_(0, slots, first + codes.shape[1])
        return self.pre_transformer(self.pre_conv(self.quantizer(codes), memory), memory, first)

    def _samples(self, x: Tensor, memory: StepMemory) -> Tensor:
        for block in self.upsample:
            x = block(x, memory)
        enter, *blocks, activate, leave = self.decoder
        x = enter(x, memory)
        for block in blocks:
            x = block(x, memory)
        x = leave(activate(x), memory).squeeze(2)
        return x.to(torch.promote_types(x.dtype, torch.float32)).clamp(-1.0, 1.0)
