"""From a Config to loaded stages: find the checkpoints, see whether they fit the device, read them, build their runners."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from aura_omni import nano
from aura_omni.config import Config, StageConfig, check_free_memory, cuda_index
from aura_omni.engine.lane import Lane
from aura_omni.engine.loader import Checkpoint, weight_bytes
from aura_omni.engine.memory import StageNeeds, plan_pages
from aura_omni.engine.runner import LEAST_KNOWN_ROWS, ArRunner
from aura_omni.engine.seats import Seats
from aura_omni.engine.stage_model import Runner, StageModel
from aura_omni.engine.steps import graph_bytes
from aura_omni.errors import ConfigError
from aura_omni.flow import Report, Sampling, StageName, unreported
from aura_omni.models import fp8
from aura_omni.models.codec import CodecDecoder
from aura_omni.models.codec_encoder import CodecEncoder
from aura_omni.models.qwen3 import Decoder, DecoderLayer
from aura_omni.models.weights import Linear
from aura_omni.stages import asr, aura, vocoder
from aura_omni.stages.asr import AsrStage
from aura_omni.stages.aura import AuraStage
from aura_omni.stages.encoder_graphs import HearingGraphs, TowerGraphs
from aura_omni.stages.references import References
from aura_omni.stages.talker import TalkerStage, predictor_sampling
from aura_omni.stages.vocoder import VocoderRunner

log = logging.getLogger(__name__)

T = TypeVar("T")

PAGE_SIZE = 16
# Who launches first: sound goes out, then what somebody waits for in silence, then speech, most of which is ahead of its listener.
URGENCY: tuple[StageName, ...] = ("code2wav", "asr", "talker", "aura")
SPEAKING: tuple[StageName, ...] = ("code2wav", "talker")  # an audio deadline goes before a prefill
REFERENCES_KEPT = 64  # voices; each is a vector and a few hundred codes
WAITING_PER_SLOT = 16  # requests that may wait for each of a stage's max_num_seqs
CPU_BYTES = 2 << 30  # what the fractions are of without CUDA
SMALL_BYTES = 256 << 20  # weights of a stage whose matrices are too small to be shared out among threads


@dataclass(frozen=True, slots=True)
class Speech:
    """Talker and Code2Wav, which only work together.

    predictor  sampling of the code predictor, the deploy file's changes applied
    encode     a reference's samples float32 [n] at VOICE_RATE -> codes int64 [T, 16]; not on the engine thread, as it takes long
    references what is built with it
    """

    talker: TalkerStage
    vocoder: VocoderRunner
    predictor: Sampling
    encode: Callable[[np.ndarray], Tensor]
    references: References


@dataclass(frozen=True, slots=True)
class Stages:
    """What is loaded. None: the pipeline has no such stage.

    ar_runners  of the stages that make tokens; Code2Wav is its own runner
    defaults    each stage's sampling as its checkpoint or the stage has it, below the deploy file's
    ahead       AURA reads while ASR hears; not on a CPU, where one has to wait for the other anyway
    """

    asr: AsrStage | None
    aura: AuraStage | None
    speech: Speech | None
    ar_runners: Mapping[StageName, ArRunner]
    defaults: Mapping[StageName, Sampling]
    ahead: bool = False

    def runners(self) -> dict[str, Runner]:
        """Of the stages, in the order in which the engine steps them."""
        found: dict[StageName, Runner] = {**self.ar_runners}
        if self.speech is not None:
            found["code2wav"] = self.speech.vocoder
        return {name: found[name] for name in URGENCY if name in found}


@dataclass(frozen=True, slots=True)
class _Site:
    """A stage before its weights are read. decoder: None for Code2Wav, which has states of streams instead of pages. alone: it has a
    GPU to itself."""

    config: StageConfig
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    decoder: Decoder | None
    max_model_len: int
    needs: StageNeeds
    alone: bool = False


def assemble(config: Config, report: Report = unreported, *, device: torch.device | None = None) -> Stages:
    """Load what config names, telling `report` of each stage that is "loading" and then "loaded".

    device: instead of what config names; "meta" stands for a GPU and takes no memory, but computes nothing.

    Raises CheckpointError, DoesNotFit or ConfigError; what can be known from configurations alone is refused before weights are
    read.
    """
    if any(nano.is_random(stage.model) for stage in config.stages):
        log.warning("%s", nano.NOTICE)
    sites = {stage.name: _site(stage, device, alone=len(config.stages) == 1) for stage in config.stages}
    pages = _share_out(list(sites.values()))
    _use_threads(list(sites.values()))
    # On CUDA PyTorch's convolutions round float32 to 10 bits unless told otherwise: a stage computes in its dtype, and the
    # encoder of reference voices is float32 so that rounding chooses no other codes. bfloat16 is not touched by it.
    torch.backends.cudnn.allow_tf32 = False

    def loaded(name: StageName, load: Callable[[_Site], T]) -> T | None:
        if name not in sites:
            return None
        report(name, "loading")
        with _timed(f"{name}: {sites[name].checkpoint.name} read"):
            stage = load(sites[name])
        report(name, "loaded")
        return stage

    hear = loaded("asr", _load_asr)
    think = loaded("aura", _load_aura)
    speak = loaded("talker", _load_talker)
    codec = loaded("code2wav", lambda site: vocoder.load(site.checkpoint, device=site.device, dtype=site.dtype))
    models: dict[StageName, StageModel | None] = {"asr": hear, "aura": think, "talker": speak}
    defaults: dict[StageName, Sampling] = {"asr": asr.SAMPLING, "aura": aura.SAMPLING, "code2wav": Sampling()}
    speech = None
    if speak is not None and codec is not None:
        defaults["talker"] = speak.sampling
        speech = _speech(config, speak, codec)
    runners: dict[StageName, ArRunner] = {}
    heard: dict[StageName, Runner] = {} if speech is None else {"code2wav": speech.vocoder}
    for name in sorted(models, key=lambda name: name not in SPEAKING):
        if model := models[name]:
            usual = _usual(sites[name], defaults[name], speech)
            first = [runners["asr"]] if name == "aura" and hear is not None and hear.device == model.device else []
            runners[name] = _runner(
                model, sites[name], pages[name], usual, before=_before(name, sites, heard), prompts_first=first
            )
            if name in SPEAKING:
                heard[name] = runners[name]
    if think is not None and speak is not None and think.device.type == "cuda" and think.device == speak.device:
        runners["talker"].make_room_for(runners["aura"])
    return Stages(
        asr=hear,
        aura=think,
        speech=speech,
        ar_runners={name: runners[name] for name in models if name in runners},
        defaults=defaults,
        ahead=think is not None and think.device.type == "cuda",
    )


def _before(name: StageName, sites: Mapping[StageName, _Site], heard: Mapping[StageName, Runner]) -> list[Runner]:
    """Who of those that make sound goes before a stage: on a CPU all, on a GPU who computes on the same."""
    device = sites[name].device
    if device.type == "cpu":
        return list(heard.values())
    # Whoever waits for a transcript has got nothing before its end, so ASR waits for nobody.
    return [runner for other, runner in heard.items() if name != "asr" and sites[other].device == device]


@contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    log.info("%s in %.1f s", what, time.monotonic() - start)


# ---------------------------------------------------------------- before the weights


def checkpoint_of(stage: StageConfig) -> Checkpoint:
    """Where a stage's files are; those of a hub id are fetched, none is read. Raises CheckpointError."""
    dummy = stage.load_format == "dummy"
    if nano.is_packaged(stage.model):
        folder = nano.folder_of(stage.model)
        return Checkpoint(folder, stage.model, folder.parent, dummy)
    return Checkpoint.find(stage.model, revision=stage.revision, dummy=dummy)


def _site(stage: StageConfig, device: torch.device | None = None, *, alone: bool = False) -> _Site:
    """alone: of a pipeline of one stage, which is ASR."""
    checkpoint = checkpoint_of(stage)
    device = device or _device(stage)
    dtype = _dtype(stage, device)
    if stage.name == "code2wav":
        checkpoint = checkpoint.sub("speech_tokenizer")
        decoder, encoder = vocoder.networks_of(checkpoint)
        networks: list[nn.Module] = [decoder]
        fixed = weight_bytes(encoder, torch.float32) + (stage.max_num_seqs + 1) * decoder.state_bytes(dtype)
        return _Site(stage, checkpoint, device, dtype, None, 0, _needs(stage, networks, dtype, fixed=fixed))
    if stage.name == "asr":
        hearing = AsrStage.network_of(checkpoint, fp8=stage.quantization is not None)
        return _ar_site(
            stage, checkpoint, device, dtype, [hearing], hearing.decoder, hearing.config.vocabulary,
            encoder=HearingGraphs.bytes(hearing.config.encoder, dtype), alone=alone and device.type != "cpu",
        )  # fmt: skip
    if stage.name == "aura":
        seeing = AuraStage.network_of(checkpoint, fp8=stage.quantization is not None)
        known = LEAST_KNOWN_ROWS["cpu" if device.type == "cpu" else "cuda"]
        return _ar_site(
            stage, checkpoint, device, dtype, [seeing], seeing.decoder, seeing.config.vocabulary,
            encoder=TowerGraphs.bytes(seeing.config.vision, dtype), adds=len(seeing.config.vision.deepstack_layers),
            more=stage.max_num_seqs * AuraStage.ahead_bytes(seeing.config, dtype, known_rows=known) + picture_cache_bytes(stage),
        )  # fmt: skip
    talker, speaker = TalkerStage.networks_of(checkpoint)
    voices: list[nn.Module] = [talker] if speaker is None else [talker, speaker]
    return _ar_site(stage, checkpoint, device, dtype, voices, talker.decoder, talker.config.codec_vocab)


def _device(stage: StageConfig) -> torch.device:
    index = cuda_index(stage, cuda_devices=torch.cuda.device_count())
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def picture_cache_bytes(stage: StageConfig) -> int:
    return int(stage.picture_cache_gib * 2**30)


def _ar_site(
    stage: StageConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    networks: list[nn.Module],
    decoder: Decoder,
    vocabulary: int,
    *,
    encoder: int = 0,
    adds: int = 0,
    more: int = 0,
    alone: bool = False,
) -> _Site:
    """encoder: bytes that graphs of the stage's encoder hold on to; adds: as `StageModel` has them; more: other bytes it always holds;
    alone: it has a GPU to itself."""
    if stage.quantization is not None:
        _check_eight_bits(stage, decoder, device, dtype)
    if stage.kv_cache_dtype != "auto":
        _check_capability(f"stage {stage.stage_id} ({stage.name}): kv_cache_dtype is {stage.kv_cache_dtype!r}", device)
    positions = decoder.config.max_positions
    length = min(stage.max_model_len or positions, positions)
    fixed = more + Seats.bytes(stage.max_num_seqs, hidden=decoder.config.hidden, vocabulary=vocabulary, dtype=dtype)
    if _graphs(device, stage):
        fixed += encoder + graph_bytes(decoder.config.hidden, adds, dtype, long=alone)
    kv = decoder.kv_bytes_per_token(dtype, eight_bits=stage.kv_cache_dtype == "fp8")
    needs = _needs(stage, networks, dtype, kv=kv, length=length, fixed=fixed)
    return _Site(stage, checkpoint, device, dtype, decoder, length, needs, alone)


def _check_eight_bits(stage: StageConfig, decoder: Decoder, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError where tensor cores do not take the matrices of the decoder; a CPU takes all."""
    if device.type != "cuda":
        return
    asked = f"stage {stage.stage_id} ({stage.name}): quantization is {stage.quantization!r}"
    _check_capability(asked, device)
    if dtype != torch.bfloat16:
        raise ConfigError(
            f"{asked}, with which a GPU computes in bfloat16, but dtype is {stage.dtype!r}. Leave one of them out"
        )
    for name, part in decoder.named_modules():
        if isinstance(part, Linear) and (part.in_features % fp8.MULTIPLE or part.out_features % fp8.MULTIPLE):
            raise ConfigError(
                f"{asked}, but {name} of checkpoint {stage.model} is {part.in_features} by {part.out_features}; on a GPU both "
                f"must be multiples of {fp8.MULTIPLE}. Leave it out"
            )


def _check_capability(asked: str, device: torch.device) -> None:
    """Raises ConfigError where a GPU has no numbers of eight bits; a CPU has them, if slowly."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < fp8.LEAST_CAPABILITY:
        major, minor = fp8.LEAST_CAPABILITY
        raise ConfigError(
            f"{asked}, which takes a GPU of compute capability {major}.{minor} or more, and {torch.cuda.get_device_name(device)} "
            "has less. Leave it out"
        )


def _dtype(stage: StageConfig, device: torch.device) -> torch.dtype:
    if stage.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[stage.dtype]


def _needs(
    stage: StageConfig, networks: list[nn.Module], dtype: torch.dtype, *, kv: int = 0, length: int = 0, fixed: int = 0
) -> StageNeeds:
    return StageNeeds(
        name=stage.name,
        fraction=stage.gpu_memory_utilization,
        weight_bytes=sum(weight_bytes(network, dtype) for network in networks) + fixed,
        activation_bytes=_activation_bytes(stage, networks[0], dtype),
        kv_bytes_per_token=kv,
        max_model_len=length,
    )


def _activation_bytes(stage: StageConfig, network: nn.Module, dtype: torch.dtype) -> int:
    """An estimate from above of what one step takes for a while: its widest tensors, a few at a time."""
    if isinstance(network, CodecDecoder):
        codec = network.config
        waveform = codec.frame_samples * (codec.width >> len(codec.wave_rates))  # elements of a frame in the last block
        return 12 * vocoder.MAX_STEP_FRAMES * waveform * dtype.itemsize  # seven of them the windows of a convolution
    inner = max(layer.mlp.down_proj.in_features for layer in network.modules() if isinstance(layer, DecoderLayer))
    widest = max(layer.out_features for layer in network.modules() if isinstance(layer, nn.Linear))
    logits = stage.max_num_seqs * 6 * widest * torch.float32.itemsize
    return stage.max_num_batched_tokens * 4 * inner * dtype.itemsize + logits


def _share_out(sites: list[_Site]) -> dict[StageName, int]:
    """Pages for every stage that has pages. Raises DoesNotFit."""
    pages: dict[StageName, int] = {}
    for device in sorted({site.device for site in sites}, key=str):
        here = [site for site in sites if site.device == device]
        if device.type == "meta":  # which stands for any number of GPUs
            pages |= {site.config.name: _enough_pages(site) for site in here}
            continue
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            check_free_memory([site.config for site in here], device=device.index, free_bytes=free, total_bytes=total)
        else:
            total = CPU_BYTES
        planned = plan_pages(total, [site.needs for site in here], page_size=PAGE_SIZE)
        for site in here:
            pages[site.config.name] = planned[site.config.name]
            if device.type == "cpu":
                pages[site.config.name] = min(pages[site.config.name], _enough_pages(site))
    return pages


def _use_threads(sites: list[_Site]) -> None:
    """One thread for small models alone on a CPU: on two busy cores nano took 1.4 times as long with two, as they wait for each other
    after every small product, and the server itself needs the other core."""
    if all(site.device.type == "cpu" and site.needs.weight_bytes < SMALL_BYTES for site in sites):
        log.info("small models on the CPU: one thread computes")
        torch.set_num_threads(1)


def _enough_pages(site: _Site) -> int:
    """Twice what all seats can fill: a small model must not take a laptop's memory for a cache it never needs."""
    return 2 * site.config.max_num_seqs * -(-site.max_model_len // PAGE_SIZE)


# ---------------------------------------------------------------- the runners


def _graphs(device: torch.device, stage: StageConfig) -> bool:
    return device.type != "cpu" and not stage.enforce_eager


def _lane(name: StageName, device: torch.device) -> Lane:
    """AURA's kernels fill the device by themselves; those of the others are small and many, and each would wait for one of them."""
    return Lane(device, urgent=name != "aura")


def _usual(site: _Site, default: Sampling, speech: Speech | None) -> tuple[Sampling, Sampling]:
    """What requests that set nothing sample with, and the Talker's code predictor."""
    sampling = default.merged(site.config.sampling)
    if site.config.name != "talker" or speech is None:
        return sampling, Sampling(temperature=0.0)
    return TalkerStage.bounded(sampling), speech.predictor


def _runner(
    model: StageModel,
    site: _Site,
    pages: int,
    usual: tuple[Sampling, Sampling],
    *,
    before: list[Runner],
    prompts_first: list[ArRunner],
) -> ArRunner:
    stage = site.config
    with _timed(f"{stage.name}: pages and graphs made"):
        return ArRunner(
            model,
            pages=pages,
            page_size=PAGE_SIZE,
            max_num_seqs=stage.max_num_seqs,
            max_num_batched_tokens=stage.max_num_batched_tokens,
            max_model_len=site.max_model_len,
            max_waiting=WAITING_PER_SLOT * stage.max_num_seqs,
            prefix_caching=stage.enable_prefix_caching,
            graphs=_graphs(site.device, stage),
            usual=usual,
            lane=_lane(stage.name, site.device),
            before=before,
            prompts_first=prompts_first,
            alone=site.alone,
            kv_eight_bits=stage.kv_cache_dtype == "fp8",
        )


def _load_asr(site: _Site) -> AsrStage:
    return AsrStage.load(
        site.checkpoint,
        device=site.device,
        dtype=site.dtype,
        max_model_len=site.max_model_len,
        fp8=site.config.quantization is not None,
    )


def _load_aura(site: _Site) -> AuraStage:
    return AuraStage.load(
        site.checkpoint,
        device=site.device,
        dtype=site.dtype,
        max_model_len=site.max_model_len,
        picture_cache_bytes=picture_cache_bytes(site.config),
        fp8=site.config.quantization is not None,
    )


def _load_talker(site: _Site) -> TalkerStage:
    return TalkerStage.load(site.checkpoint, device=site.device, dtype=site.dtype, max_model_len=site.max_model_len)


def _speech(config: Config, talker: TalkerStage, codec: tuple[CodecDecoder, CodecEncoder]) -> Speech:
    decoder, encoder = codec
    slots = config.stage("code2wav").max_num_seqs
    device = next(encoder.parameters()).device
    with _timed("code2wav: streams and graphs made"):
        runner = VocoderRunner(
            decoder,
            max_num_seqs=slots,
            max_waiting=WAITING_PER_SLOT * slots,
            graphs=_graphs(device, config.stage("code2wav")),
            alone=device.type == "cpu",
            lane=_lane("code2wav", device),
        )
    return Speech(
        talker=talker,
        vocoder=runner,
        predictor=predictor_sampling(talker.predictor_sampling, config.stage("talker").subtalker),
        encode=lambda samples: encoder.encode(torch.from_numpy(samples).to(device)),
        references=References(Lane(device), capacity=REFERENCES_KEPT, max_waiting=WAITING_PER_SLOT * slots),
    )
