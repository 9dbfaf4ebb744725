"""Importing the public Qwen3-TTS package beside the others, without either disturbing the other.

It imports torchaudio for a tokenizer that was never published (empty modules stand in for it), and it gives transformers one
rule for the base of rotary positions that only its own configurations can answer (here it answers for all).
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from functools import cache
from typing import Any

import torch


@cache
def import_qwen_tts() -> types.ModuleType:
    for name in ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi"):
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            sys.modules[name] = module
    import qwen_tts
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ROPE_INIT_FUNCTIONS["default"] = _unscaled
    return qwen_tts


def _unscaled(config: Any, device: Any = None, **_: Any) -> tuple[torch.Tensor, float]:
    """The published frequencies base ** (-2i / head_dim), wherever a configuration keeps its base."""
    rope = getattr(config, "rope_parameters", None) or {}
    base = rope.get("rope_theta") or config.rope_theta
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 1.0 / base ** (torch.arange(0, size, 2, device=device).float() / size), 1.0
