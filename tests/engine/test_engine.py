from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from tiny_stage import GREEDY, Request, TinyStage, make_runner, prompt

from aura_omni.engine.engine import Engine
from aura_omni.errors import EngineError, Overloaded, Unavailable

WAIT_S = 20.0  # for a test that would hang; never waited for when all is well


class Scripted:
    """A runner of nothing: counts its steps, and does what the test says."""

    holds = False

    def __init__(self, log: list[str], name: str, work: int = 0) -> None:
        self.log, self.name, self.work = log, name, work
        self.failure: Exception | None = None
        self.ended: list[Exception] = []
        self.steps = 0
        self.flying = False

    def land(self) -> bool:
        return False

    def launch(self) -> bool:
        self.steps += 1
        if self.failure:
            raise self.failure
        if not self.work:
            return False
        self.work -= 1
        self.log.append(self.name)
        return True

    def abort_all(self, error: Exception) -> None:
        self.ended.append(error)

    def check_integrity(self) -> None:
        assert self.work >= 0


def ended(request: Request) -> threading.Event:
    """Set when the request has ended."""
    event, before = threading.Event(), request.sequence.on_end

    def end(reason: object, error: Exception | None) -> None:
        before(reason, error)  # type: ignore[arg-type]
        event.set()

    request.sequence.on_end = end
    return event


def test_requests_posted_from_many_threads_are_all_served() -> None:
    runner = make_runner(TinyStage())
    requests = [Request(prompt(9, seed=seed)) for seed in range(24)]
    events = [ended(request) for request in requests]
    with Engine({"tiny": runner}) as engine:
        threads = [
            threading.Thread(
                target=lambda mine: [engine.post(lambda r=r: runner.add(r.sequence)) for r in mine], args=(part,)
            )
            for part in (requests[0::3], requests[1::3], requests[2::3])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(event.wait(WAIT_S) for event in events)
        engine.check_integrity()
        assert engine.call(lambda: runner.counters.pages_used) == 0
    assert all(
        request.heard == TinyStage().dense_outputs(Request(prompt(9, seed=s)).sequence)
        for s, request in enumerate(requests)
    )


def test_runners_are_stepped_in_order_of_urgency() -> None:
    log: list[str] = []
    runners = {name: Scripted(log, name, work=3) for name in ("vocoder", "talker", "aura")}
    with Engine(runners) as engine:
        engine.call(lambda: None)
        while engine.call(lambda: sum(runner.work for runner in runners.values())):
            pass
    assert log == ["vocoder", "talker", "aura"] * 3


def test_what_can_wait_for_launches_comes_after_those_of_the_pass() -> None:
    log: list[str] = []
    runners = {name: Scripted(log, name, work) for name, work in (("a", 0), ("b", 1), ("c", 1))}
    engine = Engine(runners)  # type: ignore[arg-type]
    engine.post(lambda: engine.after_launches(lambda: log.append("late")))
    with engine:
        engine.call(lambda: engine.after_launches(lambda: log.append("later")))
        engine.call(lambda: None)  # where nothing is launched it comes all the same
    assert [name for name in log if name != "later"] == ["b", "c", "late"]
    assert log.count("later") == 1


class Device(Scripted):
    """A runner whose steps take as long as the others need to launch so many times, if they have something to launch or not."""

    def __init__(self, log: list[str], name: str, work: int, *, takes: int, others: list[Device]) -> None:
        super().__init__(log, name, work)
        self.takes, self.others, self.left = takes, others, 0
        others.append(self)

    def land(self) -> bool:
        landed = self.flying and self.left <= 0
        if landed:
            self.flying = False
            self.log.append(f"{self.name} landed")
        return landed

    def launch(self) -> bool:
        for other in self.others:
            other.left -= other is not self
        if self.flying or not super().launch():
            return False
        self.flying, self.left = True, self.takes
        return True


def passes(work: dict[str, int], takes: dict[str, int]) -> list[str]:
    log: list[str] = []
    others: list[Device] = []
    runners = {name: Device(log, name, count, takes=takes[name], others=others) for name, count in work.items()}
    with Engine(runners) as engine:
        while engine.call(lambda: sum(runner.work for runner in runners.values())):
            pass
    return log


def test_what_arrives_during_a_launch_goes_on_before_less_urgent_runners_launch() -> None:
    log = passes({"asr": 3, "talker": 1, "aura": 1}, {"asr": 1, "talker": 9, "aura": 9})
    assert log[:6] == ["asr", "talker", "asr landed", "asr", "aura", "asr landed"]


def test_an_urgent_runner_that_lands_all_the_time_keeps_nobody_from_launching() -> None:
    log = passes({"asr": 40, "talker": 10, "aura": 5}, {"asr": 1, "talker": 1, "aura": 0})
    launched = [name for name in log if " " not in name]
    assert launched.count("aura") == 5
    last = max(place for place, name in enumerate(launched) if name == "aura")
    assert launched[:last].count("asr") < 20


def test_an_idle_engine_does_nothing() -> None:
    runner = Scripted([], "only")
    with Engine({"only": runner}) as engine:
        engine.call(lambda: None)
        engine.call(lambda: None)
        before, cpu_s = engine.call(lambda: runner.steps), engine.call(time.thread_time)
        time.sleep(0.3)
        assert engine.call(lambda: runner.steps) <= before + 2  # one for each call in between
        assert engine.call(time.thread_time) - cpu_s < 0.003


def test_functions_run_in_order_on_one_thread_that_is_not_ours() -> None:
    ran: list[tuple[int, int]] = []
    with Engine({}) as engine:
        for number in range(50):
            engine.post(lambda number=number: ran.append((number, threading.get_ident())))
        engine.call(lambda: None)
    assert [number for number, _ in ran] == list(range(50))
    assert {thread for _, thread in ran} != {threading.get_ident()}
    assert len({thread for _, thread in ran}) == 1


def test_a_call_from_the_engines_own_thread_does_not_wait_for_itself() -> None:
    with Engine({}) as engine:
        assert engine.call(lambda: engine.call(lambda: 5)) == 5


def test_the_error_of_a_posted_function_goes_to_who_posted_it(caplog: pytest.LogCaptureFixture) -> None:
    def overloaded() -> None:
        raise Overloaded("full")

    def broken() -> None:
        raise ZeroDivisionError("oops")

    with Engine({}) as engine:
        with pytest.raises(Overloaded):
            engine.call(overloaded)
        assert not caplog.records
        with pytest.raises(ZeroDivisionError):
            engine.call(broken)
        assert "oops" in caplog.text
        assert engine.alive


def test_a_posted_function_can_be_cancelled_before_it_runs() -> None:
    gate = threading.Event()
    with Engine({}) as engine:
        engine.post(lambda: gate.wait(WAIT_S))
        ran: list[int] = []
        future = engine.post(lambda: ran.append(1))
        assert future.cancel()
        gate.set()
        engine.call(lambda: None)
        assert ran == []


def test_a_function_that_posts_itself_again_does_not_keep_the_stages_from_working() -> None:
    runner = Scripted([], "only", work=5)
    with Engine({"only": runner}) as engine:

        def again() -> None:
            if runner.work:
                engine.post(again)

        engine.post(again)
        while engine.call(lambda: runner.work):
            pass


def test_closing_ends_every_request_and_what_was_posted_before() -> None:
    runner = make_runner(TinyStage(), max_model_len=10_000, pages=1000)
    endless = replace(GREEDY, max_tokens=9_000, ignore_eos=True)
    requests = [Request(prompt(9, seed=seed), endless) for seed in range(12)]
    engine = Engine({"tiny": runner})
    engine.start()
    for request in requests:
        engine.post(lambda request=request: runner.add(request.sequence))
    engine.close()
    assert [request.reason for request in requests] == ["error"] * 12
    assert all(isinstance(request.error, Unavailable) for request in requests)
    assert runner.counters.pages_used == 0
    assert not engine.alive
    with pytest.raises(Unavailable, match="stopping"):
        engine.post(lambda: None)
    engine.close()


def test_an_engine_that_never_started_answers_what_was_posted_when_it_closes() -> None:
    engine = Engine({})
    future = engine.post(lambda: 5)
    assert not engine.alive
    engine.close()
    assert future.result(WAIT_S) == 5
    with pytest.raises(EngineError, match="cannot be started"):
        engine.start()


def test_a_failure_of_the_loop_ends_every_request_at_once_and_is_told() -> None:
    broken, good = Scripted([], "broken"), make_runner(TinyStage(), max_model_len=10_000, pages=1000)
    request = Request(prompt(9), replace(GREEDY, max_tokens=9_000))
    event = ended(request)
    engine = Engine({"broken": broken, "good": good})
    engine.start()
    engine.call(lambda: good.add(request.sequence))
    assert engine.alive

    def break_it() -> None:
        broken.failure = RuntimeError("device lost")

    engine.post(break_it)
    assert event.wait(WAIT_S)
    assert isinstance(request.error, EngineError)
    assert "device lost" in str(request.error)
    assert broken.ended == [request.error]
    engine.close()
    assert not engine.alive
    assert engine.failure is request.error
    with pytest.raises(Unavailable, match="device lost"):
        engine.post(lambda: None)


def test_one_runner_that_cannot_end_its_requests_does_not_keep_the_others_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stuck(Scripted):
        def abort_all(self, error: Exception) -> None:
            raise ValueError("stuck")

    good = Scripted([], "good")
    with Engine({"stuck": Stuck([], "stuck"), "good": good}):
        pass
    assert len(good.ended) == 1
    assert "stuck" in caplog.text


def test_what_has_no_steps_ends_with_the_engine_too() -> None:
    class Waits:
        """No runner: the loop would find no `launch` in it."""

        def __init__(self) -> None:
            self.ended: list[Exception] = []
            self.checked = 0

        def abort_all(self, error: Exception) -> None:
            self.ended.append(error)

        def check_integrity(self) -> None:
            self.checked += 1

    waits = Waits()
    with Engine({}, {"waits": waits}) as engine:
        engine.check_integrity()
        assert (waits.checked, waits.ended) == (1, [])
    (error,) = waits.ended
    assert isinstance(error, Unavailable)


def test_several_engines_live_side_by_side() -> None:
    runners = [make_runner(TinyStage(seed=seed)) for seed in range(3)]
    engines = [Engine({"tiny": runner}) for runner in runners]
    requests = [Request(prompt(9)) for _ in engines]
    events = [ended(request) for request in requests]
    for engine in engines:
        engine.start()
    for engine, runner, request in zip(engines, runners, requests, strict=True):
        engine.post(lambda runner=runner, request=request: runner.add(request.sequence))
    assert all(event.wait(WAIT_S) for event in events)
    engines[0].close()
    assert engines[1].alive
    for engine in engines[1:]:
        engine.close()
    for seed, request in enumerate(requests):
        assert request.heard == TinyStage(seed=seed).dense_outputs(Request(prompt(9)).sequence)
