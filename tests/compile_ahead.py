"""Assembles a small pipeline as for a GPU, on any machine that has Triton, and compares what a rehearsal compiles with what a start
would look for. Run by test_rehearsal.py.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from triton import JITFunction, knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from aura_omni.assembly import assemble
from aura_omni.config import Options, load
from aura_omni.rehearsal import Gpu, Kernel, rehearse

HOPPER = Gpu(GPUTarget("cuda", 90, 32), max_shared_mem=232_448)
QUICK = {
    "_rms_norm_kernel",
    "_silu_mul_kernel",
    "_quantize_kernel",
    "_store_kernel",
    "_add_rms_norm_kernel",
}  # others take seconds


def main() -> None:
    config = load(Options(deploy_config=sys.argv[1], stage_overrides=sys.argv[2]), environ={}, platform="cuda")
    kernels: list[Kernel] = []
    rehearse(config, HOPPER, kernels.append)
    print("known", *sorted({kernel.name for kernel in kernels}))
    for kernel in kernels:
        if kernel.name in QUICK:
            kernel.compile(HOPPER)
            # Another process would not have it in memory.
            getattr(importlib.import_module(kernel.module), kernel.name).device_caches.clear()

    def looked_for(*, src: Any, cache_hit: bool, **_: Any) -> None:
        print("found" if cache_hit else "missed", src.fn.__name__)

    # A launch as it is, but that nothing is launched at its end.
    run = JITFunction.run

    def compiled(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        return run(self, *given, grid=grid, warmup=True, **named) if self.__name__ in QUICK else None

    JITFunction.run = compiled
    knobs.compilation.listener = looked_for
    driver.set_active(HOPPER)
    assemble(config, device=torch.device("meta"))


if __name__ == "__main__":
    main()
