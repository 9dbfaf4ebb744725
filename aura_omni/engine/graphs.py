"""A function of tensors as CUDA graphs, one for each batch size that occurs.

A graph replays hundreds of launches as one, and demands that shapes and addresses never change: so the batch is padded to the
next of a few sizes, and inputs are copied into tensors that stay.

    step = Graphed(decode, pads=(x_row, number_row), sizes=(1, 2, 4, 8))
    hidden, logits = step(x, numbers)          # x [3, H], numbers [3, P]: runs the graph of 4 rows, returns 3
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Capture:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def sizes_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, ... so that no more than half, and soon no more than seven, of the rows are padding."""
    return (*(size for size in (1, 2, 4, *range(8, most, 8)) if size < most), most)


class Graphed:
    """All on one device and thread. Outputs are views of tensors that the next call overwrites."""

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], *, pads: Sequence[Tensor], sizes: Sequence[int]
    ) -> None:
        """function(*tensors, **options): tensors have the batch first, options are hashable and each set has its own graphs.

        pads: for each tensor one row [1, ...] of full width, such that a padded row does no harm.
        """
        self._function, self._pads, self._sizes = function, tuple(pads), sorted(sizes)
        self._captures: dict[Hashable, _Capture] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def prepare(self, **options: Hashable) -> None:
        """Capture every size now, so that no request waits for it. Largest first: the smaller ones reuse its memory."""
        for size in reversed(self._sizes):
            self._captured(size, options)

    def __call__(self, *tensors: Tensor, **options: Hashable) -> tuple[Tensor, ...]:
        """tensors [B, ...], B at most the largest size; their second dimension may be narrower than the pad's."""
        count = tensors[0].shape[0]
        size = next(size for size in self._sizes if size >= count)
        capture = self._captured(size, options)
        for static, given, pad in zip(capture.inputs, tensors, self._pads, strict=True):
            static[:count, : given.shape[1]].copy_(given)
            if count < size:
                static[count:] = pad
        capture.graph.replay()
        return tuple(output[:count] for output in capture.outputs)

    @torch.inference_mode()
    def _captured(self, size: int, options: dict[str, Hashable]) -> _Capture:
        key = (size, *options.items())
        if key not in self._captures:
            inputs = tuple(pad.repeat(size, *[1] * (pad.dim() - 1)) for pad in self._pads)
            # Libraries set themselves up on their first calls, which a graph must not record.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._function(*inputs, **options)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = self._function(*inputs, **options)
            self._captures[key] = _Capture(graph, inputs, outputs)
        return self._captures[key]
