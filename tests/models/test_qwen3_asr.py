"""Our Qwen3-ASR networks compute what the public implementation computes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration, WhisperFeatureExtractor

from aura_omni.models.qwen3_asr import HF_LAYOUT, LAYOUT, AsrConfig, EncoderConfig, Qwen3Asr, Windows, mel_filters
from aura_omni.models.weights import from_published, slots, to_published
from tests.asr_tiny import AUDIO, CONVERTED, IDS, ORIGINAL, clip, dense, network_of, reference, reference_inputs

LENGTHS = {"1 s": (1, 0), "5 s": (5, 0), "5.3 s + 11": (5.3, 11), "12 s + 40": (12, 40)}


@pytest.fixture(scope="module")
def public():
    return reference()


@pytest.fixture(scope="module")
def ours(public):
    return network_of(public)


def ids_for(tokens: int) -> torch.Tensor:
    return torch.tensor([5, 7, *[IDS["<|audio_pad|>"]] * tokens, 11, 13, 17])


@torch.no_grad()
def prefill(network: Qwen3Asr, samples: np.ndarray, kv) -> torch.Tensor:
    (rows,) = network.encode([torch.from_numpy(samples)])
    x = network.embed_tokens(ids_for(len(rows)))
    x[2 : 2 + len(rows)] = rows
    return network(x, torch.arange(len(x)), kv)


@pytest.mark.reference
@pytest.mark.parametrize("length", [(0.5, 0), (0.73, 0), *LENGTHS.values()])
def test_mel_of_a_clip_is_bit_for_bit_the_published_one(ours, length):
    samples = clip(*length)
    expected = WhisperFeatureExtractor(feature_size=128)(
        samples, sampling_rate=16_000, padding="longest", truncation=False, return_tensors="pt"
    )["input_features"][0]
    made = ours.audio_tower.log_mel(torch.from_numpy(samples))
    assert made.shape == (128, len(samples) // 160)
    assert torch.equal(made, expected)


def test_mel_of_silence_is_minus_one_and_a_half_everywhere(ours):
    assert (ours.audio_tower.log_mel(torch.zeros(16_000)) == -1.5).all()


def test_mel_filters_have_the_published_sum():
    assert mel_filters(128).double().sum().item() == pytest.approx(3.190986, abs=1e-5)


@pytest.mark.parametrize(
    ("seconds", "tokens"), [(0.5, 7), (0.73, 10), (1, 13), (2, 26), (5, 65), (10, 130), (30, 390), (1200, 15600)]
)
def test_token_count_follows_the_published_table(seconds, tokens):
    assert EncoderConfig.from_json(AUDIO).tokens(round(seconds * 16_000)) == tokens


@pytest.mark.reference
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
@torch.no_grad()
def test_encoder_equals_the_reference(public, ours, length):
    samples = clip(*length)
    expected = public.get_audio_features(**reference_inputs(samples), return_dict=True).pooler_output
    (made,) = ours.encode([torch.from_numpy(samples)])
    assert len(made) == ours.config.encoder.tokens(len(samples))
    torch.testing.assert_close(made, expected, atol=2e-5, rtol=0)


@pytest.mark.reference
@torch.no_grad()
def test_a_clip_below_one_second_is_convolved_at_its_own_length(public, ours):
    """As the original package does it: the reference fills such a clip up to 100 frames, so its parts are used here."""
    samples = clip(0.73)
    mel = reference_inputs(samples)["input_features"][:, :, :73]
    tower = public.model.audio_tower
    x = mel[:, None]
    for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
        x = F.gelu(convolution(x))
    x = (
        tower.conv_out(x.permute(0, 3, 1, 2).reshape(1, 10, -1))[0]
        + tower.positional_embedding.positional_embedding[:10]
    )
    for layer in tower.layers:
        (x,) = layer(x, torch.tensor([0, 10]))
    expected = public.model.multi_modal_projector(tower.ln_post(x))
    (made,) = ours.encode([torch.from_numpy(samples)])
    torch.testing.assert_close(made, expected, atol=2e-5, rtol=0)
    filled_up = public.get_audio_features(**reference_inputs(samples), return_dict=True).pooler_output
    assert (made - filled_up).abs().max() > 1e-3  # the two rules differ, so the comparison above means something


@torch.no_grad()
def test_clips_encoded_together_equal_each_alone(ours):
    clips = [
        torch.from_numpy(clip(*length, seed=n))
        for n, length in enumerate([(12, 40), (0.73, 0), (5.3, 11), (1, 0), (0.5, 0)])
    ]
    together = ours.encode(clips)
    for samples, rows in zip(clips, together, strict=True):
        (alone,) = ours.encode([samples])
        torch.testing.assert_close(rows, alone, atol=1e-5, rtol=0)


@torch.no_grad()
def test_sound_after_eight_seconds_does_not_reach_the_first_window(ours):
    samples = clip(12)
    samples[0] = 1.0  # the loudest sample, so the mel's floor is the same for both
    changed = samples.copy()
    changed[9 * 16_000 :] *= 0.5
    (a,), (b,) = ours.encode([torch.from_numpy(samples)]), ours.encode([torch.from_numpy(changed)])
    assert torch.equal(a[:104], b[:104])
    assert not torch.allclose(a[104:], b[104:], atol=1e-3)


def test_windows_give_back_the_rows_they_took_apart():
    x = torch.arange(20.0)[:, None]
    windows = Windows.of([9, 4, 7], 4, x.device)
    assert (windows.count, windows.width) == (6, 4)
    assert windows.mask is not None
    assert windows.mask[:, 0, 0].sum(-1).tolist() == [4, 4, 1, 4, 4, 3]
    assert torch.equal(windows.together(windows.apart(x)), x)


@pytest.mark.reference
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
@torch.no_grad()
def test_prefill_and_64_greedy_tokens_equal_the_reference(public, ours, length):
    samples = clip(*length)
    kv = dense(ours.config.decoder, 300)
    hidden = prefill(ours, samples, kv)
    kv.advance()
    ids = ids_for(len(hidden) - 5)[None]
    theirs = public.model(input_ids=ids, **reference_inputs(samples), use_cache=True)
    torch.testing.assert_close(hidden, theirs.last_hidden_state[0], atol=2e-5, rtol=0)
    logits = public.lm_head(theirs.last_hidden_state[0])
    torch.testing.assert_close(ours.logits(hidden), logits, atol=5e-5, rtol=1e-5)

    cache = theirs.past_key_values
    token = logits[-1].argmax()
    expected, made = [int(token)], [int(ours.logits(hidden[-1:]).argmax())]
    for step in range(64):
        token = public(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True).logits[0, -1].argmax()
        expected.append(int(token))
        x = ours(ours.embed_tokens(torch.tensor(made[-1:])), torch.tensor([len(hidden) + step]), kv)
        kv.advance()
        made.append(int(ours.logits(x).argmax()))
    assert made == expected
    assert len(set(made)) > 5  # otherwise nothing was compared


def test_both_layouts_write_the_published_names(public, ours):
    """The rename between the two published layouts, stated independently."""
    converted = {name for name in public.state_dict() if name != "lm_head.weight"}
    assert set(to_published(ours, HF_LAYOUT)) == converted

    def original(name: str) -> str:
        name = name.replace("model.multi_modal_projector.linear_", "thinker.audio_tower.proj")
        return name.replace("model.audio_tower.", "thinker.audio_tower.").replace(
            "model.language_model.", "thinker.model."
        )

    assert set(to_published(ours, LAYOUT)) == {original(name) for name in converted}


def test_layouts_and_configs_of_one_network_are_told_apart():
    original, converted = AsrConfig.from_json(ORIGINAL), AsrConfig.from_json(CONVERTED)
    assert (original.layout, converted.layout) == (LAYOUT, HF_LAYOUT)
    assert original.tied
    assert converted.tied  # the outer flag, although the inner one says no
    assert (original.encoder, original.decoder) == (converted.encoder, converted.decoder)


@torch.no_grad()
def test_an_untied_head_is_its_own_matrix():
    config = copy.deepcopy(ORIGINAL)
    config["thinker_config"]["text_config"]["tie_word_embeddings"] = False
    network = Qwen3Asr(AsrConfig.from_json(config))
    assert "thinker.lm_head.weight" in {slot.published for slot in slots(network, LAYOUT)}
    network.lm_head.weight.zero_()
    assert (network.logits(torch.ones(1, 96)) == 0).all()


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("audio_config", "activation_function", "relu"),
        ("audio_config", "scale_embedding", True),
        ("audio_config", "n_window_infer", 750),
        ("audio_config", "output_dim", 80),
        ("text_config", "hidden_act", "gelu"),
        ("text_config", "attention_bias", True),
        ("text_config", "use_sliding_window", True),
        ("text_config", "rope_parameters", {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(where, name, value):
    config = copy.deepcopy(CONVERTED)
    config[where][name] = value
    with pytest.raises(ValueError, match="rope_type" if name == "rope_parameters" else name):
        AsrConfig.from_json(config)


@pytest.mark.reference
@pytest.mark.slow
@torch.no_grad()
def test_the_true_encoder_and_one_true_decoder_layer_agree():
    """Sizes of the 1.7B checkpoint but for the vocabulary; both implementations share one set of weights."""
    config = copy.deepcopy(CONVERTED)
    config["audio_config"].update(
        d_model=1024,
        encoder_layers=24,
        encoder_attention_heads=16,
        encoder_ffn_dim=4096,
        downsample_hidden_size=480,
        output_dim=2048,
    )
    config["text_config"].update(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    network = Qwen3Asr(AsrConfig.from_json(config)).requires_grad_(False)
    from_published(network, HF_LAYOUT, to_published(network, HF_LAYOUT))
    with torch.device("meta"):
        public = Qwen3ASRForConditionalGeneration(Qwen3ASRConfig(**{**config, "pad_token_id": 0})).eval()
    state = network.state_dict()
    shared = {slot.published: state[slot.ours][slot.start : slot.stop] for slot in slots(network, HF_LAYOUT)}
    public.load_state_dict(shared, strict=False, assign=True)
    public.tie_weights()
    samples = clip(8.3, 11)
    tower = public.model.audio_tower.positional_embedding
    tower.positional_embedding = tower.compute_default_singular_positional_embedding()
    rotary = public.model.language_model.rotary_emb
    rotary.inv_freq = 1.0 / 1e6 ** (torch.arange(0, 128, 2).float() / 128)

    kv = dense(network.config.decoder, 200)
    hidden = prefill(network, samples, kv)
    (rows,) = network.encode([torch.from_numpy(samples)])
    theirs = public.model(input_ids=ids_for(len(rows))[None], **reference_inputs(samples))
    torch.testing.assert_close(rows, theirs.audio_hidden_states, atol=2e-5, rtol=0)
    torch.testing.assert_close(hidden, theirs.last_hidden_state[0], atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    ("audio", "text", "tower", "projector", "decoder", "embedding"),
    [
        ((24, 1024, 16, 4096), (2048, 6144), 314_328_704, 3_148_800, 1_409_408_000, 311_164_928),
        ((18, 896, 14, 3584), (1024, 3072), 184_653_952, 1_722_240, 440_466_432, 155_582_464),
    ],
    ids=["1.7B", "0.6B"],
)
def test_the_published_sizes_have_the_published_number_of_parameters(audio, text, tower, projector, decoder, embedding):
    config = copy.deepcopy(ORIGINAL)
    layers, hidden, heads, wide = audio
    config["thinker_config"]["audio_config"].update(
        encoder_layers=layers,
        d_model=hidden,
        encoder_attention_heads=heads,
        encoder_ffn_dim=wide,
        downsample_hidden_size=480,
        output_dim=text[0],
    )
    config["thinker_config"]["text_config"].update(
        hidden_size=text[0],
        intermediate_size=text[1],
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    )
    with torch.device("meta"):
        network = Qwen3Asr(AsrConfig.from_json(config))
    found = {name: value.numel() for name, value in network.state_dict().items()}

    def total(*prefixes: str) -> int:
        return sum(size for name, size in found.items() if name.startswith(prefixes))

    assert total("audio_tower.proj") == projector
    assert total("audio_tower.") == tower + projector
    assert total("decoder.layers.") == decoder
    assert total("decoder.norm.") == text[0]
    assert sum(found.values()) == tower + projector + decoder + text[0] + embedding
