"""The server as its own process."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent


class Server:
    """`python -m aura_omni serve ...` on a free port of this machine."""

    def __init__(self, *arguments: str, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "aura_omni", "serve", *arguments, "--port", str(self.port)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=log.open("w"), stderr=subprocess.STDOUT)

    def wait(self) -> Server:
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
