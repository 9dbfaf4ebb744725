"""`aura-omni bench`: loads of a running server, one after another, as JSON and as a picture.

aura-omni bench turn --clients 1 4 8 --each 6 --out turn.json --picture turn.png
aura-omni bench speech --rate 20 --requests 200
aura-omni bench turn --url http://other-server:8000 --model its-name       # any OpenAI-compatible server
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from aura_omni import __version__
from aura_omni.bench.arrivals import closed, open_loop
from aura_omni.bench.drive import Answer, ask
from aura_omni.bench.report import draw, figures
from aura_omni.bench.work import Speeches, Transcripts, Turns
from aura_omni.errors import ConfigError, Unavailable, shown

Work = Turns | Speeches | Transcripts


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 when a request failed. Raises Unavailable without a server, ConfigError for arguments that cannot be meant."""
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    if arguments.clients and arguments.rate:
        raise ConfigError("--clients is a closed loop and --rate an open one; give one of them")
    if not arguments.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {shown(arguments.url)}; give http://{arguments.url.rpartition('://')[2][:60]}")
    headers = {"authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    async with httpx.AsyncClient(
        base_url=arguments.url, headers=headers, timeout=arguments.timeout_s, limits=httpx.Limits(max_connections=None)
    ) as client:
        work = _work(arguments, arguments.model or await _first_model(client))
        report: dict[str, Any] = {
            "command": "aura-omni " + " ".join(sys.argv[1:]),
            "date": time.strftime("%Y-%m-%d"),
            "client": f"aura-omni {__version__}, {platform.machine()} {platform.system()}",
            "runs": [],
        }
        for clients in [] if arguments.rate else arguments.clients or [1]:
            bench = Bench(client, work)
            if arguments.warm_up:
                await closed(bench.ask, clients=clients, each=arguments.warm_up)
            answers, wall_s = await bench.timed(closed(bench.ask, clients=clients, each=arguments.each))
            _add(report, arguments.out, {"load": f"{clients} clients", **figures(answers, wall_s)})
        for rate in arguments.rate or []:
            bench = Bench(client, work)
            if arguments.warm_up:
                await closed(bench.ask, clients=max(1, round(rate)), each=arguments.warm_up)
            answers, wall_s = await bench.timed(open_loop(bench.ask, rate=rate, count=arguments.requests))
            _add(report, arguments.out, {"load": f"{rate:g}/s", **figures(answers, wall_s)})
    if arguments.picture:
        draw(report["runs"], arguments.picture)
    return 1 if any(found["errors"] for found in report["runs"]) else 0


class Bench:
    """Numbers requests, so that each has media of its own, also between warm-up and measurement."""

    def __init__(self, client: httpx.AsyncClient, work: Work) -> None:
        self._client, self._work, self._asked = client, work, 0

    async def ask(self, _: int) -> Answer:
        self._asked += 1
        # Media are made before the clock starts, and off the loop, where they would delay the others' clocks.
        request = await asyncio.to_thread(self._work.request, self._asked)
        return await ask(self._client, request)

    async def timed(self, load: Any) -> tuple[list[Answer], float]:
        begin = time.monotonic()
        answers = await load
        return answers, time.monotonic() - begin


def _add(report: dict[str, Any], path: Path | None, found: dict[str, Any]) -> None:
    report["runs"].append(found)
    print(json.dumps(found), flush=True)
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise Unavailable(f"no models at {client.base_url}: {error}. Start the server, or give --url") from error


def _work(arguments: argparse.Namespace, model: str) -> Work:
    try:
        more = json.loads(arguments.body)
    except ValueError as error:
        raise ConfigError(f"--body is not JSON: {error}") from None
    if not isinstance(more, dict):
        raise ConfigError(f"--body is {arguments.body[:60]!r}; it must be a JSON object")
    match arguments.work:
        case "turn":
            spoken = not arguments.text_only
            return Turns(model, audio_s=arguments.audio_s, frames=arguments.frames, spoken=spoken, more=more)
        case "speech":
            return Speeches(model, arguments.text, more=more)
        case _:
            return Transcripts(model, audio_s=arguments.audio_s, more=more)
