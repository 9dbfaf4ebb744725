"""Eight bits: what a number becomes, what a product of such numbers is, and how a network gets them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from aura_omni.engine.loader import Checkpoint, weight_bytes
from aura_omni.models import fp8
from aura_omni.models.layers import DenseKV
from aura_omni.models.qwen3 import Decoder, DecoderConfig
from aura_omni.models.weights import Layout, Linear, in_eight_bits, slots, to_published

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Bfloat16 rounds a sum once more, and tensor cores add up with few bits: part of the spread of sums.
DTYPE, LIMIT = (torch.bfloat16, 6e-3) if DEVICE.type == "cuda" else (torch.float32, 1e-6)
CONFIG = DecoderConfig(
    layers=2,
    hidden=48,
    intermediate=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rms_eps=1e-6,
    rope_theta=1e4,
    max_positions=64,
)


def decoder(*, eight: bool, filled: bool = True) -> Decoder:
    with torch.device("meta"):
        made = Decoder(CONFIG)
    if eight:
        in_eight_bits(made)
    if filled:
        Checkpoint(Path(), "", dummy=True).load(made, Layout(), device=DEVICE, dtype=DTYPE)
    return made


def stands_for(values: Tensor, scale: Tensor) -> Tensor:
    return values.double() * scale.double()[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_number_is_within_a_sixteenth_or_a_small_part_of_its_row_s_largest(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(40, 300) * torch.logspace(-4, 4, 40)[:, None]).to(DEVICE, dtype)
    values, scale = fp8.quantized(x)
    assert (values.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    off = (stands_for(values, scale) - x.double()).abs()
    largest = x.double().abs().amax(1, keepdim=True)
    assert (off <= torch.maximum(x.double().abs() / 16, largest / 448 * 2**-10) * (1 + 1e-5)).all()
    assert torch.equal(values.float().abs().amax(1), torch.full((40,), 448.0, device=DEVICE))


def test_a_row_of_zeros_stays_one() -> None:
    values, scale = fp8.quantized(torch.zeros(2, 32, device=DEVICE))
    assert torch.equal(stands_for(values, scale), torch.zeros(2, 32, dtype=torch.double, device=DEVICE))


@pytest.mark.parametrize("rows", [1, 17, 100])
def test_a_product_is_that_of_what_both_stand_for(rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 256).to(DEVICE, DTYPE), torch.randn(96, 256).to(DEVICE, DTYPE)
    ours = fp8.linear(x, *fp8.quantized(weight))
    true = stands_for(*fp8.quantized(x)) @ stands_for(*fp8.quantized(weight)).T
    assert ours.dtype == DTYPE
    assert (ours.double() - true).std() < LIMIT * true.std()


def test_matrices_of_a_decoder_have_eight_bits_and_nothing_else_has() -> None:
    eight = decoder(eight=True)
    matrices = {name for name, part in eight.named_modules() if isinstance(part, nn.Linear)}
    kinds = {name: value.dtype for name, value in eight.state_dict().items()}
    assert {name.removesuffix(".weight") for name, kind in kinds.items() if kind == fp8.FP8} == matrices
    assert {name.removesuffix(".scale") for name in kinds if name.endswith(".scale")} == matrices
    assert len(matrices) == 4 * CONFIG.layers
    assert {kind for name, kind in kinds.items() if name.endswith("norm.weight")} == {DTYPE}


def test_the_plan_knows_what_they_take() -> None:
    for eight in (False, True):
        made = decoder(eight=eight)
        taken = sum(value.numel() * value.element_size() for value in made.state_dict().values())
        assert weight_bytes(decoder(eight=eight, filled=False), DTYPE) == taken


def test_a_file_is_read_into_eight_bits_part_by_part(tmp_path) -> None:
    """q, k and v come one by one and lie in one matrix, whose rows are as if it had been made so whole."""
    plain = decoder(eight=False)
    save_file(
        {name: value.cpu() for name, value in to_published(plain, Layout()).items()}, tmp_path / "model.safetensors"
    )
    read = decoder(eight=True, filled=False)
    assert {slot.published for slot in slots(read, Layout())} == {slot.published for slot in slots(plain, Layout())}
    Checkpoint(tmp_path, "it").load(read, Layout(), device=DEVICE, dtype=DTYPE)
    in_eight_bits(plain)
    for (name, one), (_, other) in zip(read.state_dict().items(), plain.state_dict().items(), strict=True):
        assert torch.equal(one.float(), other.float()), name


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 20])
def test_eight_bits_from_a_graph_are_those_as_written(rows: int) -> None:
    eight = decoder(eight=True)
    kv = DenseKV(CONFIG.layers, 1, rows, CONFIG.kv_heads, CONFIG.head_dim, dtype=DTYPE, device=DEVICE)
    positions = torch.arange(rows, device=DEVICE)
    given = torch.randn(3, rows, CONFIG.hidden, device=DEVICE, dtype=DTYPE)
    x, graph = given[0].clone(), torch.cuda.CUDAGraph()
    with torch.inference_mode():

        def written(x: Tensor) -> Tensor:
            kv.reset()
            return eight(x, positions, kv)

        expected = [written(one) for one in given]
        with torch.cuda.graph(graph):
            found = written(x)
        for one, plain in zip(given, expected, strict=True):
            x.copy_(one)
            graph.replay()
            assert torch.equal(found, plain)


def test_without_eight_bits_a_matrix_is_pytorch_s() -> None:
    torch.manual_seed(0)
    ours, theirs = Linear(48, 32), nn.Linear(48, 32, bias=False)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 48)
    assert torch.equal(ours(x), theirs(x))
