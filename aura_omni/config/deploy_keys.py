"""The keys of a deploy file: which are used, which the upstream server takes and this one has no use for, and which
are refused because ignoring them would change what is served.

`Notes` collects what was accepted
without effect, so that the start can say so once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aura_omni.config.checks import (
    Check,
    boolean,
    choice,
    device,
    dtype,
    fraction,
    known_keys,
    limits,
    number,
    sampling,
    subtalker,
    text,
    texts,
    whole,
)
from aura_omni.config.deploy_file import mapping
from aura_omni.errors import ConfigError, shown


class Notes:
    """What is accepted and has no effect here: key -> (reason, the places where it stands)."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[str]] = {}

    def add(self, key: str, value: Any, place: str, reason: str) -> None:
        """Nothing is noted when the value asks for what happens anyway, or for nothing."""
        if value is None or DONE_ANYWAY.get(key, ...) == value:
            return
        places = self._found.setdefault((key, reason), [])
        if place not in places:
            places.append(place)

    def lines(self) -> tuple[str, ...]:
        return tuple(
            f"{key} ({', '.join(places)}): accepted, not used by this server: {reason}"
            for (key, reason), places in self._found.items()
        )


# ---------------------------------------------------------------- top level

MEDIA_KEYS: Mapping[str, Check] = {
    "max_body_bytes": whole(1, 2**40),
    "max_bytes": whole(1, 2**40),
    "timeout_s": number(0.1, 3_600),
    "max_audio_s": number(0.1, 3_600),  # what one request may have in all
    "max_recording_s": number(0.1, 86_400),
    "max_video_frames": whole(2, 4_096),
    "max_pixels": whole(1, 2**28),
}


def media(value: Any, where: str) -> dict[str, Any]:
    """How large bodies and media may be."""
    known_keys(mapping(value, where), where, used=MEDIA_KEYS, unused={})
    return {key: MEDIA_KEYS[key](item, f"{where}.{key}") for key, item in value.items() if item is not None}


REQUEST_TIMEOUT: Check = number(0.1, 86_400)


SPEECH_KEYS: Mapping[str, Check] = {
    "normalize": boolean,
    "spare_frames": whole(1, 2**20),
    "frames_per_token": number(1, 1_000),
    "least_frames_per_token": number(0, 1_000),
    "max_loop_s": number(1, 3_600),
    "max_silence_s": number(1, 3_600),
    "tokens_ahead": whole(0, 1_000),
    "non_streaming": boolean,
}


def speech(value: Any, where: str) -> dict[str, Any]:
    """What is spoken of a text, and when the Talker is stopped."""
    known_keys(mapping(value, where), where, used=SPEECH_KEYS, unused={})
    return {key: SPEECH_KEYS[key](item, f"{where}.{key}") for key, item in value.items() if item is not None}


def of_some_stages(value: Any, where: str) -> None:
    """What only some stages can have is not set for all."""
    raise ConfigError(f"{where} is {shown(value)}; it is a key of stages, and only of asr and aura. Set it there")


KV_CACHE_DTYPE = choice("auto", "fp8")


def kv_cache_dtype(value: Any, where: str) -> None:
    """Of all stages only what changes nothing."""
    if KV_CACHE_DTYPE(value, where) != "auto":
        of_some_stages(value, where)


LOAD_FORMAT = choice("auto", "safetensors", "dummy")

TOP_KEYS: Mapping[str, Check] = {
    "pipeline": text,
    "served_model_name": texts,
    "session_mode": choice("turn", "duplex"),
    "async_chunk": boolean,
    "model_runner": choice("v1", "v2"),
    "duplex_session": mapping,
    "connectors": mapping,
    "media": media,
    "request_timeout_s": REQUEST_TIMEOUT,
    "custom_voice_dir": text,
    "speech": speech,
    "stages": mapping,
    "platforms": mapping,
    "load_format": LOAD_FORMAT,
    "dtype": dtype,
    "quantization": of_some_stages,
    "kv_cache_dtype": kv_cache_dtype,
    "enable_prefix_caching": boolean,
    "trust_remote_code": boolean,
}
_ONE_PROCESS = "all stages run in one process"
_ALWAYS_STREAMS = "frames always go to the next stage as they are made"
TOP_UNUSED: Mapping[str, str] = {
    "async_chunk": _ALWAYS_STREAMS,
    "model_runner": "there is one runner",
    "active_stream_window": "this release has no live sessions to schedule",
    "duplex_session": "this release serves turns; it has no live sessions",
    "edges": "the pipeline's name decides its edges",
    "trust_remote_code": "code from a checkpoint is never run",
    "distributed_executor_backend": _ONE_PROCESS,
    "enable_chunked_prefill": "prefill is always chunked",
}
DUPLEX_KEYS = (
    "idle_ttl_s",
    "disconnect_grace_s",
    "reaper_interval_s",
    "resume_replay_ttl_s",
    "resume_replay_max_bytes_per_session",
    "max_pending_input_bytes_per_session",
    "max_pending_turns_per_session",
    "max_sessions",
    "completed_append_cache_size",
    "server_vad_model_path",
    "warmup_frames",
)
PLATFORMS = ("cuda", "cpu", "npu", "rocm", "xpu", "musa")


# ---------------------------------------------------------------- stages

STAGE_KEYS: Mapping[str, Check] = {
    "enabled": boolean,
    "model": text,
    "revision": text,
    "devices": device,
    "load_format": LOAD_FORMAT,
    "dtype": dtype,
    "quantization": choice("fp8"),
    "kv_cache_dtype": KV_CACHE_DTYPE,
    "gpu_memory_utilization": fraction,
    "max_num_seqs": whole(1),
    "max_num_batched_tokens": whole(1),
    "max_model_len": whole(1),
    "enforce_eager": boolean,
    "enable_prefix_caching": boolean,
    "picture_cache_gib": number(0, 10_000),
    "default_sampling_params": sampling,
    "subtalker_sampling_params": subtalker,
    "limit_mm_per_prompt": limits,
    "async_chunk": boolean,
    "input_connectors": mapping,
    "output_connectors": mapping,
}
STAGE_UNUSED: Mapping[str, str] = {
    "async_chunk": _ALWAYS_STREAMS,
    "env": f"{_ONE_PROCESS}; set the environment of the server",
    "default_pooling_params": "no stage of this pipeline pools",
    "silence_ban_frames": "no codes are banned at the start of speech",
    "async_scheduling": "there is one way of scheduling",
    "compilation_config": "enforce_eager is the one switch for CUDA graphs",
    "profiler_config": "there is no built-in profiler",
    "disable_hybrid_kv_cache_manager": "there is one kind of KV cache",
    "mm_processor_cache_gb": "media are kept as pages of the KV cache",
    "mamba_ssm_cache_dtype": "no stage has such a layer",
    "skip_mm_profiling": "memory is planned from shapes, not profiled",
    "enable_flashinfer_autotune": "kernels are not tuned at start",
    "enable_chunked_prefill": TOP_UNUSED["enable_chunked_prefill"],
    "distributed_executor_backend": _ONE_PROCESS,
    "tts_max_instructions_length": "instructions are limited by max_model_len",
    "trust_remote_code": TOP_UNUSED["trust_remote_code"],
    "model_runner": TOP_UNUSED["model_runner"],
    "disable_log_stats": "there are no such logs",
    "seed": "weights are loaded, not drawn; a request's seed is default_sampling_params.seed",
}

# Keys that would change what is served. Accepted only with the value that changes nothing.
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_replicas": ((1,), "a stage runs once"),
    "tensor_parallel_size": ((1,), "a stage runs on one device"),
    "pipeline_parallel_size": ((1,), "a stage runs on one device"),
    "data_parallel_size": ((1,), "start one server per device instead"),
    "enable_expert_parallel": ((False,), "no stage has experts"),
    "config_format": (("auto", "hf"), "checkpoints are read in the published layout"),
    "tokenizer_mode": (("auto",), "the checkpoint's own tokenizer is used"),
}
DONE_ANYWAY: Mapping[str, bool] = {
    "async_chunk": True,
    "async_scheduling": True,
    "codec_streaming": True,
    "decode_enable_tf32": False,
    "enable_chunked_prefill": True,
    "trust_remote_code": False,
}
FORBIDDEN = ("use_v2_model_runner", "supports_native_mrv2_data_plane")  # upstream's own words for "not by hand"


# ---------------------------------------------------------------- connectors

CODEC_CHUNK_KEYS = {"initial_codec_chunk_frames": 0, "codec_chunk_frames": 1}  # with the least value; 0: no wish
_EXACT_STATE = "Code2Wav keeps exact state, so nothing is decoded twice"
_CHUNK_SIZES = "chunks grow with what the listener has not heard yet, up to codec_chunk_frames"
CONNECTOR_UNUSED: Mapping[str, str] = {
    "codec_streaming": _ALWAYS_STREAMS,
    "connector_get_sleep_s": "stages call each other, nothing is polled",
    "connector_get_max_wait_first_chunk": "stages call each other, nothing is polled",
    "connector_get_max_wait": "stages call each other, nothing is polled",
    "codec_left_context_frames": _EXACT_STATE,
    "ref_code_context_frames": _EXACT_STATE,
    "decode_chunk_frames": _EXACT_STATE,
    "decode_left_context_frames": _EXACT_STATE,
    "codec_chunk_ramp": _CHUNK_SIZES,
    "codec_chunk_adaptive": _CHUNK_SIZES,
    "codec_chunk_min_frames": _CHUNK_SIZES,
    "codec_chunk_safety_margin_ms": _CHUNK_SIZES,
    "codec_chunk_ramp_divisor": _CHUNK_SIZES,
    "codec_chunk_ramp_delta_min": _CHUNK_SIZES,
    "decode_cudagraph_capture_sizes": "graph sizes are chosen by the engine",
    "decode_cudagraph_batch_sizes": "graph sizes are chosen by the engine",
    "code_predictor_prefix_graph": "graph sizes are chosen by the engine",
    "decode_batch_max_size": "Code2Wav's max_num_seqs is its largest batch",
    "decode_enable_tf32": "matrix products run in the stage's dtype",
    "ref_audio_artifact_cache_max_entries": "reference voices are kept by content",
}


# ---------------------------------------------------------------- walking over keys


def check_top(content: Mapping[str, Any], where: str, notes: Notes) -> dict[str, Any]:
    """The used top-level keys, clean."""
    known_keys(content, where, used=(*TOP_KEYS, *NEUTRAL), unused=TOP_UNUSED)
    clean = {
        key: TOP_KEYS[key](value, f"{where}: {key}")
        for key, value in content.items()
        if key in TOP_KEYS and value is not None
    }
    for key, value in content.items():
        _neutral(key, value, f"{where}: {key}")
        if key in TOP_UNUSED:
            notes.add(key, value, "deploy file", TOP_UNUSED[key])
    if "active_stream_window" in content:
        whole(0)(content["active_stream_window"], f"{where}: active_stream_window")
    if "edges" in content and not isinstance(content["edges"], list):
        raise ConfigError(f"{where}: edges is {shown(content['edges'])}; it must be a list")
    if clean.get("session_mode") == "duplex":
        notes.add("session_mode", "duplex", "deploy file", "turns are served; this release has no live sessions")
    _check_duplex(clean.get("duplex_session", {}), f"{where}: duplex_session")
    return clean


def _check_duplex(session: Mapping[str, Any], where: str) -> None:
    known_keys(session, where, used=DUPLEX_KEYS, unused={})
    for key, value in session.items():
        if key == "server_vad_model_path":
            if value is not None:
                text(value, f"{where}.{key}")
        elif key == "idle_ttl_s" and value is None:
            continue
        elif (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) < float("inf")
            or (value <= 0 and key != "warmup_frames")
        ):
            raise ConfigError(f"{where}.{key} is {shown(value)}; it must be a number above 0")


def check_stage(given: Mapping[str, Any], where: str, place: str, notes: Notes) -> dict[str, Any]:
    """The used keys of one stage, clean. place: how the notes call the stage. None means "not given"."""
    for key in FORBIDDEN:
        if key in given:
            raise ConfigError(f"{where}: {key} cannot be set in a deploy file")
    known_keys(given, where, used=(*STAGE_KEYS, *NEUTRAL), unused=STAGE_UNUSED)
    clean: dict[str, Any] = {}
    for key, value in given.items():
        if value is None:
            continue
        if key in STAGE_KEYS:
            clean[key] = STAGE_KEYS[key](value, f"{where}: {key}")
        _neutral(key, value, f"{where}: {key}")
        if key in STAGE_UNUSED:
            notes.add(key, value, place, STAGE_UNUSED[key])
    return clean


def _neutral(key: str, value: Any, where: str) -> None:
    if key in NEUTRAL and value is not None:
        values, reason = NEUTRAL[key]
        if value not in values:
            raise ConfigError(f"{where} is {shown(value)}, which this server does not do: {reason}")


def check_connectors(connectors: Mapping[str, Any], where: str, notes: Notes) -> dict[str, dict[str, int]]:
    """Connector name -> its codec chunk sizes in frames."""
    sizes: dict[str, dict[str, int]] = {}
    for name, connector in connectors.items():
        here = f"{where}.{name}"
        known_keys(mapping(connector, here), here, used=("name", "extra"), unused={})
        text(connector.get("name"), f"{here}.name")
        extra = mapping(connector.get("extra") or {}, f"{here}.extra")
        named = {key: value for key, value in extra.items() if not key.startswith("code_predictor_prefix_graph")}
        known_keys(named, f"{here}.extra", used=CODEC_CHUNK_KEYS, unused=CONNECTOR_UNUSED)
        for key, value in extra.items():
            family = key if key in named else "code_predictor_prefix_graph"
            if family in CONNECTOR_UNUSED:
                notes.add(key, value, f"connector {name}", CONNECTOR_UNUSED[family])
        sizes[name] = {
            key: whole(least)(extra[key], f"{here}.extra.{key}")
            for key, least in CODEC_CHUNK_KEYS.items()
            if extra.get(key) is not None
        }
    return sizes
