"""Compiles what a start will launch on a GPU, many kernels at a time, before it comes to that.

    python -m aura_omni.rehearsal < CONFIG     # pickled; started by compiling.py

The stages are assembled as they always are, but on PyTorch's "meta" device, whose tensors have shapes and no numbers. Triton, asked
to launch a kernel that it has not compiled, tells a hook what it would compile and for which arguments; the hook gives it to
other processes and nothing is launched. What they compile is in Triton's cache on disk, where the engine finds it.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from aura_omni.assembly import assemble
from aura_omni.config import Config
from aura_omni.errors import AuraError

log = logging.getLogger(__name__)

_NICE = 10  # the engine is reading weights meanwhile


@dataclass(frozen=True, slots=True)
class Gpu:
    """What Triton must know of a GPU to compile for it: an active driver that never touches the device."""

    target: GPUTarget
    max_shared_mem: int  # bytes that one program may have of it

    @classmethod
    def here(cls, index: int) -> Gpu:
        """Asks for no more than can be known without memory on the device."""
        major, minor = torch.cuda.get_device_capability(index)
        properties = driver.active.utils.get_device_properties(index)
        return cls(GPUTarget("cuda", 10 * major + minor, 32), properties["max_shared_mem"])

    @property
    def utils(self) -> SimpleNamespace:
        return SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": self.max_shared_mem})

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, compiled for one kind of arguments. data: as Triton describes them."""

    module: str
    name: str
    data: str

    def compile(self, gpu: Gpu) -> None:
        """Into Triton's cache, unless it is there."""
        knobs.runtime.jit_cache_hook = None
        driver.set_active(gpu)
        getattr(importlib.import_module(self.module), self.name).preload(self.data)


class _Nothing:
    """A compiled kernel that does nothing, so that Triton does not ask again at each of its launches."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None: ...

    def run(self, *_: object) -> None: ...


def rehearse(config: Config, gpu: Gpu, found: Callable[[Kernel], object]) -> None:
    """Tell `found` of every kernel that `assemble` would have compiled on such a GPU, once each."""
    known: set[Kernel] = set()

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = Kernel(fn.module, fn.jit_function.__name__, compile["specialization_data"])
        if kernel not in known:
            known.add(kernel)
            found(kernel)
            compiled, *_ = fn.jit_function.device_caches[compile["device"]]
            compiled[compile["key"]] = _Nothing()
        return True  # nothing is compiled here, or launched

    driver.set_active(gpu)
    knobs.runtime.jit_cache_hook = hook
    try:
        assemble(config, device=torch.device("meta"))
    finally:
        knobs.runtime.jit_cache_hook = None


def main() -> None:
    # Of the stages themselves the engine's process speaks.
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(levelname)s %(message)s")
    log.setLevel(logging.INFO)
    config: Config = pickle.load(sys.stdin.buffer)
    try:
        _compile(config)
    except AuraError:
        pass  # the engine's process meets it as well
    except Exception as error:
        log.warning("kernels are not compiled ahead: %s: %s", type(error).__name__, error)


def _compile(config: Config) -> None:
    os.nice(_NICE)
    began_s = time.monotonic()
    workers = max(1, len(os.sched_getaffinity(0)) - 2)
    compiling: list[Future[None]] = []
    # Forked before there is a thread or anything of CUDA here, so none of them has to read torch again.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as processes:
        processes.submit(os.getpid).result()
        threading.Thread(target=_end_with_the_server, daemon=True).start()
        gpu = Gpu.here(config.stages[0].device)
        rehearse(config, gpu, lambda kernel: compiling.append(processes.submit(kernel.compile, gpu)))
    failed = [error for future in compiling if (error := future.exception())]
    log.info(
        "%d kernels compiled ahead, or found, in %.1f s by %d processes",
        len(compiling) - len(failed), time.monotonic() - began_s, workers,
    )  # fmt: skip
    if failed:
        log.warning("%d kernels could not be compiled ahead; the first: %s", len(failed), failed[0])


def _end_with_the_server() -> None:
    """Which holds the other end of our input. We are the first of a session of our own; if not, whoever started us stays."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    with suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
