"""The effective configuration as YAML, each value with where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from aura_omni.config.config import Config
from aura_omni.config.deploy_keys import MEDIA_KEYS, SPEECH_KEYS


def to_yaml(config: Config) -> str:
    """The effective configuration for people and tools; API keys are counted, not shown."""
    lines = [
        *_lines({"pipeline": config.pipeline, "deploy_file": str(config.deploy)}),
        *_lines({"served_model_name": list(config.served_names), "host": config.host, "port": config.port}),
        *_lines(
            {
                "allowed_origins": list(config.allowed_origins),
                "request_timeout_s": config.request_timeout_s,
                "custom_voice_dir": str(config.voices_dir) if config.voices_dir else None,
                "engine_process": config.engine_process,
            }
        ),
        f"api_keys: {len(config.api_keys)}  # number of keys; they are not shown",
        "media:",
        *_lines(
            {
                "allowed_local_path": str(config.media.allowed_local_path) if config.media.allowed_local_path else None,
                "allowed_domains": list(config.media.allowed_domains),
                "limit_mm_per_prompt": dict(config.media.limits),
                **{key: getattr(config.media, key) for key in MEDIA_KEYS},
            },
            indent=2,
        ),
        "audio_chunks:",
        *_lines(
            {
                "initial_codec_chunk_frames": config.audio_chunks.first_frames,
                "codec_chunk_frames": config.audio_chunks.frames,
            },
            indent=2,
        ),
        "speech:",
        *_lines({key: getattr(config.speech, key) for key in SPEECH_KEYS}, indent=2),
        "stages:",
    ]
    for stage in config.stages:
        lines.append(f"- stage_id: {stage.stage_id}  # {stage.name}")
        shown = {
            "model": stage.model,
            "revision": stage.revision,
            "devices": str(stage.device),
            "load_format": stage.load_format,
            "dtype": stage.dtype,
            "quantization": stage.quantization,
            "kv_cache_dtype": stage.kv_cache_dtype,
            "gpu_memory_utilization": stage.gpu_memory_utilization,
            "max_num_seqs": stage.max_num_seqs,
            "max_num_batched_tokens": stage.max_num_batched_tokens,
            "max_model_len": stage.max_model_len,
            "enforce_eager": stage.enforce_eager,
            "enable_prefix_caching": stage.enable_prefix_caching,
        }
        if stage.picture_cache_gib:
            shown["picture_cache_gib"] = stage.picture_cache_gib
        if stage.name == "code2wav":  # it has neither rows nor a KV cache
            shown = {
                key: value
                for key, value in shown.items()
                if key not in ("kv_cache_dtype", "max_num_batched_tokens", "max_model_len")
            }
        here = f"stages.{stage.stage_id}"
        lines += _lines(shown, indent=2, origins=config.origins, path=here)
        groups = (("default_sampling_params", stage.sampling), ("subtalker_sampling_params", stage.subtalker))
        for key, values in groups:
            if values:
                lines.append(f"  {key}:")
                lines += _lines(values, indent=4, origins=config.origins, path=f"{here}.{key}")
    return "\n".join([*lines, *(f"# {note}" for note in config.notes)]) + "\n"


def _lines(
    values: Mapping[str, Any], *, indent: int = 0, origins: Mapping[str, str] | None = None, path: str = ""
) -> list[str]:
    lines = []
    for key, value in values.items():
        plain = list(value) if isinstance(value, tuple) else value
        text = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=1000)
        text = f"{key}: {text.strip().removesuffix('...').strip()}"  # YAML ends a lone scalar with "..."
        origin = (origins or {}).get(f"{path}.{key}")
        lines.append(" " * indent + text + (f"  # {origin}" if origin else ""))
    return lines
