"""How long something was under way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from aura_omni.counters import UnderWay


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=100.0)
    clock.perf_counter = lambda: clock.now_s
    monkeypatch.setattr("aura_omni.counters.time", clock)
    return clock


def test_time_counts_from_the_first_begin_to_the_end(clock: SimpleNamespace) -> None:
    spans = UnderWay()
    assert spans.total_s == 0.0
    spans.end()  # of nothing
    spans.begin()
    clock.now_s += 2.0
    spans.begin()  # another step, behind the one under way
    clock.now_s += 3.0
    assert spans.total_s == 5.0  # it is not over yet
    spans.end()
    clock.now_s += 50.0
    assert spans.total_s == 5.0
    spans.begin()
    clock.now_s += 0.5
    spans.end()
    spans.end()
    assert spans.total_s == 5.5
