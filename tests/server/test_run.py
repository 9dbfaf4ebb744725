"""The process: the port opens before the checkpoints are loaded, and closes cleanly."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from aura_omni.errors import ConfigError
from aura_omni.flow import STAGES, Report
from aura_omni.server.app import ServerConfig, run
from tests.server.fake import WAIT_S, FakePipeline


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def process(kind: str, port: int, grace_s: float = 1.0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.server.serve_fake", kind, str(port), str(grace_s)]
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
    assert running.returncode == 0
    assert status(f"{url}/health") == 0


def test_it_serves_where_uvloop_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uvloop.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with process("0.1", port) as running:
        wait_for(f"{url}/health", 200)
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "AURA"
        running.send_signal(signal.SIGTERM)
        assert running.communicate(timeout=WAIT_S)[1] == ""


def test_ready_says_how_far_each_stage_is_while_the_process_is_alive() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with process("1.5", port):
        wait_for(f"{url}/live", 200)
        wait_for(f"{url}/ready", 503)
        loading = httpx.get(f"{url}/ready")
        assert loading.headers["retry-after"] == "5"
        body = loading.json()
        assert body["status"] == "loading"
        assert body["stages"] == {"asr": "ready", "aura": "waiting", "talker": "waiting", "code2wav": "waiting"}
        assert "1 of 4 stages" in body["error"]["message"]
        asked_at_s = time.monotonic()
        assert post(port, "take 0").status_code == 503
        assert time.monotonic() - asked_at_s < 1
        wait_for(f"{url}/ready", 200)
        assert httpx.get(f"{url}/ready").json() == {"status": "ready", "stages": dict.fromkeys(STAGES, "ready")}
        assert post(port, "take 0").status_code == 200


def test_a_signal_while_loading_stops_the_process_at_once() -> None:
    port = free_port()
    with process("60", port) as running:
        wait_for(f"http://127.0.0.1:{port}/health", 503)
        asked_at_s = time.monotonic()
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=WAIT_S)
    assert time.monotonic() - asked_at_s < 5


def post(port: int, text: str, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "modalities": ["text"], **fields}
    return httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=WAIT_S)


def test_small_pieces_of_an_answer_are_not_held_back_until_the_client_has_acknowledged_the_last() -> None:
    """A client's system acknowledges late, after 40 ms, once it takes the connection for a conversation."""
    port = free_port()
    message = {"messages": [{"role": "user", "content": "take 0"}], "modalities": ["text"], "stream": True}
    took_s = []
    with process("0", port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as client:
        wait_for(f"{client.base_url}/health", 200)
        for _ in range(20):
            begin = time.monotonic()
            assert client.post("/v1/chat/completions", json=message).text.endswith("[DONE]\n\n")
            took_s.append(time.monotonic() - begin)
    assert min(took_s[10:]) < 0.03


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_after_the_signal_answers_finish_within_the_grace_and_the_others_are_told(stop: signal.Signals) -> None:
    port = free_port()
    with process("0", port, grace_s=1.5) as running, ThreadPoolExecutor(8) as clients:
        wait_for(f"http://127.0.0.1:{port}/health", 200)
        soon = [clients.submit(post, port, "take 0.8", stream=stream) for stream in (False, True)]
        late = [
            clients.submit(post, port, text, stream=stream)
            for text in ("take 60", "quiet 60")
            for stream in (False, True)
        ]
        slow_upload = socket.create_connection(("127.0.0.1", port))
        slow_upload.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
        slow_upload.sendall(b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.4)
        running.send_signal(stop)
        whole, stream = (answer.result() for answer in soon)
        assert whole.json()["choices"][0]["message"]["content"] == "begun, done"
        assert stream.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError):
            post(port, "take 0")
        whole, stream, *quiet = (answer.result() for answer in late)
        for answer in (whole, *quiet):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "unavailable"
        assert json.loads(stream.text.strip().splitlines()[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
        slow_upload.settimeout(WAIT_S)
        told = b"".join(iter(lambda: slow_upload.recv(65_536), b""))
        slow_upload.close()
        assert told.startswith(b"HTTP/1.1 503")
        assert b'"unavailable"' in told
        _, err = running.communicate(timeout=WAIT_S)
    assert running.returncode == 0
    assert "Traceback" not in err


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stream_of_bytes_that_is_open_at_the_signal_is_broken_off_without_a_word_of_a_bug(
    stop: signal.Signals,
) -> None:
    port = free_port()
    body = {"input": "sound 60", "response_format": "pcm"}
    with process("0", port, grace_s=0.5) as running:
        wait_for(f"http://127.0.0.1:{port}/health", 200)
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/audio/speech", json=body, timeout=WAIT_S) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            running.send_signal(stop)
            with pytest.raises(httpx.RemoteProtocolError):
                next(pieces)
        asked_at_s = time.monotonic()
        _, err = running.communicate(timeout=WAIT_S)
        assert time.monotonic() - asked_at_s < 5
    assert running.returncode == 0
    assert "ASGI" not in err
    assert "Traceback" not in err


def test_when_loading_fails_the_process_ends_with_the_reason() -> None:
    with process("broken", free_port()) as running:
        out, err = running.communicate(timeout=WAIT_S)
    assert running.returncode == 1
    assert out == ""
    assert err == "error: weights of the talker are missing\n"


def test_while_it_serves_threads_take_short_turns_and_nothing_made_before_is_collected() -> None:
    before_s, seen = sys.getswitchinterval(), []

    def look_and_stop() -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not gc.get_freeze_count() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        seen.append((sys.getswitchinterval(), gc.get_freeze_count()))
        os.kill(os.getpid(), signal.SIGINT)

    def load(_: Report) -> FakePipeline:
        threading.Thread(target=look_and_stop).start()
        return FakePipeline()

    run(ServerConfig(port=0), load)
    ((interval_s, kept),) = seen
    assert interval_s < before_s / 10
    assert kept > 1_000
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == (before_s, 0)


@pytest.mark.parametrize("host", ["nope.invalid", "203.0.113.1", "x" * 300])
def test_a_host_that_is_not_here_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match="choose another --host") as refused:
        run(ServerConfig(host=host), lambda _: FakePipeline())
    assert host[:30] in refused.value.message


def test_a_taken_port_is_refused_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        loads: list[int] = []

        def load(_: Report) -> FakePipeline:
            loads.append(1)
            return FakePipeline()

        with pytest.raises(ConfigError, match=re.escape(f"port {port}: ") + ".*choose another --port"):
            run(ServerConfig(port=port), load)
    assert not loads
