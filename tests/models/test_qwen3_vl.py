"""The vision tower and the language model it feeds, against the public implementation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from aura_omni.models.layers import DenseKV, Rope
from aura_omni.models.qwen3 import DecoderConfig, DecoderLayer
from aura_omni.models.qwen3_vl import LAYOUT, Qwen3VL, VisionConfig, VisionTower, VLConfig
from aura_omni.models.weights import Layout, from_published, slots
from aura_omni.nano.published import AURA_TOKENS, CONTROL_TOKENS, PLAIN_ADDED_TOKENS, TRUE, aura_files
from tests.aura_tiny import config_json, network, randomise, reference

CLOSE = 2e-5


@pytest.mark.reference
@pytest.mark.parametrize("vision", [{}, {"hidden_size": 144, "num_heads": 2}], ids=["head of 16", "head of 72"])
@pytest.mark.parametrize(("groups", "grid"), [(1, (22, 40)), (3, (6, 10)), (2, (2, 2))])
def test_features_equal_the_reference(vision: dict[str, Any], groups: int, grid: tuple[int, int]) -> None:
    config = config_json(**vision)
    ours = network(config)
    patches = torch.randn(groups, grid[0] * grid[1], 1536, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        theirs = reference(config, ours).model.visual(patches.flatten(0, 1), torch.tensor([[groups, *grid]]))
        features = ours.visual(patches, grid)
    assert features.shape == (4, groups, grid[0] * grid[1] // 4, 96)
    for found, expected in zip(features, (theirs.pooler_output, *theirs.deepstack_features), strict=True):
        torch.testing.assert_close(found.flatten(0, 1), expected, atol=CLOSE, rtol=0)


def test_groups_do_not_see_each_other() -> None:
    ours = network(config_json())
    patches = torch.randn(3, 24, 1536)
    with torch.inference_mode():
        together, alone = ours.visual(patches, (4, 6)), ours.visual(patches[1:2], (4, 6))
    torch.testing.assert_close(together[:, 1:2], alone, atol=1e-6, rtol=1e-5)


def test_position_tables_follow_new_weights() -> None:
    ours = network(config_json())
    patches = torch.randn(1, 16, 1536)
    with torch.inference_mode():
        before = ours.visual(patches, (4, 4))
        ours.visual.pos_embed.weight.add_(1.0)
        ours.visual.prepare()
        assert not torch.allclose(before, ours.visual(patches, (4, 4)))


def test_both_spellings_of_the_rope_settings_mean_the_same() -> None:
    older, newer = config_json(), config_json()
    text = newer["text_config"]
    rope = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}
    text["rope_parameters"] = rope
    newer["vision_config"]["rope_parameters"] = {"rope_type": "axial", "rope_theta": 10000.0}
    assert VLConfig.from_json(older) == VLConfig.from_json(newer)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("vision_config", "hidden_act", "gelu"),
        ("vision_config", "deepstack_visual_indexes", [2, 1]),
        ("vision_config", "num_position_embeddings", 200),
        ("vision_config", "out_hidden_size", 97),
        ("text_config", "attention_bias", True),
        ("text_config", "rope_scaling", {"rope_type": "yarn", "mrope_section": [6, 5, 5]}),
        (
            "text_config",
            "rope_scaling",
            {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": False},
        ),
        ("text_config", "rope_scaling", {"rope_type": "default"}),
    ],
)
def test_an_architecture_that_computes_something_else_is_refused(section: str, name: str, value: Any) -> None:
    config = copy.deepcopy(config_json())
    config[section][name] = value
    with pytest.raises(ValueError, match=r"must|only|is not"):
        VLConfig.from_json(config)


def test_the_published_dimensions_have_the_published_size() -> None:
    names = {name: number for number, name in enumerate((*CONTROL_TOKENS, *PLAIN_ADDED_TOKENS, *AURA_TOKENS))}
    config = VLConfig.from_json(aura_files(TRUE, names, 151936)["config.json"])
    with torch.device("meta"):
        built = Qwen3VL(config)
    assert sum(weight.numel() for weight in built.parameters()) == 8_767_123_696
    published = [slot.published for slot in slots(built, LAYOUT)]
    assert len(set(published)) == 750
    assert {name.split(".")[0] for name in published} == {"model", "lm_head"}


@pytest.mark.reference
def test_one_block_of_the_published_size_equals_the_reference() -> None:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    sizes = {
        "depth": 1, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "out_hidden_size": 4096, "in_channels": 3,
        "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [0], "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    theirs = Qwen3VLVisionModel(Qwen3VLVisionConfig(**sizes)).eval()
    randomise(theirs)
    ours = VisionTower(VisionConfig.from_json(sizes)).eval()
    from_published(ours, Layout(), theirs.state_dict())
    patches = torch.rand(1, 8 * 12, 1536) * 2 - 1
    with torch.inference_mode():
        expected = theirs(patches[0], torch.tensor([[1, 8, 12]]))
        features = ours(patches, (8, 12))
    torch.testing.assert_close(features[0, 0], expected.pooler_output, atol=CLOSE, rtol=0)
    torch.testing.assert_close(features[1, 0], expected.deepstack_features[0], atol=CLOSE, rtol=0)


@pytest.mark.reference
def test_one_decoder_layer_of_the_published_size_equals_the_reference() -> None:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer, Qwen3VLTextRotaryEmbedding

    sizes = {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 1, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "vocab_size": 8, "max_position_embeddings": 262144, "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5_000_000, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
        },
    }  # fmt: skip
    config = Qwen3VLTextConfig(**sizes)
    config._attn_implementation = "sdpa"
    theirs = Qwen3VLTextDecoderLayer(config, 0).eval()
    randomise(theirs)
    decoder = DecoderConfig.from_json(sizes, mrope=True)
    ours = DecoderLayer(decoder, 0).eval()
    from_published(ours, Layout(), theirs.state_dict())
    x = torch.randn(1, 24, 4096)
    positions = torch.stack((torch.arange(24) // 12, torch.arange(24) % 12 // 4, torch.arange(24) % 4)) * 37 + 9000
    kv = DenseKV(1, 1, 24, 8, 128, dtype=torch.float32, device=torch.device("cpu"))
    mask = torch.full((24, 24), -torch.inf).triu(1)[None, None]
    with torch.inference_mode():
        turn = Qwen3VLTextRotaryEmbedding(config)(x, positions[:, None])
        expected = theirs(x, position_embeddings=turn, attention_mask=mask)
        summands = ours(x[0], None, *Rope(128, 5_000_000, decoder.mrope_section).tables(positions, x.dtype), kv)
    torch.testing.assert_close(sum(summands), expected[0], atol=CLOSE, rtol=0)
