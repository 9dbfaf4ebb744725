"""`aura-omni bench`: loads of a running server, one after another, as JSON and as a picture.

aura-omni bench turn --clients 1 4 8 --each 6 --out turn.json --picture turn.png
aura-omni bench speech --rate 20 --requests 200
aura-omni bench draw --from turn.json --picture turn.svg
aura-omni bench turn --url http://other-server:8000 --model its-name       # any OpenAI-compatible server
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import secrets
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from aura_omni import __version__
from aura_omni.bench.arrivals import Closed, Load, Open
from aura_omni.bench.client import Client
from aura_omni.bench.gpu import Gpus
from aura_omni.bench.picture import draw
from aura_omni.bench.report import figures
from aura_omni.bench.stages import Counts, counts, during
from aura_omni.bench.work import Speeches, Transcripts, Turns, Work
from aura_omni.errors import ConfigError, Unavailable, shown

BUSY = 0.8  # share of a core from which on a client's own work may be what is measured


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 when a request failed. Raises Unavailable without a server, ConfigError for arguments that cannot be meant."""
    _check_folders(arguments)
    if arguments.work == "draw":
        _draw(arguments)
        return 0
    loads = _loads(arguments)
    gpus = Gpus() if arguments.gpu else None
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    client = Client(
        url=_url(arguments.url),
        api_key=arguments.api_key,
        timeout_s=arguments.timeout_s,
        processes=arguments.processes,
        warm_up=arguments.warm_up,
        seed=seed,
    )
    work = _work(arguments, arguments.model or _first_model(client), seed)
    report: dict[str, Any] = {
        "command": shlex.join(["aura-omni", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "client": f"aura-omni {__version__}, {platform.machine()} {platform.system()}",
        "seed": seed,
        "runs": [],
    }
    for number, load in enumerate(loads):
        found = _measured(client, work, load, number, gpus)
        _add(report, arguments.out, found)
        if found["client_busy"] > BUSY:
            print(
                f"{load.label}: the busiest process of the client computed {found['client_busy']:.0%} of the time, so its own "
                f"work may be in these figures; raise --processes from {arguments.processes}",
                file=sys.stderr,
            )
    if arguments.picture:
        draw(report, arguments.picture)
    return 1 if any(found["errors"] for found in report["runs"]) else 0


def _draw(arguments: argparse.Namespace) -> None:
    if arguments.source is None or arguments.picture is None:
        raise ConfigError("draw needs --from JSON and --picture FILE")
    try:
        report = json.loads(arguments.source.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--from {arguments.source}: {error}") from None
    if not isinstance(report, dict) or not isinstance(report.get("runs"), list):
        raise ConfigError(f"--from {arguments.source}: it is not what aura-omni bench --out writes")
    draw(report, arguments.picture)


def _measured(client: Client, work: Work, load: Load, number: int, gpus: Gpus | None) -> dict[str, Any]:
    before: list[Counts] = []

    def begin() -> None:
        before.append(counts(client))
        if gpus is not None:
            gpus.begin()

    measured = client.run(work, load, number=number, between=begin)
    found = {"load": load.label, **figures(measured)}
    if gpus is not None:
        found["gpus"] = gpus.end()
    if stages := during(before[0], counts(client), measured.wall_s):
        found["stages"] = stages
    return found


def _loads(arguments: argparse.Namespace) -> list[Load]:
    if arguments.clients and arguments.rate:
        raise ConfigError("--clients is a closed loop and --rate an open one; give one of them")
    least = {"clients": 1, "each": 1, "requests": 1, "processes": 1, "warm-up": 0, "seed": 0}
    for flag, limit in least.items():
        given = getattr(arguments, flag.replace("-", "_"))
        if given is not None and min(given if isinstance(given, list) else [given]) < limit:
            raise ConfigError(f"--{flag} is {shown(given)}; it must be at least {limit}")
    if not all(0 < rate < math.inf for rate in arguments.rate or ()):
        raise ConfigError(f"--rate is {shown(arguments.rate)}; it must be above 0 and finite")
    if arguments.rate:
        return [Open(rate, arguments.requests) for rate in arguments.rate]
    return [Closed(clients, arguments.each) for clients in arguments.clients or [1]]


def _url(given: str) -> str:
    if not given.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {shown(given)}; give http://{given.rpartition('://')[2][:60]}")
    try:
        httpx.URL(given)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url is {shown(given)}: {error}") from None
    return given


def _check_folders(arguments: argparse.Namespace) -> None:
    """Before anything is measured that could then not be written."""
    for flag, path in (("out", arguments.out), ("picture", arguments.picture)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"--{flag} {path}: there is no such folder")


def _add(report: dict[str, Any], path: Path | None, found: dict[str, Any]) -> None:
    report["runs"].append(found)
    print(json.dumps(found), flush=True)
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def _first_model(client: Client) -> str:
    try:
        response = client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise Unavailable(f"no models at {client.url}: {error}. Start the server, or give --url") from error


def _work(arguments: argparse.Namespace, model: str, seed: int) -> Work:
    try:
        more = json.loads(arguments.body)
    except ValueError as error:
        raise ConfigError(f"--body is not JSON: {error}") from None
    if not isinstance(more, dict):
        raise ConfigError(f"--body is {arguments.body[:60]!r}; it must be a JSON object")
    match arguments.work:
        case "turn":
            return Turns(
                model=model,
                seed=seed,
                audio_s=arguments.audio_s,
                frames=arguments.frames,
                spoken=not arguments.text_only,
                more=more,
            )
        case "speech":
            return Speeches(model=model, text=arguments.text, more=more)
        case _:
            return Transcripts(model=model, seed=seed, audio_s=arguments.audio_s, more=more)
