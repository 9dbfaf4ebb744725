"""A server that is told to stop while it loads ends well, whatever is being computed then; so does a program that closes nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Loading that goes on and on, in short calls into PyTorch.
SCRIPT = """
import signal, sys, time
import torch
from aura_omni import cli, pipeline

def load(config, report):
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    print("loading", flush=True)
    one = torch.ones(64, 64)
    while True:
        one @ one

pipeline.Pipeline.load = load
sys.exit(cli.main(["serve", "--deploy-config", "tiny.yaml", "--port", "0", "--no-engine-process"]))
"""


def test_a_server_can_be_stopped_while_it_loads() -> None:
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", SCRIPT], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            assert "loading" in server.stdout.readline()
            server.send_signal(signal.SIGTERM)
            _, err = server.communicate(timeout=30)
            assert server.returncode == 0, err[-1000:]
            assert "Traceback" not in err


UNCLOSED = """
import sys
from aura_omni import Pipeline
pipeline = Pipeline.load("tiny.yaml")
{what}
print("done", flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize(
    "what",
    [
        'pipeline.chat("Hello", speak=False)',
        'next(iter(pipeline.say_chunks("One, two, three, four, five, six, seven.")))',
        'chunks = pipeline.say_chunks("One, two, three, four, five, six, seven."); next(chunks)',
        "pipeline.close()",
    ],
    ids=["idle", "speaking", "left speaking", "closed"],
)
def test_a_program_that_leaves_its_pipeline_open_ends_as_it_says(what: str) -> None:
    script = UNCLOSED.format(what=what)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n"
    assert done.returncode == 3, done.stderr[-1000:]
    assert "terminate" not in done.stderr
    assert "Traceback" not in done.stderr
