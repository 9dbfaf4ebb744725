"""Training of the small speaker, in seconds: made-up clips through every step, and the exported folder in the product."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from aura_omni.engine.loader import Checkpoint
from aura_omni.flow import Voice
from aura_omni.models.speaker_encoder import log_mel, mel_filters
from aura_omni.stages import vocoder
from aura_omni.stages.talker import TalkerStage
from tests.training.conftest import FRAMES, TEXTS
from training.tts import clock, corpus, shape
from training.tts.codec_model import TrainedCodec
from training.tts.contour import EDGES, edge_codes, sound_codes, told
from training.tts.ear import word_error, words
from training.tts.grad import refresh, speaker_vectors
from training.tts.graph import adam
from training.tts.listen import talker_of
from training.tts.phones import CODES, PHONES, SYMBOLS, Span, frame_codes, phones_of
from training.tts.speakers import FRAME_SAMPLES, SPEAKERS
from training.tts.state import State
from training.tts.talker_batch import BOS, EOS, PAD, Deck, Rows
from training.tts.talker_speak import speak
from training.tts.train_encoder import TrainedEncoder


@pytest.fixture(scope="module")
def rows(made):
    return Rows(Tokenizer.from_file(str(made.home / "tokenizer.json")))


def test_codes_say_the_phones_in_order():
    spans = [Span(5, 0.0, 0.09), Span(7, 0.09, 0.11), Span(9, 0.11, 0.3)]
    assert phones_of(frame_codes(spans, 5)) == [5, 7, 9]  # the second is shorter than a slot


def test_codes_and_controls_do_not_meet():
    assert len(SYMBOLS) ** 2 <= 2_048


def test_numbers_are_heard_as_words():
    assert " ".join(words("It took 12 seconds, and 1,400!")) == "it took twelve seconds fourteen hundred"
    assert word_error([("I see it.", "i see"), ("Two", "2")]) == 0.25


def test_pitch_is_measured_to_half_a_step():
    time = torch.arange(40 * FRAME_SAMPLES) / 24_000
    tone = sum(0.1 / n * torch.sin(2 * torch.pi * 130.0 * n * time) for n in range(1, 12)).view(40, FRAME_SAMPLES)
    found = sound_codes(tone, np.full(40, 5))[2:-2, 0]
    assert (found == round(12 * np.log2(130 / 60) / 0.8) + 1).all()


def test_edges_tell_how_late_the_phones_meet():
    spans = [Span(5, 0.0, 0.054), Span(7, 0.054, 0.2)]
    codes = edge_codes(spans, 2)
    assert list(frame_codes(spans, 1)) == [5 * PHONES + 7]
    assert codes[0] % EDGES - 4 == 2  # 14 ms after the middle of the frame
    assert codes[1] == 0  # nothing meets there


def test_small_lies_stay_small_and_silence_stays_silent():
    codes = torch.randint(0, 40, (6, 30, 5), generator=torch.Generator().manual_seed(0))
    lies = told(codes)
    assert (lies[..., 0] == codes[..., 0]).all()
    assert ((lies - codes)[..., 1:3].abs() <= 2).all()
    assert (lies[..., 1:3][codes[..., 1:3] == 0] == 0).all()


def test_sound_of_a_variant_is_one_frame_late_and_as_long_as_its_codes(made):
    parts = corpus.load(made.home / "corpus.npz")
    raw = corpus.load_raw(parts["sound"], made.home / "clips/sound.s16")
    for part in (parts["sound"], parts["variant"]):
        sound = corpus.late_sound(part, parts["sound"], raw, torch.device("cpu"))
        assert len(sound) == part.starts[-1] == len(part.codes)
        quiet = sound.float().abs().amax(1) == 0
        assert set(np.flatnonzero(quiet)) == set(part.starts[:-1])


def test_batches_have_the_rows_of_the_prompt(made, rows):
    clips = corpus.load(made.home / "corpus.npz")["sound"]
    deck = Deck(clips, rows, torch.device("cpu"), spellings=1)
    length = int(deck.length.max())
    for streaming in (0.0, 2.0):
        batch = deck.batch(torch.tensor([1, 5]), length, streaming=streaming, plain=True)
        for row, clip in enumerate((1, 5)):
            text, codec = rows.prompt(int(clips.speaker[clip]), tagged=False)
            body = [*rows.tokens([clips.texts[clip]])[0], rows.eos]
            before = [] if streaming else [PAD] * len(body)
            frames = np.arange(clips.starts[clip], clips.starts[clip + 1])
            wanted = (text + body + [rows.pad] * length)[:length]
            assert batch.text[row].tolist() == wanted
            head = [*codec, *before, BOS]
            assert batch.codec[row].tolist() == head + [-1] * (length - len(head))
            told_at = batch.frame[row][len(head) : len(head) + len(frames)]
            assert told_at.tolist() == frames.tolist()
            targets = batch.target[row][len(head) - 1 : len(head) + len(frames)]
            assert targets.tolist() == [*clips.codes[frames, 0], EOS]


def test_voices_of_their_own_have_a_vector_and_no_id(made, rows):
    clips = corpus.load(made.home / "corpus.npz")["variant"]
    deck = Deck(clips, rows, torch.device("cpu"), spellings=1)
    batch = deck.batch(torch.tensor([0]), int(deck.length.max()), plain=True)
    assert batch.codec[0, batch.voice_row[0]] == -1
    assert batch.voice[0] == clips.codes[0, 4]


def test_exported_codec_sounds_as_trained(made):
    decoder, _ = vocoder.load(made.checkpoint.sub("speech_tokenizer"), device=torch.device("cpu"), dtype=torch.float32)
    trained = TrainedCodec().eval()
    trained.load_state_dict(clock.load(made.home / "wave.pt")["model"])
    refresh(trained.decoder)
    codes = torch.randint(0, shape.BOOK_ROWS, (1, 9, 16), generator=torch.Generator().manual_seed(1))
    codes[..., 1 + shape.ACOUSTIC_BOOKS :] = torch.randint(0, shape.BOOK_ROWS, codes[..., 5:].shape)  # say nothing
    with torch.no_grad():
        wanted = trained.wave(trained.front(codes[..., : 1 + shape.ACOUSTIC_BOOKS])).clamp(-1, 1)
    torch.testing.assert_close(decoder.whole(codes), wanted, atol=2e-3, rtol=0)


def test_training_rows_are_the_rows_that_are_served(made, rows):
    stage = TalkerStage.load(made.checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    for speaker, tagged in ((0, False), (2, True)):
        voice = Voice(speaker=SPEAKERS[speaker].name, language="English" if tagged else None)
        body = stage.writer.body(TEXTS[1])
        served = stage.prompt(stage.voices.resolve(voice), body).prefill
        text, codec = rows.prompt(speaker, tagged=tagged)
        assert list(served.text_ids[: len(text)]) == text
        controls = dict(zip(served.codec_rows, served.codec_ids, strict=True))
        assert [controls.get(row, -1) for row in range(len(codec))] == codec
        assert [list(body)] == rows.tokens([TEXTS[1]])


def test_exported_talker_speaks_as_trained(made, rows):
    stage = TalkerStage.load(made.checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    trained = talker_of(made.home / "talker.pt", Tokenizer.from_file(str(made.home / "tokenizer.json"))).talker
    with torch.no_grad():
        for weight in (
            trained.parameters()
        ):  # as they are exported: after a few steps of training codes are nearly as likely as others
            weight.copy_(weight.half())
    trained.prepare()
    said = [speak(talker, rows, TEXTS[:2], [0, 1], streaming=True, most=4) for talker in (trained, stage.talker)]
    for before, after in zip(*said, strict=True):
        np.testing.assert_array_equal(before[:, :5], after[:, :5])


def test_every_code_can_be_drawn_from_the_exported_talker(made):
    """The published vocabulary ends with 1,024 ids that are no codes; what is trained must lie below them."""
    stage = TalkerStage.load(made.checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    logits = stage.logits(torch.zeros(1, stage.talker.config.decoder.hidden))[0]
    assert len(logits) == shape.PUBLISHED_CODEC_IDS
    assert len(logits) - 1_024 >= CODES
    assert logits[:CODES].isfinite().all()
    assert logits[EOS].isfinite()


def test_a_base_checkpoint_that_shares_the_weights_is_the_one_that_has_its_own(made):
    family = made.home / "family"
    shared = Checkpoint(family / "tts-base", "tts-base", family)
    assert sum(file.stat().st_size for file in (family / "tts-base").rglob("*.safetensors")) < 1e6
    for part in (lambda whole: whole, lambda whole: whole.sub("speech_tokenizer")):
        ours, own = part(shared).tensors(), part(made.base).tensors()
        assert ours.keys() == own.keys()
        for name in ours:
            with safe_open(ours[name], "pt") as one, safe_open(own[name], "pt") as other:
                assert torch.equal(one.get_tensor(name), other.get_tensor(name)), name
    stage = TalkerStage.load(shared, device=torch.device("cpu"), dtype=torch.float32)
    assert stage.voices.task == "Base"


def test_exported_encoder_gives_the_codes_it_was_trained_for(made):
    trained = TrainedEncoder().eval()
    trained.load_state_dict(clock.load(made.home / "encoder.pt")["model"])
    encoder = vocoder.load(made.base.sub("speech_tokenizer"), device=torch.device("cpu"), dtype=torch.float32)[1]
    samples = torch.randn(6 * FRAME_SAMPLES, generator=torch.Generator().manual_seed(0)) * 0.1
    with torch.no_grad():
        found = [logits[0].argmax(-1) for logits in trained.logits(samples[None])]
    wanted = torch.stack((found[0] * PHONES + found[1], *found[2:]), -1)
    codes = encoder.encode(samples)
    assert (codes[:, :5] == wanted).float().mean() > 0.9  # float16
    assert (codes[:, 5:] == 0).all()


def test_speaker_vectors_of_a_batch_are_those_of_each_clip(made):
    trained = TrainedEncoder().eval()
    samples = torch.randn(2, 20 * FRAME_SAMPLES // 256 * 256, generator=torch.Generator().manual_seed(0)) * 0.1
    with torch.no_grad():
        together = speaker_vectors(trained.speaker, samples, mel_filters())
        for row, vector in zip(samples, together, strict=True):
            torch.testing.assert_close(trained.speaker(log_mel(row)), vector, atol=1e-4, rtol=1e-3)


def test_corpus_keeps_its_clips(made):
    loaded = corpus.load(made.home / "corpus.npz")["times"]
    assert loaded.texts[:4] == list(TEXTS)
    assert (loaded.held_out.sum(), len(loaded), loaded.starts[-1]) == (2, 12, 12 * (FRAMES + 1))


def test_a_run_that_finds_a_state_takes_the_very_steps_that_the_first_one_would_have(tmp_path):
    def begun() -> tuple[State, torch.nn.Linear, torch.optim.Optimizer, clock.Clock]:
        torch.manual_seed(0)
        network, timer = torch.nn.Linear(3, 2), clock.Clock(1e9, steps=10)
        optimizer = adam([{"params": list(network.parameters())}], torch.device("cpu"), betas=(0.9, 0.98))
        optimizer.param_groups[0]["lr"].fill_(0.1)
        mean = [weight.detach().clone() for weight in network.parameters()]
        state = State(tmp_path / "x.state", timer, networks=(network,), mean=mean, optimizers=(optimizer,))
        return state, network, optimizer, timer

    def step(network: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        network(torch.arange(3.0)).square().sum().backward()
        optimizer.step()

    state, network, optimizer, timer = begun()
    assert not state.resume()
    for timer.step in range(1, 5):
        step(network, optimizer)
    state.save()
    step(network, optimizer)
    again, other, its_optimizer, its_timer = begun()
    assert again.resume()
    assert (its_timer.step, round(its_timer.progress, 6)) == (4, 0.4)
    step(other, its_optimizer)
    assert torch.equal(other.weight, network.weight)
    again.forget()
    assert not begun()[0].resume()


def test_codes_without_a_row_are_refused_before_they_reach_the_device(made, rows):
    parts = corpus.load(made.home / "corpus.npz")
    parts["sound"].codes[3, 2] = shape.BOOK_ROWS
    with pytest.raises(ValueError, match="no row"):
        corpus.known(parts["sound"].codes)
    parts["sound"].codes[3, 0] = PHONES * PHONES
    with pytest.raises(ValueError, match="no row"):
        Deck(parts["sound"], rows, torch.device("cpu"))
