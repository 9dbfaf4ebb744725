"""A server that is told to stop while it loads ends well, whatever is being computed then."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

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
