"""A trained network as a checkpoint folder in the published layout, float16.

python -m training.aura.export STATE FOLDER --words FOLDER       # STATE: where training.aura.train left its state files
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from aura_omni.models.qwen3_vl import LAYOUT, Qwen3VL
from aura_omni.models.weights import to_published
from aura_omni.nano.published import NANO, Sizes, aura_files
from training.aura.model import control_ids, network
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("state", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--words", type=Path, required=True)
    arguments = parser.parse_args()
    made = network(0)
    made.load_state_dict(load_file(arguments.state / "state_average.safetensors"))
    export(made, arguments.words, arguments.folder)


if __name__ == "__main__":
    main()
