"""Checkpoints to stages: what is refused at start, and that it is refused before anything large is read."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from aura_omni import assembly
from aura_omni.assembly import assemble
from aura_omni.config import Options, load
from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.memory import StageNeeds, plan_pages
from aura_omni.engine.runner import LEAST_KNOWN_ROWS
from aura_omni.errors import CheckpointError, ConfigError, DoesNotFit
from aura_omni.models import fp8
from aura_omni.models.qwen3 import Decoder, DecoderConfig
from aura_omni.models.weights import Linear
from aura_omni.nano.published import TRUE
from aura_omni.nano.random_family import write_family
from aura_omni.stages.aura import AuraStage
from tests.family import config, family, running


def test_what_does_not_fit_is_refused_before_weights_are_read(monkeypatch):
    monkeypatch.setattr(Checkpoint, "load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(DoesNotFit, match=r"stage aura may take .* Raise its gpu_memory_utilization from 0.0001 to"):
        assemble(config(aura={"gpu_memory_utilization": 0.0001}))


def test_a_start_does_not_import_the_compiler_of_pytorch():
    """Which takes as long as PyTorch itself."""
    script = "import sys; from aura_omni.pipeline import Pipeline; Pipeline.load('tiny.yaml').close(); print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_following_the_advice_of_a_refusal_works():
    with pytest.raises(DoesNotFit) as refusal:
        assemble(config(talker={"gpu_memory_utilization": 0.0001}))
    advised = float(refusal.value.message.split(" to ")[1].split(",")[0].rstrip("."))
    assert assemble(config(talker={"gpu_memory_utilization": advised})).speech is not None


@pytest.fixture(scope="module")
def described(tmp_path_factory) -> Path:
    """Checkpoints of the published sizes, without their weights."""
    folder = tmp_path_factory.mktemp("described")
    write_family(folder, sizes=TRUE, kinds=("custom_voice",), weights=False)
    return folder


@pytest.mark.parametrize(("mib", "length"), [(143_771, None), (81_559, 65_536)])
def test_the_packaged_file_fits_a_card(described, monkeypatch, mib, length):
    """Of 141 GB as it stands, and of 80 GB with the length that it names."""
    monkeypatch.setattr(assembly, "_graphs", lambda *_: True)
    homes = ("asr", "aura", "tts_custom_voice", "tts_custom_voice")
    overrides = {str(number): {"model": str(described / home)} for number, home in enumerate(homes)}
    options = Options(deploy_config="aura_omni.yaml", stage_overrides=json.dumps(overrides), max_model_len=length)
    loaded = load(options, environ={}, platform="cuda")
    sites = [assembly._site(stage, torch.device("meta")) for stage in loaded.stages]
    pages = plan_pages(mib * 2**20, [site.needs for site in sites], page_size=16)
    assert pages["aura"] * 16 >= (length or 262_144)
    assert pages["talker"] * 16 >= 64 * 1_024  # 80 s of speech in every seat


def test_what_graphs_hold_is_part_of_a_stage_s_memory(monkeypatch):
    stage = next(stage for stage in config().stages if stage.name == "aura")
    without = assembly._site(stage).needs.weight_bytes
    monkeypatch.setattr(assembly, "_graphs", lambda *_: True)
    site = assembly._site(stage)
    vision = assembly.AuraStage.network_of(site.checkpoint).config.vision
    graphs = assembly.graph_bytes(site.decoder.config.hidden, len(vision.deepstack_layers), site.dtype)
    assert site.needs.weight_bytes == without + graphs + assembly.TowerGraphs.bytes(vision, site.dtype)


def test_a_stage_that_has_a_gpu_to_itself_has_one_in_a_rehearsal_too():
    """Else its longer graphs are not known beforehand, and what they need is compiled when it comes to them."""
    stage = next(stage for stage in config().stages if stage.name == "asr")
    assert assembly._site(stage, torch.device("meta"), alone=True).alone
    assert not assembly._site(stage, torch.device("cpu"), alone=True).alone


def test_what_pictures_may_take_is_part_of_a_stage_s_memory():
    stage = next(stage for stage in config().stages if stage.name == "aura")
    without = assembly._site(stage).needs.weight_bytes
    assert assembly._site(replace(stage, picture_cache_gib=0.5)).needs.weight_bytes == without + 2**29


def test_weights_in_eight_bits_leave_their_room_to_the_cache():
    def aura(**given: object):
        return assembly._site(next(stage for stage in config(aura=given).stages if stage.name == "aura"))

    plain, eight = aura(), aura(quantization="fp8")
    decoder = aura().decoder.config
    wide = decoder.heads * decoder.head_dim
    inputs = decoder.hidden * (2 * decoder.kv_heads * decoder.head_dim + wide + 2 * decoder.intermediate)
    numbers = decoder.layers * (inputs + wide * decoder.hidden + decoder.intermediate * decoder.hidden)
    rows = decoder.layers * (
        2 * decoder.kv_heads * decoder.head_dim + wide + 2 * decoder.intermediate + 2 * decoder.hidden
    )
    assert plain.needs.weight_bytes - eight.needs.weight_bytes == 3 * numbers - 4 * rows  # of float32
    pages = [plan_pages(128 << 20, [site.needs], page_size=16)["aura"] for site in (plain, eight)]
    assert pages[0] < pages[1]


def test_keys_and_values_in_eight_bits_are_of_more_rows():
    def aura(**given: object):
        return assembly._site(next(stage for stage in config(aura=given).stages if stage.name == "aura"))

    plain, eight = aura(), aura(kv_cache_dtype="fp8")
    decoder = plain.decoder.config
    vectors = 2 * decoder.layers * decoder.kv_heads
    assert plain.needs.kv_bytes_per_token == vectors * 4 * decoder.head_dim  # of float32
    assert eight.needs.kv_bytes_per_token == vectors * (decoder.head_dim + 4)
    assert plain.needs.weight_bytes == eight.needs.weight_bytes
    runner = assemble(config(aura={"kv_cache_dtype": "fp8"})).ar_runners["aura"]
    kv = runner._compute._kv
    held = sum(x.numel() * x.element_size() for x in (kv.keys, kv.values, kv.scales))
    assert held == (runner.counters.pages + 1) * 16 * eight.needs.kv_bytes_per_token


def test_weights_and_keys_in_eight_bits_go_together():
    def site(**given: object):
        return assembly._site(next(stage for stage in config(asr=given).stages if stage.name == "asr"))

    weights, keys = {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}
    both = site(**weights, **keys)
    assert both.needs.weight_bytes == site(**weights).needs.weight_bytes
    assert both.needs.kv_bytes_per_token == site(**keys).needs.kv_bytes_per_token
    runner = assemble(config(asr={**weights, **keys})).ar_runners["asr"]
    kv = runner._compute._kv
    assert (kv.keys.dtype, kv.values.dtype) == (fp8.FP8, fp8.FP8)
    matrices = [part for part in runner._model.decoder.modules() if isinstance(part, Linear)]
    assert {part.weight.dtype for part in matrices} == {fp8.FP8}
    held = sum(x.numel() * x.element_size() for x in (kv.keys, kv.values, kv.scales))
    assert held == (runner.counters.pages + 1) * 16 * both.needs.kv_bytes_per_token


def test_an_8b_model_s_cache_holds_almost_twice_the_rows_in_eight_bits():
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig(36, 4_096, 12_288, 32, 8, 128, 1e-6, 5e6, 262_144))
    sixteen, eight = (decoder.kv_bytes_per_token(torch.bfloat16, eight_bits=which) for which in (False, True))
    assert (sixteen, eight) == (147_456, 76_032)
    pages = [
        plan_pages(143_771 * 2**20, [StageNeeds("aura", 0.4, 16 << 30, 1 << 30, kv, 32_768)], page_size=16)["aura"]
        for kv in (sixteen, eight)
    ]
    assert pages[1] / pages[0] == pytest.approx(1.94, abs=0.01)


def test_a_gpu_without_eight_bits_refuses_a_cache_of_them(monkeypatch):
    stage = next(stage for stage in config(aura={"kv_cache_dtype": "fp8"}).stages if stage.name == "aura")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    words = r"stage 1 \(aura\): kv_cache_dtype is 'fp8', which takes a GPU .* 8.9 or more, and an A100 has less. Leave it out"
    with pytest.raises(ConfigError, match=words):
        assembly._site(stage, torch.device("cuda", 0))


def test_a_gpu_that_does_not_multiply_eight_bits_is_refused(monkeypatch):
    stage = next(stage for stage in config(asr={"quantization": "fp8"}).stages if stage.name == "asr")
    decoder, cuda = assembly._site(stage).decoder, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A100")

    def refusal(capability: tuple[int, int], dtype: torch.dtype) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        with pytest.raises(ConfigError) as refused:
            assembly._check_eight_bits(stage, decoder, cuda, dtype)
        return refused.value.message

    assert "compute capability 8.9 or more, and an A100 has less" in refusal((8, 0), torch.bfloat16)
    assert "computes in bfloat16" in refusal((8, 9), torch.float16)
    decoder.layers[0].mlp.down_proj.in_features += 1
    assert "layers.0.mlp.down_proj" in refusal((9, 0), torch.bfloat16)


@pytest.fixture
def broken(tmp_path) -> Path:
    """A copy of the AURA checkpoint to break."""
    return Path(shutil.copytree(family() / "aura", tmp_path / "aura"))


def edited(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "missing lm_head.weight"),
        (lambda tensors: tensors.update(extra=tensors["lm_head.weight"].clone()), "unused extra"),
        (
            lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][:-1].clone()}),
            r"lm_head.weight is \[511, 64\]",
        ),
    ],
    ids=["missing", "unused", "misshaped"],
)
def test_weights_that_do_not_fit_the_configuration_are_named(broken, edit, words):
    edited(broken, edit)
    with pytest.raises(CheckpointError, match=words):
        assemble(config(aura={"model": str(broken)}))


def test_an_aura_that_could_never_be_silent_does_not_start(broken):
    tokenizer = json.loads((broken / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != "<|silent|>"]
    (broken / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"<\|silent\|>"):
        assemble(config(aura={"model": str(broken)}))


def test_on_a_cpu_pages_follow_the_seats_and_not_the_memory():
    stages = assemble(config(aura={"max_num_seqs": 2, "max_model_len": 1024}))
    assert stages.ar_runners["aura"].counters.pages == 2 * 2 * 1024 // 16


def test_float32_is_not_rounded_in_convolutions(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # PyTorch's default
    assemble(config())
    assert not torch.backends.cudnn.allow_tf32


def test_small_models_on_a_cpu_compute_in_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with running(config()) as pipeline:
            assert pipeline.engine.call(torch.get_num_threads) == 1
    finally:
        torch.set_num_threads(before)


def test_features_that_are_encoded_in_advance_are_in_the_plan(monkeypatch):
    stage = config().stage("aura")
    site = assembly._site(stage)
    known = LEAST_KNOWN_ROWS["cpu"]
    held = AuraStage.ahead_bytes(AuraStage.network_of(site.checkpoint).config, site.dtype, known_rows=known)
    monkeypatch.setattr("aura_omni.stages.aura.AHEAD_PATCHES", 0)
    monkeypatch.setitem(LEAST_KNOWN_ROWS, "cpu", 0)
    assert site.needs.weight_bytes - assembly._site(stage).needs.weight_bytes == stage.max_num_seqs * held > 0


@pytest.mark.parametrize(
    ("aura", "talker", "rooms"), [("cuda:0", "cuda:0", 1), ("cuda:0", "cuda:1", 0), ("cpu", "cpu", 0)]
)
def test_speech_makes_room_for_what_is_read_on_the_same_gpu(aura, talker, rooms, monkeypatch):
    class Runner:
        made = 0

        def make_room_for(self, behind):
            Runner.made += 1

    def elsewhere(load, device):
        def loaded(site):
            stage = load(site)
            stage.device = torch.device(device)
            return stage

        return loaded

    monkeypatch.setattr(assembly, "_load_aura", elsewhere(assembly._load_aura, aura))
    monkeypatch.setattr(assembly, "_load_talker", elsewhere(assembly._load_talker, talker))
    monkeypatch.setattr(assembly, "_runner", lambda *_, **__: Runner())
    assemble(config())
    assert Runner.made == rooms


def test_a_stage_waits_for_who_computes_on_the_same_gpu():
    one, two, cpu = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")
    heard = {"code2wav": "code2wav", "talker": "talker"}

    def before(name, **devices):
        sites = {other: SimpleNamespace(device=device) for other, device in devices.items()}
        return assembly._before(name, sites, heard)

    assert before("aura", aura=one, talker=one, code2wav=one) == ["code2wav", "talker"]
    assert before("aura", aura=one, talker=two, code2wav=two) == []
    assert before("aura", aura=one, talker=one, code2wav=two) == ["talker"]
    assert before("asr", asr=one, talker=one, code2wav=one) == []
    assert before("asr", asr=cpu, talker=one, code2wav=cpu) == ["code2wav", "talker"], (
        "a step on a CPU keeps all waiting"
    )
