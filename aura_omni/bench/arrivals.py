"""When requests start: a number of clients who wait for their answers, or people who come whenever they like."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Ask = Callable[[int], Awaitable[T]]  # the number of the request -> its result


@dataclass(frozen=True, slots=True)
class Closed:
    """Every client starts its next request when the last has ended."""

    clients: int
    each: int

    @property
    def label(self) -> str:
        return f"{self.clients} client{'s'[: self.clients != 1]}"

    @property
    def count(self) -> int:
        return self.clients * self.each

    @property
    def at_once(self) -> int:
        return self.clients

    def shares(self, most: int) -> list[Closed]:
        """The same load from up to `most` places."""
        return [Closed(clients, self.each) for clients in _parts(self.clients, most)]

    async def run(self, ask: Ask[T], *, seed: int) -> list[T]:
        async def client(number: int) -> list[T]:
            return [await ask(number * self.each + turn) for turn in range(self.each)]

        return [result for results in await asyncio.gather(*map(client, range(self.clients))) for result in results]


@dataclass(frozen=True, slots=True)
class Open:
    """`count` requests at `rate` a second with exponential gaps (a Poisson process), however slow the answers are."""

    rate: float
    count: int

    @property
    def label(self) -> str:
        return f"{self.rate:g}/s"

    @property
    def at_once(self) -> int:
        """About as many as come in a second."""
        return max(1, round(self.rate))

    def shares(self, most: int) -> list[Open]:
        """The same load from up to `most` places: together, Poisson processes are one."""
        return [Open(self.rate * count / self.count, count) for count in _parts(self.count, most)]

    async def run(self, ask: Ask[T], *, seed: int) -> list[T]:
        draw = random.Random(seed)
        begin, at = time.monotonic(), 0.0
        tasks: list[asyncio.Task[T]] = []
        async with asyncio.TaskGroup() as group:
            for number in range(self.count):
                at += draw.expovariate(self.rate)
                await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
                tasks.append(group.create_task(_as_coroutine(ask(number))))
        return [task.result() for task in tasks]


Load = Closed | Open


def _parts(whole: int, most: int) -> list[int]:
    """As equal as can be, none empty."""
    parts = min(whole, most)
    return [whole // parts + (part < whole % parts) for part in range(parts)]


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable
