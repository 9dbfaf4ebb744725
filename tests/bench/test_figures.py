"""What the bench makes of arrival times."""

import asyncio
import re
import time

import numpy as np
import pytest

from aura_omni.bench.arrivals import Closed, Open
from aura_omni.bench.client import Client, Measured
from aura_omni.bench.drive import Answer
from aura_omni.bench.picture import draw
from aura_omni.bench.playback import listen
from aura_omni.bench.report import figures, spread
from aura_omni.bench.stages import during, parsed
from aura_omni.bench.work import Transcripts, Turns, noise
from aura_omni.errors import ConfigError
from aura_omni.media.audio import decode_audio
from aura_omni.media.level import may_be_speech


def test_sound_that_comes_in_time_has_no_gap():
    played = listen([(0.5, 0.1), (0.55, 1.0), (1.0, 1.0)])
    assert played is not None
    assert played.first_s == played.gap_free_s == 0.5
    assert played.stalled_s == played.worst_s == 0.0
    assert played.audio_s == pytest.approx(2.1)


def test_a_player_that_runs_dry_stalls_and_should_have_started_later():
    # 80 ms at 0.1 s are played at 0.18; the next come at 0.48, those after it at once, the last 0.1 s late.
    played = listen([(0.1, 0.08), (0.48, 0.5), (1.08, 0.5)])
    assert played is not None
    assert played.stalled_s == pytest.approx(0.3 + 0.1)
    assert played.worst_s == pytest.approx(0.3)
    # Due times if started at t: t + 0.08 >= 0.48 and t + 0.58 >= 1.08
    assert played.gap_free_s == pytest.approx(0.5)
    assert played.gap_free_s == pytest.approx(played.first_s + played.stalled_s)


@pytest.mark.parametrize("sound", [[], [(0.3, 0.0)]])
def test_no_sound_is_no_playback(sound):
    assert listen(sound) is None


def test_percentiles_are_of_what_was_measured():
    assert spread([]) is None
    assert spread([3.0]) == {"median": 3.0, "p95": 3.0, "max": 3.0}
    assert spread([float(n) for n in range(100, 0, -1)]) == {"median": 50.0, "p95": 95.0, "max": 100.0}


def answer(**fields) -> Answer:
    made = Answer(started=0.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def measured(*answers: Answer, wall_s: float) -> Measured:
    return Measured(list(answers), 10.0, 10.0 + wall_s, cpu_s=0.25 * wall_s)


def test_failures_are_counted_and_in_no_time():
    good = answer(first_text_s=0.2, last_text_s=0.4, ended_s=1.0, heard_s=5.0, sound=[(0.3, 2.0)])
    bad = answer(error="status 503", ended_s=0.001, heard_s=5.0)
    found = figures(measured(good, bad, wall_s=2.0))
    assert (found["requests"], found["errors"], found["first_error"]) == (2, 1, "status 503")
    assert found["complete_s"] == {"median": 1.0, "p95": 1.0, "max": 1.0}
    assert found["requests_per_s"] == 0.5
    assert found["audio_s_per_s"] == 1.0
    assert found["heard_s_per_s"] == 2.5
    assert found["client_busy"] == 0.25
    assert found["rtf"]["median"] == 0.5
    assert found["underruns"] == 0.0


def test_underruns_are_a_share_of_the_answers_that_sound():
    fluent = answer(ended_s=1.0, sound=[(0.1, 1.0), (0.5, 1.0)])
    stalling = answer(ended_s=1.0, sound=[(0.1, 0.1), (0.5, 1.0)])
    mute = answer(ended_s=0.1, silent=True)
    found = figures(measured(fluent, stalling, mute, wall_s=1.0))
    assert found["underruns"] == 0.5
    assert found["silent"] == 1


def test_a_closed_loop_has_as_many_requests_at_once_as_clients():
    running = most = 0
    asked: list[int] = []

    async def ask(number: int) -> int:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        asked.append(number)
        await asyncio.sleep(0.001)
        running -= 1
        return number

    results = asyncio.run(Closed(clients=3, each=4).run(ask, seed=0))
    assert most == 3
    assert sorted(results) == sorted(asked) == list(range(12))


def test_an_open_loop_does_not_wait_for_answers():
    released = asyncio.Event()
    started = 0

    async def ask(number: int) -> int:
        nonlocal started
        started += 1
        if started == 5:
            released.set()  # only the last request lets any answer come
        await released.wait()
        return number

    begin = time.monotonic()
    assert asyncio.run(Open(rate=1_000.0, count=5).run(ask, seed=0)) == [0, 1, 2, 3, 4]
    assert time.monotonic() - begin < 5


def test_a_load_is_the_same_from_several_places():
    assert Closed(clients=10, each=3).shares(4) == [Closed(3, 3), Closed(3, 3), Closed(2, 3), Closed(2, 3)]
    assert Closed(clients=2, each=3).shares(4) == [Closed(1, 3), Closed(1, 3)]
    places = Open(rate=20.0, count=101).shares(4)
    assert [place.count for place in places] == [26, 25, 25, 25]
    assert sum(place.rate for place in places) == pytest.approx(20.0)
    assert len({round(place.count / place.rate, 6) for place in places}) == 1  # all end at about the same time


@pytest.mark.parametrize("kind", [Turns, Transcripts])
def test_no_request_is_like_another_and_a_seed_makes_the_same_again(kind):
    work = kind(model="m", seed=1, audio_s=0.5)
    bodies = {made.request(number).body for made in (work, kind(model="m", seed=2, audio_s=0.5)) for number in range(3)}
    assert len(bodies) == 6
    if kind is Turns:
        assert work.request(1) == Turns(model="m", seed=1, audio_s=0.5).request(1)


def test_more_requests_than_can_be_held_are_refused():
    with pytest.raises(
        ConfigError, match=r"100,000 requests of 160,\d{3} bytes are more than 4 GiB to hold; 26,\d{3} would fit"
    ):
        Client(url="http://127.0.0.1:9").run(Transcripts(model="m", seed=0), Open(rate=9.0, count=100_000), number=0)


@pytest.fixture
def report() -> dict:
    good = answer(first_text_s=0.2, last_text_s=0.4, ended_s=1.0, sound=[(0.3, 2.0)])
    bad = answer(error="status 503", ended_s=0.001)
    runs = [{"load": f"{n} clients", **figures(measured(good, bad, wall_s=1.0))} for n in (1, 4)]
    runs[1]["stages"] = during({}, parsed(METRICS), 4.0)
    return {"command": "aura-omni bench turn", "date": "2026-11-30", "client": "aura-omni", "runs": runs}


@pytest.mark.parametrize("stages", [True, False])
def test_a_picture_has_every_load_and_what_went_wrong_in_it(tmp_path, report, stages):
    if not stages:
        del report["runs"][1]["stages"]
    path = tmp_path / "picture.svg"
    draw(report, path)
    written = re.findall(r"<!-- (.*?) -->", path.read_text())  # matplotlib notes every text beside its outlines
    for text in ("1 clients", "4 clients", "1 of 2 failed", "300 ms", "first audio", "aura-omni bench turn"):
        assert text in written
    assert ("talker" in written) == stages


def test_in_a_picture_nothing_lies_on_a_bar_and_the_command_is_whole(tmp_path, report, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: drawn.append(figure))
    url = "http://speech-gateway.example:8091/" + "far-away/" * 30
    report["command"] = f"aura-omni bench turn --clients 1 4 --url {url}"
    draw(report, tmp_path / "picture.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    (title,) = figure.texts
    assert "".join(title.get_text().split()).startswith("".join(report["command"].split()))
    assert title.get_window_extent().width < figure.bbox.width
    legends = [(axes, legend) for axes in figure.axes if (legend := axes.get_legend())]
    assert len(legends) == 4
    for axes, legend in legends:
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_a_picture_is_of_the_kind_that_its_name_says(tmp_path, report):
    draw(report, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"--picture .*picture\.odd: .*odd"):
        draw(report, tmp_path / "picture.odd")


@pytest.mark.parametrize("length_s", [0.5, 1.0, 5.0, 40.0])
def test_what_stands_for_speech_is_listened_to(length_s):
    sound = decode_audio(noise(np.random.default_rng(0), length_s), max_s=60)
    assert sound.duration_s == pytest.approx(length_s)
    assert may_be_speech(sound.samples, sound.rate)


METRICS = """\
# TYPE aura_omni:engine_steps counter
aura_omni:engine_steps_total{stage="talker"} 100.0
aura_omni:engine_steps_total{stage="aura"} 7.0
# TYPE aura_omni:engine_step_rows counter
aura_omni:engine_step_rows_total{stage="talker"} 400.0
# TYPE aura_omni:engine_step_seconds counter
aura_omni:engine_step_seconds_total{stage="talker"} 3.0
# TYPE aura_omni:prompt_tokens counter
aura_omni:prompt_tokens_total{stage="talker"} 60.0
# TYPE aura_omni:prefix_cache_hits counter
aura_omni:prefix_cache_hits_total{stage="talker"} 15.0
# TYPE aura_omni:ready gauge
aura_omni:ready 1.0
"""


def test_a_stage_has_done_what_its_counters_gained():
    before = parsed(METRICS.replace("100.0", "60.0").replace("400.0", "240.0").replace(" 3.0", " 1.0"))
    # AURA made no step, and is not in it.
    assert during(before, parsed(METRICS), 4.0) == {
        "talker": {"steps_per_s": 10.0, "rows_a_step": 4.0, "under_way": 0.5, "from_cache": 0.0}
    }
    assert during({}, parsed(METRICS), 4.0)["talker"]["from_cache"] == 0.25


@pytest.mark.parametrize("other", ["", "<html>not found</html>", "vllm:num_requests_running{x='y'} 1.0", '{"a": [1]}'])
def test_a_server_without_such_counters_has_no_such_figures(other):
    assert during(parsed(other), parsed(other), 1.0) == {}
