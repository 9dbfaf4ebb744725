"""All of a run's state in one file, so that it goes on where it was after a fault: nothing of it is rounded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.tts.clock import Clock, load

EVERY_S = 60.0


class State:
    """networks, the running mean of weights, and the optimizers' moments. They are filled in place, before anything is captured."""

    def __init__(
        self,
        path: Path | None,
        clock: Clock,
        *,
        networks: Sequence[nn.Module],
        mean: list[Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """path: None keeps nothing."""
        self._path, self._clock, self._saved_s = path, clock, clock.elapsed_s
        self._networks, self._mean, self._optimizers = networks, mean, optimizers

    def resume(self) -> bool:
        """Whether there was a file to go on from; the clock then goes on too."""
        if self._path is None or not self._path.exists():
            return False
        found = load(self._path)
        for network, state in zip(self._networks, found["networks"], strict=True):
            network.load_state_dict(state)
        with torch.no_grad():
            for mine, kept in zip(self._mean, found["mean"], strict=True):
                mine.copy_(kept)
        for (optimizer, weight), moments in zip(self._weights(), found["moments"], strict=True):
            if moments:
                optimizer.state[weight] = {name: value.to(weight.device) for name, value in moments.items()}
        self._clock.go_on(found["progress"], found["step"])
        return True

    def due(self) -> bool:
        return self._clock.elapsed_s - self._saved_s > EVERY_S

    def save(self) -> None:
        self._saved_s = self._clock.elapsed_s
        if self._path is None:
            return
        if not bool(torch.stack([value.sum() for value in self._mean]).isfinite().all()):
            raise RuntimeError(f"the weights are no numbers at step {self._clock.step}; the last state stays")
        moments: list[dict[str, Tensor]] = [
            dict(optimizer.state.get(weight, {})) for optimizer, weight in self._weights()
        ]
        content: dict[str, Any] = {
            "networks": [network.state_dict() for network in self._networks], "mean": self._mean, "moments": moments,
            "progress": self._clock.progress, "step": self._clock.step,
        }  # fmt: skip
        draft = self._path.with_suffix(".draft")
        torch.save(content, draft)
        os.replace(draft, self._path)

    def forget(self) -> None:
        """The run is over."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _weights(self) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    yield optimizer, weight
