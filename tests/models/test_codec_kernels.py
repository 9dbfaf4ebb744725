"""Code2Wav in kernels against Code2Wav as written: compiled where there is a GPU, elsewhere by Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from aura_omni.models import codec
from aura_omni.models.codec import CodecDecoder
from tests.models.codec_reference import random_codes, tiny

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton")

# Its loops take their bounds out of arrays as NumPy did before 2.4.
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="Triton's interpreter needs NumPy < 2.4",
)


@pytest.fixture(scope="module")
def decoder() -> CodecDecoder:
    return tiny()[0].to(DEVICE)


def steps(decoder: CodecDecoder, codes: Tensor, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Samples of two streams in slots 3 and 1 of 4, cut into steps of so many frames; and the state after them."""
    state, slots = decoder.new_state(4), torch.tensor([3, 1], device=DEVICE)
    parts = codes.to(DEVICE).split(counts, dim=1)
    return torch.cat([decoder.step(part, state, slots) for part in parts], dim=1), state.rows, state.frames


@pytest.mark.parametrize("counts", [[1, 1, 1, 2], [2, 1]])
def test_steps_in_kernels_are_those_as_written(
    decoder: CodecDecoder, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = random_codes(sum(counts), batch=2, seed=9)
    with monkeypatch.context() as patched:
        patched.setattr(codec, "fusible", lambda x: False)
        plain = steps(decoder, codes, counts)
    monkeypatch.setattr(codec, "fusible", lambda x: True)
    for one, other in zip(steps(decoder, codes, counts), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
