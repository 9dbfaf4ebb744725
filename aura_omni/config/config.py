"""The frozen configuration of one server, and what can be asked of it before anything is loaded.

Does not know torch: whoever starts the engine passes in what the machine has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aura_omni.errors import ConfigError, DoesNotFit
from aura_omni.flow import MediaLimits, StageName

PipelineName = Literal["aura_omni", "qwen3_tts", "qwen3_asr"]
Platform = Literal["cuda", "cpu"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Quantization = Literal["fp8"]
KvCacheDtype = Literal["auto", "fp8"]
LoadFormat = Literal["auto", "safetensors", "dummy"]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8091
DEFAULT_MAX_BODY_BYTES = 160 * 2**20  # base64 makes the media in it a third larger
DEFAULT_REQUEST_TIMEOUT_S = 600.0  # what official clients wait by default
LOCAL_ORIGINS = ("http://localhost:*", "http://127.0.0.1:*", "http://[::1]:*")
DEFAULT_PARTS: Mapping[str, int] = {"audio": 64, "image": 128, "video": 64}


@dataclass(frozen=True, slots=True)
class MediaConfig(MediaLimits):
    """What a request may point at, and how much of it."""

    allowed_local_path: Path | None = None  # None: no file:// at all
    allowed_domains: tuple[str, ...] = ()  # empty: no http(s):// at all
    limits: Mapping[str, int] = field(
        default_factory=lambda: dict(DEFAULT_PARTS)
    )  # most items of a kind in one request
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES


@dataclass(frozen=True, slots=True)
class StageConfig:
    name: StageName
    stage_id: int
    model: str  # a folder, a hub id, or "nano:..." or "tiny:..."
    revision: str | None
    device: int  # CUDA device number; on a machine without CUDA the stage runs on the CPU
    load_format: (
        LoadFormat  # auto and safetensors: weights are read; dummy: they are made up, to measure without a checkpoint
    )
    dtype: Dtype  # auto: bfloat16 on CUDA, float32 on the CPU
    quantization: Quantization | None  # of the matrices of ASR's or AURA's decoder, made when they are loaded
    kv_cache_dtype: (
        KvCacheDtype  # auto: keys and values are of the stage's dtype; fp8: of ASR or AURA, each with a scale
    )
    gpu_memory_utilization: float  # of the whole device: weights, KV pages and activations
    max_num_seqs: int  # sequences in one step
    max_num_batched_tokens: int  # rows in one step
    max_model_len: int | None  # rows of one sequence; None: as the checkpoint says
    enforce_eager: bool  # no CUDA graphs
    enable_prefix_caching: bool
    picture_cache_gib: float  # of that memory, for what encoded pictures have become; 0 but for AURA
    sampling: Mapping[str, Any]  # fields of flow.Sampling that the deploy file sets
    subtalker: Mapping[str, Any]  # the code predictor's do_sample, temperature, top_k, top_p; empty but for the Talker


@dataclass(frozen=True, slots=True)
class AudioChunks:
    """How many frames go out together: the first time, and later at most."""

    first_frames: int
    frames: int


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """What is spoken of a text, and when a Talker that does not come to an end is stopped."""

    normalize: bool = True  # requests may say otherwise
    # The most frames that a text of n tokens may become: speech has 3 or 4 for each; 12.5 are a second
    spare_frames: int = 38
    frames_per_token: float = 12.0
    least_frames_per_token: float = 0.75  # and the least; nobody speaks 16 tokens a second
    max_loop_s: float = 8.0  # of a few codes again and again
    max_silence_s: float = 6.0
    # Ids that the Talker has in hand before it starts, beside those of its prompt. Its listener hears 12.5 frames a second, one for
    # each id, and AURA writes ten times as many: they would only bridge a pause of AURA right after its first words.
    tokens_ahead: int = 0
    # Whether the Talker waits for all of AURA's text; requests may say otherwise
    non_streaming: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    pipeline: PipelineName
    served_names: tuple[str, ...]  # what a request may call the model; the first is the one shown
    host: str
    port: int
    api_keys: tuple[str, ...] = field(repr=False)  # empty: no key is asked for
    allowed_origins: tuple[str, ...]  # web pages that may call; "*": all
    request_timeout_s: float  # longest work on one request
    voices_dir: Path | None  # where uploaded voices are kept; None: none are
    media: MediaConfig
    stages: tuple[StageConfig, ...]  # in the order of the pipeline
    engine_process: bool  # `serve` runs the stages in a process of their own
    audio_chunks: AudioChunks
    speech: SpeechConfig
    deploy: Path
    notes: tuple[str, ...]  # for the log at start: what was accepted without effect, and the like
    origins: Mapping[str, str]  # "stages.1.max_model_len" -> where the value came from

    def stage(self, name: StageName) -> StageConfig:
        """Raises KeyError when the pipeline has no such stage."""
        return {stage.name: stage for stage in self.stages}[name]


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of `serve`. None and () mean "not typed"."""

    model: str | None = None
    deploy_config: str | None = None
    served_model_name: Sequence[str] = ()
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_key: Sequence[str] = field(default=(), repr=False)
    allowed_origins: Sequence[str] = ()
    request_timeout: float | None = None
    custom_voice_dir: str | None = None
    allowed_local_media_path: str | None = None
    allowed_media_domains: Sequence[str] = ()
    stage_overrides: str | None = None  # JSON
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    enforce_eager: bool | None = None
    load_format: LoadFormat | None = None
    engine_process: bool | None = None
    trust_remote_code: bool = False


def cuda_index(stage: StageConfig, *, cuda_devices: int) -> int | None:
    """The CUDA device the stage runs on, given how many there are; None: the CPU."""
    if cuda_devices == 0:
        return None
    if stage.device >= cuda_devices:
        raise ConfigError(
            f"stage {stage.stage_id} ({stage.name}) asks for device {stage.device}, "
            f"but this machine shows {cuda_devices}, counted from 0. Change `devices` or CUDA_VISIBLE_DEVICES"
        )
    return stage.device


def check_free_memory(stages: Sequence[StageConfig], *, device: int, free_bytes: int, total_bytes: int) -> None:
    """Raises DoesNotFit when the fractions of the stages on `device` ask for more than is free on it now."""
    here = [stage for stage in stages if stage.device == device]
    asked = sum(stage.gpu_memory_utilization for stage in here)
    if asked * total_bytes > free_bytes:
        gib = 2**30
        raise DoesNotFit(
            f"the stages on device {device} take {sum_text(here)} of {total_bytes / gib:.1f} GiB = "
            f"{asked * total_bytes / gib:.1f} GiB, but {free_bytes / gib:.1f} GiB are free. Free the device, or start "
            f"with --gpu-memory-utilization {int(free_bytes / total_bytes * 100) / 100:g}, which scales all stages"
        )


def sum_text(stages: Sequence[StageConfig]) -> str:
    parts = " + ".join(f"{stage.gpu_memory_utilization:g}" for stage in stages)
    return f"{parts} = {sum(stage.gpu_memory_utilization for stage in stages):.4g}" if len(stages) > 1 else parts
