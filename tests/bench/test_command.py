"""`aura-omni bench` against a server of the tiny family, over a socket."""

import json

import pytest

from aura_omni import cli
from tests.test_serve import server as server

FORCED = json.dumps({"sampling_params_list": [{}, {"max_tokens": 12}, {"max_tokens": 6, "min_tokens": 6, "seed": 1}]})


def bench(server, *arguments: str) -> int:
    return cli.main(["bench", *arguments, "--url", server.url])


def test_turns_are_measured_from_first_text_to_last_sound(server, tmp_path, capsys):
    out, picture = tmp_path / "turn.json", tmp_path / "turn.svg"
    flags = ["--clients", "1", "2", "--each", "2", "--audio-s", "1", "--body", FORCED]
    assert bench(server, "turn", *flags, "--out", str(out), "--picture", str(picture)) == 0
    report = json.loads(out.read_text())
    assert [run["load"] for run in report["runs"]] == ["1 client", "2 clients"]
    assert len(capsys.readouterr().out.splitlines()) == 2
    for run in report["runs"]:
        assert run["errors"] == 0
        assert run["first_text_s"]["median"] <= run["text_complete_s"]["median"] <= run["complete_s"]["max"]
        assert run["first_audio_s"]["median"] <= run["gap_free_s"]["median"] <= run["complete_s"]["max"]
        assert set(run["stages"]) == {"asr", "aura", "talker", "code2wav"}
        assert all(0 < stage["under_way"] < 1 for stage in run["stages"].values())
    assert picture.read_text().startswith("<?xml")
    again = tmp_path / "again.svg"
    assert cli.main(["bench", "draw", "--from", str(out), "--picture", str(again)]) == 0
    assert again.read_text().count("<path") == picture.read_text().count("<path")


def test_speech_comes_before_it_is_complete(server, capsys):
    body = json.dumps({"seed": 7})
    assert (
        bench(server, "speech", "--rate", "20", "--requests", "3", "--text", "Four words are spoken.", "--body", body)
        == 0
    )
    (run,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert run["requests"] == 3
    assert run["audio_s_per_s"] > 0
    assert run["first_audio_s"]["median"] < run["complete_s"]["median"]


def test_transcripts_are_measured(server, capsys):
    assert bench(server, "transcript", "--audio-s", "2", "--each", "1") == 0
    (run,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert run["complete_s"]["median"] > 0
    assert run["first_audio_s"] is None
    assert run["heard_s_per_s"] == pytest.approx(
        2 / run["wall_s"], rel=0.05
    )  # which is rounded to milliseconds, of some 50


def test_several_processes_make_one_load(server, tmp_path, capsys):
    out = tmp_path / "out.json"
    flags = ["--clients", "3", "--each", "2", "--audio-s", "1", "--processes", "2", "--seed", "5"]
    assert bench(server, "transcript", *flags, "--out", str(out)) == 0
    assert capsys.readouterr().err == ""
    report = json.loads(out.read_text())
    assert report["seed"] == 5
    (run,) = report["runs"]
    assert run["load"] == "3 clients"
    assert (run["requests"], run["errors"]) == (6, 0)
    assert 0 < run["client_busy"] < 1


def test_a_refusal_is_an_error_of_the_run_and_of_the_command(server, capsys):
    assert bench(server, "speech", "--each", "1", "--warm-up", "0", "--body", '{"speed": "fast"}') == 1
    (run,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert run["errors"] == 1
    assert run["first_error"].startswith("ValueError: status 400")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speech", "--body", "[1]"], "--body is '[1]'; it must be a JSON object"),
        (["speech", "--body", "{"], "--body is not JSON"),
        (["speech", "--warm-up", "-1"], "--warm-up is -1; it must be at least 0"),
        (["turn", "--seed", "-1"], "--seed is -1; it must be at least 0"),
        (["speech", "--rate", "5", "nan"], "--rate is [5.0, nan]; it must be above 0 and finite"),
        (["speech", "--rate", "inf"], "--rate is [inf]; it must be above 0 and finite"),
        (["speech", "--out", "absent/x.json"], "--out absent/x.json: there is no such folder"),
        (["speech", "--picture", "absent/x.png"], "--picture absent/x.png: there is no such folder"),
        (["turn", "--clients", "1", "--rate", "2"], "--clients is a closed loop and --rate an open one"),
        (["turn", "--clients", "1", "0"], "--clients is [1, 0]; it must be at least 1"),
        (["turn", "--processes", "0"], "--processes is 0; it must be at least 1"),
        (["turn", "--rate", "0"], "--rate is [0.0]; it must be above 0"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(server, capsys, arguments, message):
    assert bench(server, *arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--picture", "x.png"], "draw needs --from JSON and --picture FILE"),
        (["--from", "absent.json", "--picture", "x.png"], "--from absent.json: [Errno 2]"),
        (["--from", "pyproject.toml", "--picture", "x.png"], "--from pyproject.toml: Expecting value"),
    ],
)
def test_a_picture_of_nothing_is_refused(capsys, arguments, message):
    assert cli.main(["bench", "draw", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_an_address_without_its_scheme_is_told_with_one(capsys):
    assert cli.main(["bench", "turn", "--url", "127.0.0.1:18311"]) == 1
    assert capsys.readouterr().err == "aura-omni: --url is '127.0.0.1:18311'; give http://127.0.0.1:18311\n"


def test_an_address_with_an_impossible_port_is_refused(capsys):
    assert cli.main(["bench", "turn", "--url", "http://127.0.0.1:80x"]) == 1
    assert capsys.readouterr().err == "aura-omni: --url is 'http://127.0.0.1:80x': Invalid port: '80x'\n"


def test_without_a_server_it_says_what_to_do(capsys):
    assert cli.main(["bench", "turn", "--url", "http://127.0.0.1:9"]) == 1
    assert "Start the server, or give --url" in capsys.readouterr().err
