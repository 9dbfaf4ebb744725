"""The server over HTTP, with true sizes on a GPU or the tiny family on a CPU: starts it, sends every load, ends it.

    python benchmarks/server.py --folder /scratch/true --out results    # writes the checkpoints (31 GB) unless they are there
    python benchmarks/server.py --folder /tmp/described --dummy --out results       # makes weights up instead, on the GPU
    python benchmarks/server.py --tiny --out results                    # in a minute on two cores
    python benchmarks/server.py --asr-alone --folder /scratch/true --out results    # nothing but ASR on the device

Random weights know no end, so the server's defaults say how long everything is, whoever asks and by whatever endpoint: ASR
writes 24 tokens, AURA 48, the Talker 124 frames (9.92 s; `lengths.py`). Each load is one `aura-omni bench`, whose command is in its JSON; `summary.json` has the machine, how long the start
took and which loads failed, `serve.log` what the server said. docs/benchmarks.md explains the figures.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from lengths import FRAMES, forced, silence
from machine import machine
from true_size import add_eight_bits, in_eight_bits, load_format, stages_of, true_stages, write

from aura_omni.nano.random_family import write_family

SENTENCE = "A red ball is on the table, and two blue cups are beside it on the left."
START_S = 300.0  # the most that a start may take
LOADS = ("first", "turn", "silent", "speech", "open", "transcript")
ASR_LOADS = ("transcript", "recording")  # of a server that only transcribes
ASR_ALONE = {"gpu_memory_utilization": 0.85, "max_num_seqs": 256}
RECORDING_S = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="checkpoints of true size; written unless they are there")
    parser.add_argument("--dummy", action="store_true", help="weights are made up on the GPU, not written and read")
    parser.add_argument("--tiny", action="store_true", help="the tiny family and fewer clients")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--asr-alone", action="store_true", help=f"qwen3_asr.yaml, with the whole device; loads {ASR_LOADS}"
    )
    parser.add_argument("--loads", nargs="+", choices=tuple(dict.fromkeys((*LOADS, *ASR_LOADS))), help="only these")
    add_eight_bits(parser)
    parser.add_argument("--each", type=int, help="requests of each client (default: 6; tiny: 2)")
    parser.add_argument(
        "--processes", type=int, default=max(1, (os.cpu_count() or 1) // 4), help="of the client (default: %(default)s)"
    )
    parser.add_argument("--gpu", action="store_true", help="also how busy the GPUs are during each load")
    parser.add_argument("--limit-s", type=float, default=90.0, help="of each load (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.tiny == (arguments.folder is not None):
        parser.error("give --folder FOLDER or --tiny")
    known = ASR_LOADS if arguments.asr_alone else LOADS
    arguments.loads = arguments.loads or known
    if not set(arguments.loads) <= set(known):
        parser.error(f"--loads: this server gets {', '.join(known)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what we have started ends with us
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.tiny:
        with TemporaryDirectory() as folder:
            write_family(Path(folder), kinds=("custom_voice",))
            return measure(arguments, Path(folder), "tiny.yaml", stages_of(Path(folder)))
    write(arguments.folder, dummy=arguments.dummy)
    return measure(arguments, arguments.folder, "aura_omni.yaml", true_stages(arguments.folder))


def measure(arguments: argparse.Namespace, folder: Path, deploy: str, stages: dict[str, dict[str, Any]]) -> int:
    if arguments.asr_alone:
        deploy, stages = "qwen3_asr.yaml", {"0": {**stages["0"], **ASR_ALONE}}
    for stage, sampling in zip(stages.values(), forced(folder).values(), strict=False):  # Code2Wav draws nothing
        stage["default_sampling_params"] = sampling
    in_eight_bits(stages, arguments.fp8, arguments.kv_fp8)
    flags = ["--deploy-config", deploy, "--stage-overrides", json.dumps(stages), "--served-model-name", "aura"]
    flags += ["--load-format", load_format(arguments.dummy)]
    summary: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "serve": shlex.join(["aura-omni", "serve", *flags]),
    }

    def add(name: str, value: Any) -> None:
        summary[name] = value
        (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")

    with Server(flags, log=arguments.out / "serve.log") as server:
        add("ready_s", round(server.wait(START_S), 2))
        print(f"ready after {summary['ready_s']} s", flush=True)
        commands = loads(folder, tiny=arguments.tiny, each=arguments.each or (2 if arguments.tiny else 6))
        add("failed", [name for name in arguments.loads if not bench(name, commands[name], server.url, arguments)])
    return 1 if summary["failed"] else 0


# ---------------------------------------------------------------- what is asked


def loads(folder: Path, *, tiny: bool, each: int) -> dict[str, list[str]]:
    """Arguments of `aura-omni bench` by name of the load."""

    def closed(*clients: int) -> list[str]:
        few = clients if not tiny else [number for number in clients if number <= 4]
        return ["--clients", *map(str, few), "--each", str(each)]

    half = {"max_new_tokens": FRAMES // 2}
    rate, count = ("1", "10") if tiny else ("20", "200")
    return {
        # The first request that a server ever gets: as fast as the others?
        "first": ["turn", "--clients", "1", "--each", "1", "--warm-up", "0"],
        "turn": ["turn", *closed(1, 4, 8)],
        "silent": [
            "turn",
            "--text-only",
            *closed(1),
            "--body",
            json.dumps({"sampling_params_list": [{}, silence(folder)]}),
        ],
        "speech": ["speech", "--text", SENTENCE, *closed(1, 4, 8, 16, 64)],
        "open": ["speech", "--text", SENTENCE, "--rate", rate, "--requests", count, "--body", json.dumps(half)],
        "transcript": ["transcript", *closed(1, 4, 128)],
        "recording": ["transcript", "--audio-s", str(RECORDING_S), *closed(1, 128)],
    }


def bench(name: str, command: Sequence[str], url: str, arguments: argparse.Namespace) -> bool:
    """Whether every request of the load was answered in time. What was measured before it was given up is in its JSON."""
    command = [*command, "--url", url, "--processes", str(arguments.processes)]
    command += ["--out", str(arguments.out / f"{name}.json"), *(["--gpu"] if arguments.gpu else [])]
    if importlib.util.find_spec("matplotlib") is not None:
        command += ["--picture", str(arguments.out / f"{name}.png")]
    print(f"== {name}", flush=True)
    # A session of its own, so that the client's own processes can be ended with it.
    client = subprocess.Popen([sys.executable, "-m", "aura_omni", "bench", *command], start_new_session=True)
    try:
        return client.wait(arguments.limit_s) == 0
    except subprocess.TimeoutExpired:
        print(f"given up after {arguments.limit_s:g} s", flush=True)
        return False
    finally:
        if client.poll() is None:
            os.killpg(client.pid, signal.SIGTERM)
            client.wait()


# ---------------------------------------------------------------- the server


class Server:
    """`aura-omni serve` on a free port, while the context lasts."""

    def __init__(self, flags: Sequence[str], *, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._command = [sys.executable, "-m", "aura_omni", "serve", *flags, "--port", str(port)]

    def __enter__(self) -> Server:
        self._began_s = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self, limit_s: float) -> float:
        """Until every stage has answered once; the seconds since the process was started."""
        while True:
            passed_s = time.monotonic() - self._began_s
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", timeout=1).status_code == httpx.codes.OK:
                    return passed_s
            if self._process.poll() is not None or passed_s > limit_s:
                what = "has not started" if self._process.poll() is None else "has ended"
                raise SystemExit(f"the server {what} after {passed_s:.0f} s:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
