"""The process: the port opens before the checkpoints are loaded, and closes cleanly."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from aura_omni.errors import ConfigError
from aura_omni.server.app import ServerConfig, run
from tests.server.fake import WAIT_S, FakePipeline


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def process(kind: str, port: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.server.serve_fake", kind, str(port)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.communicate(timeout=WAIT_S)


def status(url: str) -> int:
    try:
        return httpx.get(url, timeout=2).status_code
    except httpx.ConnectError:
        return 0


def wait_for(url: str, wanted: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while status(url) != wanted:
        assert time.monotonic() < deadline_s, f"{url} never answered {wanted}"
        time.sleep(0.05)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_health_is_503_while_loading_and_then_one_line_names_url_and_models(stop: signal.Signals) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with process("1.0", port) as running:
        wait_for(f"{url}/health", 503)
        assert "loading" in httpx.get(f"{url}/v1/models").json()["error"]["message"]
        wait_for(f"{url}/health", 200)
        assert running.stdout is not None
        assert running.stdout.readline() == f"aura-omni: {url} serves AURA, aurateam/AURA\n"
        running.send_signal(stop)
        out, err = running.communicate(timeout=WAIT_S)
    assert (out, err) == ("", "")
    assert running.returncode == (0 if stop == signal.SIGINT else -stop)
    assert status(f"{url}/health") == 0


def test_a_signal_while_loading_stops_the_process_at_once() -> None:
    port = free_port()
    with process("60", port) as running:
        wait_for(f"http://127.0.0.1:{port}/health", 503)
        asked_at_s = time.monotonic()
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=WAIT_S)
    assert time.monotonic() - asked_at_s < 5


def test_when_loading_fails_the_process_ends_with_the_reason() -> None:
    with process("broken", free_port()) as running:
        out, err = running.communicate(timeout=WAIT_S)
    assert running.returncode == 1
    assert out == ""
    assert err == "error: weights of the talker are missing\n"


def test_a_taken_port_is_refused_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        loads: list[int] = []

        def load() -> FakePipeline:
            loads.append(1)
            return FakePipeline()

        with pytest.raises(ConfigError, match=re.escape(f"port {port}")):
            run(ServerConfig(port=port), load)
    assert not loads
