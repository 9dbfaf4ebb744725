"""A training step as one CUDA graph: some two thousand kernels, each shorter than its launch, for the price of one launch.

    steps = Replayed(work, quiet)
    result = steps(inputs)          # the tensors of the result belong to the graph, and the next call writes over them

The first calls run as they are, since libraries set themselves up at first use; then one is recorded, and from there on replayed.
Inputs of another shape than that one's run as they are; so does everything if recording fails, after the error is printed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import torch

from training.aura.model import Inputs

FIRST = 3  # calls that run as they are
Result = TypeVar("Result")


class Replayed(Generic[Result]):
    def __init__(self, work: Callable[[Inputs], Result], quiet: AbstractContextManager[object]) -> None:
        """work: reads and writes tensors that stay where they are, and waits for nothing. quiet: keeps other threads off the device."""
        self._work, self._quiet = work, quiet
        self._calls = 0
        self._side = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Inputs | None = None
        self._result: Result | None = None
        self.failed = False

    @property
    def recorded(self) -> bool:
        return self._graph is not None

    def __call__(self, inputs: Inputs) -> Result:
        if self.failed:
            return self._work(inputs)
        if self._graph is None:
            if self._calls < FIRST:
                return self._aside(inputs)
            if not self._record(inputs):
                return self._work(inputs)
        assert self._graph is not None
        assert self._inputs is not None
        assert self._result is not None
        mine, given = self._inputs.tensors(), inputs.tensors()
        if [x.shape for x in mine] != [x.shape for x in given]:
            return self._work(inputs)
        torch._foreach_copy_(mine, given)
        self._graph.replay()
        return self._result

    def _aside(self, inputs: Inputs) -> Result:
        self._calls += 1
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            result = self._work(inputs)
        torch.cuda.current_stream().wait_stream(self._side)
        return result

    def _record(self, inputs: Inputs) -> bool:
        """inputs become the graph's own; recording computes nothing."""
        graph = torch.cuda.CUDAGraph()
        with self._quiet:
            torch.cuda.synchronize()
            try:
                with torch.cuda.graph(graph, stream=self._side, capture_error_mode="thread_local"):
                    result = self._work(inputs)
            except RuntimeError:
                traceback.print_exc()
                self.failed = True
                torch.cuda.synchronize()
                return False
        self._graph, self._inputs, self._result = graph, inputs, result
        return True
