"""CUDA graphs without CUDA: a replay runs the function again on the tensors that stay. All but the recording is as it is there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from aura_omni.engine import graphs


class _Replay:
    def __init__(self, function: Callable[[], Tensor], output: Tensor) -> None:
        self._function, self._output = function, output

    def replay(self) -> None:
        self._output.copy_(self._function())


def without_cuda(patch: pytest.MonkeyPatch) -> list[int]:
    """Until the patch is undone; the list gets the rows of every graph that is recorded."""
    sizes: list[int] = []

    def recorded(function: Callable[[], Tensor], pool: object) -> tuple[_Replay, Tensor]:
        function()
        output = function().clone()
        sizes.append(len(output))
        return _Replay(function, output), output

    patch.setattr(graphs, "recorded", recorded)
    return sizes
