"""Steps of the training as cheap as the device allows: each form of batch is captured once as a CUDA graph and replayed.

    steps = Steps(training, clips.samples, graphs=True)
    steps.prepare(deal)                 # once for each form; where that fails, the form is run launch by launch
    steps.take(deal)                    # a step, without waiting for it

A replay does what the launches would: forward, backward, clipping and optimizer, with fresh noise each time. What it reads it makes
or finds in its place (tests/training/lasting.py watches over that). Each form is replayed once before anything counts: a fault of the
device shows then, and leaves the process unusable; run.sh starts again without graphs.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from training.asr.clips import Deal, Form
from training.asr.ctc import CtcLoss, native, scanned

AHEAD_STEPS = 3  # that the host may be ahead of the device
WARM_STEPS = 2


class Learner(Protocol):
    device: torch.device
    noise: torch.Generator
    losses: Tensor
    parameters: list[torch.nn.Parameter]

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def learn(self, samples: Tensor, form: Form, table: Tensor, *, ctc: CtcLoss = scanned) -> None: ...


class Steps:
    def __init__(self, learner: Learner, samples: Tensor, *, graphs: bool) -> None:
        self._learner, self._samples, self._graphs = learner, samples, graphs
        self._captured: dict[Form, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._failed: list[Form] = []
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._running: deque[torch.cuda.Event] = deque()

    def __str__(self) -> str:
        return f"{len(self._captured)} forms captured, {len(self._failed)} failed"

    def prepare(self, deal: Deal) -> bool:
        """Captures the form of the deal. The learner is as before afterwards. False where it does not work."""
        if not self._graphs:
            return False
        try:
            with self._unchanged():
                self._captured[deal.form] = self._capture(deal)
        except RuntimeError:
            traceback.print_exc()
            self._failed.append(deal.form)
        return deal.form in self._captured

    def take(self, deal: Deal) -> None:
        learner = self._learner
        if deal.form in self._captured:
            graph, table = self._captured[deal.form]
            table.copy_(deal.table, non_blocking=True)
            graph.replay()
        else:
            ctc = native if learner.device.type == "cuda" else scanned
            learner.learn(self._samples, deal.form, deal.table.to(learner.device, non_blocking=True), ctc=ctc)
        if learner.device.type == "cuda":
            self._running.append(torch.cuda.Event(blocking=True))
            self._running[-1].record()
            if len(self._running) > AHEAD_STEPS:
                self._running.popleft().synchronize()

    def _capture(self, deal: Deal) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        learner, table = self._learner, deal.table.to(self._learner.device)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_STEPS):
                learner.learn(self._samples, deal.form, table)
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(learner.noise)
        with torch.cuda.graph(graph, pool=self._pool):
            learner.learn(self._samples, deal.form, table)
        graph.replay()
        torch.cuda.synchronize()
        if not bool(learner.losses.isfinite().all()):
            raise RuntimeError(f"a replayed step of {deal.form} gave {learner.losses.tolist()}")
        return graph, table

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Weights, the optimizer's means and the sums of losses come back to what they were, in place."""
        learner = self._learner
        held = [*learner.parameters, learner.losses, *_moments(learner)]
        before = [value.detach().clone() for value in held]
        known = {id(value) for value in held}
        try:
            yield
        finally:
            torch.cuda.synchronize()
            with torch.no_grad():
                for value, old in zip(held, before, strict=True):
                    value.copy_(old)
                for value in _moments(learner):
                    if id(value) not in known:  # made by the first step ever
                        value.zero_()


def _moments(learner: Learner) -> list[Tensor]:
    state: dict[Any, dict[str, Any]] = learner.optimizer.state
    return [value for moments in state.values() for value in moments.values() if isinstance(value, Tensor)]
