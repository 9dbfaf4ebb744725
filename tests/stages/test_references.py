"""Reference voices are built one after another, once each, and only while somebody waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from aura_omni.engine.lane import Lane
from aura_omni.errors import Overloaded, Unavailable
from aura_omni.flow import Audio
from aura_omni.stages.references import Asked, References
from aura_omni.stages.voices import Reference

TIMEOUT_S = 30


class Bench:
    """References whose builds wait to be let go, and an engine's inbox that is emptied by hand."""

    def __init__(self, references: References) -> None:
        self.references = references
        self.started: queue.Queue[str] = queue.Queue()
        self.inbox: queue.Queue[Callable[[], None]] = queue.Queue()
        self.ends: list[tuple[str, str, Exception | None]] = []
        self._let_go: dict[str, threading.Event] = {}
        self.errors: dict[str, Exception] = {}

    def ask(self, name: str, ref_text: str | None = None) -> Asked:
        go = self._let_go.setdefault(name, threading.Event())

        def build() -> Reference:
            self.started.put(name)
            assert go.wait(TIMEOUT_S)
            if name in self.errors:
                raise self.errors[name]
            return Reference(torch.zeros(1))

        return self.references.ask(
            audio(name),
            ref_text,
            build,
            post=self.inbox.put,
            on_end=lambda reason, error: self.ends.append((name, reason, error)),
        )

    def has_started(self, name: str) -> None:
        assert self.started.get(timeout=TIMEOUT_S) == name

    def let_go(self, *names: str) -> None:
        for name in names:
            self._let_go[name].set()

    def take_in(self) -> None:
        self.inbox.get(timeout=TIMEOUT_S)()
        self.references.check_integrity()

    def close(self) -> None:
        self.references.abort_all(Unavailable("the server is stopping"))
        self.let_go(*self._let_go)


def audio(name: str) -> Audio:
    return Audio(np.zeros(24_000, np.float32), 24_000, name.encode())


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(References(Lane(torch.device("cpu")), capacity=2, max_waiting=3))
    yield made
    made.close()


def test_a_reference_is_built_once_and_the_least_recently_used_goes(bench: Bench) -> None:
    references = bench.references

    def build(name: str, ref_text: str | None = None) -> None:
        assert references.kept(audio(name), ref_text) is None
        asked = bench.ask(name, ref_text)
        bench.let_go(name)
        bench.take_in()
        assert references.kept(audio(name), ref_text) is asked.reference is not None

    build("a")
    build("b")
    assert references.kept(audio("a"), None) is not None
    build("a", "with text")  # b goes
    assert references.kept(audio("a"), None) is not None
    assert references.kept(audio("b"), None) is None
    assert references.counters.steps == 3
    with pytest.raises(ValueError, match="capacity 0"):
        References(Lane(torch.device("cpu")), capacity=0, max_waiting=3)


def test_those_who_ask_for_the_same_share_one_build(bench: Bench) -> None:
    first, second = bench.ask("a"), bench.ask("a")
    bench.has_started("a")
    third = bench.ask("a")  # it is under way already
    bench.let_go("a")
    bench.take_in()
    assert bench.ends == [("a", "stop", None)] * 3
    assert first.reference is second.reference is third.reference is not None
    assert bench.started.empty()


def test_a_build_that_nobody_waits_for_does_not_start(bench: Bench) -> None:
    bench.ask("a")
    bench.has_started("a")
    left, stays, both = bench.ask("b"), bench.ask("c"), None
    bench.references.abort(left)
    bench.references.abort(left)
    assert bench.ends == [("b", "cancelled", None)]
    both = bench.ask("c")
    bench.references.abort(stays)
    bench.references.check_integrity()
    bench.let_go("a", "b", "c")
    bench.has_started("c")
    bench.take_in()
    bench.take_in()
    assert bench.ends[1:] == [("c", "cancelled", None), ("a", "stop", None), ("c", "stop", None)]
    assert both.reference is not None
    assert left.reference is stays.reference is None


def test_a_build_under_way_that_nobody_waits_for_tells_nobody_and_can_be_joined(bench: Bench) -> None:
    left = bench.ask("a")
    bench.has_started("a")
    bench.references.abort(left)
    bench.references.check_integrity()
    joined = bench.ask("a")
    bench.let_go("a")
    bench.take_in()
    assert bench.ends == [("a", "cancelled", None), ("a", "stop", None)]
    assert left.reference is None
    assert joined.reference is not None


def test_an_error_is_that_of_all_who_wait_and_the_next_is_built(bench: Bench) -> None:
    wrong = bench.errors["a"] = RuntimeError("out of memory")
    bench.ask("a")
    bench.ask("a")
    bench.let_go("a")
    bench.take_in()
    assert bench.ends == [("a", "error", wrong)] * 2
    del bench.errors["a"]
    bench.ask("a")
    bench.take_in()
    assert bench.ends[2:] == [("a", "stop", None)]


def test_an_error_that_nobody_waits_for_is_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.errors["a"] = RuntimeError("out of memory")
    left = bench.ask("a")
    bench.has_started("a")
    bench.references.abort(left)
    bench.let_go("a")
    bench.take_in()
    assert bench.ends == [("a", "cancelled", None)]
    assert "out of memory" in caplog.text


def test_no_more_may_wait_than_the_limit(bench: Bench) -> None:
    bench.ask("a")
    left = bench.ask("a")
    bench.ask("b")
    with pytest.raises(Overloaded, match="3 requests wait for their reference voices"):
        bench.ask("a")
    bench.references.abort(left)
    bench.ask("c")


def test_stopping_ends_all_who_wait_and_does_not_wait_for_the_build(bench: Bench) -> None:
    bench.ask("a")
    bench.has_started("a")
    bench.ask("b")
    error = Unavailable("the server is stopping")
    bench.references.abort_all(error)
    assert bench.ends == [("a", "error", error), ("b", "error", error)]
    bench.references.check_integrity()
    bench.let_go("a", "b")
    assert bench.inbox.get(timeout=TIMEOUT_S)
    assert bench.started.empty()
