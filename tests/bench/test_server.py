"""benchmarks/server.py with the tiny family."""

import json
import subprocess
import sys
from pathlib import Path

from aura_omni.flow import FRAME_S

ROOT = Path(__file__).parents[2]


def test_every_answer_has_the_lengths_that_the_server_was_started_with(tmp_path):
    command = [
        sys.executable,
        "benchmarks/server.py",
        "--tiny",
        "--out",
        str(tmp_path),
        "--each",
        "1",
        "--fp8",
        "asr",
        "aura",
        "--kv-fp8",
        "aura",
    ]
    done = subprocess.run(
        [*command, "--loads", "first", "silent", "transcript"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {
        name: json.loads((tmp_path / f"{name}.json").read_text())["runs"] for name in ("first", "silent", "transcript")
    }
    (first,) = runs["first"]
    assert first["audio_s"]["median"] == round(124 * FRAME_S, 4)
    # Spoken word by word: whoever listens does not wait for the end of the text.
    assert first["first_audio_s"]["median"] < first["text_complete_s"]["median"]
    (silent,) = runs["silent"]
    assert silent["silent"] == silent["requests"] == 1
    assert [run["load"] for run in runs["transcript"]] == ["1 client", "4 clients"]
    # The log says of every clip, with those to warm up, that its budget of 24 tokens ended it.
    assert (tmp_path / "serve.log").read_text().count("max_tokens 24 of ASR cut a transcript") == 1 + 2 + 2 * (1 + 4)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["failed"] == []
    assert {"device", "driver", "torch", "commit", "date"} <= summary["machine"].keys()
    assert summary["serve"].count('"quantization": "fp8"') == 2
    assert summary["serve"].count('"kv_cache_dtype": "fp8"') == 1


def test_a_server_that_only_transcribes_hears_two_minutes_as_sixteen_segments(tmp_path):
    command = [sys.executable, "benchmarks/server.py", "--tiny", "--asr-alone", "--out", str(tmp_path), "--each", "1"]
    done = subprocess.run([*command, "--loads", "recording"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads((tmp_path / "recording.json").read_text())["runs"]
    assert (run["requests"], run["errors"]) == (1, 0)
    assert set(run["stages"]) == {"asr"}
    assert (tmp_path / "serve.log").read_text().count("max_tokens 24 of ASR cut a transcript") == 2 * 16
