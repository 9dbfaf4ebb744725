"""Drawing ahead of the step: order, errors and the end of the thread, with a device that only says it is one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from training.aura.ahead import ahead
from training.aura.model import Inputs
from training.aura.packed import Pieces


class Device:
    device = SimpleNamespace(type="cuda")

    def inputs(self, batch: int, room: object) -> Inputs:
        if batch == 7:
            raise ValueError("seven")
        t = torch.tensor(batch)
        return Inputs(t, t, Pieces(t, 1), t, t, t, None)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None, synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)


def drawn(batches: Iterator[int] | range) -> Iterator[int]:
    return (int(inputs.tokens) for inputs in ahead(batches, Device(), None, contextlib.nullcontext()))  # type: ignore[arg-type]


def test_batches_come_in_order_and_an_error_is_raised_where_they_are_used() -> None:
    numbers = drawn(range(100))
    assert [next(numbers) for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="seven"):
        next(numbers)


def test_the_thread_ends_with_the_loop() -> None:
    before = threading.active_count()
    inputs = ahead(count(10), Device(), None, contextlib.nullcontext())  # type: ignore[arg-type]
    assert int(next(inputs).tokens) == 10
    assert threading.active_count() == before + 1
    inputs.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
