"""Batches drawn while the step before them computes.

Drawing waits for the device several times a batch (sizes, tables), so in the training's own thread neither the processor nor the
device is ever busy for long. Here it has a thread and a stream of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from queue import Empty, Full, Queue

import torch

from training.aura.data import Batch, Room
from training.aura.model import Feeder, Inputs

DEPTH = 2  # batches that wait, drawn; and steps that the device may be behind
POLL_S = 0.2


def ahead(
    batches: Iterable[Batch], feeder: Feeder, room: Room | None, quiet: AbstractContextManager[object]
) -> Iterator[Inputs]:
    """Inputs of each batch, in order. On a CPU they are made when they are asked for. Nothing is drawn while someone else holds quiet."""
    if feeder.device.type != "cuda":
        for batch in batches:
            with torch.no_grad():
                inputs = feeder.inputs(batch, room)
            yield inputs
        return
    ready: Queue[Inputs | BaseException] = Queue(DEPTH)
    stopped = threading.Event()
    thread = threading.Thread(target=_draw, args=(batches, feeder, room, quiet, ready, stopped), daemon=True)
    thread.start()
    steps: deque[torch.cuda.Event] = deque()  # those that the device has not been seen to end
    try:
        while True:
            made = _next(ready, thread)
            if isinstance(made, BaseException):
                raise made
            stream = torch.cuda.current_stream(feeder.device)
            for tensor in made.tensors():
                tensor.record_stream(stream)  # its memory belongs to the other stream and is in use in this one
            yield made
            used = torch.cuda.Event()
            used.record(stream)
            steps.append(used)
            if len(steps) > DEPTH:
                steps.popleft().synchronize()
    finally:
        stopped.set()
        thread.join()


def _next(ready: Queue[Inputs | BaseException], thread: threading.Thread) -> Inputs | BaseException:
    while True:
        try:
            return ready.get(timeout=POLL_S)
        except Empty:
            if not thread.is_alive() and ready.empty():
                return EOFError("there are no more batches")


def _draw(
    batches: Iterable[Batch],
    feeder: Feeder,
    room: Room | None,
    quiet: AbstractContextManager[object],
    ready: Queue[Inputs | BaseException],
    stopped: threading.Event,
) -> None:
    made: Inputs | BaseException
    try:
        stream = torch.cuda.Stream(feeder.device)
        for batch in batches:
            with quiet, torch.no_grad(), torch.cuda.stream(stream):
                made = feeder.inputs(batch, room)
                stream.synchronize()
            if not _put(ready, made, stopped):
                return
    except BaseException as error:  # raised again where the batches are used
        _put(ready, error, stopped)


def _put(ready: Queue[Inputs | BaseException], made: Inputs | BaseException, stopped: threading.Event) -> bool:
    while not stopped.is_set():
        try:
            ready.put(made, timeout=POLL_S)
            return True
        except Full:
            continue
    return False
