"""The Talker stage against the public package, and against itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.sampler import Draw, pick
from aura_omni.engine.seats import sound
from aura_omni.errors import BadRequest, CheckpointError
from aura_omni.flow import Audio, Sampling, Voice
from aura_omni.media.noise import swelling_noise
from aura_omni.models.layers import DenseKV
from aura_omni.models.qwen3_tts import looked_up
from aura_omni.stages.talker import TalkerPrompt, TalkerStage, TextTrack, predictor_sampling, published_sampling
from tests.reference_tts import (
    reference_ids,
    reference_model,
    reference_tokenizer,
    tts_config,
    write_checkpoint,
)
from tests.stages.drive import run

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0, repetition_penalty=1.05, max_tokens=20)
NO_RANDOM = Sampling(temperature=0.0)
TEXT = "Hello the world."
LONG_TEXT = "Hello the world, this is what the user said."


@dataclass
class Pair:
    """The same weights in our stage and in the package's model."""

    stage: TalkerStage
    model: Any
    tokenizer: Any


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    made: dict[tuple[str, str], Pair] = {}

    def get(kind: str, size: str = "1b7") -> Pair:
        if (kind, size) not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-{size}")
            config = tts_config(kind, size=size)
            model = reference_model(config, seed=len(kind))
            write_checkpoint(folder, config, model)
            stage = TalkerStage.load(Checkpoint.find(str(folder)), device=CPU, dtype=torch.float32)
            made[kind, size] = Pair(stage, model, reference_tokenizer(folder))
        return made[kind, size]

    return get


@dataclass(frozen=True)
class Case:
    kind: str
    voice: Voice
    size: str = "1b7"
    reference_frames: int = 0

    @property
    def name(self) -> str:
        voice = self.voice
        parts = [self.kind, self.size, voice.language, voice.speaker, "instruct" if voice.instruct else None]
        parts += [f"ref{self.reference_frames}", "whole" if voice.non_streaming else "streaming"]
        return "-".join(part for part in parts if part)


SPEECH = Audio(swelling_noise(np.random.default_rng(0), 1.25, 24_000), 24_000, b"speech")
REF_TEXT = "the assistant said hello"


def _cases() -> list[Case]:
    cases = []
    for non_streaming in (True, False):
        x = Voice(non_streaming=non_streaming)
        clone = replace(x, ref_audio=SPEECH)
        cases += [
            Case("custom_voice", replace(x, speaker="Ryan", language="English")),
            Case("custom_voice", replace(x, speaker="serena", language="auto", instruct="Say it slowly.\n")),
            Case("custom_voice", replace(x, speaker="eric", language="auto")),
            Case("custom_voice", replace(x, speaker="dylan", language="chinese")),
            Case("custom_voice", replace(x, speaker="eric", language="english")),
            Case("custom_voice", replace(x, speaker="vivian", language="german"), size="0b6"),
            Case("voice_design", replace(x, instruct="An old man, far away", language="auto")),
            Case("voice_design", replace(x, instruct="A child", language="japanese")),
            Case("base", replace(clone, x_vector_only=True, language="english")),
            Case("base", replace(clone, x_vector_only=True), size="0b6"),
            Case("base", replace(clone, ref_text=REF_TEXT, language="chinese"), reference_frames=4),
            Case("base", replace(clone, ref_text=REF_TEXT), reference_frames=120),
        ]
    return cases


def reference_codes(frames: int) -> torch.Tensor:
    return torch.randint(2048, (frames, 16), generator=torch.Generator().manual_seed(frames))


def prompt_of(pair: Pair, case: Case, text: str = TEXT) -> TalkerPrompt:
    stage, speaking = pair.stage, pair.stage.voices.resolve(case.voice)
    reference = None
    if speaking.clone:
        reference = stage.reference(
            speaking, SPEECH.samples, case.voice.ref_text, lambda _: reference_codes(case.reference_frames)
        )
    return stage.prompt(speaking, stage.writer.body(text), reference)


def speak(stage: TalkerStage, prompts: list[TalkerPrompt], sampling: Sampling, **options: Any) -> list[np.ndarray]:
    """Frames int64 [n, 16] of each prompt, run as one batch; and each sequence ends once."""
    frames: list[list[np.ndarray]] = [[] for _ in prompts]
    ends: list[Any] = options.get("ends", [])
    ended = len(ends)
    sequences = []
    for index, prompt in enumerate(prompts):
        sequences.append(
            stage.sequence(
                prompt,
                sampling,
                predictor=options.get("predictor", NO_RANDOM),
                on_output=frames[index].append,
                on_end=lambda reason, error: ends.append(reason),
            )
        )
        sequences[-1].seed = options.get("seeds", range(len(prompts)))[index]
    run(stage, sequences, rows_per_step=options.get("rows_per_step", 10**6))
    assert len(ends) == ended + len(prompts)
    return [np.stack(part) for part in frames]


def ask_reference(pair: Pair, case: Case, frames: int, text: str = TEXT) -> tuple[np.ndarray, dict[str, Any]]:
    """The package's greedy codes, at most `frames` of them, and what it handed to its decoder's generate()."""
    voice, model, tokenizer = case.voice, pair.model, pair.tokenizer
    options: dict[str, Any] = {}
    if voice.instruct:
        options["instruct_ids"] = [reference_ids(tokenizer, "instruct", voice.instruct)]
    if voice.ref_audio is not None:
        options["voice_clone_prompt"] = {
            "ref_spk_embedding": [model.extract_speaker_embedding(SPEECH.samples, 24_000)],
            "ref_code": [None if voice.x_vector_only else reference_codes(case.reference_frames)],
            "x_vector_only_mode": [voice.x_vector_only],
            "icl_mode": [not voice.x_vector_only],
        }
        options["ref_ids"] = [reference_ids(tokenizer, "reference", voice.ref_text or "")]
    seen: dict[str, Any] = {}
    generate = model.talker.generate

    def watched(**arguments: Any) -> Any:
        seen.update(arguments)
        return generate(**arguments)

    model.talker.generate = watched
    try:
        codes, _ = model.generate(
            input_ids=[reference_ids(tokenizer, "target", text)],
            languages=[voice.language or "auto"],
            speakers=[voice.speaker],
            non_streaming_mode=voice.non_streaming,
            # The package runs its code predictor at the start of the next step, so its last token never becomes a frame.
            max_new_tokens=frames + 1,
            do_sample=False,
            subtalker_dosample=False,
            **options,
        )
    finally:
        del model.talker.generate
    return codes[0].numpy(), seen


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_prompt_rows_and_greedy_frames_equal_the_reference(pair: Callable[..., Pair], case: Case) -> None:
    models, frames = pair(case.kind, case.size), 12
    expected, seen = ask_reference(models, case, frames)
    prompt = prompt_of(models, case)

    assert prompt.prefill.length == seen["inputs_embeds"].shape[1]
    rows = models.stage.embedded(models.stage.prompt_rows(prompt)).x
    torch.testing.assert_close(rows, seen["inputs_embeds"][0], atol=1e-5, rtol=1e-5)
    trailing = prompt.prefill.trailing_ids or (models.stage.writer.ids.text_pad,)
    rows = models.stage.talker.text(torch.tensor(trailing))
    torch.testing.assert_close(rows, seen["trailing_text_hidden"][0], atol=1e-5, rtol=1e-5)

    [actual] = speak(models.stage, [prompt], replace(GREEDY, max_tokens=frames))
    assert actual.shape == (frames, 16)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["custom_voice", "base"])
def test_a_long_run_past_the_end_of_the_text_equals_the_reference(pair: Callable[..., Pair], kind: str) -> None:
    clone = Voice(ref_audio=SPEECH, ref_text=REF_TEXT, language="english", non_streaming=False)
    case = Case(kind, clone if kind == "base" else Voice(language="english", non_streaming=False, speaker="ryan"))
    case = replace(case, reference_frames=9 if kind == "base" else 0)
    expected, _ = ask_reference(pair(kind), case, 66, LONG_TEXT)
    [actual] = speak(pair(kind).stage, [prompt_of(pair(kind), case, LONG_TEXT)], replace(GREEDY, max_tokens=66))
    np.testing.assert_array_equal(actual, expected)
    assert actual.shape == (66, 16)


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_end_comes_where_the_reference_ends_and_not_before_two_frames(tmp_path: Path) -> None:
    config, case = tts_config("custom_voice"), Case("custom_voice", Voice(speaker="ryan", non_streaming=False))
    model = reference_model(config, seed=4)
    before = Pair(_stage(tmp_path / "before", config, model), model, reference_tokenizer(tmp_path / "before"))
    [frames] = speak(before.stage, [prompt_of(before, case)], GREEDY)
    with torch.no_grad():  # the end now wins wherever the codes of frames 0 and 6 did
        head = model.talker.codec_head.weight
        head[2150] = 3 * (head[frames[0, 0]] + head[frames[6, 0]])
    after = Pair(_stage(tmp_path / "after", config, model), model, before.tokenizer)
    hidden_wins = after.stage.logits(_last_hidden(after.stage, prompt_of(after, case))).argmax(-1)
    assert hidden_wins.tolist() == [2150]

    expected, _ = ask_reference(after, case, 20)
    ends: list[Any] = []
    [actual] = speak(after.stage, [prompt_of(after, case)], GREEDY, ends=ends)
    np.testing.assert_array_equal(actual, expected)
    assert 2 <= len(actual) < 20
    assert ends == ["stop"]


def _stage(folder: Path, config: dict[str, Any], model: Any) -> TalkerStage:
    folder.mkdir()
    write_checkpoint(folder, config, model)
    return TalkerStage.load(Checkpoint.find(str(folder)), device=CPU, dtype=torch.float32)


def _last_hidden(stage: TalkerStage, prompt: TalkerPrompt) -> torch.Tensor:
    rows, config = stage.embedded(stage.prompt_rows(prompt)).x, stage.decoder_config
    kv = DenseKV(config.layers, 1, len(rows), config.kv_heads, config.head_dim, dtype=stage.dtype, device=CPU)
    return stage.talker.decoder(rows, torch.arange(len(rows)), kv)[-1:]


def test_n_frames_come_of_a_budget_of_n(pair: Callable[..., Pair]) -> None:
    models, ends = pair("custom_voice"), []
    for budget in (1, 2, 7):
        prompt = prompt_of(models, Case("custom_voice", Voice()))
        [frames] = speak(models.stage, [prompt], replace(GREEDY, max_tokens=budget, min_tokens=8), ends=ends)
        assert frames.shape == (budget, 16)
        assert frames.dtype == np.int64
    assert ends == ["length"] * 3


RANDOM = Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, max_tokens=9)
VOICES = [
    Voice(speaker="ryan", language="english"),
    Voice(speaker="eric", non_streaming=False),
    Voice(instruct="slowly", non_streaming=False, language="german"),
    Voice(speaker="dylan", instruct="fast"),
]


def test_frames_do_not_depend_on_who_shares_the_batch(pair: Callable[..., Pair]) -> None:
    models = pair("custom_voice")
    prompts = [prompt_of(models, Case("custom_voice", voice), TEXT * (n + 1)) for n, voice in enumerate(VOICES)]
    options = {"predictor": Sampling(temperature=0.9, top_k=50)}
    together = speak(models.stage, prompts, RANDOM, seeds=[5, 6, 7, 8], **options)
    for index, prompt in enumerate(prompts):
        [alone] = speak(models.stage, [prompt], RANDOM, seeds=[5 + index], **options)
        np.testing.assert_array_equal(alone, together[index])


@pytest.mark.parametrize("rows_per_step", [1, 4, 11])
def test_a_prompt_prefilled_in_parts_gives_the_same_frames(pair: Callable[..., Pair], rows_per_step: int) -> None:
    models = pair("base")
    case = Case("base", Voice(ref_audio=SPEECH, ref_text=REF_TEXT, non_streaming=True), reference_frames=6)
    [whole] = speak(models.stage, [prompt_of(models, case)], GREEDY)
    [parts] = speak(models.stage, [prompt_of(models, case)], GREEDY, rows_per_step=rows_per_step)
    np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize("rows_per_step", [3, 1000])
def test_a_sequence_computed_again_from_its_state_goes_on_the_same(
    pair: Callable[..., Pair], rows_per_step: int
) -> None:
    stage, frames = pair("custom_voice").stage, []
    prompt = prompt_of(pair("custom_voice"), Case("custom_voice", Voice(non_streaming=False)), LONG_TEXT)
    [whole] = speak(stage, [prompt], replace(GREEDY, max_tokens=16))
    sequence = stage.sequence(
        prompt,
        replace(GREEDY, max_tokens=7),
        predictor=NO_RANDOM,
        on_output=frames.append,
        on_end=lambda reason, error: None,
    )
    run(stage, [sequence])
    sequence.computed, sequence.finished = 0, None
    sequence.sampling = replace(sequence.sampling, max_tokens=16)
    run(stage, [sequence], rows_per_step=rows_per_step)
    np.testing.assert_array_equal(np.stack(frames), whole)


def test_seeds_decide_what_is_drawn_and_top_k_1_is_greedy(pair: Callable[..., Pair]) -> None:
    models = pair("custom_voice")
    prompts = [prompt_of(models, Case("custom_voice", Voice()))] * 3
    random = replace(RANDOM, repetition_penalty=1.0)
    first, again, other = speak(models.stage, prompts, random, predictor=RANDOM, seeds=[1, 1, 2])
    np.testing.assert_array_equal(first, again)
    assert (first[:, 0] != other[:, 0]).any()
    assert (first[0, 1:] != other[0, 1:]).any()

    one = replace(random, top_k=1)
    [drawn] = speak(models.stage, prompts[:1], one, predictor=one)
    [best] = speak(models.stage, prompts[:1], replace(random, temperature=0.0), predictor=NO_RANDOM)
    np.testing.assert_array_equal(drawn, best)


def test_a_sampled_codebook_follows_the_predictors_distribution(pair: Callable[..., Pair]) -> None:
    talker = pair("custom_voice").stage.talker
    hidden = torch.randn(1, talker.config.decoder.hidden, generator=torch.Generator().manual_seed(3)).expand(1000, -1)
    draw = Draw.of([Sampling(temperature=0.9, top_k=3)] * 1000, list(range(1000)), [0] * 1000, CPU)
    seen: dict[int, torch.Tensor] = {}

    def choose(logits: torch.Tensor, group: int) -> torch.Tensor:
        if group > 1:
            return torch.zeros_like(hidden[:, 0], dtype=torch.int64)
        seen[group] = logits
        return pick(logits, draw, stream=group)

    with torch.no_grad():
        codes, _ = talker.frame(hidden, torch.zeros(1000, dtype=torch.int64), looked_up(choose))
    best = (seen[1][0] / 0.9).topk(3)
    counts = torch.stack([(codes[:, 1] == code).sum() for code in best.indices])
    assert counts.sum() == 1000
    torch.testing.assert_close(counts / 1000, best.values.softmax(-1), atol=0.05, rtol=0)


def test_only_codes_and_the_end_can_be_drawn(pair: Callable[..., Pair]) -> None:
    stage = pair("custom_voice").stage
    logits = stage.logits(torch.randn(2, stage.decoder_config.hidden))
    allowed = torch.isfinite(logits)
    assert logits.dtype == torch.float32
    assert allowed[:, :2048].all()  # code 0 too, as in the reference
    assert allowed[:, 2048:].nonzero()[:, 1].tolist() == [2150 - 2048] * 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_whatever_the_logit_of_a_banned_id_is_draws_are_the_same(
    pair: Callable[..., Pair], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that can never be drawn ends nobody; one that can does."""
    stage = pair("custom_voice").stage
    hidden, plain = torch.randn(2, stage.decoder_config.hidden), stage.talker.codec_head.forward
    expected = stage.logits(hidden)

    def head(at: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: plain(x).index_fill(1, torch.tensor([at]), value)

    for banned in (2048, 3071):
        monkeypatch.setattr(stage.talker.codec_head, "forward", head(banned))
        found = stage.logits(hidden)
        assert torch.equal(found, expected)
        assert sound(found).all()
    for allowed in (0, 2150):
        monkeypatch.setattr(stage.talker.codec_head, "forward", head(allowed))
        assert bool(sound(stage.logits(hidden)).any()) == (value == -torch.inf)


@pytest.mark.parametrize("rows_per_step", [2, 1000])
def test_a_bfloat16_stage_speaks(tmp_path: Path, rows_per_step: int) -> None:
    config = tts_config("base")
    write_checkpoint(tmp_path, config, reference_model(config, seed=1))
    stage = TalkerStage.load(Checkpoint.find(str(tmp_path)), device=CPU, dtype=torch.bfloat16)
    case = Case("base", Voice(ref_audio=SPEECH, ref_text=REF_TEXT), reference_frames=5)
    prompt = prompt_of(Pair(stage, None, None), case)
    assert stage.embedded(stage.prompt_rows(prompt)).x.dtype == torch.bfloat16
    [frames] = speak(stage, [prompt], replace(GREEDY, max_tokens=5, min_tokens=5), rows_per_step=rows_per_step)
    assert frames.shape == (5, 16)
    assert (frames >= 0).all()
    assert (frames < 2048).all()


def test_text_is_read_one_id_per_step_and_then_padding() -> None:
    track = TextTrack(9)
    track.feed([1, 2])
    assert track.take() == 1
    track.feed([3])
    assert [track.take(), track.take()] == [2, 3]
    assert not track.ready
    with pytest.raises(LookupError, match="before its next text"):
        track.take()
    track.close()
    assert [track.take(), track.take()] == [9, 9]
    with pytest.raises(ValueError, match="closed"):
        track.feed([4])


def test_published_sampling_fills_what_the_file_lacks() -> None:
    talker, predictor = published_sampling({})
    assert (talker.temperature, talker.top_k, talker.top_p, talker.repetition_penalty) == (0.9, 50, 1.0, 1.05)
    assert (talker.max_tokens, talker.min_tokens) == (2048, 2)
    assert (predictor.temperature, predictor.top_k, predictor.top_p) == (0.9, 50, 1.0)
    assert predictor.repetition_penalty == 1.0

    talker, predictor = published_sampling(
        {"max_new_tokens": 8192, "top_k": 7, "do_sample": False, "subtalker_dosample": False, "subtalker_top_p": 0.5}
    )
    assert (talker.temperature, talker.top_k, talker.max_tokens) == (0.0, 7, 8192)
    assert (predictor.temperature, predictor.top_p) == (0.0, 0.5)


def test_predictor_sampling_refuses_what_it_does_not_know() -> None:
    base = Sampling(temperature=0.9, top_k=50)
    assert predictor_sampling(base, {"top_k": 5, "temperature": None}) == replace(base, top_k=5)
    assert predictor_sampling(base, {"do_sample": False, "temperature": 2.0}).temperature == 0.0
    with pytest.raises(BadRequest, match="min_p is not a field"):
        predictor_sampling(base, {"min_p": 0.1})
    with pytest.raises(BadRequest, match="do_sample is 1"):
        predictor_sampling(base, {"do_sample": 1})
    with pytest.raises(BadRequest, match="top_p"):
        predictor_sampling(base, {"top_p": 1.5})


def test_a_checkpoint_that_cannot_be_spoken_with_is_refused_by_name(tmp_path: Path) -> None:
    good = tts_config("base")
    write_checkpoint(tmp_path, good, reference_model(good))

    def refused(change: Callable[[dict[str, Any]], None]) -> str:
        config = copy.deepcopy(good)
        change(config)
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError) as error:
            TalkerStage.load(Checkpoint.find(str(tmp_path)), device=CPU, dtype=torch.float32)
        return str(error.value)

    assert "hidden_act 'gelu'" in refused(lambda c: c["talker_config"].update(hidden_act="gelu"))
    assert "rope_type 'yarn'" in refused(lambda c: c["talker_config"]["rope_scaling"].update(rope_type="yarn"))
    assert "text_vocab_size" in refused(lambda c: c["talker_config"].pop("text_vocab_size"))
    assert "num_code_groups" in refused(lambda c: c["talker_config"].update(num_code_groups=8))
    assert "spells the assistant turn" in refused(lambda c: c.update(assistant_token_id=3))
    assert "speaker vectors have 32" in refused(lambda c: c["speaker_encoder_config"].update(enc_dim=32))
    assert "tts_model_type 'talk'" in refused(lambda c: c.update(tts_model_type="talk"))
    assert "missing" in refused(lambda c: c["talker_config"].update(num_hidden_layers=4))
