"""AURA as a stage: the reference's ids, any cut of the prefill, any company in the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aura_omni.engine.loader import Checkpoint
from aura_omni.errors import CheckpointError
from aura_omni.flow import Message, Sampling, Text, Video
from aura_omni.stages.aura import AuraStage
from tests.aura_tiny import (
    ADDED,
    PlainKV,
    config_json,
    forward,
    greedy,
    image,
    network,
    reference,
    sequence_of,
    stage,
    video,
    write_checkpoint,
)
from tests.stages.drive import completed

CLOSE = 2e-5
CPU = torch.device("cpu")


def user(*parts: Video | str) -> Message:
    return Message("user", tuple(Text(part) if isinstance(part, str) else part for part in parts))


CHAT = [
    user(video(3, 96, 160), image(70, 40, seed=2), "look"),
    Message("assistant", (Text("A cat."),)),
    user(video(2, 64, 64)),
]


@pytest.fixture(scope="module")
def aura() -> AuraStage:
    return stage()


def inputs_of(aura: AuraStage, prompt: Any) -> dict[str, torch.Tensor]:
    """The prompt as the reference takes it."""
    ids = torch.tensor([prompt.tokens])
    kinds = (ids == aura.controls.image_pad).int() + 2 * (ids == aura.controls.video_pad).int()
    inputs: dict[str, torch.Tensor] = {"input_ids": ids, "mm_token_type_ids": kinds}
    for still, pixels, grid in (
        (True, "pixel_values", "image_grid_thw"),
        (False, "pixel_values_videos", "video_grid_thw"),
    ):
        visuals = [visual for visual in prompt.visuals if visual.video.still == still]
        if visuals:
            patches = [visual.rules.patches(torch.from_numpy(visual.video.frames), visual.size) for visual in visuals]
            inputs[pixels] = torch.cat([part.flatten(0, 1) for part in patches])
            inputs[grid] = torch.tensor([[v.groups, v.size[0] // 16, v.size[1] // 16] for v in visuals])
    return inputs


@pytest.mark.reference
@pytest.mark.parametrize(
    ("vision", "tied"),
    [({}, False), ({"hidden_size": 144, "num_heads": 2}, True)],
    ids=["own head", "tied, vision heads of 72"],
)
def test_rows_logits_and_greedy_ids_equal_the_reference(vision: dict[str, Any], tied: bool) -> None:
    config = config_json(tied=tied, **vision)
    aura = stage(config)
    prompt = aura.prompt(CHAT)
    model, inputs = reference(config, aura.network), inputs_of(aura, prompt)
    with torch.inference_mode():
        rows = model.model(**inputs).last_hidden_state[0]
        logits = model.lm_head(rows)
        out = model.generate(**inputs, max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None)
    ids = out[0, len(prompt.tokens) :].tolist()
    kv, sequence = PlainKV(), sequence_of(aura, prompt)
    hidden = forward(aura, kv, (sequence, 0, sequence.length))
    torch.testing.assert_close(hidden, rows, atol=CLOSE, rtol=0)
    torch.testing.assert_close(aura.logits(hidden), logits, atol=CLOSE, rtol=0)
    assert greedy(aura, kv, sequence, hidden, 64) == ids
    assert tied or len(set(ids)) > 3  # a random tied head repeats what it reads


@pytest.mark.reference
def test_bfloat16_is_no_further_from_float32_than_the_references_own() -> None:
    config = config_json()
    exact, half = stage(config), stage(config)
    half.network.bfloat16()
    half.dtype = torch.bfloat16
    prompt = exact.prompt(CHAT)
    model = reference(config, exact.network).bfloat16()
    with torch.inference_mode():
        theirs = model.model(**inputs_of(exact, prompt)).last_hidden_state[0].float()
    want, found = (
        forward(aura, PlainKV(), (sequence_of(aura, prompt), 0, len(prompt.tokens))).float() for aura in (exact, half)
    )
    own = (theirs - want).square().mean().sqrt()
    assert (found - want).square().mean().sqrt() < 1.2 * own


def test_a_prefill_cut_anywhere_equals_the_whole(aura: AuraStage) -> None:
    prompt = aura.prompt(CHAT)
    whole = sequence_of(aura, prompt)
    hidden = forward(aura, PlainKV(), (whole, 0, whole.length))
    inside = [group.start + group.length // 2 for group in prompt.groups]
    edges = [edge for group in prompt.groups for edge in (group.start, group.start + group.length)]
    for cuts in [*([cut] for cut in inside[:3]), sorted({*edges, 3}), inside]:
        kv, sequence = PlainKV(), sequence_of(aura, prompt)
        parts = [
            forward(aura, kv, (sequence, start, stop - start))
            for start, stop in zip([0, *cuts], [*cuts, sequence.length], strict=True)
        ]
        torch.testing.assert_close(torch.cat(parts), hidden, atol=CLOSE, rtol=0)


def test_sequences_of_different_delta_do_not_notice_each_other(aura: AuraStage) -> None:
    prompts = [
        aura.prompt(CHAT),
        aura.prompt([user(video(2, 64, 320, seed=3), "wide")]),
        aura.prompt([user("text")], system_prompt="S"),
    ]
    assert len({prompt.delta for prompt in prompts}) == 3
    alone = []
    for prompt in prompts:
        kv, sequence = PlainKV(), sequence_of(aura, prompt)
        alone.append(greedy(aura, kv, sequence, forward(aura, kv, (sequence, 0, sequence.length)), 8))
    kv, sequences = PlainKV(), [sequence_of(aura, prompt) for prompt in prompts]
    # The first is still inside its video when the others are through with theirs.
    cut = prompts[0].groups[1].start + 5
    forward(aura, kv, (sequences[0], 0, cut), *((sequence, 0, sequence.length - 1) for sequence in sequences[1:]))
    parts = [(sequences[0], cut, sequences[0].length - cut), *((s, s.length - 1, 1) for s in sequences[1:])]
    for _ in range(8):
        hidden = forward(aura, kv, *parts)
        ends = torch.tensor([count for _, _, count in parts]).cumsum(0) - 1
        ids = aura.logits(hidden[ends]).argmax(-1)
        for sequence, values in zip(sequences, completed(aura, sequences, hidden[ends], ids), strict=True):
            sequence.tokens.append(aura.heard(sequence, values))
        parts = [(sequence, sequence.length - 1, 1) for sequence in sequences]
    assert [sequence.outputs for sequence in sequences] == alone


class Encoder:
    """Counts the temporal groups that the vision tower is asked for."""

    def __init__(self, aura: AuraStage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups = 0
        tower = aura.network.visual
        original = tower.forward

        def counted(patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
            self.groups += len(patches)
            return original(patches, grid)

        monkeypatch.setattr(tower, "forward", counted)


def test_each_group_is_encoded_once_and_only_when_its_rows_are_due(
    aura: AuraStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder(aura, monkeypatch)
    prompt = aura.prompt(CHAT)
    kv, sequence = PlainKV(), sequence_of(aura, prompt)
    seen, step = [], 13
    for start in range(0, sequence.length, step):
        forward(aura, kv, (sequence, start, min(step, sequence.length - start)))
        seen.append(encoder.groups)
        assert len(sequence.state.features) <= 2
    first = prompt.groups[0].start // step
    assert seen[first - 1 : first + 1] == [0, 1]
    assert seen[-1] == len(prompt.groups) == 4
    assert not sequence.state.features


def test_rows_that_are_cached_never_need_the_encoder(aura: AuraStage, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = aura.prompt(CHAT)
    kv, sequence = PlainKV(), sequence_of(aura, prompt)
    whole = forward(aura, kv, (sequence, 0, sequence.length))
    encoder = Encoder(aura, monkeypatch)
    last = prompt.groups[-1]
    again = forward(aura, kv, (sequence, last.start - 2, sequence.length - last.start + 2))
    assert encoder.groups == 1
    torch.testing.assert_close(again, whole[last.start - 2 :], atol=CLOSE, rtol=0)
    forward(aura, kv, (sequence, sequence.length - 1, 1))
    assert encoder.groups == 1


def test_groups_of_one_size_are_encoded_together(aura: AuraStage, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = aura.network.visual.forward
    monkeypatch.setattr(
        aura.network.visual, "forward", lambda patches, grid: calls.append(len(patches)) or original(patches, grid)
    )
    prompt = aura.prompt([user(video(4, 64, 64), video(2, 64, 64, seed=5), video(2, 64, 96))])
    sequence = sequence_of(aura, prompt)
    forward(aura, PlainKV(), (sequence, 0, sequence.length))
    assert sorted(calls) == [1, 3]


def test_rows_after_a_preemption_are_computed_again_with_the_answer(aura: AuraStage) -> None:
    prompt = aura.prompt(CHAT)
    kv, sequence = PlainKV(), sequence_of(aura, prompt)
    greedy(aura, kv, sequence, forward(aura, kv, (sequence, 0, sequence.length)), 5)
    last = forward(aura, kv, (sequence, sequence.length - 1, 1))
    again = forward(aura, PlainKV(), (sequence, 0, sequence.length))
    torch.testing.assert_close(again[-1:], last, atol=CLOSE, rtol=0)


def test_the_answer_gets_what_room_the_context_has() -> None:
    aura = stage(max_model_len=200)
    prompt = aura.prompt([user("hi")], system_prompt="S")
    assert sequence_of(aura, prompt, max_tokens=50).sampling.max_tokens == 50
    assert sequence_of(aura, prompt, max_tokens=500).sampling.max_tokens == 200 - len(prompt.tokens)


def test_silence_and_the_end_of_the_message_stop_an_answer(aura: AuraStage) -> None:
    sequence = sequence_of(aura, aura.prompt([user("hi")]))
    assert sequence.stop_ids == {aura.controls.silent, aura.controls.im_end, aura.controls.end_of_text}
    reader = aura.reader(Sampling(stop=("!",)))
    assert (
        "".join([reader.push(token) for token in aura.tokenizer.encode("Hi! there")] + [reader.end(chosen=True)])
        == "Hi"
    )


def test_a_written_checkpoint_loads_and_answers_the_same(tmp_path: Path, aura: AuraStage) -> None:
    config = config_json()
    write_checkpoint(tmp_path, config, aura.network)
    loaded = AuraStage.load(Checkpoint(tmp_path, "tiny"), device=CPU, dtype=torch.float32)
    prompt = loaded.prompt(CHAT)
    assert prompt.tokens == aura.prompt(CHAT).tokens
    hidden = [forward(one, PlainKV(), (sequence_of(one, prompt), 0, len(prompt.tokens))) for one in (loaded, aura)]
    assert torch.equal(hidden[0], hidden[1])


def test_bfloat16_weights_give_bfloat16_rows_and_logits(tmp_path: Path) -> None:
    config = config_json()
    write_checkpoint(tmp_path, config, network(config))
    loaded = AuraStage.load(Checkpoint(tmp_path, "tiny"), device=CPU, dtype=torch.bfloat16)
    sequence = sequence_of(loaded, loaded.prompt(CHAT))
    hidden = forward(loaded, PlainKV(), (sequence, 0, sequence.length))
    assert hidden.dtype == torch.bfloat16
    assert loaded.logits(hidden[-1:]).dtype == torch.bfloat16


def test_a_limit_on_video_pixels_makes_frames_smaller(tmp_path: Path) -> None:
    config = config_json()
    write_checkpoint(tmp_path, config, network(config))
    checkpoint = Checkpoint(tmp_path, "tiny")
    loaded = AuraStage.load(checkpoint, device=CPU, dtype=torch.float32, max_video_pixels=602112)
    assert loaded.prompt([user(video(2, 480, 640))]).video_tokens == 266


def test_a_checkpoint_that_cannot_be_silent_is_refused(tmp_path: Path) -> None:
    config = config_json()
    write_checkpoint(tmp_path, config, network(config), added=ADDED[:-1])
    with pytest.raises(CheckpointError, match=r"<\|silent\|>"):
        AuraStage.load(Checkpoint(tmp_path, "tiny"), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", {"model_type": "qwen2_vl"}, "model_type is 'qwen2_vl'"),
        ("config.json", {"vision_config": {}}, "config.json of checkpoint tiny lacks"),
        ("video_preprocessor_config.json", {"resample": 2}, "resample is 2"),
        ("preprocessor_config.json", {"patch_size": 14}, "patch, temporal and merge sizes 14, 2, 2"),
        ("video_preprocessor_config.json", {"size": {}}, "lacks 'shortest_edge'"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    config = config_json()
    write_checkpoint(tmp_path, config, network(config))
    file = tmp_path / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        AuraStage.load(Checkpoint(tmp_path, "tiny"), device=CPU, dtype=torch.float32)
