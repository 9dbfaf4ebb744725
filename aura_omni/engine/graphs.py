"""A function of tensors as CUDA graphs, one for each batch size that occurs.

A graph replays hundreds of launches as one, and demands that shapes and addresses never change: so inputs are copied into
tensors that stay, and the caller pads the batch to the next of a few sizes.

    step = Graphed(decode, rows=(number_row,), sizes=(1, 2, 4, 8))
    outputs = step(numbers, how=how)          # numbers [4, n] of 3 sequences and one that is nobody's
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Capture:
    graph: torch.cuda.CUDAGraph | None  # None: on "meta" there is nothing to replay
    inputs: tuple[Tensor, ...]
    output: Tensor


class GraphPool:
    """Memory that graphs share which never run at the same time."""

    @cached_property
    def handle(self) -> torch.cuda._POOL_HANDLE:
        return torch.cuda.graph_pool_handle()


def sizes_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, ... so that no more than half, and soon no more than seven, of the rows are padding."""
    return (*(size for size in (1, 2, 4, *range(8, most, 8)) if size < most), most)


class Graphed:
    """All in one lane, whose stream is current at every call. The output is overwritten by the next call."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        *,
        sizes: Iterable[int],
        pool: GraphPool,
        rows: Sequence[Tensor] = (),
        columns: Sequence[Tensor] = (),
        fixed: Sequence[Tensor] = (),
    ) -> None:
        """function(*tensors, **options): first tensors with the batch first, then with the batch last, then those that are fixed in
        shape; options are hashable and each set has its own graphs.

        rows, columns, fixed: for each tensor one row [1, ...] or column [n, 1], or itself, of full size and such that it does no
        harm; pool: memory shared by what runs in one lane.
        """
        self._function = function
        self._rows, self._columns, self._fixed = tuple(rows), tuple(columns), tuple(fixed)
        self._sizes, self._pool = sorted(sizes), pool
        self._captures: dict[Hashable, _Capture] = {}

    @property
    def most(self) -> int:
        """Rows of the largest batch."""
        return self._sizes[-1]

    def size(self, count: int) -> int:
        """The number of rows that a batch of `count` is padded to."""
        return next(size for size in self._sizes if size >= count)

    def prepare(self, **options: Hashable) -> None:
        """Capture every size now, so that no request waits for it. Largest first: the smaller ones reuse its memory."""
        for size in reversed(self._sizes):
            self._captured(size, options)
        torch.cuda.empty_cache()  # of what the calls before recording took; graphs have memory of their own

    def __call__(self, *tensors: Tensor | None, **options: Hashable) -> Tensor:
        """tensors [B, ...] on the host (pinned) or the device.

        Their second dimension may be narrower than the row's, and a tensor may lack the last rows of the batch, or all that
        makes it one of the sizes, or (None) all of them: there the function sees what earlier calls left. The last rows of columns
        and of what is fixed may be missing likewise. Of what is narrower PyTorch makes a copy on the device and launches another to
        where it belongs; what only lacks rows is copied there at once.
        """
        rows, columns = tensors[: len(self._rows)], tensors[len(self._rows) :][: len(self._columns)]
        counts = [len(one) for one in rows if one is not None] + [one.shape[1] for one in columns if one is not None]
        capture = self._captured(self.size(max(counts)), options)
        for static, given in zip(capture.inputs, tensors, strict=True):
            if given is None:
                continue
            if static.shape != given.shape:
                static = static[: len(given), : given.shape[1]]
            static.copy_(given, non_blocking=True)
        if capture.graph is not None:
            capture.graph.replay()
        return capture.output

    def _captured(self, size: int, options: dict[str, Hashable]) -> _Capture:
        key = (size, *options.items())
        return self._captures.get(key) or self._capture(key, size, options)

    @torch.inference_mode()
    def _capture(self, key: Hashable, size: int, options: dict[str, Hashable]) -> _Capture:
        batch = [row.repeat(size, *[1] * (row.dim() - 1)) for row in self._rows]
        batch += [column.repeat(1, size) for column in self._columns]
        inputs = (*batch, *(tensor.clone() for tensor in self._fixed))
        graph, output = recorded(lambda: self._function(*inputs, **options), self._pool)
        capture = self._captures[key] = _Capture(graph, inputs, output)
        return capture


def recorded(function: Callable[[], Tensor], pool: GraphPool) -> tuple[torch.cuda.CUDAGraph | None, Tensor]:
    """The function as a graph, and where a replay leaves its result. In a lane; one recording of the process at a time."""
    # Kernels are compiled and libraries set themselves up on their first call, which a graph must not record.
    output = function()
    if output.is_meta:
        return None, output
    graph = torch.cuda.CUDAGraph()
    # On the lane's own stream: its priority and its libraries' workspaces go into the graph. Not `torch.cuda.graph`, which
    # waits for the device and gives all free memory back before every single recording.
    with _no_collection():
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            output = function()
        finally:
            graph.capture_end()
    return graph, output


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collector may run at any allocation, and freeing an older graph on this thread spoils a recording."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
