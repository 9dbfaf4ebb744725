"""What is sent to a device arrives as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aura_omni.engine.lane import sent, sent_together, staged

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
ARRAYS = [
    np.arange(7, dtype=np.int64),
    np.zeros(0, np.int64),
    np.arange(6, dtype=np.int32).reshape(3, 2).T,  # not as it lies in memory
    np.array([True, False, True]),
    np.linspace(0, 1, 5, dtype=np.float32)[None],
]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_arrays_of_any_kind_arrive_alone_and_together(device: torch.device) -> None:
    for arrived in ([sent(array, device) for array in ARRAYS], sent_together(ARRAYS, device)):
        for array, tensor in zip(ARRAYS, arrived, strict=True):
            assert tensor.device.type == device.type
            assert tensor.shape == array.shape
            assert tensor.cpu().numpy().dtype == array.dtype
            assert np.array_equal(tensor.cpu().numpy(), array)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_lists_arrive_as_integers_or_floats(device: torch.device) -> None:
    assert sent([1, 2], device).dtype == torch.int64
    assert sent([1.0, 2.5], device).dtype == torch.float32
    assert sent([1.0, 2.5], device).tolist() == [1.0, 2.5]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_parts_are_staged_one_after_another(device: torch.device) -> None:
    frames = np.arange(60, dtype=np.uint8).reshape(5, 2, 2, 3)
    host = staged([frames[:2], frames[4:], frames[:, ::-1]], device)
    assert host.is_pinned() == (device.type == "cuda")
    assert np.array_equal(host.numpy(), np.concatenate([frames[:2], frames[4:], frames[:, ::-1]]))
