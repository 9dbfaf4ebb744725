"""Which deploy file, and so which pipeline, serves MODEL when none is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from aura_omni.config import deploy_file
from aura_omni.config.config import Options
from aura_omni.errors import ConfigError
from aura_omni.flow import StageName

DEFAULT_DEPLOY = "nano.yaml"  # ships with the package, so that `serve` alone works anywhere

# model_type of a config.json -> the packaged deploy file that serves it, and the stage it is the checkpoint of
# (None: of every stage).
_BY_TYPE: Mapping[str, tuple[str, StageName | None]] = {
    "qwen3_vl": ("aura_omni.yaml", "aura"),
    "qwen3_tts": ("qwen3_tts.yaml", None),
    "qwen3_asr": ("qwen3_asr.yaml", None),
}
# Hub repositories whose type is known without asking the hub; the start of their names.
_BY_HUB_NAME: Mapping[str, str] = {
    "aurateam/AURA": "qwen3_vl",
    "Qwen/Qwen3-TTS-": "qwen3_tts",
    "Qwen/Qwen3-ASR-": "qwen3_asr",
}


def deploy_source(options: Options) -> tuple[str, tuple[str, StageName | None] | None]:
    """The deploy file, and by which rule MODEL chose it (None: it did not)."""
    if options.deploy_config is not None:
        return options.deploy_config, None
    if options.model is None:
        return DEFAULT_DEPLOY, None
    chosen = by_model_type(options.model)
    return chosen[0], chosen


def by_model_type(model: str) -> tuple[str, StageName | None]:
    kind = next((kind for name, kind in _BY_HUB_NAME.items() if model.startswith(name)), None) or _model_type(model)
    if kind not in _BY_TYPE:
        raise ConfigError(
            f"MODEL {model!r} is of type {kind!r}, which no packaged pipeline serves; known: {', '.join(_BY_TYPE)}. "
            "Name a deploy file with --deploy-config"
        )
    return _BY_TYPE[kind]


def _model_type(model: str) -> str:
    folder = Path(model).expanduser()
    if folder.is_dir():
        path = folder / "config.json"
    elif model.count("/") == 1 and not model.startswith((".", "/", "~")):
        path = _hub_config(model)
    else:
        raise ConfigError(
            f"MODEL {model!r} is neither a folder nor a hub id of the form owner/name. "
            f"Leave it out to serve {DEFAULT_DEPLOY}, or name a deploy file with --deploy-config"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"MODEL {model!r} has no config.json, so it is not a checkpoint") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    return str(content.get("model_type")) if isinstance(content, dict) else "unknown"


def _hub_config(model: str) -> Path:
    from huggingface_hub import hf_hub_download  # only here: it is slow to import and most starts do not need it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"MODEL {model!r}: its config.json could not be fetched from the hub ({type(error).__name__}), so its "
            f"pipeline is unknown. Say --deploy-config with one of {', '.join(deploy_file.packaged_names())}"
        ) from error
