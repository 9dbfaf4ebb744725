"""A training step as one CUDA graph: the small networks here are bound by the launching of kernels, not by their work.

A step reads only tensors that it makes or that outlive it in their place (see `Dial` for numbers that change; tests/training/lasting.py
watches over it), and has the same shapes every time. On a CPU the step is simply called. Whether a device can capture is found
out by trying, all steps before the first that counts, with rates of zero: a failed capture or replay leaves the process
unusable, and run.sh then starts the script again with --eager.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Step:
    """step() -> a dict of scalar tensors; calling this runs it once, and the tensors hold its values until the next call."""

    def __init__(self, step: Callable[[], dict[str, Tensor]], *, captured: bool, pool: object = None) -> None:
        self._step, self._graph, self._found = step, None, {}
        if captured:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._found = step()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool):
                self._found = step()
            self._graph.replay()
            torch.cuda.synchronize()
            if not all(bool(value.isfinite()) for value in self._found.values()):
                raise RuntimeError(f"a replayed step gave {self._found}")

    @property
    def pool(self) -> object:
        return self._graph.pool() if self._graph is not None else None

    def __call__(self) -> dict[str, Tensor]:
        if self._graph is None:
            self._found = self._step()
        else:
            self._graph.replay()
        return self._found


class Dial:
    """A number that a captured step reads: set by the host, held on the device."""

    def __init__(self, device: torch.device, value: float = 0.0) -> None:
        self.value = torch.full((), value, device=device)

    def set(self, value: float) -> None:
        self.value.fill_(value)


def average(mean: list[Tensor], weights: list[Tensor], rate: Tensor) -> None:
    """Exponential moving average of the weights, in place; rate: how far towards them, a number on the device."""
    with torch.no_grad():
        away = torch._foreach_sub([weight.detach() for weight in weights], mean)
        torch._foreach_mul_(away, rate)
        torch._foreach_add_(mean, away)


def adam(groups: list[dict], device: torch.device, *, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW whose rates are numbers on the device: param_groups[n]["lr"].fill_(..)."""
    on_gpu = device.type == "cuda"
    for group in groups:
        group["lr"] = torch.zeros((), device=device)
    return torch.optim.AdamW(
        groups, betas=betas, fused=on_gpu, capturable=on_gpu, foreach=False if not on_gpu else None
    )
