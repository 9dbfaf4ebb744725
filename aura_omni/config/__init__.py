"""From deploy file and flags to one frozen Config. A leaf: knows no torch, no engine and no HTTP."""

from aura_omni.config.config import (
    AudioChunks,
    Config,
    MediaConfig,
    Options,
    SpeechConfig,
    StageConfig,
    check_free_memory,
    cuda_index,
)
from aura_omni.config.load import load
from aura_omni.config.machine import load_here, narrowed, platform
from aura_omni.config.show import to_yaml

__all__ = [
    "AudioChunks",
    "Config",
    "MediaConfig",
    "Options",
    "SpeechConfig",
    "StageConfig",
    "check_free_memory",
    "cuda_index",
    "load",
    "load_here",
    "narrowed",
    "platform",
    "to_yaml",
]
