"""benchmarks/live.py with the tiny family."""

import json
import subprocess
import sys
from pathlib import Path

from aura_omni.flow import FRAME_S

ROOT = Path(__file__).parents[2]


def test_sessions_see_every_second_and_answer_what_is_asked(tmp_path):
    out = tmp_path / "live.json"
    sizes = ["--sessions", "2", "--seconds", "6", "--rounds", "4", "--prune-at", "6", "--question-every", "3"]
    command = [sys.executable, "benchmarks/live.py", "--tiny", "--out", str(out), *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    rounds = found["sessions_2"]
    assert (rounds["rounds"], rounds["errors"], rounds["given_up"], rounds["questions"]) == (12, 0, 0, 4)
    assert rounds["audio_s"]["median"] == round(124 * FRAME_S, 4)
    # Of six rounds at most, sessions of four and five are cut to four with the third and second that come, and every third after.
    assert rounds["cuts"] == 2 + 2
    rows = rounds["aura_rows_a_round"]
    one_round = 220  # rows of two frames of 640x360
    assert rows["cached"] > 2 * one_round
    assert one_round < rows["rows"] < 3 * one_round
