"""The small checkpoints of the package, by name in a deploy file.

`nano:asr`, `nano:aura`, `nano:tts` and `nano:tts-base` are trained: they hear, see and speak of a small world
(`training/README.md`) and ship as files. tts-base holds its speaker encoder only; its indexes name the other weights in tts.
`tiny:NAME` is a random one of the same layout, written to the user's cache on first use: every line that serves the real
models runs in a moment, and the words mean nothing.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from aura_omni.errors import CheckpointError

NANO, TINY = "nano:", "tiny:"
NOTICE = (
    "tiny: checkpoints are random weights: the server works, but its words and sounds mean nothing. "
    "Name nano: or real checkpoints in a deploy file to get answers."
)
CHECKPOINTS = Path(__file__).parent / "checkpoints"
_SEED = 3  # of those tried the first whose model meets the sample question with words, not with silence
_FOLDERS = {
    "asr": "asr",
    "aura": "aura",
    "tts": "tts_custom_voice",
    "tts-base": "tts_base",
    "tts-design": "tts_voice_design",
}


def is_random(model: str) -> bool:
    return model.startswith(TINY)


def is_packaged(model: str) -> bool:
    return model.startswith((NANO, TINY))


def folder_of(model: str) -> Path:
    """The folder of `nano:NAME`, or of `tiny:NAME`, written first if need be (about a second). Raises CheckpointError."""
    scheme, _, name = model.partition(":")
    trained = sorted(folder.name for folder in CHECKPOINTS.iterdir() if folder.is_dir())
    known = trained if scheme + ":" == NANO else list(_FOLDERS)
    if name not in known:
        there_are = ", ".join([*(NANO + each for each in trained), *(TINY + each for each in _FOLDERS)])
        raise CheckpointError(f"there is no packaged checkpoint {model!r}; there are {there_are}")
    if scheme + ":" == NANO:
        return CHECKPOINTS / name
    home = _cache() / f"tiny-{_fingerprint()}"
    try:
        if not home.is_dir():
            _write(home)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the packaged checkpoints cannot be kept in {home.parent} ({error}). "
            "Set XDG_CACHE_HOME to a folder that can be written to."
        ) from error
    return home / _FOLDERS[name]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "aura-omni"
    except RuntimeError as error:
        raise CheckpointError(f"{error}. Set XDG_CACHE_HOME to a folder that can be written to.") from error


def _fingerprint() -> str:
    """Of the code that writes the family: a newer release must not read what an older one left behind."""
    here = Path(__file__).parent
    code = b"".join((here / name).read_bytes() for name in ("__init__.py", "published.py", "random_family.py"))
    return hashlib.blake2b(code, digest_size=6).hexdigest()


def _write(home: Path) -> None:
    from aura_omni.nano.random_family import write_family  # torch, and only on first use

    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as draft:
        write_family(Path(draft) / "family", seed=_SEED)
        try:
            (Path(draft) / "family").rename(home)
        except OSError:
            if not home.is_dir():  # else another process was faster, with the same bytes
                raise
