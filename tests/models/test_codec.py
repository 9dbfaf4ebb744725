"""Code2Wav against the published implementation, and against itself cut into steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aura_omni.engine.loader import Checkpoint
from aura_omni.models.codec import DECODER_LAYOUT, CodecConfig, CodecDecoder
from aura_omni.models.codec_layers import CausalConv
from aura_omni.models.weights import Prepared, from_published, to_published
from tests.models.codec_reference import PUBLISHED, TINY, ours, random_codes, reference, tiny


def prepare(network: torch.nn.Module) -> None:
    for part in network.modules():
        if isinstance(part, Prepared):
            part.prepare()


@pytest.fixture(scope="module")
def pair() -> tuple[torch.nn.Module, CodecDecoder]:
    theirs = reference(TINY)
    return theirs, ours(TINY, theirs)[0]


@pytest.fixture(scope="module")
def decoder() -> CodecDecoder:
    return tiny()[0]


@pytest.fixture(scope="module")
def exact() -> CodecDecoder:
    """In float64, where any difference that is not rounding shows."""
    network = tiny()[0].double()
    prepare(network)
    return network


def stream(decoder: CodecDecoder, codes: torch.Tensor, frames: int) -> torch.Tensor:
    state, slots = decoder.new_state(1), torch.tensor([0])
    steps = [decoder.step(part, state, slots) for part in codes.split(frames, dim=1)]
    return torch.cat(steps, dim=1)


@pytest.mark.reference
@pytest.mark.parametrize("frames", [1, 2, 73, 300])
def test_samples_are_those_of_the_published_decoder(pair: tuple[torch.nn.Module, CodecDecoder], frames: int) -> None:
    theirs, mine = pair
    codes = random_codes(frames, batch=2, seed=frames)
    expected = torch.stack(theirs.decode(codes, return_dict=True).audio_values)
    samples = mine.whole(codes)
    assert samples.shape == (2, frames * 1920)
    assert samples.dtype == torch.float32
    assert 0.05 < samples.std() < 0.5  # neither silent nor clipped, or the comparison would say little
    torch.testing.assert_close(samples, expected, rtol=0, atol=1e-5)


@pytest.mark.reference
def test_streamed_samples_beyond_the_windows_are_those_of_the_published_decoder(
    pair: tuple[torch.nn.Module, CodecDecoder],
) -> None:
    # Not `decode`, which cuts at 300 frames and repeats 25: the decoder itself, over all frames at once.
    theirs, mine = pair
    codes = random_codes(340, seed=1)
    expected = theirs.decoder(codes.transpose(1, 2))[:, 0]
    torch.testing.assert_close(stream(mine, codes, 7), expected, rtol=0, atol=1e-5)


@pytest.mark.reference
def test_published_dimensions_match_the_published_decoder() -> None:
    theirs = reference(PUBLISHED)
    mine, _ = ours(PUBLISHED, theirs)
    codes = random_codes(4)
    expected = theirs.decode(codes, return_dict=True).audio_values[0]
    assert 0.05 < expected.std() < 0.5
    torch.testing.assert_close(mine.whole(codes)[0], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(stream(mine, codes, 1)[0], expected, rtol=0, atol=1e-5)


def test_convolutions_as_products_are_the_same(exact: CodecDecoder) -> None:
    """As products of windows on CUDA, as images elsewhere."""
    convolutions = [part for part in exact.modules() if isinstance(part, CausalConv) and part.conv.kernel_size != (1,)]
    assert {part.conv.dilation for part in convolutions} >= {(1,), (3,), (9,)}
    random = torch.Generator().manual_seed(0)
    for part in convolutions:
        reach = (part.conv.kernel_size[0] - 1) * part.conv.dilation[0]
        seen = torch.randn(2, reach + 11, part.conv.in_channels, generator=random, dtype=torch.float64)
        torch.testing.assert_close(part.as_product(seen), part.as_image(seen), rtol=0, atol=1e-12)


@pytest.mark.parametrize("frames", [1, 2, 7, 25])
def test_streamed_audio_equals_whole_audio(decoder: CodecDecoder, exact: CodecDecoder, frames: int) -> None:
    codes = random_codes(160, batch=1, seed=2)
    torch.testing.assert_close(stream(decoder, codes, frames), decoder.whole(codes), rtol=0, atol=1e-5)
    torch.testing.assert_close(stream(exact, codes, frames), exact.whole(codes), rtol=0, atol=1e-12)


def test_streams_of_any_age_in_one_step_sound_as_alone(exact: CodecDecoder) -> None:
    codes = random_codes(100, batch=4, seed=3)
    alone = exact.whole(codes)
    state = exact.new_state(6)
    place = [5, 0, 3, 2]
    ages = [0, 1, 37, 90]
    for row, age in enumerate(ages):
        if age:
            exact.step(codes[row : row + 1, :age], state, torch.tensor([place[row]]))
    together = exact.step(
        torch.stack([codes[row, age : age + 10] for row, age in enumerate(ages)]), state, torch.tensor(place)
    )
    for row, age in enumerate(ages):
        expected = alone[row, age * 1920 : (age + 10) * 1920]
        torch.testing.assert_close(together[row], expected, rtol=0, atol=1e-12)
    assert state.frames.tolist() == [11, 0, 100, 47, 0, 10]
    assert not state.rows[[1, 4]].any()


def test_a_frame_changes_no_earlier_sample(exact: CodecDecoder) -> None:
    codes = random_codes(20, seed=4)
    changed = codes.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 2048
    before, after = exact.whole(codes)[0], exact.whole(changed)[0]
    assert torch.equal(before[: 12 * 1920], after[: 12 * 1920])
    assert not torch.equal(before[12 * 1920 : 12 * 1920 + 100], after[12 * 1920 : 12 * 1920 + 100])


@pytest.mark.parametrize("frames", [1, 9, 10, 11, 80])
def test_a_primed_stream_goes_on_as_if_it_had_decoded(exact: CodecDecoder, frames: int) -> None:
    codes = random_codes(frames + 12, batch=2, seed=5)
    state, slots = exact.new_state(2), torch.tensor([0, 1])
    exact.prime(codes[:, :frames], state, slots)
    rest = exact.step(codes[:, frames:], state, slots)
    torch.testing.assert_close(rest, exact.whole(codes)[:, frames * 1920 :], rtol=0, atol=1e-12)


def test_memory_frames_is_the_least_that_will_do(exact: CodecDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, slots = random_codes(30, seed=6), torch.tensor([0])
    full, short = exact.new_state(1), exact.new_state(1)
    exact.step(codes, full, slots)
    fewer = exact.memory_frames - 1
    monkeypatch.setattr(CodecDecoder, "memory_frames", property(lambda _: fewer))
    exact.prime(codes, short, slots)
    assert fewer == 9
    assert (full.rows - short.rows).abs().max() > 1e-6


def test_a_snapshot_continues_in_any_slot_and_any_number_of_times(decoder: CodecDecoder) -> None:
    codes = random_codes(30, seed=7)
    state = decoder.new_state(3)
    decoder.step(codes[:, :20], state, torch.tensor([1]))
    snapshot = state.snapshot(1)
    first = decoder.step(codes[:, 20:], state, torch.tensor([1]))
    for slot in (2, 0):
        state.restore(slot, snapshot)
        assert torch.equal(decoder.step(codes[:, 20:], state, torch.tensor([slot])), first)


def test_a_cleared_slot_is_a_new_stream(decoder: CodecDecoder) -> None:
    codes = random_codes(90, seed=8)
    state, slots = decoder.new_state(2), torch.tensor([1])
    decoder.step(codes, state, slots)
    state.clear(1)
    assert torch.equal(decoder.step(codes[:, :3], state, slots), decoder.whole(codes[:, :3]))


def test_state_of_a_stream_is_2_6_megabytes_at_published_dimensions() -> None:
    with torch.device("meta"):
        network = CodecDecoder(CodecConfig.from_json(PUBLISHED))
    assert network.state_bytes(torch.bfloat16) == 1_298_496 * 2 + 8
    assert network.memory_frames == 10


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_act", "gelu"), ("num_key_value_heads", 2), ("attention_bias", True), ("rope_scaling", {"type": "yarn"})],
)
def test_an_architecture_that_changes_the_maths_is_refused_by_name(name: str, value: object) -> None:
    config = {**TINY, "decoder_config": {**TINY["decoder_config"], name: value}}
    with pytest.raises(ValueError, match=name):
        CodecConfig.from_json(config)


def test_a_missing_field_is_named() -> None:
    part = {name: value for name, value in TINY["decoder_config"].items() if name != "head_dim"}
    with pytest.raises(KeyError, match="head_dim"):
        CodecConfig.from_json({**TINY, "decoder_config": part})


def test_rates_that_do_not_multiply_to_the_stated_one_are_refused() -> None:
    with pytest.raises(ValueError, match="decode_upsample_rate is 1920; only 960"):
        CodecConfig.from_json({**TINY, "decoder_config": {**TINY["decoder_config"], "upsampling_ratios": [2, 1]}})


def test_published_names_survive_a_round_trip(decoder: CodecDecoder) -> None:
    other = CodecDecoder(CodecConfig.from_json(TINY))
    from_published(other, DECODER_LAYOUT, to_published(decoder, DECODER_LAYOUT))
    codes = random_codes(3)
    assert torch.equal(other.whole(codes), decoder.whole(codes))


@pytest.mark.reference
def test_a_published_file_loads_without_missing_or_unused_tensors(
    pair: tuple[torch.nn.Module, CodecDecoder], tmp_path: Path
) -> None:
    theirs, mine = pair
    save_file({name: value.contiguous() for name, value in theirs.state_dict().items()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        network = CodecDecoder(CodecConfig.from_json(TINY))
    checkpoint = Checkpoint.find(str(tmp_path))
    checkpoint.load(network, DECODER_LAYOUT, device=torch.device("cpu"), dtype=torch.float32, own="decoder.")
    codes = random_codes(3)
    assert torch.equal(network.whole(codes), mine.whole(codes))
