"""The dimensions of the small recogniser and its vocabulary."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aura_omni.engine.loader import Checkpoint
from aura_omni.models.qwen3_asr import AsrConfig
from aura_omni.nano import published
from aura_omni.nano.published import TINY, Sizes, Text
from aura_omni.nano.random_family import write_tokenizer
from aura_omni.stages.tokenizer import TextTokenizer
from training.text.grammar import sentence

# 6.6 million parameters, 13 MB in float16: most of them listen.
NANO = replace(
    TINY,
    asr=Text(hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, head_dim=64, sections=(16, 8, 8)),
    asr_audio_layers=6,
    asr_audio_width=256,
    asr_audio_heads=4,
    asr_conv_channels=48,
)
SMOKE = replace(
    NANO,
    asr=Text(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, sections=(4, 2, 2)),
    asr_audio_layers=2,
    asr_audio_width=64,
    asr_conv_channels=16,
)
PIECES = 1_400
HEADS = ("language English", "language None")
FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
)
_ROLES = ("system", "user", "assistant", "\n", *HEADS)


def vocabulary_texts(english: Sequence[str], seed: int = 0) -> Iterator[str]:
    """What the pieces are learned from: as much of the small world as of English, and the words of the prompt."""
    rng = random.Random(seed)
    for text in english:
        yield text
        yield sentence(rng)
    for text in _ROLES:
        yield from [text] * 2_000


@dataclass(frozen=True, slots=True)
class Recogniser:
    """All of a checkpoint but its weights."""

    config: AsrConfig
    tokenizer: TextTokenizer

    @classmethod
    def written(cls, folder: Path, english: Sequence[str], sizes: Sizes, *, pieces: int = PIECES) -> Recogniser:
        """Learns the vocabulary and writes everything but the weights into folder."""

        ids = write_tokenizer(folder, published.AUDIO_TOKENS, texts=vocabulary_texts(english), pieces=pieces)
        tokenizer = TextTokenizer.load(Checkpoint(folder, "nano asr"))
        files = published.asr_files(sizes, ids, -(-tokenizer.size // 8) * 8)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
        return cls(AsrConfig.from_json(files["config.json"]), tokenizer)

    @classmethod
    def copied(cls, before: Path, folder: Path) -> Recogniser:
        """That of an earlier run, whose weights mean nothing with another vocabulary. Its JSON files are copied into folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (before / name).exists():  # a tokenizer may be one file or three
                shutil.copyfile(before / name, folder / name)
        checkpoint = Checkpoint(folder, "nano asr")
        return cls(checkpoint.parse(AsrConfig.from_json), TextTokenizer.load(checkpoint))
