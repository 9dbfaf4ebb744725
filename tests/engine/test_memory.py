from __future__ import annotations

from dataclasses import replace

import pytest

from aura_omni.engine.memory import GIB, StageNeeds, plan_pages
from aura_omni.errors import DoesNotFit

AURA = StageNeeds(
    "aura", 0.5, weight_bytes=16 * GIB, activation_bytes=2 * GIB, kv_bytes_per_token=147_456, max_model_len=32_768
)
VOCODER = StageNeeds("code2wav", 0.05, weight_bytes=GIB // 2, activation_bytes=GIB)


def test_pages_take_what_weights_and_activations_leave() -> None:
    pages = plan_pages(80 * GIB, [AURA, VOCODER], page_size=16)
    assert pages["code2wav"] == 0
    page_bytes = 16 * 147_456
    used = 18 * GIB + (pages["aura"] + 1) * page_bytes  # the zero page included
    assert 0 <= 40 * GIB - used < page_bytes


def test_fractions_that_sum_to_more_than_one_are_refused() -> None:
    with pytest.raises(DoesNotFit, match=r"sums to 1\.1 \(aura 0\.5, aura2 0\.6\)"):
        plan_pages(800 * GIB, [AURA, replace(AURA, name="aura2", fraction=0.6)], page_size=16)
    assert plan_pages(800 * GIB, [replace(AURA, name=f"s{n}", fraction=0.1) for n in range(10)], page_size=16)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5])
def test_fractions_outside_their_range_are_refused(fraction: float) -> None:
    with pytest.raises(DoesNotFit, match="of stage aura is"):
        plan_pages(80 * GIB, [replace(AURA, fraction=fraction)], page_size=16)


def test_weights_that_do_not_fit_are_refused_with_the_numbers_and_the_way_out() -> None:
    with pytest.raises(
        DoesNotFit, match=r"stage aura may take 8\.00 GiB \(0\.1 of 80\.00 GiB\) and needs 16\.00 GiB for weights"
    ):
        plan_pages(80 * GIB, [replace(AURA, fraction=0.1)], page_size=16)
    with pytest.raises(DoesNotFit, match="Use a device with more memory"):
        plan_pages(8 * GIB, [AURA], page_size=16)


def test_following_the_advice_works() -> None:
    tight = replace(AURA, fraction=0.26)
    with pytest.raises(DoesNotFit) as refused:
        plan_pages(80 * GIB, [tight], page_size=16)
    message = str(refused.value)
    fraction = float(message.split("from 0.26 to ")[1].split(",")[0])
    tokens = int(message.split("lower max_model_len to ")[1].rstrip(".").replace(",", ""))
    assert plan_pages(80 * GIB, [replace(tight, fraction=fraction)], page_size=16)["aura"] * 16 >= 32_768
    assert plan_pages(80 * GIB, [replace(tight, max_model_len=tokens)], page_size=16)["aura"] * 16 >= tokens


def test_the_longest_sequence_must_fit_beside_the_spare_page() -> None:
    stage = StageNeeds("asr", 1.0, weight_bytes=500, activation_bytes=500, kv_bytes_per_token=100, max_model_len=160)
    enough = 1_000 + 11 * 16 * 100
    assert plan_pages(enough, [stage], page_size=16) == {"asr": 10}
    with pytest.raises(DoesNotFit, match="for one sequence of 160 tokens"):
        plan_pages(enough - 1, [stage], page_size=16)


def test_a_stage_without_pages_is_refused_when_its_weights_do_not_fit() -> None:
    with pytest.raises(DoesNotFit, match="stage code2wav"):
        plan_pages(20 * GIB, [VOCODER], page_size=16)
