"""The Code2Wav stage: many streams, each sounding as it would alone, and nothing left behind."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.sequence import FinishReason
from aura_omni.errors import CheckpointError, CodeOutOfRange, EngineError, Overloaded
from aura_omni.models.codec import DECODER_LAYOUT, CodecDecoder
from aura_omni.models.codec_encoder import ENCODER_LAYOUT
from aura_omni.models.codec_state import CodecState
from aura_omni.models.weights import to_published
from aura_omni.stages.vocoder import Reference, Stream, VocoderRunner, load
from tests.models.codec_reference import TINY, random_codes, tiny
from tests.replayed import without_cuda
from tests.slow_lane import SlowLane


@pytest.fixture(scope="module")
def decoder() -> CodecDecoder:
    return tiny()[0]


@dataclass
class Listener:
    """What one stream was told, and what was true when it was told."""

    runner: VocoderRunner
    chunks: list[np.ndarray] = field(default_factory=list)
    ends: list[tuple[FinishReason, Exception | None]] = field(default_factory=list)
    slots_at_end: int = -1

    def on_audio(self, samples: np.ndarray) -> None:
        assert not self.ends, "audio after the end"
        assert samples.dtype == np.float32
        self.chunks.append(samples)

    def on_end(self, reason: FinishReason, error: Exception | None) -> None:
        self.ends.append((reason, error))
        self.slots_at_end = self.runner.slots_used

    @property
    def samples(self) -> np.ndarray:
        return np.concatenate(self.chunks) if self.chunks else np.zeros(0, np.float32)


def start(runner: VocoderRunner, reference: Reference | None = None) -> tuple[Stream, Listener]:
    listener = Listener(runner)
    return runner.open(listener.on_audio, listener.on_end, reference=reference), listener


def drain(runner: VocoderRunner) -> int:
    """Step until there is no work; returns the number of steps that did some."""
    steps = 0
    while runner.step():
        runner.check_integrity()
        steps += 1
        assert steps < 10_000
    return steps


def codes_of(frames: int, seed: int) -> np.ndarray:
    return random_codes(frames, seed=seed)[0].numpy()


def whole(decoder: CodecDecoder, codes: np.ndarray) -> np.ndarray:
    return decoder.whole(torch.from_numpy(codes)[None])[0].numpy()


def test_one_stream_is_its_whole_audio_then_one_end(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=2)
    stream, heard = start(runner)
    codes = codes_of(45, seed=1)
    runner.push(stream, codes)
    runner.close(stream)
    drain(runner)
    assert [len(chunk) // 1920 for chunk in heard.chunks] == [45]  # what was pushed together
    np.testing.assert_allclose(heard.samples, whole(decoder, codes), atol=1e-5)
    assert heard.ends == [("stop", None)]
    assert heard.slots_at_end == runner.slots_used == 0
    assert not runner.step()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.data())
def test_frames_that_are_computed_alone_sound_the_same_to_the_last_bit(
    decoder: CodecDecoder, sizes: list[int], data: st.DataObject
) -> None:
    """However they are pushed, and whoever else speaks."""
    codes = codes_of(sum(sizes), seed=11)

    def spoken(cuts: list[int], *, company: bool) -> np.ndarray:
        runner = VocoderRunner(decoder, max_num_seqs=2, alone=True)
        stream, heard = start(runner)
        other, _ = start(runner)
        for chunk in np.split(codes, np.cumsum(cuts)[:-1]):
            runner.push(stream, chunk)
            if company:
                runner.push(other, chunk[::-1])
            for _ in range(data.draw(st.integers(0, 3), "steps")):
                runner.step()
        runner.close(stream)
        drain(runner)
        assert [len(chunk) // 1920 for chunk in heard.chunks] == cuts
        return heard.samples

    np.testing.assert_array_equal(spoken(sizes, company=True), spoken([sum(sizes)], company=False))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.data())
def test_no_cut_and_no_company_changes_the_sound(decoder: CodecDecoder, sizes: list[int], data: st.DataObject) -> None:
    """Chunks of any size, with steps between them or not, beside another stream or not."""
    runner = VocoderRunner(decoder, max_num_seqs=2)
    codes = codes_of(sum(sizes), seed=11)
    stream, heard = start(runner)
    other, _ = start(runner)
    for chunk in np.split(codes, np.cumsum(sizes)[:-1]):
        runner.push(stream, chunk)
        if data.draw(st.booleans(), "company"):
            runner.push(other, chunk)
        for _ in range(data.draw(st.integers(0, 3), "steps")):
            runner.step()
    runner.close(stream)
    drain(runner)
    np.testing.assert_allclose(heard.samples, whole(decoder, codes), atol=1e-5)
    assert heard.ends == [("stop", None)]


def test_the_first_frame_becomes_audio_at_once(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=2)
    stream, heard = start(runner)
    assert not runner.step()
    runner.push(stream, [codes_of(1, seed=2)[0].tolist()])
    assert runner.step()
    assert len(heard.samples) == 1920
    assert not heard.ends


@pytest.mark.parametrize("graphs", [False, True])
def test_forty_streams_through_eight_slots_each_sound_as_alone(
    decoder: CodecDecoder, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = without_cuda(monkeypatch)
    runner = VocoderRunner(decoder, max_num_seqs=8, max_waiting=32, graphs=graphs)
    captured = len(recorded)
    random = np.random.default_rng(0)
    codes = [codes_of(int(random.integers(1, 30)), seed=n) for n in range(40)]
    opened = [start(runner) for _ in codes]
    sent = [0] * len(codes)
    busiest = 0
    while any(not heard.ends for _, heard in opened):
        for n, (stream, _) in enumerate(opened):
            few = int(random.integers(0, 4))
            if stream.closing:
                continue
            runner.push(stream, codes[n][sent[n] : sent[n] + few])
            sent[n] += few
            if sent[n] >= len(codes[n]):
                runner.close(stream)
        runner.step()
        runner.check_integrity()
        busiest = max(busiest, runner.slots_used)
    assert busiest == 8
    assert len(recorded) == captured == (20 if graphs else 0)
    assert runner.slots_used == 0
    for (_, heard), frames in zip(opened, codes, strict=True):
        assert heard.ends == [("stop", None)]
        np.testing.assert_allclose(heard.samples, whole(decoder, frames), atol=1e-5)


def test_every_group_that_there_can_be_has_its_graph(decoder: CodecDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = without_cuda(monkeypatch)
    runner = VocoderRunner(decoder, max_num_seqs=5, max_step_frames=20, graphs=True)
    captured = len(recorded)
    for frames in (1, 2, 4, 8, 16):
        for streams in range(1, 6):
            opened = [start(runner) for _ in range(streams)]
            for number, (stream, _) in enumerate(opened):
                runner.push(stream, codes_of(frames, seed=number))
                runner.close(stream)
            drain(runner)
            for number, (_, heard) in enumerate(opened):
                np.testing.assert_allclose(heard.samples, whole(decoder, codes_of(frames, seed=number)), atol=1e-5)
    assert len(recorded) == captured


def test_streams_of_equal_backlog_share_a_step(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=4)
    for seed in range(4):
        stream, _ = start(runner)
        runner.push(stream, codes_of(4, seed=seed))
    assert drain(runner) == 1


def test_a_step_is_bounded_in_frames(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=4, max_step_frames=8)
    for seed in range(4):
        stream, _ = start(runner)
        runner.push(stream, codes_of(4, seed=seed))
    assert drain(runner) == 2


def test_first_audio_goes_before_the_backlog_of_others(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=4)
    busy, _ = start(runner)
    runner.push(busy, codes_of(1, seed=0))
    runner.step()
    runner.push(busy, codes_of(32, seed=1))
    late, heard = start(runner)
    runner.push(late, codes_of(1, seed=2))
    runner.step()
    assert len(heard.samples) == 1920
    assert len(busy.pending) == 32


def test_only_a_first_chunk_under_way_is_awaited(decoder: CodecDecoder) -> None:
    lane = SlowLane()
    runner = VocoderRunner(decoder, max_num_seqs=4, lane=lane)
    stream, _ = start(runner)
    runner.push(stream, codes_of(1, seed=0))
    assert not runner.awaited
    for due_s, first in ((None, True), (5.0, False)):
        if due_s is not None:
            runner.push(stream, codes_of(1, seed=1), due_s=due_s)
        runner.step()
        assert (runner.flying, runner.awaited) == (True, first)
        lane.arrive()
        runner.step()
    assert not runner.awaited


def test_whose_listener_runs_out_first_is_decoded_first(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=4)
    streams = [start(runner) for _ in range(3)]
    for number, (stream, _) in enumerate(streams):
        runner.push(stream, codes_of(1, seed=number))
    runner.step()
    for (stream, _), frames, due_s in zip(streams, (1, 2, 4), (30.0, 20.0, 10.0), strict=True):
        runner.push(stream, codes_of(frames, seed=frames), due_s=due_s)
    late, late_heard = start(runner)
    runner.push(late, codes_of(8, seed=8))
    order = []
    for heard in (late_heard, *(listener for _, listener in reversed(streams))):
        before = len(heard.chunks)
        runner.step()
        order.append(len(heard.chunks) - before)
    assert order == [1, 1, 1, 1], "first audio, then by the time at which silence would begin"


def test_where_frames_are_computed_alone_a_step_makes_all_of_a_chunk(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=2, alone=True)
    stream, heard = start(runner)
    runner.push(stream, codes_of(5, seed=0))
    runner.push(stream, codes_of(3, seed=1))
    assert runner.busy
    runner.step()
    assert [len(chunk) // 1920 for chunk in heard.chunks] == [5]
    assert runner.busy
    runner.step()
    assert [len(chunk) // 1920 for chunk in heard.chunks] == [5, 3]
    assert not runner.busy


def test_a_long_backlog_does_not_starve_a_stream_with_little(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=2)
    behind, _ = start(runner)
    live, heard = start(runner)
    for stream in (behind, live):
        runner.push(stream, codes_of(1, seed=0))
    runner.step()
    runner.push(behind, codes_of(96, seed=1))
    runner.push(live, codes_of(1, seed=2))
    runner.step()
    runner.step()
    assert len(heard.samples) == 2 * 1920


def test_abort_midway_leaves_no_slot_and_the_slot_is_clean_for_the_next(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=1)
    stream, heard = start(runner)
    runner.push(stream, codes_of(80, seed=3))
    runner.step()
    runner.abort(stream)
    runner.abort(stream)
    assert heard.ends == [("cancelled", None)]
    assert heard.slots_at_end == 0
    runner.push(stream, codes_of(2, seed=3))
    assert not runner.step()
    following, next_heard = start(runner)
    codes = codes_of(3, seed=4)
    runner.push(following, codes)
    runner.close(following)
    drain(runner)
    np.testing.assert_allclose(next_heard.samples, whole(decoder, codes), atol=1e-5)


def test_a_stream_may_abort_itself_and_others_while_it_is_told_of_audio(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=3)
    other, other_heard = start(runner)  # comes later in the batch, because it waited less
    third, third_heard = start(runner)

    def on_audio(_: np.ndarray) -> None:
        runner.abort(own)
        runner.abort(other)

    ends: list[FinishReason] = []
    own = runner.open(on_audio, lambda reason, _: ends.append(reason))
    for stream, seed in ((other, 0), (third, 1)):
        runner.push(stream, codes_of(1, seed=seed))
    runner.step()
    for stream, seed in ((own, 2), (other, 3), (third, 4)):
        runner.push(stream, codes_of(2, seed=seed))
    runner.step()
    assert ends == ["cancelled"]
    assert other_heard.ends == [("cancelled", None)]
    assert len(other_heard.samples) == 1920
    assert len(third_heard.samples) == 3 * 1920
    runner.check_integrity()
    assert runner.slots_used == 1


@pytest.mark.parametrize("code", [-1, 2048, 2150])
def test_a_code_that_does_not_exist_ends_its_stream_alone_and_is_named(decoder: CodecDecoder, code: int) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=2)
    bad, bad_heard = start(runner)
    good, good_heard = start(runner)
    codes = codes_of(3, seed=5)
    runner.push(good, codes)
    runner.close(good)
    runner.push(bad, codes[:2])
    wrong = codes[2:].copy()
    wrong[0, 7] = code
    runner.push(bad, wrong)
    runner.close(bad)
    drain(runner)
    [(reason, error)] = bad_heard.ends
    assert reason == "error"
    assert isinstance(error, CodeOutOfRange)
    assert str(error) == f"frame 2 has code {code} in codebook 7; codebooks have codes 0 to 2047"
    np.testing.assert_allclose(good_heard.samples, whole(decoder, codes), atol=1e-5)
    assert runner.slots_used == 0


def test_frames_of_another_width_are_refused(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=1)
    stream, _ = start(runner)
    with pytest.raises(ValueError, match=r"\(1, 15\)"):
        runner.push(stream, [[0] * 15])


def test_more_streams_than_slots_and_waiting_room_are_refused(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=2, max_waiting=1)
    streams = [start(runner)[0] for _ in range(3)]
    with pytest.raises(Overloaded, match="3 streams"):
        start(runner)
    runner.abort(streams[0])
    start(runner)


def test_a_stream_without_frames_takes_no_slot_and_ends_without_audio(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=1)
    idle, heard = start(runner)
    busy, _ = start(runner)
    runner.push(busy, codes_of(1, seed=6))
    runner.step()
    assert (idle.slot, busy.slot) == (None, 0)
    runner.close(idle)
    runner.step()
    assert heard.ends == [("stop", None)]
    assert not heard.chunks


def test_frames_after_close_are_a_mistake_of_the_caller(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=1)
    stream, _ = start(runner)
    runner.push(stream, codes_of(1, seed=7))
    runner.close(stream)
    with pytest.raises(RuntimeError, match="closed"):
        runner.push(stream, codes_of(1, seed=7))


@pytest.mark.parametrize("length", [1, 7, 13, 110])
def test_audio_after_a_reference_is_the_joint_audio_cut_at_the_reference(decoder: CodecDecoder, length: int) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=2)
    before, codes = codes_of(length, seed=8), codes_of(9, seed=9)
    stream, heard = start(runner, Reference(before, b"voice"))
    runner.push(stream, codes)
    runner.close(stream)
    drain(runner)
    joint = whole(decoder, np.concatenate((before, codes)))
    assert len(heard.samples) == 9 * 1920
    np.testing.assert_allclose(heard.samples, joint[length * 1920 :], atol=1e-5)


def test_a_reference_is_decoded_once_and_the_least_used_is_forgotten(
    decoder: CodecDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    primed: list[int] = []
    prime = decoder.prime

    def counting(codes: torch.Tensor, state: CodecState, slots: torch.Tensor) -> None:
        primed.append(codes.shape[1])
        prime(codes, state, slots)

    monkeypatch.setattr(decoder, "prime", counting)
    runner = VocoderRunner(decoder, max_num_seqs=2, max_references=2)

    def speak(length: int) -> np.ndarray:
        stream, heard = start(runner, Reference(codes_of(length, seed=length), bytes([length])))
        runner.push(stream, codes_of(2, seed=10))
        runner.close(stream)
        drain(runner)
        return heard.samples

    first = speak(5)
    speak(6)
    assert np.array_equal(speak(5), first)
    assert primed == [5, 6]
    speak(7)  # forgets 6, the least recently used
    speak(5)
    speak(6)
    assert primed == [5, 6, 7, 6]


def test_a_reference_is_decoded_before_the_first_frame_comes(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=1)
    stream, _ = start(runner, Reference(codes_of(20, seed=11), b"voice"))
    assert runner.step()
    assert stream.start is not None
    assert stream.slot is None
    assert not runner.step()


def test_a_reference_with_a_code_that_does_not_exist_is_refused_at_open(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=1)
    codes = codes_of(3, seed=12)
    codes[1, 15] = 2048
    with pytest.raises(CodeOutOfRange, match="frame 1 of the reference has code 2048 in codebook 15"):
        start(runner, Reference(codes, b"voice"))
    runner.check_integrity()


def test_a_failing_step_ends_the_streams_in_it_and_no_others(
    decoder: CodecDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=2)
    lost, lost_heard = start(runner)
    kept, kept_heard = start(runner)
    codes = codes_of(2, seed=13)
    expected = whole(decoder, codes)
    step = decoder.step

    def refusing(frames: torch.Tensor, state: CodecState, slots: torch.Tensor) -> torch.Tensor:
        if frames.shape[1] == 2:
            raise torch.OutOfMemoryError("no memory for 2 frames")
        return step(frames, state, slots)

    monkeypatch.setattr(decoder, "step", refusing)
    runner.push(lost, codes)
    runner.push(kept, codes[:1])
    drain(runner)
    [(reason, error)] = lost_heard.ends
    assert reason == "error"
    assert isinstance(error, EngineError)
    assert "no memory for 2 frames" in str(error)
    runner.push(kept, codes[1:])
    runner.close(kept)
    drain(runner)
    np.testing.assert_allclose(kept_heard.samples, expected, atol=1e-5)


def test_abort_all_tells_every_stream_the_error(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=1)
    opened = [start(runner) for _ in range(3)]
    runner.push(opened[0][0], codes_of(4, seed=14))
    runner.step()
    error = EngineError("the device is gone")
    runner.abort_all(error)
    assert [heard.ends for _, heard in opened] == [[("error", error)]] * 3
    assert runner.slots_used == 0
    runner.check_integrity()


def test_integrity_notices_a_slot_given_twice(decoder: CodecDecoder) -> None:
    runner = VocoderRunner(decoder, max_num_seqs=2)
    stream, _ = start(runner)
    runner.push(stream, codes_of(1, seed=15))
    runner.step()
    stream.slot = 1
    with pytest.raises(AssertionError, match="lost or shared"):
        runner.check_integrity()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    decoder, encoder = tiny(seed=1)
    tensors = to_published(decoder, DECODER_LAYOUT) | to_published(encoder, ENCODER_LAYOUT)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def test_both_halves_load_from_one_file(folder: Path) -> None:
    cpu = torch.device("cpu")
    decoder, encoder = load(Checkpoint.find(str(folder)), device=cpu, dtype=torch.float32)
    expected_decoder, expected_encoder = tiny(seed=1)
    codes = random_codes(3)
    assert torch.equal(decoder.whole(codes), expected_decoder.whole(codes))
    samples = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(encoder.encode(samples), expected_encoder.encode(samples))


def test_a_bfloat16_decoder_keeps_its_encoder_in_float32(folder: Path) -> None:
    decoder, encoder = load(Checkpoint.find(str(folder)), device=torch.device("cpu"), dtype=torch.bfloat16)
    codes = random_codes(12)
    state, slots = decoder.new_state(1), torch.tensor([0])
    assert state.rows.dtype == torch.bfloat16
    samples = torch.cat([decoder.step(part, state, slots) for part in codes.split(5, dim=1)], dim=1)
    assert samples.dtype == torch.float32
    assert (samples - tiny(seed=1)[0].whole(codes)).pow(2).mean().sqrt() < 0.1
    assert {weight.dtype for weight in encoder.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_sample_rate": 16_000}, "decoder's sample rate is 16000, this server speaks 24000"),
        ({"decode_upsample_rate": 960}, "decode_upsample_rate is 960; only 1920"),
        ({"encoder_config": {**TINY["encoder_config"], "pad_mode": "reflect"}}, "pad_mode is 'reflect'"),
    ],
)
def test_a_codec_we_cannot_honour_is_refused_by_name(folder: Path, change: dict[str, object], message: str) -> None:
    (folder / "config.json").write_text(json.dumps({**TINY, **change}))
    with pytest.raises(CheckpointError, match=message):
        load(Checkpoint.find(str(folder)), device=torch.device("cpu"), dtype=torch.float32)


def test_a_missing_field_is_named(folder: Path) -> None:
    config = {name: value for name, value in TINY.items() if name != "decoder_config"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"lacks .decoder_config"):
        load(Checkpoint.find(str(folder)), device=torch.device("cpu"), dtype=torch.float32)


def test_frames_under_way_are_heard_when_they_arrive_unless_their_stream_has_ended(decoder: CodecDecoder) -> None:
    """Eight streams through two slots; some are aborted, and frames are pushed and closed, while steps are under way."""
    dice, lane = np.random.default_rng(5), SlowLane()
    runner = VocoderRunner(decoder, max_num_seqs=2, max_waiting=8, lane=lane)
    codes = [codes_of(int(dice.integers(1, 20)), seed=n) for n in range(8)]
    opened = [start(runner) for _ in codes]
    sent = [0] * len(codes)
    launched = 0
    while any(not heard.ends for _, heard in opened):
        for n, (stream, _) in enumerate(opened):
            if stream.closing or stream.ended:
                continue
            few = int(dice.integers(0, 5))
            runner.push(stream, codes[n][sent[n] : sent[n] + few])
            sent[n] += few
            if sent[n] >= len(codes[n]):
                runner.close(stream)
            elif n % 4 == 3 and dice.random() < 0.1:
                runner.abort(stream)
        launched += runner.step() and runner.flying
        runner.check_integrity()
        if dice.random() < 0.5:
            lane.arrive()
    assert launched > 8
    for n, (_, heard) in enumerate(opened):
        samples = whole(decoder, codes[n])
        assert heard.ends == [("stop", None)] or n % 4 == 3
        if heard.ends == [("stop", None)]:
            np.testing.assert_allclose(heard.samples, samples, atol=1e-5)
        else:
            np.testing.assert_allclose(heard.samples, samples[: len(heard.samples)], atol=1e-5)
    assert ("cancelled", None) in [heard.ends[0] for _, heard in opened]
    assert runner.slots_used == 0


def test_all_streams_end_and_the_device_is_waited_for_when_the_runner_is_closed(decoder: CodecDecoder) -> None:
    lane = SlowLane()
    runner = VocoderRunner(decoder, max_num_seqs=1, lane=lane)
    opened = [start(runner) for _ in range(2)]
    for stream, _ in opened:
        runner.push(stream, codes_of(2, seed=1))
    runner.step()
    assert runner.flying
    assert runner.counters.step_s < runner.counters.step_s  # it goes on
    error = EngineError("stopping")
    runner.abort_all(error)
    assert runner.counters.step_s == runner.counters.step_s > 0
    assert [heard.ends for _, heard in opened] == [[("error", error)]] * 2
    assert lane.waited == 1
    assert not runner.flying
    assert not runner.step()
