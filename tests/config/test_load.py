"""What a deploy file and the flags come to."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from aura_omni.config import AudioChunks, Config, Options, load, to_yaml
from aura_omni.errors import ConfigError, DoesNotFit
from aura_omni.flow import STAGES, Sampling

FIXTURES = Path(__file__).parent.parent / "fixtures" / "deploy"
AURA = str(FIXTURES / "upstream_aura_omni.yaml")
TTS = str(FIXTURES / "upstream_qwen3_tts.yaml")
OVERLAY = str(FIXTURES / "overlay.yaml")


def loaded(*, environ=None, platform="cpu", **options) -> Config:
    return load(Options(**options), environ=environ or {}, platform=platform)


def written(folder: Path, text: str) -> str:
    path = folder / "deploy.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def fractions(config: Config) -> list[float]:
    return [stage.gpu_memory_utilization for stage in config.stages]


# ---------------------------------------------------------------- upstream's files


def test_upstream_aura_file_has_its_values():
    config = loaded(deploy_config=AURA)
    assert config.pipeline == "aura_omni"
    assert [stage.name for stage in config.stages] == list(STAGES)
    assert [stage.stage_id for stage in config.stages] == [0, 1, 2, 3]
    assert fractions(config) == [0.1, 0.4, 0.2, 0.2]
    assert [stage.max_num_seqs for stage in config.stages] == [8, 4, 8, 8]
    assert [stage.max_num_batched_tokens for stage in config.stages] == [4096, 15360, 512, 65536]
    assert [stage.max_model_len for stage in config.stages] == [8192, 262144, 4096, 65536]
    assert [stage.enable_prefix_caching for stage in config.stages] == [True, True, False, False]
    assert [stage.enforce_eager for stage in config.stages] == [False] * 4  # another platform's block has no effect
    assert config.stage("aura").model == "aurateam/AURA"
    assert config.stage("talker").model == config.stage("code2wav").model == "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"
    assert config.audio_chunks == AudioChunks(8, 25)
    assert config.media.limits == {"audio": 64, "image": 4, "video": 1}
    talker = Sampling().merged(config.stage("talker").sampling)
    assert (talker.temperature, talker.top_k, talker.repetition_penalty, talker.seed) == (0.9, 50, 1.05, 42)
    assert talker.max_tokens == 4096
    assert talker.stop_token_ids == (2150,)
    assert config.stage("talker").subtalker == {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 1.0}
    assert Sampling().merged(config.stage("asr").sampling).temperature == 0


def test_upstream_tts_file_has_its_values():
    config = loaded(deploy_config=TTS, model="Qwen/Qwen3-TTS-12Hz-0.6B-Base")
    assert [stage.name for stage in config.stages] == ["talker", "code2wav"]
    assert {stage.model for stage in config.stages} == {"Qwen/Qwen3-TTS-12Hz-0.6B-Base"}
    assert fractions(config) == [0.3, 0.3]
    assert [stage.dtype for stage in config.stages] == ["auto", "bfloat16"]
    assert config.audio_chunks == AudioChunks(1, 25)
    assert "seed" not in config.stage("talker").sampling
    assert config.stage("talker").sampling["min_tokens"] == 2
    assert config.stage("talker").subtalker == {}
    assert config.stage("talker").sampling.keys() <= {
        "min_tokens",
        "max_tokens",
        "temperature",
        "top_k",
        "seed",
        "repetition_penalty",
    }


def test_a_silent_file_leaves_sampling_to_the_checkpoint(tmp_path):
    file = tmp_path / "silent.yaml"
    file.write_text("pipeline: qwen3_tts\nstages:\n  - stage_id: 0\n    model: a\n  - stage_id: 1\n    model: a\n")
    talker = loaded(deploy_config=str(file)).stage("talker")
    assert talker.sampling == {"min_tokens": 2}
    assert talker.subtalker == {}


def test_keys_without_use_are_named_once_with_the_reason():
    notes = loaded(deploy_config=AURA).notes
    assert any(line.startswith("duplex_session (deploy file): accepted, not used") for line in notes)
    assert any(line.startswith("session_mode (deploy file)") for line in notes)
    assert any(line.startswith("decode_cudagraph_capture_sizes (connector shared_memory)") for line in notes)
    assert any(line.startswith("async_scheduling (stage 3)") for line in notes)
    assert any(line.startswith("default_sampling_params (stage 3)") for line in notes)
    assert any(line.startswith("max_model_len (stage 3)") for line in notes)
    assert not any(line.startswith("max_model_len") and "(stage 3)" not in line for line in notes)
    assert not any(line.startswith("codec_streaming") for line in notes)  # true is what happens anyway
    assert len(notes) == len(set(notes))


@pytest.mark.parametrize("name", ["aura_omni", "tiny.yaml", "vllm_omni/deploy/aura_omni.yaml", "tiny.yml"])
def test_packaged_files_are_found_by_name_and_load_without_notes_of_their_own(name):
    config = loaded(deploy_config=name)
    assert config.pipeline == "aura_omni"
    assert [note for note in config.notes if "does not exist" not in note] == []


def test_packaged_aura_file_agrees_with_upstreams():
    ours, theirs = loaded(deploy_config="aura_omni"), loaded(deploy_config=AURA)
    for mine, other in zip(ours.stages, theirs.stages, strict=True):
        # The two differ in seats, in how long a transcript may be (ours: as its clip), how the Talker's stop id is known, in its least length, and in fields
        # that say the default.
        sampling = Sampling().merged(other.sampling | {"stop_token_ids": [], "top_k": mine.sampling.get("top_k", 0)})
        assert Sampling().merged(mine.sampling) == sampling
        assert replace(mine, sampling={}) == replace(other, sampling={}, max_num_seqs=mine.max_num_seqs)
        assert mine.max_num_seqs >= 32 > other.max_num_seqs  # many sessions on one GPU


# ---------------------------------------------------------------- base_config, platforms, nesting, ${...}


def test_overlay_beats_its_base_field_by_field():
    config = loaded(deploy_config=OVERLAY)
    aura = config.stage("aura")
    assert aura.gpu_memory_utilization == 0.3
    assert aura.dtype == "float16"
    assert aura.sampling["max_tokens"] == 64
    assert aura.sampling["temperature"] == 0.5  # from the base
    assert config.audio_chunks == AudioChunks(8, 10)
    assert config.stage("code2wav").device == 1
    assert not any(note.startswith("session_mode") for note in config.notes)


def test_platform_block_beats_the_stage_on_that_platform_only():
    assert loaded(deploy_config=OVERLAY, platform="cpu").stage("asr").max_num_seqs == 8
    asr = loaded(deploy_config=OVERLAY, platform="cuda").stage("asr")
    assert asr.max_num_seqs == 16
    assert asr.sampling["temperature"] == pytest.approx(0.1)
    assert asr.sampling["max_tokens"] == 256


def test_environment_fills_in():
    environ = {"AURA_FOLDER": "/models/aura", "AURA_FRACTION": "0.25"}
    aura = loaded(deploy_config=OVERLAY, environ=environ).stage("aura")
    assert (aura.model, aura.gpu_memory_utilization) == ("/models/aura", 0.25)


# ---------------------------------------------------------------- flags


def test_stage_override_beats_flag_beats_file():
    overrides = json.dumps({"1": {"max_num_seqs": 2, "default_sampling_params": {"max_tokens": 7}}})
    config = loaded(deploy_config=AURA, max_num_seqs=3, stage_overrides=overrides)
    assert [stage.max_num_seqs for stage in config.stages] == [3, 2, 3, 3]
    assert config.stage("aura").sampling["max_tokens"] == 7
    assert config.stage("aura").sampling["temperature"] == 0.5
    assert config.origins["stages.1.max_num_seqs"] == "flag --stage-overrides"
    assert config.origins["stages.0.max_num_seqs"] == "flag --max-num-seqs"
    assert config.origins["stages.0.max_model_len"] == "upstream_aura_omni.yaml"


def test_max_model_len_is_auras():
    config = loaded(deploy_config=AURA, max_model_len=16384, enforce_eager=True)
    assert [stage.max_model_len for stage in config.stages] == [8192, 16384, 4096, 65536]
    assert all(stage.enforce_eager for stage in config.stages)


def test_weights_can_be_made_up_for_every_stage_or_for_one():
    assert {stage.load_format for stage in loaded(deploy_config=AURA).stages} == {"auto"}
    config = loaded(deploy_config=AURA, load_format="dummy", stage_overrides='{"0": {"load_format": "safetensors"}}')
    assert [stage.load_format for stage in config.stages] == ["safetensors", "dummy", "dummy", "dummy"]
    assert any("aura, talker, code2wav are random" in note for note in config.notes)
    with pytest.raises(ConfigError, match="--load-format is 'pt'"):
        loaded(deploy_config=AURA, load_format="pt")


def test_memory_flag_is_the_total_in_the_files_proportions():
    assert fractions(loaded(deploy_config=AURA, gpu_memory_utilization=0.45)) == pytest.approx([0.05, 0.2, 0.1, 0.1])
    shared = loaded(deploy_config=AURA, gpu_memory_utilization=0.7)
    assert sum(fractions(shared)) <= 0.7
    assert sum(fractions(shared)) == pytest.approx(0.7, abs=1e-3)


def test_memory_flag_leaves_overridden_stages_alone():
    config = loaded(
        deploy_config=AURA, gpu_memory_utilization=0.8, stage_overrides='{"1": {"gpu_memory_utilization": 0.6}}'
    )
    assert fractions(config) == pytest.approx([0.04, 0.6, 0.08, 0.08])


def test_memory_flag_with_overrides_that_leave_nothing_is_refused():
    with pytest.raises(DoesNotFit, match="leaves nothing"):
        loaded(deploy_config=AURA, gpu_memory_utilization=0.5, stage_overrides='{"1": {"gpu_memory_utilization": 0.6}}')


def test_fractions_above_one_device_are_refused_with_the_numbers():
    with pytest.raises(DoesNotFit, match=r"0.1 \+ 0.7 \+ 0.2 \+ 0.2 = 1.2 .*at most 1.*--gpu-memory-utilization"):
        loaded(deploy_config=AURA, stage_overrides='{"1": {"gpu_memory_utilization": 0.7}}')


def test_fractions_are_counted_per_device():
    overrides = '{"1": {"gpu_memory_utilization": 0.9, "devices": "1"}}'
    assert fractions(loaded(deploy_config=AURA, stage_overrides=overrides)) == [0.1, 0.9, 0.2, 0.2]


# ---------------------------------------------------------------- MODEL


@pytest.mark.parametrize(
    ("model", "pipeline"),
    [
        ("aurateam/AURA", "aura_omni"),
        ("Qwen/Qwen3-TTS-12Hz-1.7B-Base", "qwen3_tts"),
        ("Qwen/Qwen3-ASR-0.6B", "qwen3_asr"),
    ],
)
def test_known_hub_ids_choose_their_pipeline_and_name_the_model(model, pipeline):
    config = loaded(model=model)
    assert (config.pipeline, config.served_names) == (pipeline, (model,))
    assert model in {stage.model for stage in config.stages}


def test_folder_of_a_known_type_takes_its_place_in_the_pipeline(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    config = loaded(model=str(tmp_path))
    assert config.stage("aura").model == str(tmp_path)
    assert config.stage("asr").model == "Qwen/Qwen3-ASR-1.7B"


def test_folder_of_an_unknown_type_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=r"'gpt2'.*qwen3_vl.*--deploy-config"):
        loaded(model=str(tmp_path))


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        loaded(model=str(tmp_path))


def test_pipeline_of_the_file_stands_whatever_model_is_given():
    config = loaded(model="Qwen/Qwen3-0.6B", deploy_config=AURA)
    assert config.pipeline == "aura_omni"
    assert "Qwen/Qwen3-0.6B" not in {stage.model for stage in config.stages}
    assert config.served_names == ("Qwen/Qwen3-0.6B",)
    assert any("loads nothing" in note for note in config.notes)


def test_stage_without_a_checkpoint_is_refused():
    with pytest.raises(ConfigError, match=r"stage 0 \(talker\).*no checkpoint.*MODEL"):
        loaded(deploy_config=TTS)


def test_without_anything_the_small_checkpoints_are_served():
    config = loaded()
    assert [stage.model for stage in config.stages] == ["nano:asr", "nano:aura", "nano:tts", "nano:tts"]
    assert config.served_names == ("aura-nano",)


def test_served_names_are_the_flags_then_model_then_the_files_own():
    assert loaded(deploy_config=AURA, served_model_name=["a", "b", "a"]).served_names == ("a", "b")
    assert loaded(deploy_config=AURA, model="m/x").served_names == ("m/x",)
    assert loaded(deploy_config=AURA).served_names == ("upstream_aura_omni",)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipeline: aura_omni\nstagse: []", r"'stagse' is not known; did you mean stages\?"),
        ("pipeline: aura_omin", r"pipeline 'aura_omin' is not registered; did you mean aura_omni\?"),
        ("async_chunk: true", r"no `pipeline:`; known: .*aura_omni"),
        ("pipeline: aura_omni\nsession_mode: duplx", "did you mean duplex"),
        ("pipeline: aura_omni\nasync_chunk: 1", "async_chunk is 1; it must be true or false"),
        ("pipeline: aura_omni\nmodel_runner: v3", "model_runner is 'v3'"),
        ("pipeline: aura_omni\nedges: {}", "edges is {}; it must be a list"),
        (
            "pipeline: aura_omni\nquantization: fp8",
            "quantization is 'fp8'; it is a key of stages, and only of asr and aura",
        ),
        (
            "pipeline: aura_omni\nkv_cache_dtype: fp8",
            "kv_cache_dtype is 'fp8'; it is a key of stages, and only of asr and aura",
        ),
        ("pipeline: aura_omni\nkv_cache_dtype: fp9", "kv_cache_dtype is 'fp9'; did you mean fp8"),
        ("pipeline: aura_omni\nduplex_session: {max_session: 1}", "did you mean max_sessions"),
        ("pipeline: aura_omni\nduplex_session: {max_sessions: 0}", "max_sessions is 0; it must be a number above 0"),
        ("pipeline: aura_omni\nstage_args: []", "layout of 2025"),
        ("pipeline: aura_omni\nplatforms: {cudda: {}}", r"'cudda'; did you mean cuda\?"),
        (
            "pipeline: aura_omni\nconnectors: {c: {name: x, extra: {codec_chunk_frame: 3}}}",
            "did you mean codec_chunk_frames",
        ),
        ("pipeline: aura_omni\nconnectors: {c: {name: x, extra: {codec_chunk_frames: 0}}}", "codec_chunk_frames is 0"),
        ("pipeline: aura_omni\nstages: {}", "must be a list of stages"),
        ("pipeline: aura_omni\nstages: [{model: x}]", "stage_id is null"),
        ("pipeline: aura_omni\nstages: [{stage_id: 1}, {stage_id: 1}]", "stage_id 1 is given twice"),
        (
            "pipeline: aura_omni\nstages: [{stage_id: 4}]",
            r"stage_id 4 is not in this pipeline; its stages are 0 \(asr\)",
        ),
        ("pipeline: aura_omni\nplatforms: {npu: {stages: [{stage_id: 9}]}}", "stage_id 9 is not in this pipeline"),
        ("pipeline: aura_omni\npipeline: aura_omni", "pipeline is given twice"),
        ("- a", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("a: !!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        loaded(deploy_config=written(tmp_path, text))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("max_nun_seqs", 1, r"did you mean max_num_seqs\?"),
        ("max_num_seqs", 0, "max_num_seqs is 0"),
        ("max_num_seqs", True, "max_num_seqs is true"),
        ("max_num_batched_tokens", 3, r"max_num_batched_tokens is 3, below max_num_seqs 4"),
        ("gpu_memory_utilization", 1.1, "gpu_memory_utilization is 1.1"),
        ("gpu_memory_utilization", float("nan"), "gpu_memory_utilization is nan"),
        ("dtype", "int8", "dtype is 'int8'"),
        ("devices", "0,1", "one device"),
        ("tensor_parallel_size", 2, "tensor_parallel_size is 2, which this server does not do"),
        ("num_replicas", 2, "num_replicas is 2"),
        ("quantization", "awq", "quantization is 'awq'; known: fp8"),
        ("kv_cache_dtype", "bfloat16", "kv_cache_dtype is 'bfloat16'; known: auto, fp8"),
        ("load_format", "pt", "load_format is 'pt'"),
        ("use_v2_model_runner", True, "cannot be set"),
        ("default_sampling_params", {"temprature": 1}, "temprature"),
        ("default_sampling_params", {"temperature": -1}, "temperature is -1"),
        ("default_sampling_params", {"detokenize": "no"}, "detokenize is 'no'"),
        ("subtalker_sampling_params", {"seed": 1}, "seed is not known"),
        ("limit_mm_per_prompt", {"pictures": 1}, "'pictures'"),
        ("input_connectors", {"from_stage_0": "nowhere"}, "'nowhere'"),
        ("engine_args", {"max_num_seqs": 8, "x": 1}, "'x' is not known"),
    ],
)
def test_wrong_stage_keys_are_refused_by_name(key, value, message):
    with pytest.raises(ConfigError, match=message):
        loaded(deploy_config=AURA, stage_overrides=json.dumps({"1": {key: value}}))


def test_weights_in_eight_bits_are_for_stages_that_have_a_check_of_them():
    fp8 = {"quantization": "fp8"}
    config = loaded(deploy_config=AURA, stage_overrides=json.dumps({"0": fp8, "1": fp8}))
    assert [stage.quantization for stage in config.stages] == ["fp8", "fp8", None, None]
    for number, reason in (("2", "there is no check of what coarser weights do to speech"), ("3", "convolutions")):
        with pytest.raises(ConfigError, match=reason):
            loaded(deploy_config=AURA, stage_overrides=json.dumps({number: fp8}))


def test_keys_and_values_in_eight_bits_are_for_stages_that_have_a_check_of_them():
    fp8, auto = {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "auto"}
    config = loaded(deploy_config=AURA, stage_overrides=json.dumps({"0": fp8, "1": fp8, "2": auto, "3": auto}))
    assert [stage.kv_cache_dtype for stage in config.stages] == ["fp8", "fp8", "auto", "auto"]
    assert "kv_cache_dtype: fp8  # flag --stage-overrides" in to_yaml(config)
    assert {stage.kv_cache_dtype for stage in loaded(deploy_config=AURA).stages} == {"auto"}
    for number, reason in (
        ("2", "there is no check of what coarser keys and values do to speech"),
        ("3", "no KV cache"),
    ):
        with pytest.raises(ConfigError, match=rf"kv_cache_dtype is 'fp8'; only asr and aura can have it.*{reason}"):
            loaded(deploy_config=AURA, stage_overrides=json.dumps({number: fp8}))


@pytest.mark.parametrize("overrides", ["{", "[]", '{"7": {}}', '{"aura": {}}', '{"1": 3}'])
def test_wrong_stage_overrides_are_refused(overrides):
    with pytest.raises(ConfigError, match="--stage-overrides"):
        loaded(deploy_config=AURA, stage_overrides=overrides)


def test_a_stage_key_said_twice_differently_is_refused(tmp_path):
    text = "pipeline: aura_omni\nstages: [{stage_id: 0, max_num_seqs: 2, engine_args: {max_num_seqs: 3}}]"
    with pytest.raises(ConfigError, match=r"max_num_seqs is 2 and also 3 in engine_args"):
        loaded(deploy_config=written(tmp_path, text), model="m/x")


def test_missing_deploy_file_is_refused_with_the_packaged_ones():
    with pytest.raises(ConfigError, match=r"not found: no/such.yaml.*nano\.yaml"):
        loaded(deploy_config="no/such.yaml")


@pytest.mark.parametrize("port", [-1, 65536])
def test_impossible_ports_are_refused(port):
    with pytest.raises(ConfigError, match="--port"):
        loaded(port=port)


# ---------------------------------------------------------------- media


def test_media_flags_become_a_policy(tmp_path):
    media = loaded(
        allowed_local_media_path=str(tmp_path / "." / ""), allowed_media_domains=["Example.com", "[::1]", "127.0.0.1"]
    ).media
    assert media.allowed_local_path == tmp_path.resolve()
    assert media.allowed_domains == ("example.com", "::1", "127.0.0.1")


def test_media_keys_of_the_file_reach_the_policy_and_are_printed(tmp_path):
    path = written(tmp_path, "base_config: tiny.yaml\nmedia: {max_pixels: 1000, timeout_s: 3, max_body_bytes: 5000}")
    config = loaded(deploy_config=path)
    assert (config.media.max_pixels, config.media.timeout_s, config.media.max_body_bytes) == (1000, 3.0, 5000)
    assert config.media.max_audio_s == 1200
    assert yaml.safe_load(to_yaml(config))["media"]["max_pixels"] == 1000


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ("{max_pixel: 5}", "did you mean max_pixels?"),
        ("{max_pixels: 0}", "max_pixels is 0; it must be a whole number from 1"),
        ("{timeout_s: .inf}", "timeout_s is inf; it must be a number from 0.1 to 3600"),
        ("{timeout_s: .nan}", "timeout_s is nan"),
        ("5", "must be a mapping"),
    ],
)
def test_wrong_media_keys_are_refused_by_name(media, message, tmp_path):
    with pytest.raises(ConfigError) as refused:
        loaded(deploy_config=written(tmp_path, f"base_config: tiny.yaml\nmedia: {media}"))
    assert message in refused.value.message


def test_speech_keys_of_the_file_are_kept_and_printed(tmp_path):
    path = written(
        tmp_path, "base_config: nano.yaml\nspeech: {normalize: false, frames_per_token: 20, tokens_ahead: 12}"
    )
    config = loaded(deploy_config=path)
    assert (config.speech.normalize, config.speech.frames_per_token, config.speech.spare_frames) == (False, 20.0, 38)
    assert (config.speech.tokens_ahead, loaded().speech.tokens_ahead) == (12, 0)
    assert loaded(deploy_config="nano.yaml").speech.non_streaming
    assert not loaded(deploy_config="tiny.yaml").speech.non_streaming
    assert yaml.safe_load(to_yaml(config))["speech"]["normalize"] is False
    assert loaded().speech.normalize


@pytest.mark.parametrize(
    ("speech", "message"),
    [
        ("{normalise: true}", "did you mean normalize?"),
        ("{non_streaming: 1}", "non_streaming is 1; it must be true or false"),
        ("{normalize: 1}", "normalize is 1; it must be true or false"),
        ("{frames_per_token: 0.5}", "frames_per_token is 0.5; it must be a number from 1 to 1000"),
        ("{max_loop_s: 0}", "max_loop_s is 0; it must be a number from 1"),
    ],
)
def test_wrong_speech_keys_are_refused_by_name(speech, message, tmp_path):
    with pytest.raises(ConfigError) as refused:
        loaded(deploy_config=written(tmp_path, f"base_config: nano.yaml\nspeech: {speech}"))
    assert message in refused.value.message


def test_parts_of_a_kind_are_limited_where_no_stage_says_how_many(tmp_path):
    path = written(tmp_path, "base_config: tiny.yaml\nstages: [{stage_id: 1, limit_mm_per_prompt: {image: 500}}]")
    assert loaded(deploy_config=path).media.limits == {"audio": 64, "image": 500, "video": 64}


def test_keys_that_code2wav_has_no_use_for_are_noted_and_not_checked_against_others(tmp_path):
    keys = "{stage_id: 3, max_num_seqs: 8, max_num_batched_tokens: 2, max_model_len: 1}"
    config = loaded(deploy_config=written(tmp_path, f"base_config: tiny.yaml\nstages: [{keys}]"))
    notes = [note for note in config.notes if "stage 3" in note]
    assert {note.partition(" ")[0] for note in notes} >= {"max_model_len", "max_num_batched_tokens"}
    assert all("accepted, not used" in note for note in notes)
    (shown,) = [stage for stage in yaml.safe_load(to_yaml(config))["stages"] if stage["stage_id"] == 3]
    assert "max_num_batched_tokens" not in shown


def test_only_aura_keeps_pictures(tmp_path):
    stages = "{stage_id: 0, picture_cache_gib: 2}, {stage_id: 1, picture_cache_gib: 1.5}"
    config = loaded(deploy_config=written(tmp_path, f"base_config: tiny.yaml\nstages: [{stages}]"))
    assert [stage.picture_cache_gib for stage in config.stages] == [0, 1.5, 0, 0]
    assert any(note.startswith("picture_cache_gib (stage 0): accepted, not used") for note in config.notes)
    shown = {stage["stage_id"]: stage for stage in yaml.safe_load(to_yaml(config))["stages"]}
    assert shown[1]["picture_cache_gib"] == 1.5
    assert "picture_cache_gib" not in shown[0]
    with pytest.raises(ConfigError, match="picture_cache_gib is -1; it must be a number from 0"):
        loaded(
            deploy_config=written(tmp_path, "base_config: tiny.yaml\nstages: [{stage_id: 1, picture_cache_gib: -1}]")
        )


def test_known_names_are_listed_once(tmp_path):
    with pytest.raises(ConfigError) as refused:
        loaded(deploy_config=written(tmp_path, "base_config: tiny.yaml\nstages: [{stage_id: 1, qqqq: 2}]"))
    names = refused.value.message.partition("known: ")[2].split(", ")
    assert len(names) == len(set(names)) > 10


def test_media_are_closed_without_flags():
    assert (loaded().media.allowed_local_path, loaded().media.allowed_domains) == (None, ())


@pytest.mark.parametrize("domain", ["https://example.com", "example.com/x", "*.example.com", "example.com:80", ""])
def test_what_is_not_a_host_name_is_refused(domain):
    with pytest.raises(ConfigError, match="--allowed-media-domains"):
        loaded(allowed_media_domains=[domain])


def test_local_media_path_must_be_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        loaded(allowed_local_media_path=str(tmp_path / "nothing"))


# ---------------------------------------------------------------- stages that are switched off

MUTE = {"2": {"enabled": False}, "3": {"enabled": False}}


def test_the_speaking_stages_can_be_switched_off_and_the_start_says_so():
    config = loaded(deploy_config=AURA, stage_overrides=json.dumps(MUTE))
    assert [stage.name for stage in config.stages] == ["asr", "aura"]
    assert "talker and code2wav are switched off (enabled: false): answers are text, without speech" in config.notes
    assert not any("switched off" in note for note in loaded(deploy_config=AURA).notes)


@pytest.mark.parametrize(
    ("deploy", "off"),
    [
        (AURA, ["0"]),
        (AURA, ["1"]),
        (AURA, ["2"]),
        (AURA, ["1", "2", "3"]),
        (AURA, ["0", "1", "2", "3"]),
        (TTS, ["0", "1"]),
    ],
)
def test_no_stage_is_switched_off_whose_result_another_needs(deploy, off):
    overrides = json.dumps({number: {"enabled": False} for number in off})
    with pytest.raises(ConfigError, match="only talker and code2wav can be switched off, together"):
        loaded(deploy_config=deploy, stage_overrides=overrides)


# ---------------------------------------------------------------- what surrounds requests


def test_time_and_voices_are_in_the_file_and_flags_beat_it(tmp_path):
    deploy = written(tmp_path, f"base_config: nano.yaml\nrequest_timeout_s: 30\ncustom_voice_dir: {tmp_path / 'a'}\n")
    in_file = loaded(deploy_config=deploy)
    assert (in_file.request_timeout_s, in_file.voices_dir) == (30, tmp_path / "a")
    by_flag = loaded(deploy_config=deploy, request_timeout=5.0, custom_voice_dir=str(tmp_path / "b"))
    assert (by_flag.request_timeout_s, by_flag.voices_dir) == (5.0, tmp_path / "b")
    neither = loaded()
    assert (neither.request_timeout_s, neither.voices_dir) == (600, None)
    assert yaml.safe_load(to_yaml(by_flag))["request_timeout_s"] == 5.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_time_limit_that_is_none_is_refused(seconds):
    with pytest.raises(ConfigError, match="--request-timeout"):
        loaded(request_timeout=seconds)
