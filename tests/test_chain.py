"""The whole chain, from a real recording and a real clip to sound, against the public packages joined by hand.

Greedy everywhere, on checkpoints of random weights in the published file layout: the same tokens, the same frames, the same
sound. Reference and server share nothing but the files and the decoded media.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoFeatureExtractor, AutoTokenizer, Qwen2Tokenizer

from aura_omni.config import Options, load
from aura_omni.engine.sequence import Sequence
from aura_omni.flow import FRAME_SAMPLES, AudioChunk, Message, Text, TurnRequest, Video, Voice
from aura_omni.media.video import decode_video, video_of
from aura_omni.nano.random_family import write_family
from aura_omni.pipeline import Pipeline
from tests.family import DATA, Listener, recording, running
from tests.reference_chain import Ears, Line, Mind, Mouth, Said, Spoken, read
from tests.reference_package import import_qwen_tts

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore::UserWarning")]

SEED = 27  # of those tried the first whose models hear several pieces and stop of themselves, not at once
TOKENS, FRAMES = 24, 40
CLOSE = 1e-4


# ---------------------------------------------------------------- weights


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    write_family(folder, seed=SEED)
    for home in (folder / "asr", *folder.glob("tts_*")):
        (home / "tokenizer.json").unlink()  # published are only vocab.json and merges.txt
    tokenizer = Qwen2Tokenizer.from_pretrained(folder / "aura")
    added = set(tokenizer.get_added_vocab().values())
    pieces = {token: tokenizer.decode([token]) for token in range(len(tokenizer)) if token not in added}
    unreadable = [token for token, text in pieces.items() if not (text.isascii() and text.isprintable())]

    def hearing(weights: dict[str, torch.Tensor]) -> None:
        # A tied head repeats what it reads, unless the layers outweigh the embedding.
        embedding = weights["thinker.model.embed_tokens.weight"]
        embedding *= 0.02
        embedding[unreadable] = 0

    def thinking(weights: dict[str, torch.Tensor]) -> None:
        head, end = weights["lm_head.weight"], tokenizer.convert_tokens_to_ids("<|im_end|>")
        loud = 2.2 * head[end]
        head[unreadable], head[len(pieces) :] = 0, 0
        head[end] = loud

    def speaking(weights: dict[str, torch.Tensor]) -> None:
        weights["talker.codec_head.weight"][2150] *= 2.3

    def sounding(weights: dict[str, torch.Tensor]) -> None:
        # Large arguments of its sines would amplify the rounding of float32, the reference's own too, to some 4e-5.
        for name, value in weights.items():
            if name.startswith("decoder.decoder.") and ".conv2." in name:
                value *= 0.3
        weights["decoder.decoder.6.conv.weight"] *= 5

    _change(folder / "asr", hearing)
    _change(folder / "aura", thinking)
    for home in folder.glob("tts_*"):
        _change(home, speaking)
        _change(home / "speech_tokenizer", sounding)
    return folder


def _change(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


# ---------------------------------------------------------------- ours


CHAIN = """
pipeline: aura_omni
speech: {{normalize: false}}
dtype: float32
connectors:
  memory: {{name: SharedMemoryConnector, extra: {{initial_codec_chunk_frames: {first}, codec_chunk_frames: {frames}}}}}
stages:
  - {{stage_id: 0, model: {asr}, gpu_memory_utilization: 0.1, max_num_batched_tokens: 64,
     default_sampling_params: {{temperature: 0.0, max_tokens: {tokens}}}}}
  - {{stage_id: 1, model: {aura}, gpu_memory_utilization: 0.2, max_num_batched_tokens: 700, max_model_len: 8192,
     default_sampling_params: {{temperature: 0.0, max_tokens: {tokens}}}}}
  - {{stage_id: 2, model: {tts}, gpu_memory_utilization: 0.1, max_model_len: 1024, output_connectors: {{to_stage_3: memory}},
     default_sampling_params: {{temperature: 0.0, max_tokens: {budget}}}, subtalker_sampling_params: {{do_sample: false}}}}
  - {{stage_id: 3, model: {tts}, gpu_memory_utilization: 0.1}}
"""
SPEECH = """
pipeline: qwen3_tts
speech: {{normalize: false}}
dtype: float32
stages:
  - {{stage_id: 0, model: {tts}, max_model_len: 1024, max_num_batched_tokens: 100,
     default_sampling_params: {{temperature: 0.0, max_tokens: {budget}}}, subtalker_sampling_params: {{do_sample: false}}}}
  - {{stage_id: 1, model: {tts}}}
"""


@dataclass
class Watched:
    """A pipeline, the sequences that its stages were asked for, and the logits that these were drawn from."""

    pipeline: Pipeline
    sequences: dict[str, list[Sequence]]
    logits: dict[str, list[torch.Tensor]]

    def ask(self, *requests: TurnRequest) -> list[Listener]:
        """All at once."""
        for noted in (*self.sequences.values(), *self.logits.values()):
            noted.clear()
        listeners = [Listener() for _ in requests]
        for request, listener in zip(requests, listeners, strict=True):
            self.pipeline.submit(request, listener)
        return [listener.wait() for listener in listeners]

    @property
    def frames(self) -> np.ndarray:
        """int64 [n, 16] of the one sequence of the Talker."""
        (sequence,) = self.sequences["talker"]
        return np.stack(sequence.state.frames)


@contextmanager
def served(folder: Path, deploy: str, **fields: Any) -> Iterator[Watched]:
    file = folder / "deploy.yaml"
    file.write_text(deploy.format(tokens=TOKENS, budget=FRAMES, **fields))
    with running(load(Options(deploy_config=str(file)), environ={}, platform="cpu")) as pipeline:
        speech = pipeline.parts.speech
        assert speech is not None
        watched = Watched(pipeline, {}, {})
        for name, stage in (("asr", pipeline.parts.asr), ("aura", pipeline.parts.aura), ("talker", speech.talker)):
            if stage is not None:
                watched.sequences[name], watched.logits[name] = [], []
                stage.sequence = partial(_noted, stage.sequence, watched.sequences[name])
                stage.logits = partial(_noted, stage.logits, watched.logits[name])
        yield watched


def _noted(make: Callable[..., Any], made: list[Any], *arguments: Any, **options: Any) -> Any:
    made.append(make(*arguments, **options))
    return made[-1]


@contextmanager
def chain(folder: Path, family: Path, *, first: int, frames: int) -> Iterator[Watched]:
    homes = {"asr": family / "asr", "aura": family / "aura", "tts": family / "tts_custom_voice"}
    with served(folder, CHAIN, first=first, frames=frames, **homes) as watched:
        yield watched


@pytest.fixture(scope="module")
def ours(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with chain(tmp_path_factory.mktemp("ours"), family, first=8, frames=25) as watched:
        yield watched


# ---------------------------------------------------------------- what is asked, and what the references say to it


@pytest.fixture(scope="module")
def clip() -> Video:
    return decode_video((DATA / "bikes.mp4").read_bytes(), max_frames=128, max_pixels=10**7)


@dataclass(frozen=True)
class Theirs:
    heard: Said
    said: Said
    spoken: Spoken


@dataclass(frozen=True)
class References:
    ears: Ears
    mind: Mind
    mouth: Mouth

    def answer(self, lines: list[Line], *, bias: dict[int, float] | None = None, **voice: Any) -> Theirs:
        """The recording is what is said in the last of lines."""
        heard = self.ears.hear(recording().samples, max_tokens=TOKENS)
        lines = [*lines[:-1], replace(lines[-1], text="\n".join(filter(None, (heard.text, lines[-1].text))))]
        said = self.mind.answer(lines, max_tokens=TOKENS, bias=bias)
        return Theirs(heard, said, self.mouth.speak(said.text, frames=FRAMES, **voice))


@pytest.fixture(scope="module")
def references(family: Path) -> References:
    return References(Ears(family / "asr"), Mind(family / "aura"), Mouth(family / "tts_custom_voice"))


@pytest.fixture(scope="module")
def one_round(references: References, clip: Video) -> tuple[TurnRequest, Theirs]:
    request = TurnRequest(
        (Message("user", (recording(), clip)),), voice=Voice(speaker="Ryan", language="English", non_streaming=True)
    )
    line = Line("user", "", clip.frames, clip.times_s)
    return request, references.answer([line], speaker="Ryan", language="English")


@pytest.fixture(scope="module")
def two_rounds(references: References, clip: Video) -> tuple[TurnRequest, Theirs]:
    """The clip's two halves with a silent round between them, a written word beside the spoken ones, an answer that may not end."""
    before, after = (_part(clip, 0, 10), _part(clip, 10, 18))
    end = references.mind.tokenizer.convert_tokens_to_ids("<|im_end|>")
    request = TurnRequest(
        (
            Message("user", (before, Text("watch"))),
            Message("assistant", (Text("<|silent|>"),)),
            Message("user", (after, recording(), Text("now"))),
        ),
        voice=Voice(speaker="eric", instruct="Slowly.", non_streaming=False),
        sampling={"aura": {"logit_bias": {end: -100.0}}},
    )
    lines = [
        Line("user", "watch", before.frames, before.times_s),
        Line("assistant", "<|silent|>"),
        Line("user", "now", after.frames, after.times_s),
    ]
    voice = {"speaker": "eric", "instruct": "Slowly.", "non_streaming_mode": False}
    return request, references.answer(lines, bias={end: -100.0}, **voice)


def _part(clip: Video, first: int, stop: int) -> Video:
    times_s = tuple(time_s - clip.times_s[first] for time_s in clip.times_s[first:stop])
    return video_of(clip.frames[first:stop], times_s, fps=clip.fps)


# ---------------------------------------------------------------- claims


@pytest.mark.parametrize("case", ["one_round", "two_rounds"])
def test_the_chain_equals_the_chain_of_the_references(case: str, ours: Watched, request: pytest.FixtureRequest) -> None:
    asked, theirs = request.getfixturevalue(case)
    [listener] = ours.ask(asked)
    assert listener.heard == [theirs.heard.text]
    assert listener.text == theirs.said.text
    for stage, reference in (("asr", theirs.heard), ("aura", theirs.said)):
        [sequence] = ours.sequences[stage]
        assert sequence.tokens == reference.prompt + reference.ids
        logits = torch.cat(ours.logits[stage]).cpu()
        torch.testing.assert_close(logits, reference.logits, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(ours.frames, theirs.spoken.frames)
    np.testing.assert_allclose(listener.samples, theirs.spoken.samples, rtol=0, atol=CLOSE)

    # What makes the above worth something: no stage says nothing, or one thing over and over.
    assert len(set(theirs.heard.ids)) >= 3
    assert len(set(theirs.said.ids)) >= 4
    assert len({tuple(frame) for frame in theirs.spoken.frames}) >= 12
    assert np.abs(theirs.spoken.samples).max() > 0.1
    ends = {"one_round": ("stop", "stop"), "two_rounds": ("length", "length")}
    assert (listener.end.reason, listener.end.speech_reason) == ends[case]


def test_chunks_and_company_change_no_sample(
    family: Path,
    tmp_path: Path,
    ours: Watched,
    one_round: tuple[TurnRequest, Theirs],
    two_rounds: tuple[TurnRequest, Theirs],
) -> None:
    cases = (one_round, two_rounds)
    alone = [ours.ask(asked)[0] for asked, _ in cases]
    assert _chunks(alone[1])[0] == 8
    assert max(_chunks(alone[1])) > 1  # how large the later ones are depends on the clock
    assert sum(_chunks(alone[1])) == FRAMES
    with chain(tmp_path, family, first=1, frames=1) as frame_by_frame:
        together = frame_by_frame.ask(*(asked for asked, _ in cases))
    for one, other, (_, theirs) in zip(alone, together, cases, strict=True):
        assert set(_chunks(other)) == {1}
        assert other.text == one.text == theirs.said.text
        np.testing.assert_allclose(other.samples, one.samples, rtol=0, atol=1e-5)
        np.testing.assert_allclose(other.samples, theirs.spoken.samples, rtol=0, atol=CLOSE)


def _chunks(listener: Listener) -> list[int]:
    return [len(event.samples) // FRAME_SAMPLES for event in listener.events if isinstance(event, AudioChunk)]


def test_token_ids_passed_on_are_spoken_as_the_reference_speaks_ids(
    ours: Watched, references: References, one_round: tuple[TurnRequest, Theirs]
) -> None:
    """An answer of single letters, which its text, encoded anew, would melt into longer pieces."""
    tokenizer = references.mind.tokenizer
    letters = {tokenizer.convert_tokens_to_ids(letter): 100.0 for letter in "userlang"}
    asked = replace(one_round[0], sampling={"aura": {"logit_bias": letters}})
    voice = {"speaker": "Ryan", "language": "English"}

    [written] = ours.ask(asked)
    ids = ours.sequences["aura"][-1].outputs
    from_text = list(ours.frames)
    assert ids != tokenizer(written.text, add_special_tokens=False)["input_ids"]
    theirs = references.mouth.speak(written.text, frames=FRAMES, **voice)
    np.testing.assert_array_equal(from_text, theirs.frames)

    [passed] = ours.ask(replace(asked, voice=replace(asked.voice, pass_token_ids=True)))
    assert passed.text == written.text
    theirs = references.mouth.speak_ids(ids, frames=FRAMES, **voice)
    np.testing.assert_array_equal(ours.frames, theirs.frames)
    np.testing.assert_allclose(passed.samples, theirs.samples, rtol=0, atol=CLOSE)
    assert not np.array_equal(from_text, ours.frames)


def test_token_ids_sound_like_their_text_where_both_tokenizers_cut_it_alike(
    ours: Watched, references: References, one_round: tuple[TurnRequest, Theirs]
) -> None:
    # Digits never melt into longer pieces, whatever their order.
    digits = {references.mind.tokenizer.convert_tokens_to_ids(digit): 100.0 for digit in "0123456789"}
    asked = replace(one_round[0], sampling={"aura": {"logit_bias": digits}})
    [text] = ours.ask(asked)
    [ids] = ours.ask(replace(asked, voice=replace(asked.voice, pass_token_ids=True)))
    assert ids.text == text.text
    assert text.text.isdigit()
    assert len(text.text) == TOKENS
    assert len(text.samples) >= 2 * FRAME_SAMPLES
    np.testing.assert_allclose(ids.samples, text.samples, rtol=0, atol=1e-5)


REFERENCE_TEXT = "It was the best of times."
VOICES: dict[str, tuple[str, Voice, dict[str, Any]]] = {
    "a recording continued": (
        "tts_base",
        Voice(ref_text=REFERENCE_TEXT, language="English"),
        {"ref_text": REFERENCE_TEXT, "language": "English"},
    ),
    "a recording's sound alone": ("tts_base", Voice(x_vector_only=True), {"x_vector_only_mode": True}),
    "a voice described": (
        "tts_voice_design",
        Voice(instruct="An old man, far away", language="German"),
        {"instruct": "An old man, far away", "language": "German"},
    ),
}


@pytest.mark.parametrize("case", VOICES)
def test_text_to_sound_equals_the_reference(case: str, family: Path, tmp_path: Path) -> None:
    name, voice, options = VOICES[case]
    if name == "tts_base":
        voice = replace(voice, ref_audio=recording())
        options = {**options, "ref_audio": (recording().samples, recording().rate)}
    text = "I see a red circle, and the blue one moves."
    spoken = Mouth(family / name).speak(text, frames=FRAMES, **options)
    with served(tmp_path, SPEECH, tts=family / name) as watched:
        [listener] = watched.ask(TurnRequest((Message("user", (Text(text),)),), voice=voice))
        np.testing.assert_array_equal(watched.frames, spoken.frames)
    np.testing.assert_allclose(listener.samples, spoken.samples, rtol=0, atol=CLOSE)
    assert len({tuple(frame) for frame in spoken.frames}) >= 12


def test_the_files_are_what_the_public_packages_load(family: Path, references: References) -> None:
    """Every tensor that they want, none that they do not know, and the values."""
    models = {family / "aura": references.mind.model}
    for home in sorted(family.glob("tts_*")):
        models[home] = import_qwen_tts().Qwen3TTSModel.from_pretrained(str(home)).model
        models[home / "speech_tokenizer"] = models[home].speech_tokenizer.model
    for home, model in models.items():
        files, loaded = load_file(home / "model.safetensors"), model.state_dict()
        assert set(files) == set(loaded), home
        for name, value in files.items():
            assert torch.equal(value, loaded[name]), (home, name)
    for home in (family / "asr", family / "aura", *family.glob("tts_*")):
        tokenizer = AutoTokenizer.from_pretrained(home)
        for number, token in read(home / "tokenizer_config.json")["added_tokens_decoder"].items():
            assert tokenizer(token["content"])["input_ids"] == [int(number)]
    hearing = AutoFeatureExtractor.from_pretrained(family / "asr")
    assert (type(hearing).__name__, hearing.feature_size, hearing.n_fft) == ("WhisperFeatureExtractor", 128, 400)
