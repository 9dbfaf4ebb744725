"""Lets the kernels of a start be compiled beside it, by a process that goes before the engine (`rehearsal.py`).

    with compiled_ahead(config, environ=os.environ):
        pipeline = load(config)      # reads weights, and finds most kernels in Triton's cache when it comes to them

Without it, or if it fails, a start takes longer and is otherwise the same.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from aura_omni.config import Config, platform

log = logging.getLogger(__name__)

_LEAST_CORES = 4  # with fewer, the engine needs them all


@contextmanager
def compiled_ahead(config: Config, *, environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes] | None]:
    """Where there is a GPU, cores to spare and graphs to record; what is not compiled by the end is left to the engine.

    Yields the process, or None.
    """
    process = _started(environ) if _worth_it(config, environ) else None
    if process is None:
        yield None
        return
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            pickle.dump(config, process.stdin)
            process.stdin.flush()  # and it stays open: when it is closed, however that came about, the process ends
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _started(environ: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    # As the engine's process: else Python would first look for modules in the folder where the server was started.
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "aura_omni.rehearsal"],
            stdin=subprocess.PIPE,
            env={**environ, **path, "HF_HUB_OFFLINE": "1"},  # what is not here yet is fetched by the engine
            start_new_session=True,  # so that it can be ended with its own processes
        )
    except OSError as error:
        log.warning("kernels are not compiled ahead: %s", error)
        return None


def _worth_it(config: Config, environ: Mapping[str, str]) -> bool:
    return (
        platform(environ) == "cuda"
        and not all(stage.enforce_eager for stage in config.stages)
        and importlib.util.find_spec("triton") is not None
        and len(os.sched_getaffinity(0)) >= _LEAST_CORES
    )
