import io

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_omni.errors import BadMedia
from aura_omni.media import audio as audio_module
from aura_omni.media.audio import Resampler, decode_audio, resample
from aura_omni.media.encoder import encode, pcm16
from tests.media_files import likeness

PARAM = "messages[0].content[1].audio_url"
WEBM = ("webm", "libopus", "flt")
CLUSTER = bytes.fromhex("1f43b675")


def heard(data: bytes, max_s: float = 60.0) -> np.ndarray:
    audio = decode_audio(data, max_s=max_s, param=PARAM)
    assert audio.samples.dtype == np.float32
    assert np.abs(audio.samples).max() <= 1
    return resample(audio.samples, audio.rate, 16_000)


def refused(data: bytes, max_s: float = 60.0) -> str:
    with pytest.raises(BadMedia) as caught:
        decode_audio(data, max_s=max_s, param=PARAM)
    assert caught.value.param == PARAM
    assert caught.value.status == 400
    return caught.value.message


def assert_same_sound(data: bytes, speech: np.ndarray, *, up_to_s: float = 2.0, like: float = 0.99) -> None:
    """The same sound as `speech` within codec noise and at most 30 ms of codec delay."""
    got, want = heard(data), resample(speech, 48_000, 16_000)[: int(up_to_s * 16_000)]
    assert abs(len(got) - len(want)) <= 0.06 * 16_000
    assert likeness(got, want) > like


def test_m01_live_browser_recording_is_heard_whole(audio_file, speech):
    data = audio_file(speech, 48_000, *WEBM, live=True, options={"live": "1"})
    assert_same_sound(data, speech)


def test_m02_recording_cut_off_is_good_up_to_the_cut(audio_file, speech):
    data = audio_file(speech, 48_000, *WEBM, live=True, options={"live": "1"})
    cut = heard(data[: int(0.7 * len(data))])
    assert 1.2 * 16_000 < len(cut) < 1.6 * 16_000
    assert_same_sound(data[: int(0.7 * len(data))], speech, up_to_s=len(cut) / 16_000)


def test_m03_slice_without_header_is_refused(audio_file, speech):
    data = audio_file(speech, 48_000, *WEBM, live=True, options={"live": "1", "cluster_time_limit": "300"})
    start = 0
    for _ in range(3):
        start = data.index(CLUSTER, start + 1)
    assert "header is missing" in refused(data[start:])


def test_m04_header_without_audio_is_refused(audio_file, speech):
    data = audio_file(speech, 48_000, *WEBM, live=True, options={"live": "1"})
    assert "nothing follows" in refused(data[: data.index(CLUSTER)])
    assert "nothing follows" in refused(data[: data.index(CLUSTER) - 20])


def test_m06_phone_memo_is_heard_wherever_its_index_is(audio_file, speech):
    index_last = audio_file(speech, 48_000, "ipod", "aac", "fltp")
    assert index_last.index(b"moov") > index_last.index(b"mdat")
    assert_same_sound(index_last, speech)
    index_first = audio_file(speech, 48_000, "ipod", "aac", "fltp", options={"moov_size": "8000"})
    assert index_first.index(b"moov") < index_first.index(b"mdat")
    assert_same_sound(index_first, speech)


def test_m07_fragmented_recording_is_heard(audio_file, speech):
    flags = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    assert_same_sound(audio_file(speech, 48_000, "mp4", "aac", "fltp", options=flags), speech)


def test_m08_cover_picture_is_not_sound(audio_file, speech, cover):
    data = audio_file(speech, 48_000, "mp3", "libmp3lame", "fltp", cover=cover, options={"id3v2_version": "3"})
    assert b"APIC" in data
    assert_same_sound(data, speech)


def test_m11_studio_flac_is_heard(audio_file, speech):
    data = audio_file(resample(speech, 48_000, 96_000), 96_000, "flac", "flac", "s32")
    audio = decode_audio(data, max_s=60)
    assert audio.rate == 96_000
    assert_same_sound(data, speech, like=0.9999)


def test_m12_messenger_ogg_is_heard(audio_file, speech):
    assert_same_sound(audio_file(speech, 48_000, "ogg", "libopus", "flt"), speech)
    vorbis = io.BytesIO()
    soundfile.write(vorbis, speech, 48_000, format="OGG", subtype="VORBIS")
    assert_same_sound(vorbis.getvalue(), speech)


@pytest.mark.parametrize("codec", ["pcm_mulaw", "pcm_alaw"])
def test_m13_telephony_wav_is_heard(audio_file, speech, codec):
    data = audio_file(resample(speech, 48_000, 8_000), 8_000, "wav", codec, "s16")
    assert decode_audio(data, max_s=60).rate == 8_000
    assert_same_sound(data, speech)


@pytest.mark.parametrize(
    ("codec", "sample_format", "step"),
    [
        ("pcm_u8", "u8", 1 / 128),
        ("pcm_s16le", "s16", 1 / 32_768),
        ("pcm_s24le", "s32", 1e-6),
        ("pcm_s32le", "s32", 1e-7),
        ("pcm_f32le", "flt", 0),
        ("pcm_f64le", "dbl", 0),
    ],
)
def test_m14_every_wav_width_has_the_same_full_scale(audio_file, speech, codec, sample_format, step):
    audio = decode_audio(audio_file(speech, 48_000, "wav", codec, sample_format), max_s=60)
    assert len(audio.samples) == len(speech)
    assert np.abs(audio.samples - speech).max() <= step


def test_m14_sixty_four_bit_integers_are_refused_by_name(wav_file):
    assert "s64" in refused(wav_file(bytes(8_000), 16_000, tag=1, bits=64))


def test_m15_extensible_wav_header_is_read(wav_file, speech):
    raw = pcm16(speech)
    audio = decode_audio(wav_file(raw, 48_000, tag=1, bits=16, extensible=True), max_s=60)
    assert np.array_equal(audio.samples, np.frombuffer(raw, "<i2").astype(np.float32) / 32_768)


@pytest.mark.parametrize("channels", range(1, 9))
def test_m16_channels_are_averaged_whichever_one_speaks(wav_file, speech, channels):
    samples = np.zeros((len(speech), channels), "<f4")
    samples[:, -1] = speech
    audio = decode_audio(wav_file(samples.tobytes(), 48_000, tag=3, bits=32, channels=channels), max_s=60)
    assert np.allclose(audio.samples, speech / channels, atol=1e-7)


def test_m16_planar_stereo_is_not_taken_for_samples(audio_file, speech):
    right_only = np.stack([np.zeros_like(speech), speech], axis=1)
    assert_same_sound(audio_file(right_only, 48_000, "mp4", "aac", "fltp", layout="stereo"), speech)


def test_m17_no_samples_and_no_bytes_are_refused(wav_file):
    assert "no samples" in refused(wav_file(b"", 16_000, tag=1, bits=16))
    assert "0 bytes" in refused(b"")


def test_m18_silence_is_audio(wav_file):
    audio = decode_audio(wav_file(bytes(32_000), 16_000, tag=1, bits=16), max_s=60)
    assert audio.duration_s == 1.0
    assert not audio.samples.any()


def test_m19_short_clip_keeps_its_true_duration(wav_file, speech):
    audio = decode_audio(wav_file(pcm16(speech[:480]), 48_000, tag=1, bits=16), max_s=60)
    assert audio.duration_s == 0.01
    assert len(resample(audio.samples, 48_000, 16_000)) == 160


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_m20_non_finite_samples_are_refused(wav_file, speech, value):
    samples = speech.astype("<f4")
    samples[77] = value
    assert "1 of 96,000 samples" in refused(wav_file(samples.tobytes(), 48_000, tag=3, bits=32))
    too_large = np.full(9, 1e300, "<f8")
    assert "9 of 9 samples" in refused(wav_file(too_large.tobytes(), 48_000, tag=3, bits=64))


def test_m21_quiet_and_offset_sound_is_untouched_and_loud_sound_is_scaled(wav_file, speech):
    for samples in (speech * np.float32(0.0056), speech + np.float32(0.4)):
        data = wav_file(samples.astype("<f4").tobytes(), 48_000, tag=3, bits=32)
        assert np.array_equal(decode_audio(data, max_s=60).samples, samples)
    loud = decode_audio(wav_file((speech * 8).astype("<f4").tobytes(), 48_000, tag=3, bits=32), max_s=60)
    assert np.abs(loud.samples).max() == 1
    assert np.allclose(loud.samples, speech / np.abs(speech).max(), atol=1e-6)


@pytest.mark.parametrize("data", [b"hello\n", b"<!doctype html><html><body>no</body></html>", bytes(5_000)])
def test_m22_text_and_zeros_are_refused(data):
    assert "no audio or video file" in refused(data)


def test_playlists_that_name_other_files_are_refused(tmp_path, wav_file):
    secret = tmp_path / "secret.wav"
    secret.write_bytes(wav_file(bytes(3_200), 16_000, tag=1, bits=16))
    lists = [
        f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{secret}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{secret}'\n",
    ]
    for text in lists:
        assert "no audio or video file" in refused(text.encode())


def test_picture_has_no_audio_track(video_file, picture):
    silent = video_file([np.asarray(picture)] * 3, [0, 40, 80], "mp4", "libx264")
    assert "no audio track" in refused(silent)


def test_sound_of_a_video_is_heard(video_file, picture, speech):
    data = video_file([np.asarray(picture)] * 50, range(0, 2_000, 40), "mp4", "libx264", sound=speech)
    assert_same_sound(data, speech)


def test_too_long_sound_is_refused_with_the_limit(audio_file, speech, monkeypatch):
    data = audio_file(speech, 48_000, *WEBM, live=True, options={"live": "1"})
    assert "longer than 1.5 s" in refused(data, max_s=1.5)
    whole = audio_file(speech, 48_000, "flac", "flac", "s16")
    assert len(heard(whole, max_s=2.0)) == 32_000
    monkeypatch.setattr(audio_module, "MAX_SAMPLES", 90_000)
    assert "more than 90,000 samples, 2 s at 48,000 Hz" in refused(whole)


@pytest.mark.parametrize("rate", [1, 3_999, 192_001, 4_000_000_000])
def test_absurd_sample_rate_is_refused(wav_file, rate):
    data = bytearray(wav_file(bytes(3_200), 16_000, tag=1, bits=16))
    data[24:28] = rate.to_bytes(4, "little")
    refused(bytes(data))


def test_key_depends_on_samples_and_rate_alone(audio_file, wav_file, speech):
    wav = decode_audio(wav_file(pcm16(speech), 48_000, tag=1, bits=16), max_s=60)
    flac = decode_audio(encode(speech, 48_000, "flac"), max_s=60)
    other = decode_audio(wav_file(pcm16(speech), 44_100, tag=1, bits=16), max_s=60)
    shorter = decode_audio(wav_file(pcm16(speech[1:]), 48_000, tag=1, bits=16), max_s=60)
    assert wav.key == flac.key
    assert len({wav.key, other.key, shorter.key}) == 3


@pytest.fixture(scope="module")
def good_files(audio_file, speech) -> list[bytes]:
    return [
        audio_file(speech[:24_000], 48_000, *WEBM),
        audio_file(speech[:24_000], 48_000, "mp4", "aac", "fltp"),
        audio_file(speech[:24_000], 48_000, "mp3", "libmp3lame", "fltp"),
        audio_file(speech[:24_000], 48_000, "flac", "flac", "s16"),
    ]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_files_are_decoded_or_refused_and_nothing_else(good_files, data):
    file = bytearray(data.draw(st.sampled_from(good_files)))
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(file) - 1), st.integers(0, 255)), max_size=20)):
        file[place] = value
    try:
        audio = decode_audio(bytes(file[: data.draw(st.integers(0, len(file)))]), max_s=60)
    except BadMedia:
        return
    assert len(audio.samples) > 0
    assert np.isfinite(audio.samples).all()


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=3_000))
def test_random_bytes_are_refused(data):
    refused(data)


# ---------------------------------------------------------------- rate


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 5_000),
    st.sampled_from([8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000, 96_000]),
    st.sampled_from([8_000, 16_000, 24_000, 48_000]),
)
def test_resampled_length_is_the_duration_rounded_up(count, rate_in, rate_out):
    out = resample(np.zeros(count, np.float32), rate_in, rate_out)
    assert out.dtype == np.float32
    assert len(out) == -(-count * rate_out // rate_in)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([8_000, 16_000, 22_050, 24_000, 44_100, 48_000]),
    st.integers(0, 9_000),
    st.lists(st.integers(0, 9_000), max_size=12),
)
def test_a_sound_that_comes_in_parts_is_resampled_as_if_it_came_at_once(rate_out, count, cuts):
    samples = np.random.default_rng(count).normal(0, 0.2, count).astype(np.float32)
    resampler = Resampler(24_000, rate_out)
    parts = [resampler.feed(part) for part in np.split(samples, sorted(min(cut, count) for cut in cuts))]
    got = np.concatenate([*parts, resampler.finish()])
    assert len(got) == -(-count * rate_out // 24_000)
    assert np.array_equal(got, resample(samples, 24_000, rate_out))


def test_resampling_keeps_a_tone_and_removes_what_would_alias():
    time_s = np.arange(48_000) / 48_000
    both = np.sin(2 * np.pi * 440 * time_s) + np.sin(2 * np.pi * 12_000 * time_s)
    want = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    got = resample(both.astype(np.float32), 48_000, 16_000)
    assert np.abs(got - want)[400:-400].max() < 1e-3


@pytest.mark.reference
def test_resampling_equals_librosa(speech):
    import librosa

    want = librosa.resample(speech, orig_sr=48_000, target_sr=16_000)
    assert np.array_equal(resample(speech, 48_000, 16_000), want)
