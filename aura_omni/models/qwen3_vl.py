"""Qwen3-VL: the vision tower, and the decoder it feeds. AURA is a fine-tune of it.

Knows patches, token embeddings and hidden rows. Does not know frames, prompts or batches of requests.

    features = network.visual(patches, (22, 40))    # main and deepstack features of temporal groups of one size
    hidden = network.decoder(embeddings, positions, kv, adds, rows)
    logits = network.head(hidden)
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.fields import whole, wholes
from aura_omni.models.layers import fused, fusible, layer_normed_sum
from aura_omni.models.qwen3 import Decoder, DecoderConfig
from aura_omni.models.weights import Layout, Prepared

LAYER_NORM_EPS = 1e-6  # fixed in the architecture, not in config.json
VISION_ROPE_THETA = 10_000.0  # likewise, except in files of transformers 5, which name it
TABLES_KEPT = 16  # frame sizes whose position tables stay on the device; 2 MB each at 640x352 in bf16


@dataclass(frozen=True, slots=True)
class VisionConfig:
    depth: int
    hidden: int
    intermediate: int
    heads: int
    channels: int
    patch: int  # pixels per side
    temporal_patch: int  # frames
    merge: int  # patches per side of one token
    position_side: int  # the learned position table is position_side x position_side
    out_hidden: int
    deepstack_layers: tuple[int, ...]
    rope_theta: float = VISION_ROPE_THETA

    @classmethod
    def from_json(cls, vision: Mapping[str, Any]) -> VisionConfig:
        """From the vision_config section. Raises ValueError for an architecture that computes something else."""
        _require(vision, "hidden_act", "gelu_pytorch_tanh")
        rope = vision.get("rope_parameters") or {}
        _require(rope, "rope_type", "axial")
        side = math.isqrt(vision["num_position_embeddings"])
        if side * side != vision["num_position_embeddings"]:
            raise ValueError(f"num_position_embeddings is {vision['num_position_embeddings']}; it must be a square")
        for name in ("patch_size", "temporal_patch_size"):
            if not isinstance(vision[name], int):
                raise ValueError(f"vision {name} is {vision[name]!r}; only one number is supported")
        config = cls(
            depth=whole(vision, "depth"),
            hidden=whole(vision, "hidden_size"),
            intermediate=whole(vision, "intermediate_size"),
            heads=whole(vision, "num_heads"),
            channels=whole(vision, "in_channels"),
            patch=whole(vision, "patch_size"),
            temporal_patch=whole(vision, "temporal_patch_size"),
            merge=whole(vision, "spatial_merge_size"),
            position_side=side,
            out_hidden=whole(vision, "out_hidden_size"),
            deepstack_layers=wholes(vision, "deepstack_visual_indexes", least=0),
            rope_theta=rope.get("rope_theta", VISION_ROPE_THETA),
        )
        if config.hidden % config.heads or config.head_dim % 4:
            raise ValueError(
                f"vision hidden_size {config.hidden} does not divide into {config.heads} heads of 4n values"
            )
        if list(config.deepstack_layers) != sorted(set(config.deepstack_layers)) or not all(
            0 <= layer < config.depth for layer in config.deepstack_layers
        ):
            raise ValueError(
                f"deepstack_visual_indexes is {list(config.deepstack_layers)}; it must rise from 0 to below {config.depth}"
            )
        return config

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, slots=True)
class VLConfig:
    vision: VisionConfig
    text: DecoderConfig
    vocabulary: int
    tied: bool  # the head is the embedding table
    max_positions: int

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> VLConfig:
        """From config.json, as written by transformers 4.57 or 5. `auto_map` and the class defaults are not consulted.

        Raises ValueError for an architecture that computes something else, KeyError for a missing field.
        """
        _require(config, "model_type", "qwen3_vl")
        text = config["text_config"]
        _require(text, "hidden_act", "silu")
        _require(text, "attention_bias", False)
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        _require(rope, "rope_type", "default")
        _require(rope, "mrope_interleaved", True)
        decoder = DecoderConfig.from_json(text, mrope=True)
        if decoder.mrope_section is None or sum(decoder.mrope_section) != decoder.head_dim // 2:
            raise ValueError(
                f"mrope_section is {decoder.mrope_section}; it must name {decoder.head_dim // 2} frequency pairs"
            )
        vision = VisionConfig.from_json(config["vision_config"])
        if vision.out_hidden != decoder.hidden:
            raise ValueError(f"vision out_hidden_size {vision.out_hidden} is not the text hidden_size {decoder.hidden}")
        if len(vision.deepstack_layers) > decoder.layers:
            raise ValueError(f"{len(vision.deepstack_layers)} deepstack features for {decoder.layers} text layers")
        return cls(
            vision=vision,
            text=decoder,
            vocabulary=whole(text, "vocab_size"),
            tied=config.get("tie_word_embeddings", False),
            max_positions=whole(text, "max_position_embeddings"),
        )


def _require(section: Mapping[str, Any], name: str, value: Any) -> None:
    found = section.get(name, value)
    if found != value:
        raise ValueError(f"{name} is {found!r}; only {value!r} is supported")


class PatchEmbed(nn.Module):
    """Published as a 3-D convolution whose stride is its size, which is one matrix product per patch."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = (config.temporal_patch, config.patch, config.patch)
        self.proj = nn.Conv3d(config.channels, config.hidden, kernel_size=size, stride=size)

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class VisionAttention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [G, P, hidden]; cos, sin float32 [P, head_dim]. Every patch sees all patches of its own group, and no other."""
        groups, patches, hidden = x.shape
        qkv = self.qkv(x)
        q, k, v = qkv.view(groups, patches, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k = (
            fused().turn_patches(qkv, cos, sin, self.heads) if fusible(x) else (_turn(q, cos, sin), _turn(k, cos, sin))
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(groups, patches, hidden))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [G, heads, P, D] rotated in float32, back in its own dtype. Pairs are (j, j + D/2)."""
    wide = x.float()
    half = x.shape[-1] // 2
    turned = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
    return (wide * cos + turned * sin).to(x.dtype)


class VisionMLP(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden, config.intermediate)
        self.linear_fc2 = nn.Linear(config.intermediate, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.linear_fc1
        if fusible(x):
            # On CUDA the product does this activation on its way out, of sums that are not rounded yet.
            rows = torch._addmm_activation(inner.bias, x.flatten(0, -2), inner.weight.T, use_gelu=True)
            return self.linear_fc2(rows.unflatten(0, x.shape[:-1]))
        return self.linear_fc2(F.gelu(inner(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden, eps=LAYER_NORM_EPS)
        self.norm2 = nn.LayerNorm(config.hidden, eps=LAYER_NORM_EPS)
        self.attn = VisionAttention(config)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor, more: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream as two summands, before and after; whoever reads it adds them up and norms them at once."""
        x, normed = layer_normed_sum(self.norm1, x, more)
        x, normed = layer_normed_sum(self.norm2, x, self.attn(normed, cos, sin))
        return x, self.mlp(normed)


class PatchMerger(nn.Module):
    """merge x merge patches, which lie next to each other, become one token. The activation is the exact GELU.

    The main merger normalises each patch, the deepstack mergers the joined patches.
    """

    def __init__(self, config: VisionConfig, *, norm_joined: bool) -> None:
        super().__init__()
        self.joined = config.hidden * config.merge**2
        self.norm = nn.LayerNorm(self.joined if norm_joined else config.hidden, eps=LAYER_NORM_EPS)
        self.linear_fc1 = nn.Linear(self.joined, self.joined)
        self.linear_fc2 = nn.Linear(self.joined, config.out_hidden)
        self.norm_joined = norm_joined

    def forward(self, x: Tensor) -> Tensor:
        """x [G, P, hidden] -> [G, P / merge^2, out_hidden]."""
        groups = x.shape[0]
        if self.norm_joined:
            x = self.norm(x.reshape(groups, -1, self.joined))
        else:
            x = self.norm(x).view(groups, -1, self.joined)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class VisionTower(Prepared):
    """Published names below `model.visual`. Temporal groups are independent, so groups of one size form a batch."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Embedding(config.position_side**2, config.hidden)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config, norm_joined=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, norm_joined=True) for _ in config.deepstack_layers
        )
        self._tables: OrderedDict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = OrderedDict()

    def prepare(self) -> None:
        self._tables.clear()

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """patches [G, P, channels x time x patch x patch] in the weights' dtype, P = height x width of `grid`, counted in patches.

        Patches lie in merge-block order (`vision_input.patchify`). Returns [1 + K, G, P / merge^2, out_hidden]: the main
        features, then the K deepstack features in layer order.
        """
        return self.encoded(patches, *self.tables(grid))

    def encoded(self, patches: Tensor, position: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`forward` with what `tables` gives for the grid. Tensors only: it may be recorded in a CUDA graph."""
        x = self.patch_embed(patches) + position
        more: Tensor | None = None
        taps: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x, more = block(x, more, cos, sin)
            if number in self.config.deepstack_layers:
                x, more = x + more, None
                taps.append(self.deepstack_merger_list[len(taps)](x))
        return torch.stack((self.merger(x if more is None else x + more), *taps))

    def tables(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Learned positions [P, hidden] in the weights' dtype, rotary cos and sin float32 [P, head_dim]."""
        if grid not in self._tables:
            self._tables[grid] = (self._learned_positions(grid), *self._rotary(grid))
            if len(self._tables) > TABLES_KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(grid)
        return self._tables[grid]

    def _learned_positions(self, grid: tuple[int, int]) -> Tensor:
        """The square table stretched over the grid, corner on corner, bilinear.

        Weights and sum are float32 and rounded once. Rounding the weights to bf16 first, as older implementations do,
        costs 4e-3 of the table's scale and gains nothing, since the table is computed once per size.
        """
        height, width = grid
        side = self.config.position_side
        table = self.pos_embed.weight
        rows, columns = (
            torch.linspace(0, side - 1, size, dtype=torch.float32, device=table.device) for size in (height, width)
        )
        top, left = rows.long(), columns.long()
        down, right = (rows - top)[:, None, None], (columns - left)[:, None]
        bottom, beyond = (top + 1).clamp_max(side - 1), (left + 1).clamp_max(side - 1)

        def corner(row: Tensor, column: Tensor) -> Tensor:
            return table[row[:, None] * side + column].float()

        mixed = (
            corner(top, left) * ((1 - down) * (1 - right))
            + corner(top, beyond) * ((1 - down) * right)
            + corner(bottom, left) * (down * (1 - right))
            + corner(bottom, beyond) * (down * right)
        )
        return self._block_order(mixed).to(table.dtype)

    def _rotary(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """The first half of the pairs turns by the patch's row, the second by its column."""
        height, width = grid
        device = self.pos_embed.weight.device
        axis = self.config.head_dim // 2
        rates = 1.0 / self.config.rope_theta ** (torch.arange(0, axis, 2, dtype=torch.float32, device=device) / axis)
        by_row = (torch.arange(height, device=device)[:, None] * rates)[:, None].expand(height, width, -1)
        by_column = (torch.arange(width, device=device)[:, None] * rates)[None].expand(height, width, -1)
        angles = self._block_order(torch.cat((by_row, by_column), dim=-1))
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def _block_order(self, x: Tensor) -> Tensor:
        """[height, width, C] in reading order -> [P, C], the patches of one token together."""
        height, width, channels = x.shape
        merge = self.config.merge
        blocks = x.view(height // merge, merge, width // merge, merge, channels)
        return blocks.transpose(1, 2).reshape(height * width, channels)


class Qwen3VL(nn.Module):
    def __init__(self, config: VLConfig) -> None:
        super().__init__()
        self.config = config
        self.visual = VisionTower(config.vision)
        self.embed_tokens = nn.Embedding(config.vocabulary, config.text.hidden)
        self.decoder = Decoder(config.text)
        self.lm_head = None if config.tied else nn.Linear(config.text.hidden, config.vocabulary, bias=False)

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [B, H] -> logits [B, vocabulary] in the weights' dtype."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden, weight)


LAYOUT = Layout(
    renames=(
        ("visual.", "model.visual."),
        ("embed_tokens.", "model.language_model.embed_tokens."),
        ("decoder.", "model.language_model."),
    ),
    ignore=(r"lm_head\.weight",),  # some files store the head although it is tied; untied, it is read, not ignored
)
