"""Checkpoints that are not what they should be: one line that names the file, whatever is wrong with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aura_omni import nano
from aura_omni.engine.loader import Checkpoint
from aura_omni.errors import CheckpointError
from aura_omni.pipeline import Pipeline
from tests.family import config, family

Change = Callable[[Path], None]


def cut(name: str, keep: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def written(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def changed(name: str, path: str, value: object) -> Change:
    """A field of a JSON file, by its keys with dots between them."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        *inner, last = path.split(".")
        section = content
        for key in inner:
            section = section[key]
        section[last] = value
        (folder / name).write_text(json.dumps(content))

    return change


def without_tokenizer_json(change: Change) -> Change:
    def both(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        change(folder)

    return both


WEIGHTS, INDEX, CONFIG, GENERATION = (
    "model.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
)
CASES: list[tuple[str, Change, str]] = [
    ("asr", cut(WEIGHTS, 0), WEIGHTS),
    ("asr", cut(WEIGHTS, 1000), WEIGHTS),
    ("asr", written(WEIGHTS, "not weights at all"), WEIGHTS),
    ("aura", cut(WEIGHTS, 100_000), WEIGHTS),
    ("tts_custom_voice", cut("speech_tokenizer/" + WEIGHTS, 0), "speech_tokenizer"),
    ("tts_custom_voice", cut("speech_tokenizer/" + WEIGHTS, 100_000), "speech_tokenizer"),
    ("asr", written(INDEX, '{"weight_map": ["model.safetensors"]}'), INDEX),
    ("asr", written(INDEX, '{"weight_map": {"a": 1}}'), INDEX),
    ("asr", written(INDEX, '{"weight_map": {"a": "../../etc/passwd"}}'), INDEX),
    ("asr", written(INDEX, '{"weight_map": {"a": "gone.safetensors"}}'), "gone.safetensors"),
    ("asr", written(INDEX, "[]"), INDEX),
    ("asr", written("tokenizer.json", "{}"), "tokenizer.json"),
    ("aura", written("tokenizer.json", "garbage"), "tokenizer.json"),
    ("tts_custom_voice", written("tokenizer.json", '{"model": null}'), "tokenizer.json"),
    ("asr", without_tokenizer_json(written("vocab.json", "[]")), "vocab.json"),
    (
        "asr",
        without_tokenizer_json(written("tokenizer_config.json", '{"added_tokens_decoder": []}')),
        "tokenizer_config",
    ),
    (
        "asr",
        without_tokenizer_json(written("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}')),
        "tokenizer_c",
    ),
    ("asr", changed(CONFIG, "thinker_config", None), CONFIG),
    ("asr", changed(CONFIG, "thinker_config.text_config", "text"), CONFIG),
    ("asr", changed(CONFIG, "thinker_config.text_config.num_hidden_layers", -1), "num_hidden_layers is -1"),
    ("asr", changed(CONFIG, "thinker_config.text_config.hidden_size", "64"), "hidden_size is '64'"),
    ("asr", changed(CONFIG, "thinker_config.text_config.rms_norm_eps", None), "rms_norm_eps is None"),
    ("asr", changed(CONFIG, "thinker_config.text_config.head_dim", 15), "head_dim is 15"),
    ("asr", changed(CONFIG, "thinker_config.audio_config.n_window", 0), "n_window is 0"),
    ("asr", changed(CONFIG, "thinker_config.audio_config.encoder_attention_heads", 0), "encoder_attention_heads is 0"),
    ("aura", changed(CONFIG, "vision_config", []), CONFIG),
    ("aura", changed(CONFIG, "vision_config.depth", None), "depth is None"),
    ("aura", changed(CONFIG, "vision_config.deepstack_visual_indexes", 3), "deepstack_visual_indexes is 3"),
    ("aura", changed(CONFIG, "text_config.max_position_embeddings", True), "max_position_embeddings is True"),
    ("aura", changed("video_preprocessor_config.json", "size", None), "video_preprocessor_config.json"),
    ("aura", changed("preprocessor_config.json", "patch_size", "16"), "patch_size is '16'"),
    ("tts_custom_voice", changed(CONFIG, "tts_model_type", ["base"]), "tts_model_type"),
    ("tts_custom_voice", changed(CONFIG, "talker_config", []), CONFIG),
    ("tts_custom_voice", changed(CONFIG, "talker_config.num_hidden_layers", 2.0), "num_hidden_layers is 2.0"),
    ("tts_custom_voice", changed(CONFIG, "talker_config.codec_pad_id", None), "codec_pad_id is None"),
    ("tts_custom_voice", changed(CONFIG, "talker_config.codec_bos_id", 10**6), "codec_bos_id is 1000000"),
    ("tts_custom_voice", changed(CONFIG, "talker_config.spk_id", {"ann": "3"}), "ann is '3'"),
    ("tts_custom_voice", changed(CONFIG, "talker_config.spk_id", {"ann": 10**6}), "ann"),
    ("tts_custom_voice", changed(CONFIG, "talker_config.codec_language_id", [1]), CONFIG),
    ("tts_base", changed(CONFIG, "speaker_encoder_config", "none"), CONFIG),
    ("tts_base", changed(CONFIG, "speaker_encoder_config.enc_dim", 0), "enc_dim is 0"),
    ("tts_custom_voice", changed(GENERATION, "temperature", "hot"), "generation_config.json.*temperature is 'hot'"),
    ("tts_custom_voice", changed(GENERATION, "temperature", -3), "generation_config.json.*temperature is -3"),
    ("tts_custom_voice", changed(GENERATION, "subtalker_top_k", "many"), "generation_config.json.*top_k is 'many'"),
    ("tts_custom_voice", changed(GENERATION, "max_new_tokens", 0), "generation_config.json.*max_tokens is 0"),
    ("tts_custom_voice", changed("speech_tokenizer/config.json", "decoder_config", None), "speech_tokenizer"),
    (
        "tts_custom_voice",
        changed("speech_tokenizer/config.json", "decoder_config.upsample_rates", 8),
        "upsample_rates is 8",
    ),
    ("tts_custom_voice", changed("speech_tokenizer/config.json", "encoder_config", "x"), "speech_tokenizer"),
]


@pytest.mark.parametrize(("name", "change", "words"), CASES, ids=[f"{name}-{words}" for name, _, words in CASES])
def test_a_broken_checkpoint_is_one_line_that_names_what_is_broken(name, change, words, tmp_path):
    shutil.copytree(family() / name, tmp_path / name)
    change(tmp_path / name)
    model = {"model": str(tmp_path / name)}
    broken = {"talker": model, "code2wav": model} if name.startswith("tts") else {name: model}
    pipeline = {"asr": "qwen3_asr.yaml", "aura": "tiny.yaml"}.get(name, "qwen3_tts.yaml")
    with pytest.raises(CheckpointError, match=words) as caught:
        Pipeline.load(config(pipeline=pipeline, **broken))
    assert "\n" not in caught.value.message.strip()


# ---------------------------------------------------------------- checkpoints that share their weights


@pytest.fixture
def shelf(tmp_path):
    """Two checkpoints beside each other; the index of the second names a file of the first."""
    for name in ("own", "shared"):
        (tmp_path / "shelf" / name).mkdir(parents=True)
    tensor = {"weight": torch.ones(2)}
    save_file(tensor, tmp_path / "shelf/own" / WEIGHTS)
    save_file(tensor, tmp_path / WEIGHTS)
    return tmp_path / "shelf"


def index(folder: Path, file: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"weight": file}}))


def test_an_index_may_name_weights_on_its_shelf(shelf):
    index(shelf / "shared", f"../own/{WEIGHTS}")
    (file,) = Checkpoint(shelf / "shared", "shared", shelf).tensors().values()
    assert file.samefile(shelf / "own" / WEIGHTS)


@pytest.mark.parametrize("away", [f"../../{WEIGHTS}", f"../own/../../{WEIGHTS}", "/etc/passwd"])
def test_an_index_that_leaves_its_shelf_is_refused(shelf, away):
    index(shelf / "shared", away)
    with pytest.raises(CheckpointError, match="below shelf"):
        Checkpoint(shelf / "shared", "shared", shelf).tensors()


def test_a_link_that_leaves_the_shelf_is_refused(shelf):
    (shelf / "shared/link.safetensors").symlink_to(shelf.parent / WEIGHTS)
    index(shelf / "shared", "link.safetensors")
    with pytest.raises(CheckpointError, match="below shelf"):
        Checkpoint(shelf / "shared", "shared", shelf).tensors()


def test_an_index_without_a_shelf_names_files_of_its_own_folder(shelf):
    index(shelf / "shared", f"../own/{WEIGHTS}")
    with pytest.raises(CheckpointError, match="a file of this folder"):
        Checkpoint.find(str(shelf / "shared")).tensors()


def test_a_file_that_an_index_names_in_vain_is_named_with_its_folder(shelf):
    index(shelf / "shared", "../own/gone.safetensors")
    with pytest.raises(CheckpointError, match=r"'\.\./own/gone\.safetensors', which is not there"):
        Checkpoint(shelf / "shared", "shared", shelf).tensors()


def test_a_damaged_file_of_another_folder_is_named_with_its_folder(shelf):
    (shelf / "own" / WEIGHTS).write_bytes(b"x")
    for name in (f"../own/{WEIGHTS}", str(shelf / "own" / WEIGHTS)):
        index(shelf / "shared", name)
        with pytest.raises(CheckpointError, match=f"^{name} of checkpoint shared cannot be read"):
            Checkpoint(shelf / "shared", "shared", shelf).tensors()


@pytest.mark.parametrize("on_shelf", [False, True])
def test_a_name_that_no_file_can_have_is_refused_in_few_words(shelf, on_shelf):
    index(shelf / "shared", "x" * 5_000)
    with pytest.raises(CheckpointError, match=r"xxx.*which is not there") as caught:
        Checkpoint(shelf / "shared", "shared", shelf if on_shelf else None).tensors()
    assert len(caught.value.message) < 300


def test_a_tensor_that_is_not_in_the_file_that_the_index_gives_it_is_named(shelf):
    save_file({"bias": torch.ones(1)}, shelf / "own/more.safetensors")

    def refusal(**where: str) -> str:
        (shelf / "own" / INDEX).write_text(json.dumps({"weight_map": where}))
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.find(str(shelf / "own")).tensors()
        return caught.value.message

    assert "'none' (said to be in more.safetensors, it is in none)" in refusal(weight=WEIGHTS, none="more.safetensors")
    swapped = refusal(weight="more.safetensors", bias=WEIGHTS)
    assert f"'bias' (said to be in {WEIGHTS}, it is in more.safetensors)" in swapped
    assert f"'weight' (said to be in more.safetensors, it is in {WEIGHTS})" in swapped


def test_of_a_tensor_that_two_files_hold_the_index_chooses_one(shelf):
    for name, value in (("a.safetensors", 1), ("b.safetensors", 2)):
        save_file({"weight": torch.tensor([value]), name: torch.ones(1)}, shelf / "shared" / name)
    (shelf / "shared" / INDEX).write_text(
        json.dumps({"weight_map": {"weight": "a.safetensors", "b.safetensors": "b.safetensors"}})
    )
    assert Checkpoint.find(str(shelf / "shared")).tensors()["weight"].name == "a.safetensors"


@pytest.mark.parametrize("cache", ["/proc/nope", "/dev/null"])
def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    with pytest.raises(CheckpointError, match=f"{cache}.*XDG_CACHE_HOME"):
        nano.folder_of("tiny:asr")
