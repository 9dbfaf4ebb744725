"""One load of a server, from this process or from several, so that what is measured is the server and not the client.

    client = Client(url="http://localhost:8091", processes=4)
    measured = client.run(Transcripts(model="asr", seed=1), Closed(clients=128, each=4), number=0)

Every process makes its requests before the clock starts, says that it is ready, and begins when all are: first to warm up, so
that the server has seen all of them at once, then in earnest. Their clock is the system's monotonic one, which processes
of a machine share.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import httpx

from aura_omni.bench.arrivals import Closed, Load
from aura_omni.bench.drive import Answer, ask
from aura_omni.bench.work import Request, Work
from aura_omni.errors import ConfigError, Unavailable

MOST_BYTES = 4 << 30  # of all requests of a load together
NEW_EACH_LOAD = 1_000_000  # requests are numbered; loads have numbers of their own


@dataclass(frozen=True, slots=True)
class Measured:
    """began_s, ended_s: time.monotonic(); cpu_s: what the busiest process computed in between."""

    answers: list[Answer]
    began_s: float
    ended_s: float
    cpu_s: float

    @property
    def wall_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """warm_up: requests of each client, or for each that an open loop has at once, before a load is measured. seed: of when
    people come."""

    url: str
    api_key: str | None = None
    timeout_s: float = 300.0
    processes: int = 1
    warm_up: int = 1
    seed: int = 0

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url.rstrip("/") + path, headers=self.headers, timeout=self.timeout_s)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connections]:
        async with AsyncExitStack() as opened:
            yield Connections(self, opened)

    def run(self, work: Work, load: Load, *, number: int, between: Callable[[], None] = lambda: None) -> Measured:
        """number: of the load, of whose requests none is like one of another's. between: called after the warm-up."""
        size = len(work.request(0).body)
        if (total := size * load.count) > MOST_BYTES:
            raise ConfigError(
                f"{load.label}: {load.count:,} requests of {size:,} bytes are more than {MOST_BYTES >> 30} GiB to hold; "
                f"{load.count * MOST_BYTES // total:,} would fit. Lower --each or --requests"
            )
        parts: Sequence[Load] = load.shares(self.processes)
        shares = [
            _Share(self, work, share, NEW_EACH_LOAD * (number * self.processes + place))
            for place, share in enumerate(parts)
        ]
        if len(shares) == 1:
            return asyncio.run(shares[0].run(before=lambda: None, between=between))
        return _together(shares, between)


class Connections:
    """As many as there are requests at once, each kept for the next request when its answer has ended.

    Each is an httpx client of its own: one with 128 connections looks through all of them for every request, which takes
    6 ms, and one with a single connection 0.4 ms.
    """

    def __init__(self, client: Client, opened: AsyncExitStack) -> None:
        self._client, self._opened = client, opened
        self._tls = httpx.create_ssl_context()
        self._free: list[httpx.AsyncClient] = []

    async def open(self, count: int) -> None:
        """Make so many, with a first request each, for which a client reads modules and connects: 90 ms of its own."""
        made = [self._made() for _ in range(count)]
        await asyncio.gather(*(connection.get("/v1/models") for connection in made))
        self._free += made

    async def ask(self, request: Request) -> Answer:
        connection = self._free.pop() if self._free else self._made()
        try:
            return await ask(connection, request)
        finally:
            self._free.append(connection)

    def _made(self) -> httpx.AsyncClient:
        connection = httpx.AsyncClient(
            base_url=self._client.url,
            headers=self._client.headers,
            timeout=self._client.timeout_s,
            verify=self._tls,
        )
        self._opened.push_async_callback(connection.aclose)
        return connection


class _Together:
    """What one share of several waits for: the word of the process that started it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def wait(self) -> None:
        self._connection.send("ready")
        self._connection.recv()


@dataclass(frozen=True, slots=True)
class _Share:
    client: Client
    work: Work
    load: Load
    first: int  # number of its first request

    async def run(self, *, before: Callable[[], None], between: Callable[[], None]) -> Measured:
        """Called before and after the warm-up."""
        warm_up = Closed(self.load.at_once, self.client.warm_up)
        requests = [self.work.request(self.first + number) for number in range(warm_up.count + self.load.count)]
        before()
        async with self.client.connect() as connections:
            await connections.open(warm_up.clients)
            if warm_up.count:
                await warm_up.run(lambda number: connections.ask(requests[number]), seed=0)
            del requests[: warm_up.count]
            between()
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            answers = await self.load.run(
                lambda number: connections.ask(requests[number]), seed=self.client.seed + self.first
            )
            return Measured(answers, began_s, time.monotonic(), time.process_time() - began_cpu_s)


def _together(shares: list[_Share], between: Callable[[], None]) -> Measured:
    """Each share in a process of its own."""
    spawn = multiprocessing.get_context("spawn")  # forking a process with threads is asking for trouble
    started: list[tuple[Connection, BaseProcess]] = []
    try:
        for share in shares:
            ours, theirs = spawn.Pipe()
            process: BaseProcess = spawn.Process(target=_work, args=(share, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((ours, process))
        for all_are_ready in (lambda: None, between):
            for ours, _ in started:
                ours.recv()
            all_are_ready()
            for ours, _ in started:
                ours.send("go")
        found: list[Measured] = [ours.recv() for ours, _ in started]
    except EOFError:
        raise Unavailable("a process of the client has ended before its time; what it says is above") from None
    finally:
        for _, process in started:
            process.terminate()  # it has said what it had to say, or we do not wait for it
            process.join()
    return Measured(
        [answer for part in found for answer in part.answers],
        min(part.began_s for part in found),
        max(part.ended_s for part in found),
        max(part.cpu_s for part in found),
    )


def _work(share: _Share, connection: Connection) -> None:
    """Of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to us as well; who started us ends us
    others = _Together(connection)
    connection.send(asyncio.run(share.run(before=others.wait, between=others.wait)))
