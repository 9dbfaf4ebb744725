"""When requests start: a number of clients who wait for their answers, or people who come whenever they like."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
Ask = Callable[[int], Awaitable[T]]  # the number of the request -> its result


async def closed(ask: Ask[T], *, clients: int, each: int) -> list[T]:
    """Every client starts its next request when the last has ended."""

    async def client(number: int) -> list[T]:
        return [await ask(number * each + turn) for turn in range(each)]

    return [result for results in await asyncio.gather(*map(client, range(clients))) for result in results]


async def open_loop(ask: Ask[T], *, rate: float, count: int, seed: int = 0) -> list[T]:
    """`count` requests at `rate` a second with exponential gaps (a Poisson process), however slow the answers are."""
    draw = random.Random(seed)
    begin, at = time.monotonic(), 0.0
    tasks: list[asyncio.Task[T]] = []
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            at += draw.expovariate(rate)
            await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
            tasks.append(group.create_task(_as_coroutine(ask(number))))
    return [task.result() for task in tasks]


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable
