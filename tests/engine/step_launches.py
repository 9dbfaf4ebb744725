"""Assembles a small pipeline as for a GPU, on any machine that has Triton, and prints what each kind of step launches: stage, step, kernels
in order, those with a star that begin before the ones in front of them have ended. Run by test_step_launches.py.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from aura_omni.assembly import assemble
from aura_omni.config import Options, load
from aura_omni.engine.steps import Steps
from aura_omni.rehearsal import Gpu

STEPS = ("_decoded", "_both", "_computed", "_drawn")


def main() -> None:
    launched: list[list[str]] = []

    def named(name: str) -> None:
        step = getattr(Steps, name)

        def noted(self: Steps, *given: Any, **more: Any) -> Any:
            launched.append([type(self._model).__name__, name])
            return step(self, *given, **more)

        setattr(Steps, name, noted)

    def run(self: Any, *_: Any, launch_pdl: bool = False, **__: Any) -> None:
        if launched:
            launched[-1].append(self.__name__ + "*" * launch_pdl)

    for name in STEPS:
        named(name)
    JITFunction.run = run
    driver.set_active(Gpu(GPUTarget("cuda", 90, 32), max_shared_mem=232_448))
    assemble(load(Options(deploy_config=sys.argv[1]), environ={}, platform="cuda"), device=torch.device("meta"))
    for line in launched:
        print(*line)


if __name__ == "__main__":
    main()
