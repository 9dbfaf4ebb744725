"""The configuration that a deploy file means on this machine. Reads its environment; the rest of config is handed it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from aura_omni.config.config import Config, Options, PipelineName, Platform
from aura_omni.config.load import PIPELINES, load
from aura_omni.errors import ConfigError
from aura_omni.flow import why_mute


def platform(environ: Mapping[str, str]) -> Platform:
    """Which `platforms:` block of a deploy file applies: whether an NVIDIA driver is here, without importing torch."""
    hidden = environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    driver = any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))
    return "cuda" if driver and not hidden else "cpu"


def load_here(options: Options) -> Config:
    """Raises ConfigError, as `load`."""
    return load(options, environ=os.environ, platform=platform(os.environ))


def narrowed(config: Config, pipeline: PipelineName) -> Config:
    """The stages of `pipeline` alone, as config has them: who only listens need not load what speaks. Raises ConfigError."""
    names = PIPELINES[pipeline].stages
    stages = tuple(stage for stage in config.stages if stage.name in names)
    missing = [name for name in names if name not in [stage.name for stage in stages]]
    if "talker" in missing:
        raise ConfigError(why_mute([stage.name for stage in config.stages]))
    if missing:
        raise ConfigError(f"{config.deploy.name} (pipeline {config.pipeline}) has no {', no '.join(missing)}")
    return replace(config, pipeline=pipeline, stages=stages)
