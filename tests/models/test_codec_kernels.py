"""Code2Wav in kernels against Code2Wav as written: compiled where there is a GPU, elsewhere by Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from aura_omni.models import codec
from aura_omni.models.codec import CodecDecoder
from tests.models.codec_reference import TINY, random_codes, random_decoder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton")

# Its loops take their bounds out of arrays as NumPy did before 2.4.
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="Triton's interpreter needs NumPy < 2.4",
)


# Of 96 samples a frame: a step of one frame is shorter than what some layers remember, a step of two is longer.
SMALL = {
    **TINY,
    "decode_upsample_rate": 96,
    "decoder_config": {**TINY["decoder_config"], "upsample_rates": [2, 3, 2, 2]},
}


@pytest.fixture(scope="module")
def decoder() -> CodecDecoder:
    return random_decoder(SMALL).to(DEVICE)


def steps(decoder: CodecDecoder, codes: Tensor, counts: list[int], *, primed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Samples of streams in slots 3 and 1 of 4, cut into steps of so many frames after some that are primed; the state after them."""
    state, slots = decoder.new_state(4), torch.tensor([3, 1], device=DEVICE)
    first, *parts = codes.to(DEVICE).split([primed, *counts], dim=1)
    if primed:
        decoder.prime(first, state, slots)
    return torch.cat([decoder.step(part, state, slots) for part in parts], dim=1), state.rows, state.frames


@pytest.mark.parametrize(("primed", "counts"), [(0, [1, 1, 2, 1]), (70, [3, 1]), (12, [1])])
def test_steps_in_kernels_are_those_as_written(
    decoder: CodecDecoder, primed: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = random_codes(primed + sum(counts), batch=2, seed=9)
    with monkeypatch.context() as patched:
        patched.setattr(codec, "fusible", lambda x: False)
        plain = steps(decoder, codes, counts, primed=primed)
    monkeypatch.setattr(codec, "fusible", lambda x: True)
    samples, rows, frames = steps(decoder, codes, counts, primed=primed)
    torch.testing.assert_close(samples, plain[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(rows, plain[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(frames, plain[2])
