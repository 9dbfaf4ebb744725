"""From sound to frames of 16 codes: the encoder half of Mimi, for reference voices.

    codes = encoder.encode(samples)      # float32 [n] at 24 kHz -> int64 [ceil(n / 1920), 16]

One clip at a time: padding to a longer neighbour would change a clip's last frame. Attention is causal over the whole
clip, although the configuration names a window of 250 positions (10 s): the published codes and talkers were used with
that (eager and SDPA attention of transformers 4.57, restored by qwen-tts-hf on 5.x). Only flash-attention honoured the
window, and codes of references longer than 10 s differ between the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.codec import require
from aura_omni.models.codec_layers import LayerScale
from aura_omni.models.fields import positive, whole, wholes
from aura_omni.models.layers import Rope, rotate
from aura_omni.models.weights import Layout, Prepared, StackedLinear

CODEBOOKS = 16

ENCODER_LAYOUT = Layout(
    renames=(("", "encoder."),),
    ignore=(
        # Acoustic books 15 and up: with the semantic one, 16 books are used of the 32 that were trained.
        r"encoder\.quantizer\.acoustic_residual_vector_quantizer\.layers\.(1[5-9]|[2-9]\d)\.codebook\..*",
        # A flag of training: whether k-means has filled the book.
        r"encoder\.quantizer\..*\.codebook\.initialized",
        # The way back from codes, which the decoder has its own of.
        r"encoder\.quantizer\..*\.output_proj\.weight",
    ),
)

# Published files name only what differs from the class that wrote them; these are the values of the published model.
_PUBLISHED: Mapping[str, Any] = {
    "num_filters": 64,
    "kernel_size": 7,
    "last_kernel_size": 3,
    "residual_kernel_size": 3,
    "num_residual_layers": 1,
    "dilation_growth_rate": 2,
    "compress": 2,
    "upsampling_ratios": [8, 6, 5, 4],
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "codebook_size": 2048,
    "codebook_dim": 256,
}
_ONLY: Mapping[str, Any] = {
    "audio_channels": 1,
    "use_causal_conv": True,
    "use_conv_shortcut": False,
    "pad_mode": "constant",
    "hidden_act": "gelu",
    "attention_bias": False,
    "num_semantic_quantizers": 1,
}


@dataclass(frozen=True, slots=True)
class CodecEncoderConfig:
    filters: int
    kernel: int
    last_kernel: int
    residual_kernel: int
    residual_layers: int
    dilation_growth: int
    compress: int
    strides: tuple[int, ...]
    hidden: int
    intermediate: int
    layers: int
    heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    codebook_size: int
    codebook_dim: int
    sample_rate: int  # Hz

    @property
    def frame_samples(self) -> int:
        return math.prod(self.strides) * 2  # the last halving is `downsample`

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> CodecEncoderConfig:
        """config: speech_tokenizer/config.json. Raises KeyError for a missing field, ValueError for one we cannot honour."""
        given = {name: value for name, value in config["encoder_config"].items() if value is not None}
        part = {**_PUBLISHED, **(given.get("rope_parameters") or {}), **given}
        for name, value in _ONLY.items():
            require(part, name, value=value)
        require(part, "rope_type", value="default")
        require(part, "num_key_value_heads", value=part["num_attention_heads"])
        require(part, "vector_quantization_hidden_dimension", value=part["codebook_dim"])
        require(config, "encoder_valid_num_quantizers", value=CODEBOOKS)
        made = cls(
            filters=whole(part, "num_filters"),
            kernel=whole(part, "kernel_size"),
            last_kernel=whole(part, "last_kernel_size"),
            residual_kernel=whole(part, "residual_kernel_size"),
            residual_layers=whole(part, "num_residual_layers"),
            dilation_growth=whole(part, "dilation_growth_rate"),
            compress=whole(part, "compress"),
            strides=tuple(reversed(wholes(part, "upsampling_ratios"))),
            hidden=whole(part, "hidden_size"),
            intermediate=whole(part, "intermediate_size"),
            layers=whole(part, "num_hidden_layers"),
            heads=whole(part, "num_attention_heads"),
            head_dim=whole({"head_dim": part["hidden_size"] // part["num_attention_heads"], **part}, "head_dim"),
            norm_eps=positive(part, "norm_eps"),
            rope_theta=positive(part, "rope_theta"),
            codebook_size=whole(part, "codebook_size"),
            codebook_dim=whole(part, "codebook_dim"),
            sample_rate=whole(config, "input_sample_rate"),
        )
        require(config, "encode_downsample_rate", value=made.frame_samples)
        if made.codebook_dim == made.hidden:
            raise ValueError(
                f"codebook_dim is hidden_size ({made.hidden}); books without a projection are not implemented"
            )
        return made


class _Conv(nn.Module):
    """Causal convolution x [1, C, L] -> [1, C', ceil(L / stride)]; the right edge is filled up to a whole stride."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        bias: bool = True,
        edge: str = "constant",
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, stride=stride, dilation=dilation, bias=bias)
        self.stride, self.left, self.edge = stride, (kernel - 1) * dilation + 1 - stride, edge

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (self.left, -x.shape[-1] % self.stride), mode=self.edge))


class _Residual(nn.Module):
    def __init__(self, config: CodecEncoderConfig, channels: int, dilation: int) -> None:
        super().__init__()
        inner = channels // config.compress
        self.block = nn.Sequential(
            nn.ELU(),
            _Conv(channels, inner, config.residual_kernel, dilation=dilation),
            nn.ELU(),
            _Conv(inner, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class _Waveform(nn.Module):
    """Samples [1, 1, n] -> latents [1, hidden, ceil(n / 960)]."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        channels = config.filters
        layers: list[nn.Module] = [_Conv(1, channels, config.kernel)]
        for stride in config.strides:
            layers += [
                _Residual(config, channels, config.dilation_growth**depth) for depth in range(config.residual_layers)
            ]
            layers += [nn.ELU(), _Conv(channels, 2 * channels, 2 * stride, stride=stride)]
            channels *= 2
        self.layers = nn.Sequential(*layers, nn.ELU(), _Conv(channels, config.hidden, config.last_kernel))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class _Attention(nn.Module):
    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        width = config.heads * config.head_dim
        self.qkv_proj = StackedLinear(config.hidden, {"q_proj": width, "k_proj": width, "v_proj": width})
        self.o_proj = nn.Linear(width, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, self.head_dim)) for part in self.qkv_proj.split(self.qkv_proj(x)))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True)
        return self.o_proj(out.transpose(0, 1).flatten(1))


class _MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, intermediate, bias=False)
        self.fc2 = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class _TransformerLayer(nn.Module):
    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.self_attn = _Attention(config)
        self.self_attn_layer_scale = LayerScale(config.hidden)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.mlp = _MLP(config.hidden, config.intermediate)
        self.mlp_layer_scale = LayerScale(config.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class _Transformer(nn.Module):
    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.rope = Rope(config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(_TransformerLayer(config) for _ in range(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        """x [L, hidden] of one clip."""
        cos, sin = self.rope.tables(torch.arange(x.shape[0], device=x.device), x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


class _Codebook(Prepared):
    """Published as running sums: row = embed_sum / cluster_usage."""

    table: Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(size))
        self.embed_sum = nn.Parameter(torch.zeros(size, width))

    def prepare(self) -> None:
        table = self.embed_sum.detach() / self.cluster_usage.detach().clamp(min=1e-5)[:, None]
        self.register_buffer("table", table, persistent=False)

    def nearest(self, x: Tensor) -> Tensor:
        """x [N, width] -> int64 [N], the row at the least Euclidean distance, the lowest of equals."""
        return torch.cdist(x[None].float(), self.table[None].float())[0].argmin(-1)


class _Books(nn.Module):
    """Books that code, one after another, what the earlier ones left over."""

    def __init__(self, config: CodecEncoderConfig, count: int) -> None:
        super().__init__()
        self.input_proj = nn.Conv1d(config.hidden, config.codebook_dim, 1, bias=False)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"codebook": _Codebook(config.codebook_size, config.codebook_dim)}) for _ in range(count)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """x [1, hidden, T] -> the codes of each book, int64 [T]."""
        rest = self.input_proj(x)[0].T
        codes = []
        for book in (part for part in self.modules() if isinstance(part, _Codebook)):
            codes.append(book.nearest(rest))
            rest = rest - book.table[codes[-1]]
        return codes


class _Quantizer(nn.Module):
    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.semantic_residual_vector_quantizer = _Books(config, 1)
        self.acoustic_residual_vector_quantizer = _Books(config, CODEBOOKS - 1)

    def forward(self, x: Tensor) -> Tensor:
        """x [1, hidden, T] -> int64 [T, 16]."""
        semantic = self.semantic_residual_vector_quantizer(x)
        return torch.stack(semantic + self.acoustic_residual_vector_quantizer(x), dim=-1)


class CodecEncoder(nn.Module):
    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = _Waveform(config)
        self.encoder_transformer = _Transformer(config)
        self.downsample = _Conv(config.hidden, config.hidden, 4, stride=2, bias=False, edge="replicate")
        self.quantizer = _Quantizer(config)

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """One clip: samples float [n] mono at 24 kHz, n >= 1, on the network's device -> int64 [ceil(n / 1920), 16]."""
        latents = self.encoder(samples[None, None])
        latents = self.encoder_transformer(latents[0].T).T[None]
        return self.quantizer(self.downsample(latents))
