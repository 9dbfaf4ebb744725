"""A tiny Qwen3-VL for tests: config, toy tokenizer, random weights shared with the reference, and a stage driven by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from aura_omni.engine.sequence import Batch, Sequence
from aura_omni.flow import Sampling, Video
from aura_omni.models.qwen3_vl import LAYOUT, Qwen3VL, VLConfig
from aura_omni.models.vision_input import PixelRules
from aura_omni.models.weights import from_published, to_published
from aura_omni.stages.aura import AuraStage
from aura_omni.stages.aura_prompt import Profile
from aura_omni.stages.tokenizer import TextTokenizer
from tests.stages.drive import PlainKV

ADDED = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
    "<think>", "</think>", "<|silent|>",
)  # fmt: skip
VOCABULARY = 280
IDS = {token: 256 + number for number, token in enumerate(ADDED)}

PIXELS = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
VIDEO_PIXELS = {**PIXELS, "size": {"shortest_edge": 4096, "longest_edge": 25165824}}
IMAGE_PIXELS = {**PIXELS, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}

TEXT_CONFIG = {
    "model_type": "qwen3_vl_text", "vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "attention_bias": False,
    "hidden_act": "silu", "max_position_embeddings": 4096, "rope_theta": 5_000_000,
    "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
}  # fmt: skip
VISION_CONFIG = {
    "model_type": "qwen3_vl", "depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 112, "in_channels": 3,
    "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 256, "out_hidden_size": 96,
    "deepstack_visual_indexes": [0, 1, 2], "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


def config_json(*, tied: bool = False, **vision: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "vision_end_token_id": IDS["<|vision_end|>"],
        "tie_word_embeddings": tied,
        "text_config": dict(TEXT_CONFIG),
        "vision_config": {**VISION_CONFIG, **vision},
    }


def randomise(module: torch.nn.Module, seed: int = 0) -> None:
    """Norm weights 1 + 0.2n, other vectors 0.1n, matrices scaled to keep the variance, embeddings 0.2n."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(module.named_parameters()):
            values = torch.randn(weight.shape, generator=noise)
            if weight.dim() == 1:
                values = 1 + 0.2 * values if name.endswith("weight") else 0.1 * values
            elif "embed" in name and weight.dim() == 2:
                values = 0.2 * values
            else:
                values = values / weight[0].numel() ** 0.5
            weight.copy_(values)


def network(config: dict[str, Any], seed: int = 0) -> Qwen3VL:
    built = Qwen3VL(VLConfig.from_json(config))
    randomise(built, seed)
    return built.requires_grad_(False).eval()


def reference(config: dict[str, Any], ours: Qwen3VL) -> Any:
    """The public implementation with our weights."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**json.loads(json.dumps(config)))).eval()
    state = to_published(ours, LAYOUT)
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.language_model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def adopt(ours: Qwen3VL, theirs: Any) -> None:
    from_published(ours, LAYOUT, theirs.state_dict())


def tokenizer(added: Seq[str] = ADDED) -> Tokenizer:
    """One token per byte; ids of the control tokens follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    toy = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    toy.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    toy.decoder = decoders.ByteLevel()
    plain = ("<think>", "</think>", "<|silent|>")
    toy.add_tokens([AddedToken(token, normalized=False, special=token not in plain) for token in added])
    return toy


def stage(
    config: dict[str, Any] | None = None, *, profile: Profile | None = None, max_model_len: int = 4096
) -> AuraStage:
    return AuraStage(
        network(config or config_json()),
        TextTokenizer(tokenizer(), "toy"),
        video_rules=PixelRules.from_json(VIDEO_PIXELS),
        image_rules=PixelRules.from_json(IMAGE_PIXELS),
        profile=profile or Profile(),
        max_model_len=max_model_len,
    )


def write_checkpoint(folder: Path, config: dict[str, Any], ours: Qwen3VL, added: Seq[str] = ADDED) -> None:
    tokenizer(added).save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", config),
        ("preprocessor_config.json", IMAGE_PIXELS),
        ("video_preprocessor_config.json", VIDEO_PIXELS),
    ):
        (folder / name).write_text(json.dumps(content))
    save_file(to_published(ours, LAYOUT), str(folder / "model.safetensors"))


def frames(count: int, height: int, width: int, seed: int) -> np.ndarray:
    """uint8 [n, h, w, 3] that the fixtures were made with too."""
    index = np.arange(count * height * width * 3, dtype=np.int64)
    return ((index * 2654435761 + seed * 97) >> 7 & 255).astype(np.uint8).reshape(count, height, width, 3)


def video(count: int, height: int, width: int, *, seed: int = 1, fps: float = 2.0) -> Video:
    key = repr((count, height, width, seed, fps)).encode()
    return Video(frames(count, height, width, seed), tuple(n / fps for n in range(count)), fps, key)


def image(height: int, width: int, *, seed: int = 1) -> Video:
    return Video(frames(1, height, width, seed), (0.0,), 1.0, repr((height, width, seed)).encode(), still=True)


def sequence_of(stage: AuraStage, prompt: Any, **sampling: Any) -> Sequence:
    return stage.sequence(prompt, Sampling(**sampling), on_output=lambda _: None, on_end=lambda *_: None)


def forward(stage: AuraStage, kv: PlainKV, *parts: tuple[Sequence, int, int]) -> Tensor:
    """One step of (sequence, start, count) parts -> hidden rows."""
    kv.batch = Batch(
        tuple(sequence for sequence, _, _ in parts), tuple(part[1] for part in parts), tuple(part[2] for part in parts)
    )
    with torch.inference_mode():
        return stage.forward(kv.batch, kv)


def greedy(stage: AuraStage, kv: PlainKV, sequence: Sequence, hidden: Tensor, count: int) -> list[int]:
    """count ids after the row whose hidden is given; stop ids do not stop it."""
    for _ in range(count):
        sequence.tokens.append(int(stage.logits(hidden[-1:]).argmax()))
        hidden = forward(stage, kv, (sequence, sequence.length - 1, 1))
    return sequence.outputs
