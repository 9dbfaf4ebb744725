"""How much each stage writes in a benchmark: random weights know no end, so it is said.

    sampling = forced(folder)      # of TurnRequest, or of each stage's default_sampling_params

The words are " circle" over and over: whole words, as a Talker that reads while AURA writes waits for the end of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from aura_omni.flow import SILENT_TEXT, StageName

WORD = " circle"  # one token in the published vocabularies and in those of random families
ASR_TOKENS, AURA_TOKENS, FRAMES = 24, 48, 124


def forced(folder: Path) -> dict[StageName, Mapping[str, Any]]:
    """So many tokens of one word, so many frames of whatever is drawn. folder: of a family."""
    return {
        "asr": {**_exactly(ASR_TOKENS), **_only(folder / "asr", WORD)},
        "aura": {**_exactly(AURA_TOKENS), **_only(folder / "aura", WORD)},
        "talker": _exactly(FRAMES),
    }


def silence(folder: Path) -> dict[str, Any]:
    """AURA says nothing."""
    return {"min_tokens": 0, **_only(folder / "aura", SILENT_TEXT)}


def _exactly(count: int) -> dict[str, Any]:
    return {"min_tokens": count, "max_tokens": count}


def _only(checkpoint: Path, text: str) -> dict[str, Any]:
    """Of a text that is one token."""
    ids: list[int] = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids
    if len(ids) != 1:
        raise SystemExit(f"{text!r} is {len(ids)} tokens of {checkpoint}; this needs a checkpoint where it is one")
    return {"logit_bias": {str(ids[0]): 100.0}}
