"""Where the steps of a runner are computed: in the order of their launch, on a CUDA stream of their own, or at once on a CPU.

The order is all the safety there is: memory, pages and seats may be given to someone else while a step that uses them is
still under way, because whatever the new owner does with them comes later in the lane.

    with lane.active():
        arrival = lane.home(step(sent(numbers, device)))      # launched; the host goes on
    ...
    if arrival.there:
        values = arrival.numpy()
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Arrival(Protocol):
    """Values on their way to the host, behind everything that was launched in their lane before."""

    @property
    def there(self) -> bool:
        """Whether `numpy` would not wait. Raises torch.AcceleratorError when the device has failed."""
        ...

    def numpy(self) -> np.ndarray:
        """The values, in memory of their own."""
        ...


class Lane:
    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        """urgent: on CUDA, blocks of its kernels go before those of lanes that are not, wherever one is free."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)
            # What is on the device already (weights) was put there by another stream.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def active(self) -> AbstractContextManager[object]:
        """Inside it, operations on the device are launched in this lane, and CUDA graphs are recorded with its priority."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def home(self, values: Tensor) -> Arrival:
        """Start to copy values, which were computed in this lane, to the host. Inside `active` only."""
        return _Here(values) if self._stream is None else _Coming(values)

    def wait(self) -> None:
        """Until nothing that was launched in this lane is under way."""
        if self._stream is not None:
            self._stream.synchronize()


class _Here:
    there = True

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def numpy(self) -> np.ndarray:
        return self._values.numpy().copy()


class _Coming:
    def __init__(self, values: Tensor) -> None:
        # PyTorch keeps a pinned block from being given away while a copy to or from it is under way.
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def there(self) -> bool:
        return self._event.query()

    def numpy(self) -> np.ndarray:
        self._event.synchronize()
        return self._host.numpy().copy()


_ALIGNED = 16  # bytes


def sent(values: np.ndarray | Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """values on the device, in their own dtype (a list: int64 or float32), without waiting for what is under way there."""
    if device.type == "cpu":
        return torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values)
    array = values if isinstance(values, np.ndarray) else torch.tensor(values).numpy()
    return staged([array], device).to(device, non_blocking=True)


def sent_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """As `sent` does each, in one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    # Each begins where numbers of any size may begin.
    ends = np.cumsum([-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays])
    host = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    begins = [0, *ends[:-1].tolist()]
    for array, begin in zip(arrays, begins, strict=True):
        np.copyto(host.numpy()[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape), array)
    there = host.to(device, non_blocking=True)
    return [
        there[begin : begin + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
        for array, begin in zip(arrays, begins, strict=True)
    ]


def staged(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """parts, one after another along their first dimension, on the host, where a copy to the device may start without waiting.

    From memory that is not pinned the driver may wait for the whole lane first. `Tensor.pin_memory` shares its copy out among
    threads, who were seen to need 1.5 to 5.6 ms for two frames of 640x360; one alone copies them in a fraction of that.
    """
    first = parts[0]
    shape = (sum(map(len, parts)), *first.shape[1:])
    host = torch.empty(shape, dtype=_torch_dtype(first.dtype), pin_memory=device.type == "cuda")
    np.concatenate(parts, out=host.numpy())
    return host


@cache
def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def staged_padded(rows: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """N arrays [n_i] of one dtype as `staged` has them, side by side: [N, 1 + the longest], first n_i itself, zeros behind the end."""
    longest = max(map(len, rows))
    host = torch.empty(len(rows), 1 + longest, dtype=_torch_dtype(rows[0].dtype), pin_memory=device.type == "cuda")
    for line, row in zip(host.numpy(), rows, strict=True):
        end = 1 + len(row)
        line[0], line[1:end], line[end:] = len(row), row, 0
    return host
