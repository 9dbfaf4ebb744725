"""A trained network as a checkpoint folder in the published layout, float16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from aura_omni.models.qwen3_vl import LAYOUT, Qwen3VL
from aura_omni.models.weights import to_published
from aura_omni.nano.published import NANO, Sizes, aura_files
from training.aura.model import control_ids
from training.aura.vocabulary import ROWS


def export(made: Qwen3VL, words: Path, folder: Path, *, sizes: Sizes = NANO) -> None:
    """words: the folder of the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in aura_files(sizes, control_ids(), ROWS).items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if words != folder:
            shutil.copyfile(words / name, folder / name)
    weights = {name: value.detach().to("cpu", torch.float16) for name, value in to_published(made, LAYOUT).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
