import io
import wave
from collections.abc import Sequence
from typing import get_args

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_omni.errors import BadRequest, EngineError
from aura_omni.flow import FRAME_SAMPLES, VOICE_RATE
from aura_omni.media.audio import decode_audio, resample
from aura_omni.media.encoder import MEDIA_TYPES, AudioFormat, encode, pcm16, start, wav_header

FORMATS: tuple[AudioFormat, ...] = get_args(AudioFormat)
FILES = [kind for kind in FORMATS if kind != "pcm16"]
CODED = ["flac", "mp3", "opus", "aac"]
# Samples of silence in front of what a decoder makes of a stream, which cannot say so
PRIMING = {"mp3": 1_105, "aac": 1_024}


@pytest.fixture(scope="module")
def voice(speech) -> np.ndarray:
    """float32 [48000], 2 s at 24 kHz."""
    return resample(speech, 48_000, VOICE_RATE)


def decoded(data: bytes) -> np.ndarray:
    audio = decode_audio(data, max_s=60)
    return resample(audio.samples, audio.rate, VOICE_RATE)


def streamed(samples: np.ndarray, kind: AudioFormat, cuts: Sequence[int]) -> list[bytes]:
    encoder = start(kind, VOICE_RATE)
    pieces = np.split(samples, sorted(min(cut, len(samples)) for cut in cuts))
    return [*(encoder.feed(piece) for piece in pieces), encoder.finish()]


def likeness(got: np.ndarray, want: np.ndarray) -> float:
    """1: the same but for loudness."""
    count = min(len(got), len(want))
    got, want = got[:count], want[:count]
    return float(got @ want / np.sqrt((got @ got) * (want @ want)))


# ---------------------------------------------------------------- streams


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 9_000), st.lists(st.integers(0, 9_000), max_size=15))
def test_cutting_changes_no_byte(voice, kind, count, cuts):
    samples = voice[2_000 : 2_000 + count]
    assert b"".join(streamed(samples, kind, cuts)) == b"".join(streamed(samples, kind, []))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_stream_is_the_file_but_for_what_the_front_says_of_the_length(voice, kind):
    file = encode(voice, VOICE_RATE, kind)
    stream = b"".join(streamed(voice, kind, range(0, len(voice), FRAME_SAMPLES)))
    front = {"wav": 44, "flac": 42}.get(kind, 0)
    info_frame = len(file) - len(stream)
    assert info_frame == (288 if kind == "mp3" else 0)
    assert stream[front:] == file[front + info_frame :]


@pytest.mark.parametrize("kind", FILES)
def test_a_stream_sounds_like_its_file(voice, kind):
    file = decoded(encode(voice, VOICE_RATE, kind))
    stream = decoded(b"".join(streamed(voice, kind, [FRAME_SAMPLES, 30_000])))
    skipped = PRIMING["mp3"] if kind == "mp3" else 0  # the file of mp3 says how much to skip; aac never can
    assert np.array_equal(stream[skipped : skipped + len(file)], file)


@pytest.mark.parametrize(("kind", "most_ms"), [("wav", 0), ("flac", 0), ("opus", 27), ("mp3", 87), ("aac", 123)])
def test_what_is_sent_after_each_frame_can_be_heard_soon(voice, kind, most_ms):
    """How much of the sound so far a player does not have, when whole frames of 80 ms are fed."""
    encoder, data, late_ms = start(kind, VOICE_RATE), b"", []
    for taken in range(FRAME_SAMPLES, 12 * FRAME_SAMPLES, FRAME_SAMPLES):
        data += encoder.feed(voice[taken - FRAME_SAMPLES : taken])
        heard = len(decoded(data)) - PRIMING.get(kind, 0) if data else 0
        late_ms.append((taken - heard) / VOICE_RATE * 1e3)
    assert max(late_ms) <= most_ms


@pytest.mark.parametrize("kind", ["wav", "opus", "flac"])
def test_the_first_frame_leaves_at_once_behind_the_only_header(voice, kind):
    first, *_ = pieces = streamed(voice, kind, range(FRAME_SAMPLES, len(voice), FRAME_SAMPLES))
    header = {"wav": b"RIFF", "opus": b"OpusHead", "flac": b"fLaC"}[kind]
    assert header in first
    assert b"".join(pieces).count(header) == 1
    assert all(pieces[:-1])


def test_nothing_leaves_before_the_first_sample():
    assert start("wav", VOICE_RATE).feed(np.zeros(0, np.float32)) == b""
    assert start("pcm16", VOICE_RATE).finish() == b""


def test_an_encoder_that_is_given_up_leaves_nothing_open():
    for _ in range(20):
        for kind in CODED:
            start(kind, VOICE_RATE).feed(np.zeros(FRAME_SAMPLES, np.float32))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("kind", "like"), [("wav", 0.999999), ("flac", 0.999999), ("mp3", 0.99), ("opus", 0.99), ("aac", 0.99)]
)
def test_encoded_file_holds_the_whole_sound(voice, kind, like):
    data = encode(voice, VOICE_RATE, kind)
    got = decoded(data)
    if kind == "aac":  # ADTS cannot say where the sound begins and ends
        got = got[PRIMING["aac"] :][: len(voice)]
    assert len(got) == len(voice)
    assert likeness(got, voice) > like
    assert data == encode(voice, VOICE_RATE, kind)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 48_000])
def test_every_rate_that_a_client_may_ask_for_encodes(speech, kind, rate):
    audio = decode_audio(encode(speech[:rate], rate, kind), max_s=60)
    padding_s = 2 * 1_024 / rate if kind == "aac" else 0
    assert 0 <= audio.duration_s - 1 < 0.001 + padding_s


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1.5, 1.5, width=32), min_size=1, max_size=200), st.sampled_from([8_000, 24_000, 48_000]))
def test_wav_round_trip_is_within_a_step(values, rate):
    samples = np.array(values, np.float32)
    audio = decode_audio(encode(samples, rate, "wav"), max_s=60)
    assert audio.rate == rate
    assert np.abs(audio.samples - np.clip(samples, -1, 1)).max() <= 1.5 / 32_767


def test_pcm16_clips_and_rounds_half_to_even():
    halves = np.array([0.5, 1.5, 2.5, -0.5, -1.5], np.float64) / 32_767
    samples = np.array([0.0, 1.0, -1.0, 2.0, -2.0], np.float32)
    assert np.frombuffer(pcm16(samples), "<i2").tolist() == [0, 32_767, -32_767, 32_767, -32_767]
    assert np.frombuffer(pcm16(halves), "<i2").tolist() == [0, 2, 2, 0, -2]


def test_flac_and_wav_hold_the_same_samples(voice):
    wav, flac = (decode_audio(encode(voice, VOICE_RATE, kind), max_s=60).samples for kind in ("wav", "flac"))
    assert np.array_equal(wav, flac)
    assert encode(voice, VOICE_RATE, "wav") == wav_header(VOICE_RATE, len(voice)) + encode(voice, VOICE_RATE, "pcm16")


@pytest.mark.parametrize("kind", ["flac", "mp3"])
def test_a_file_knows_its_length(voice, kind):
    with av.open(io.BytesIO(encode(voice, VOICE_RATE, kind))) as file:
        assert file.duration == len(voice) * av.time_base // VOICE_RATE


def test_wav_header_of_known_length_is_read_by_all(voice):
    file = encode(voice, VOICE_RATE, "wav")
    with wave.open(io.BytesIO(file)) as read:
        assert (read.getframerate(), read.getnchannels(), read.getsampwidth()) == (24_000, 1, 2)
        assert read.getnframes() == len(voice)
    assert len(soundfile.read(io.BytesIO(file))[0]) == len(voice)


def test_wav_header_of_a_stream_plays_to_the_end(voice):
    file = b"".join(streamed(voice, "wav", [7_000, 19_000]))
    assert file.count(b"RIFF") == 1
    assert np.array_equal(decoded(file), decoded(encode(voice, VOICE_RATE, "wav")))
    with wave.open(io.BytesIO(file)) as read:
        assert len(read.readframes(len(voice) + 10)) == 2 * len(voice)


# ---------------------------------------------------------------- what cannot be encoded


def test_one_sample_encodes():
    for kind in FORMATS:
        assert encode(np.zeros(1, np.float32), VOICE_RATE, kind)
        assert b"".join(streamed(np.zeros(1, np.float32), kind, []))


@pytest.mark.parametrize("make", [start, lambda kind, rate: encode(np.zeros(9, np.float32), rate, kind)])
def test_impossible_rate_names_the_possible_ones(make):
    with pytest.raises(BadRequest, match="48000"):
        make("opus", 22_050)


@pytest.mark.parametrize("kind", FORMATS)
def test_broken_samples_of_a_stage_are_its_error(kind):
    with pytest.raises(EngineError, match="NaN"):
        encode(np.array([np.nan], np.float32), VOICE_RATE, kind)
    with pytest.raises(EngineError, match="NaN"):
        start(kind, VOICE_RATE).feed(np.array([np.inf], np.float32))


@pytest.mark.parametrize("kind", CODED)
def test_no_samples_at_all_are_an_error_of_a_stage(kind):
    with pytest.raises(EngineError, match="no samples"):
        encode(np.zeros(0, np.float32), VOICE_RATE, kind)
    with pytest.raises(EngineError, match="no samples"):
        start(kind, VOICE_RATE).finish()


def test_every_format_has_a_media_type():
    assert set(MEDIA_TYPES) == set(FORMATS)
