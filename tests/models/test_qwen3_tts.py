"""The Talker's networks against the public package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aura_omni.models.layers import DenseKV
from aura_omni.models.qwen3_tts import TALKER_LAYOUT, Choose, Talker, TalkerConfig, looked_up
from aura_omni.models.weights import from_published, to_published
from tests.reference_tts import reference_model, tts_config


def same_weights(config: dict[str, Any], model: Any) -> Talker:
    with torch.device("meta"):
        talker = Talker(TalkerConfig.from_json(config))
    talker = talker.to_empty(device="cpu").requires_grad_(False)
    from_published(talker, TALKER_LAYOUT, model.state_dict())
    return talker


def forced(codes: Tensor, seen: list[Tensor]) -> Choose:
    """Chooses the given codes [B, 16] whatever the logits, which it keeps."""

    def choose(logits: Tensor, group: int) -> Tensor:
        seen.append(logits)
        return codes[:, group]

    return looked_up(choose)


def reference_logits(model: Any, hidden: Tensor, codes: Tensor) -> Tensor:
    """The package's code predictor over whole frames at once: [B, 15, V]."""
    tables = [model.talker.get_input_embeddings(), *model.talker.code_predictor.get_input_embeddings()]
    rows = [hidden] + [table(codes[:, group]) for group, table in enumerate(tables[:-1])]
    with torch.no_grad():
        return model.talker.code_predictor.forward_finetune(inputs_embeds=torch.stack(rows, dim=1)).logits


def decoded(talker: Talker, rows: Tensor) -> Tensor:
    config = talker.config.decoder
    kv = DenseKV(config.layers, 1, len(rows), config.kv_heads, config.head_dim, dtype=rows.dtype, device=rows.device)
    return talker.decoder(rows, torch.arange(len(rows)), kv)


@pytest.mark.reference
@pytest.mark.parametrize("size", ["1b7", "0b6"])
@pytest.mark.parametrize("batch", [1, 3])
def test_predictor_logits_and_embedding_sum_equal_the_reference(size: str, batch: int) -> None:
    config = tts_config("custom_voice", size=size)
    model = reference_model(config, seed=2)
    talker = same_weights(config, model)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(batch, 64, generator=generator)
    codes = torch.randint(2048, (batch, 16), generator=generator)

    seen: list[Tensor] = []
    kv = talker.new_kv(batch)
    for _ in range(2):  # the second frame in the same memory
        seen.clear()
        frame, embedding = talker.frame(hidden, codes[:, 0], forced(codes, seen), kv)
    torch.testing.assert_close(torch.stack(seen, dim=1), reference_logits(model, hidden, codes), atol=1e-5, rtol=1e-5)
    assert torch.equal(frame, codes)
    tables = [model.talker.get_input_embeddings(), *model.talker.code_predictor.get_input_embeddings()]
    expected = torch.stack([table(codes[:, group]) for group, table in enumerate(tables)], dim=1).sum(1)
    assert torch.equal(embedding, expected)


def test_the_sum_of_embeddings_keeps_its_order_in_bfloat16() -> None:
    config = tts_config("custom_voice")
    talker = same_weights(config, reference_model(config)).to(torch.bfloat16)
    talker.prepare()
    codes = torch.randint(2048, (50, 16), generator=torch.Generator().manual_seed(0))
    tables = [talker.codec_embedding, *talker.code_predictor.codec_embedding]
    rows = torch.cat([table(codes[:, group : group + 1]) for group, table in enumerate(tables)], dim=1)
    assert torch.equal(talker.frames(codes), rows.sum(1))
    one_by_one = rows[:, 0]
    for group in range(1, 16):
        one_by_one = one_by_one + rows[:, group]
    assert not torch.equal(talker.frames(codes), one_by_one)


def test_stacked_tables_take_no_memory_of_their_own_and_are_written_as_published() -> None:
    config = tts_config("base", size="0b6")
    model = reference_model(config)
    talker = same_weights(config, model)
    tables = [talker.codec_embedding, *talker.code_predictor.codec_embedding]
    assert len({table.weight.untyped_storage().data_ptr() for table in tables}) == 1
    written = to_published(talker, TALKER_LAYOUT)
    expected = {name: value for name, value in model.state_dict().items() if name.startswith("talker.")}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


@pytest.mark.reference
@pytest.mark.parametrize("size", ["1b7", "0b6"])
def test_hidden_rows_and_logits_equal_the_reference(size: str) -> None:
    config = tts_config("custom_voice", hidden=64 if size == "1b7" else 32)
    model = reference_model(config, seed=4)
    talker = same_weights(config, model)
    rows = torch.randn(70, talker.config.decoder.hidden, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model.talker.model(inputs_embeds=rows[None]).last_hidden_state[0]
        expected_logits = model.talker.codec_head(expected)
    hidden = decoded(talker, rows)
    torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(talker.codec_head(hidden), expected_logits, atol=2e-5, rtol=0)
    assert expected_logits.std() > 0.3


@pytest.mark.reference
def test_one_layer_of_the_published_size_equals_the_reference() -> None:
    config = tts_config("voice_design", hidden=2048)
    talker_config = config["talker_config"]
    talker_config.update(num_hidden_layers=1, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8)
    talker_config.update(head_dim=128, text_hidden_size=2048, max_position_embeddings=32_768)
    talker_config["rope_scaling"]["mrope_section"] = [24, 20, 20]
    talker_config["code_predictor_config"].update(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=8
    )
    talker_config["code_predictor_config"].update(head_dim=128)
    model = reference_model(config, seed=1, spread=0.03)
    talker = same_weights(config, model)

    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(12, 2048, generator=generator) * 0.2
    with torch.no_grad():
        expected = model.talker.model(inputs_embeds=rows[None]).last_hidden_state[0]
    hidden = decoded(talker, rows)
    torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(talker.codec_head(hidden), model.talker.codec_head(expected), atol=1e-3, rtol=1e-4)

    codes = torch.randint(2048, (2, 16), generator=generator)
    seen: list[Tensor] = []
    talker.frame(hidden[:2], codes[:, 0], forced(codes, seen))
    expected_logits = reference_logits(model, hidden[:2], codes)
    torch.testing.assert_close(torch.stack(seen, dim=1), expected_logits, atol=1e-3, rtol=1e-4)
    assert expected_logits.std() > 0.5


def test_architectures_that_are_not_computed_are_refused() -> None:
    def refused(message: str, section: str, **changes: Any) -> None:
        config = tts_config("base")
        talker = config["talker_config"]
        (talker if section == "talker" else talker["code_predictor_config"]).update(changes)
        with pytest.raises(ValueError, match=message):
            TalkerConfig.from_json(config)

    refused("talker_config has hidden_act 'gelu'", "talker", hidden_act="gelu")
    refused("code_predictor_config has attention_bias True", "predictor", attention_bias=True)
    refused("code_predictor_config has use_sliding_window True", "predictor", use_sliding_window=True)
    refused("layer_types", "predictor", layer_types=["full_attention", "sliding_attention"])
    refused("rope_type 'yarn'", "predictor", rope_scaling={"rope_type": "yarn", "factor": 4})
    refused("num_code_groups 16, its code_predictor_config 8", "predictor", num_code_groups=8)
