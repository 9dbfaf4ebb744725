"""Deploy file and flags become one frozen Config, decided once.

Precedence, strongest first: `--stage-overrides` of a stage, a plain flag, MODEL where it chose the deploy file, the
file's block for this platform, the file's stage, its pipeline-wide keys, MODEL as the checkpoint of stages that name
none, the defaults below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

from aura_omni.config import checks, deploy_file, deploy_keys
from aura_omni.config.choose import by_model_type, deploy_source
from aura_omni.config.config import (
    DEFAULT_PARTS,
    DEFAULT_REQUEST_TIMEOUT_S,
    LOCAL_ORIGINS,
    AudioChunks,
    Config,
    MediaConfig,
    Options,
    PipelineName,
    Platform,
    SpeechConfig,
    StageConfig,
    sum_text,
)
from aura_omni.config.deploy_file import DeployFile
from aura_omni.config.deploy_keys import Notes
from aura_omni.errors import ConfigError, DoesNotFit, meant, shown
from aura_omni.flow import STAGES, StageName


@dataclass(frozen=True, slots=True)
class _Pipeline:
    stages: tuple[StageName, ...]  # their stage_id is the position
    fractions: tuple[float, ...]
    main: StageName  # the stage whose context a user thinks of: --max-model-len is its length
    chunks: AudioChunks


PIPELINES: Mapping[PipelineName, _Pipeline] = {
    "aura_omni": _Pipeline(STAGES, (0.10, 0.40, 0.20, 0.20), "aura", AudioChunks(1, 25)),
    "qwen3_tts": _Pipeline(("talker", "code2wav"), (0.30, 0.30), "talker", AudioChunks(1, 25)),
    "qwen3_asr": _Pipeline(("asr",), (0.30,), "asr", AudioChunks(1, 25)),
}

_DEFAULTS: Mapping[StageName, Mapping[str, Any]] = {
    "asr": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 4096,
        "max_model_len": 8192,
        "enable_prefix_caching": True,
        "default_sampling_params": {
            "temperature": 0.0
        },  # without max_tokens: as long as the clip can be, see stages.asr
    },
    "aura": {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 15360,
        "enable_prefix_caching": True,
        "default_sampling_params": {"temperature": 0.5, "max_tokens": 256},
    },
    "talker": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_model_len": 4096,
        # The rest is the checkpoint's generation_config.json. min_tokens: a first token that ends speech would leave a
        # spoken answer without sound.
        "default_sampling_params": {"min_tokens": 2},
    },
    "code2wav": {"max_num_seqs": 8, "max_num_batched_tokens": 65536, "max_model_len": 65536},
}
_SPEECH: tuple[StageName, ...] = ("talker", "code2wav")
_NOT_QUANTIZED: Mapping[StageName, str] = {
    "talker": "The Talker draws codes, and there is no check of what coarser weights do to speech",
    "code2wav": "Code2Wav is convolutions, and its weights are small",
}
_NO_EIGHT_BIT_KEYS: Mapping[StageName, str] = {
    "talker": "The Talker draws codes, and there is no check of what coarser keys and values do to speech",
    "code2wav": "Code2Wav has states of streams, no KV cache",
}
_COMMON: dict[str, Any] = {
    "enabled": True,
    "devices": 0,
    "load_format": "auto",
    "dtype": "auto",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "enforce_eager": False,
    "enable_prefix_caching": False,
}


def load(options: Options, *, environ: Mapping[str, str], platform: Platform) -> Config:
    """Raises ConfigError (DoesNotFit for memory fractions), naming the value, the limit and the way out."""
    notes = Notes()
    source, chosen_by_model = deploy_source(options)
    deploy = deploy_file.read(source, environ=environ)
    top = deploy_keys.check_top(deploy.content, str(deploy.path), notes)
    pipeline = _pipeline_name(top, deploy, options)
    layers = _layers(options, deploy, top, pipeline, chosen_by_model, platform, notes)
    audio_chunks = _audio_chunks(pipeline, layers, top, notes, str(deploy.path))
    stages, origins = _stages(pipeline, layers)
    stages = _scaled(stages, options, {number for number, given in layers.overrides.items() if _FRACTION in given})
    if options.gpu_memory_utilization is not None:
        origins |= {
            f"stages.{stage.stage_id}.{_FRACTION}": "flag --gpu-memory-utilization, split as the deploy file does"
            for stage in stages
            if _FRACTION not in layers.overrides.get(stage.stage_id, {})
        }
    _check_fractions(stages)
    return Config(
        pipeline=pipeline,
        served_names=_served_names(options, top, deploy),
        host=checks.text(options.host, "--host"),
        port=checks.whole(0, 65535)(options.port, "--port"),
        api_keys=tuple(checks.text(key, "--api-key") for key in options.api_key),
        allowed_origins=_allowed_origins(options),
        request_timeout_s=_request_timeout_s(options, top),
        voices_dir=_voices_dir(options, top),
        media=_media(options, layers, top),
        stages=stages,
        engine_process=platform == "cuda" if options.engine_process is None else options.engine_process,
        audio_chunks=audio_chunks,
        speech=SpeechConfig(**top.get("speech", {})),
        deploy=deploy.path,
        notes=_all_notes(options, deploy, pipeline, stages, notes),
        origins=origins,
    )


def _pipeline_name(top: Mapping[str, Any], deploy: DeployFile, options: Options) -> PipelineName:
    name = top.get("pipeline")
    if name is None and options.model is not None:
        name = Path(by_model_type(options.model)[0]).stem
    if name is None:
        raise ConfigError(f"{deploy.path} has no `pipeline:`; known: {', '.join(PIPELINES)}")
    if name not in PIPELINES:
        raise ConfigError(f"{deploy.path}: pipeline {name!r} is not registered; {meant(name, PIPELINES)}")
    return cast(PipelineName, name)


# ---------------------------------------------------------------- layers of each stage

_FRACTION = "gpu_memory_utilization"
_Layer = tuple[str, Mapping[str, Any]]  # origin, clean keys


@dataclass(frozen=True, slots=True)
class _Layers:
    by_stage: Mapping[int, list[_Layer]]  # weakest first
    overrides: Mapping[int, Mapping[str, Any]]


def _layers(
    options: Options,
    deploy: DeployFile,
    top: Mapping[str, Any],
    pipeline: PipelineName,
    chosen_by_model: tuple[str, StageName | None] | None,
    platform: Platform,
    notes: Notes,
) -> _Layers:
    names = PIPELINES[pipeline].stages
    file = deploy.path.name
    in_file = _clean_stages(top.get("stages", {}), f"{deploy.path}: stages", names, notes)
    on_platform: Mapping[int, Mapping[str, Any]] = {}
    for name, block in top.get("platforms", {}).items():
        where = f"{deploy.path}: platforms.{name}"
        checks.choice(*deploy_keys.PLATFORMS)(name, f"{deploy.path}: platforms: name")
        checks.known_keys(block, where, used=("stages", "model_runner"), unused={})
        # Other platforms' blocks are read too: a slip in them should not wait for the day they are needed.
        clean = _clean_stages(block.get("stages", {}), where, names, notes if name == platform else Notes())
        if name == platform:
            on_platform = clean
    overrides = _overrides(options, names, notes)
    wide = {key: top[key] for key in ("load_format", "dtype", "enable_prefix_caching") if key in top}
    by_stage: dict[int, list[_Layer]] = {}
    for number, name in enumerate(names):
        typed = _typed(options, name, PIPELINES[pipeline])
        chosen = chosen_by_model is not None and chosen_by_model[1] in (None, name)
        by_stage[number] = [
            ("default", {**_COMMON, **_DEFAULTS[name], _FRACTION: PIPELINES[pipeline].fractions[number]}),
            *([("MODEL", {"model": options.model})] if options.model else []),
            (file, wide),
            (file, in_file.get(number, {})),
            (f"{file}, platforms.{platform}", on_platform.get(number, {})),
            *([("MODEL", {"model": options.model})] if chosen else []),
            *((f"flag --{key.replace('_', '-')}", {key: value}) for key, value in typed.items()),
            ("flag --stage-overrides", overrides.get(number, {})),
        ]
    return _Layers(by_stage, overrides)


def _clean_stages(
    stages: Mapping[Any, Mapping[str, Any]], where: str, names: Sequence[StageName], notes: Notes
) -> dict[int, dict[str, Any]]:
    clean = {}
    for number, given in stages.items():
        if number not in range(len(names)):
            known = ", ".join(f"{index} ({name})" for index, name in enumerate(names))
            raise ConfigError(f"{where}: stage_id {number} is not in this pipeline; its stages are {known}")
        place = f"stage {number}"
        clean[number] = deploy_keys.check_stage(given, f"{where}[stage_id {number}]", place, notes)
        if names[number] in _SPEECH and "quantization" in clean[number]:
            raise ConfigError(
                f"{where}[stage_id {number}]: quantization is {shown(clean[number]['quantization'])}; only asr and aura can "
                f"have it. {_NOT_QUANTIZED[names[number]]}. Leave it out"
            )
        if names[number] in _SPEECH and clean[number].get("kv_cache_dtype", "auto") != "auto":
            raise ConfigError(
                f"{where}[stage_id {number}]: kv_cache_dtype is {shown(clean[number]['kv_cache_dtype'])}; only asr and aura can "
                f"have it. {_NO_EIGHT_BIT_KEYS[names[number]]}. Leave it out"
            )
        if names[number] != "talker" and clean[number].get("subtalker_sampling_params"):
            notes.add("subtalker_sampling_params", True, place, "only the Talker has a code predictor")
        if names[number] == "code2wav" and clean[number].pop("default_sampling_params", None):
            notes.add("default_sampling_params", True, place, "Code2Wav draws nothing")
        if names[number] == "code2wav":
            for key in ("max_model_len", "max_num_batched_tokens"):
                if clean[number].pop(key, None) is not None:
                    notes.add(key, True, place, "Code2Wav decodes a few frames of each stream in a step, of any length")
        if names[number] != "aura" and clean[number].pop("picture_cache_gib", None):
            notes.add("picture_cache_gib", True, place, "only AURA sees pictures")
        if names[number] in _SPEECH and clean[number].get("enable_prefix_caching"):
            reason = "speech is not a function of the token ids, so its rows cannot be found again"
            notes.add("enable_prefix_caching", True, place, reason)
    return clean


def _overrides(options: Options, names: Sequence[StageName], notes: Notes) -> dict[int, dict[str, Any]]:
    if options.stage_overrides is None:
        return {}
    where = "--stage-overrides"
    try:
        content = json.loads(options.stage_overrides)
    except ValueError as error:
        raise ConfigError(f'{where} is not valid JSON ({error}); write {{"0": {{"max_num_seqs": 4}}}}') from error
    stages: dict[Any, dict[str, Any]] = {}
    for key, given in deploy_file.mapping(content, where).items():
        number = int(key) if key.isascii() and key.isdigit() else key
        stages[number] = deploy_file.flattened(deploy_file.mapping(given, f"{where}.{key}"), f"{where}.{key}")
    return _clean_stages(stages, where, names, notes)


def _typed(options: Options, name: StageName, pipeline: _Pipeline) -> dict[str, Any]:
    """Plain flags that reach this stage. The memory flag is not among them: it is the total, see `_scaled`."""
    typed: dict[str, Any] = {
        "max_num_seqs": options.max_num_seqs,
        "enforce_eager": options.enforce_eager,
        "load_format": options.load_format,
        "max_model_len": options.max_model_len if name == pipeline.main else None,
    }
    return {
        key: deploy_keys.STAGE_KEYS[key](value, f"--{key.replace('_', '-')}")
        for key, value in typed.items()
        if value is not None
    }


# ---------------------------------------------------------------- stages


def _stages(pipeline: PipelineName, layers: _Layers) -> tuple[tuple[StageConfig, ...], dict[str, str]]:
    stages = []
    origins: dict[str, str] = {}
    for number, name in enumerate(PIPELINES[pipeline].stages):
        effective: dict[str, Any] = {}
        for origin, given in layers.by_stage[number]:
            for key, value in given.items():
                if isinstance(value, dict):
                    effective[key] = effective.get(key, {}) | value
                    origins |= {f"stages.{number}.{key}.{part}": origin for part in value}
                else:
                    effective[key] = value
                    origins[f"stages.{number}.{key}"] = origin
        if effective["enabled"]:
            stages.append(_stage(name, number, effective, pipeline))
    _check_enabled(pipeline, [stage.name for stage in stages])
    return tuple(stages), origins


def _check_enabled(pipeline: PipelineName, enabled: Sequence[StageName]) -> None:
    missing = [name for name in PIPELINES[pipeline].stages if name not in enabled]
    if missing not in ([], list(_SPEECH)) or not enabled:
        raise ConfigError(
            f"pipeline {pipeline}: enabled: false switches off {', '.join(missing)}; only talker and code2wav can be switched "
            "off, together, where another stage writes the answer"
        )


def _stage(name: StageName, number: int, effective: Mapping[str, Any], pipeline: PipelineName) -> StageConfig:
    called = f"stage {number} ({name})"
    if "model" not in effective:
        raise ConfigError(
            f"{called} of pipeline {pipeline} has no checkpoint. Give MODEL (a folder or a hub id) on the command line, "
            "or `model:` in the stage's part of the deploy file"
        )
    if name != "code2wav" and effective["max_num_batched_tokens"] < effective["max_num_seqs"]:
        raise ConfigError(
            f"{called}: max_num_batched_tokens is {effective['max_num_batched_tokens']}, below max_num_seqs "
            f"{effective['max_num_seqs']}: one step must have room for a row of each. Raise the one or lower the other"
        )
    speech = name in _SPEECH
    return StageConfig(
        name=name,
        stage_id=number,
        model=effective["model"],
        revision=effective.get("revision"),
        device=effective["devices"],
        load_format=effective["load_format"],
        dtype=effective["dtype"],
        quantization=effective["quantization"],
        kv_cache_dtype=effective["kv_cache_dtype"],
        gpu_memory_utilization=effective[_FRACTION],
        max_num_seqs=effective["max_num_seqs"],
        max_num_batched_tokens=effective["max_num_batched_tokens"],
        max_model_len=effective.get("max_model_len"),
        enforce_eager=effective["enforce_eager"],
        enable_prefix_caching=effective["enable_prefix_caching"] and not speech,
        picture_cache_gib=effective.get("picture_cache_gib", 0.0),
        sampling=effective.get("default_sampling_params", {}),
        subtalker=effective.get("subtalker_sampling_params", {}) if name == "talker" else {},
    )


def _scaled(stages: tuple[StageConfig, ...], options: Options, fixed: set[int]) -> tuple[StageConfig, ...]:
    """`--gpu-memory-utilization` is what the server takes of each device, shared out in the file's proportions.

    Given to every stage, as its value in the file would be, 0.9 would ask for 3.6 devices.
    """
    if options.gpu_memory_utilization is None:
        return stages
    total = checks.fraction(options.gpu_memory_utilization, "--gpu-memory-utilization")
    scaled = list(stages)
    for device in {stage.device for stage in stages}:
        here = [stage for stage in stages if stage.device == device]
        kept = [stage for stage in here if stage.stage_id in fixed]
        rest = total - sum(stage.gpu_memory_utilization for stage in kept)
        shared = [stage for stage in here if stage.stage_id not in fixed]
        if shared and rest <= 0:
            raise DoesNotFit(
                f"--stage-overrides give {sum_text(kept)} of device {device} to some stages, which leaves nothing of "
                f"--gpu-memory-utilization {total:g} for the others. Raise the total or lower the overrides"
            )
        scale = rest / sum(stage.gpu_memory_utilization for stage in shared) if shared else 1.0
        for stage in shared:
            share = int(stage.gpu_memory_utilization * scale * 10_000) / 10_000  # down, so that the sum is no more
            scaled[stage.stage_id] = replace(stage, gpu_memory_utilization=share)
    return tuple(scaled)


def _check_fractions(stages: Sequence[StageConfig]) -> None:
    for device in sorted({stage.device for stage in stages}):
        here = [stage for stage in stages if stage.device == device]
        if sum(stage.gpu_memory_utilization for stage in here) > 1 + 1e-9:
            which = ", ".join(f"{stage.stage_id} ({stage.name})" for stage in here)
            raise DoesNotFit(
                f"gpu_memory_utilization of stages {which} adds up to {sum_text(here)} of device {device}; at most 1. "
                "Lower it in the deploy file, or start with --gpu-memory-utilization 0.9, which scales them to that sum"
            )


# ---------------------------------------------------------------- the rest of the configuration


def _served_names(options: Options, top: Mapping[str, Any], deploy: DeployFile) -> tuple[str, ...]:
    names = options.served_model_name or ([options.model] if options.model else None)
    names = names or top.get("served_model_name") or [deploy.path.stem]
    return tuple(dict.fromkeys(checks.text(name, "--served-model-name") for name in names))


_ORIGIN = re.compile(r"\*|https?://[^/\s:@?#]+(:(\d+|\*))?|https?://\[[0-9A-Fa-f:]+\](:(\d+|\*))?|null")


def _allowed_origins(options: Options) -> tuple[str, ...]:
    """With API keys every page may call, for the key is what admits; without, only pages of this machine."""
    if not options.allowed_origins:
        return ("*",) if options.api_key else LOCAL_ORIGINS
    return tuple(origin for given in options.allowed_origins for origin in _origins(given))


def _origins(given: str) -> list[str]:
    """One origin, or a JSON list of them as the upstream command takes it."""
    flag = "--allowed-origins"
    try:
        origins = json.loads(given) if given.startswith("[") else [given]
    except ValueError as error:
        raise ConfigError(f"{flag} {shown(given)} is not valid JSON ({error})") from error
    for origin in origins:
        if not isinstance(origin, str) or not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"{flag} {shown(origin)} is not an origin; write https://example.com, or * for all")
    return origins


def _request_timeout_s(options: Options, top: Mapping[str, Any]) -> float:
    if options.request_timeout is not None:
        return deploy_keys.REQUEST_TIMEOUT(options.request_timeout, "--request-timeout")
    return top.get("request_timeout_s", DEFAULT_REQUEST_TIMEOUT_S)


def _voices_dir(options: Options, top: Mapping[str, Any]) -> Path | None:
    given = options.custom_voice_dir or top.get("custom_voice_dir")
    return Path(given).expanduser().resolve() if given else None


def _media(options: Options, layers: _Layers, top: Mapping[str, Any]) -> MediaConfig:
    local = None
    if options.allowed_local_media_path:
        local = Path(options.allowed_local_media_path).expanduser().resolve()
        if not local.is_dir():
            raise ConfigError(f"--allowed-local-media-path {options.allowed_local_media_path!r} is not a folder")
    domains = tuple(_host_name(domain) for domain in options.allowed_media_domains)
    limits: dict[str, int] = {}
    for stage_layers in layers.by_stage.values():
        for _, given in stage_layers:
            for kind, most in given.get("limit_mm_per_prompt", {}).items():
                limits[kind] = min(most, limits.get(kind, most))
    return MediaConfig(local, domains, {**DEFAULT_PARTS, **limits}, **top.get("media", {}))


def _host_name(domain: str) -> str:
    with suppress(ValueError):
        return str(ip_address(domain.strip("[]")))
    if not domain or any(sign in domain for sign in "/:*@ "):
        raise ConfigError(
            f"--allowed-media-domains {domain!r} is not a host name; write example.com, which includes its subdomains"
        )
    return domain.lower()


def _audio_chunks(
    pipeline: PipelineName, layers: _Layers, top: Mapping[str, Any], notes: Notes, where: str
) -> AudioChunks:
    """From the connector between Talker and Code2Wav, if there is one."""
    sizes = deploy_keys.check_connectors(top.get("connectors", {}), f"{where}: connectors", notes)
    chunks = PIPELINES[pipeline].chunks
    for number, name in enumerate(PIPELINES[pipeline].stages):
        effective: dict[str, Any] = {}
        for _, given in layers.by_stage[number]:
            effective |= given
        for key in ("input_connectors", "output_connectors"):
            for end, connector in effective.get(key, {}).items():
                if connector not in sizes:
                    raise ConfigError(
                        f"{where}: stage {number}: {key}.{end} is {connector!r}; {meant(str(connector), sizes)}"
                    )
                into_code2wav = (name, key) in (("code2wav", "input_connectors"), ("talker", "output_connectors"))
                if into_code2wav:
                    given = sizes[connector]
                    chunks = AudioChunks(
                        given.get("initial_codec_chunk_frames") or chunks.first_frames,
                        given.get("codec_chunk_frames", chunks.frames),
                    )
    return chunks


def _all_notes(
    options: Options, deploy: DeployFile, pipeline: PipelineName, stages: Sequence[StageConfig], notes: Notes
) -> tuple[str, ...]:
    lines = list(notes.lines())
    off = [name for name in PIPELINES[pipeline].stages if name not in [stage.name for stage in stages]]
    if off:
        lines.append(f"{' and '.join(off)} are switched off (enabled: false): answers are text, without speech")
    asked = options.deploy_config or ""
    if "/" in asked and not Path(asked).expanduser().is_file():
        lines.append(f"{asked} does not exist; the packaged {deploy.path.name} is used")
    made_up = [stage.name for stage in stages if stage.load_format == "dummy"]
    if made_up:
        lines.append(
            f"load_format: dummy: the weights of {', '.join(made_up)} are random, so what is answered means nothing"
        )
    if options.model and all(stage.model != options.model for stage in stages):
        lines.append(f"MODEL {options.model!r} loads nothing: {deploy.path.name} names a checkpoint for every stage")
    if options.trust_remote_code:
        lines.append("--trust-remote-code: accepted; code from a checkpoint is never run")
    return tuple(lines)
