"""How busy the GPUs of this machine are during a load, by NVIDIA's driver: for a server that runs beside the client.

gpus = Gpus()             # raises ConfigError where there are none
gpus.begin()
...
gpus.end()                # [{"name": "NVIDIA H200", "busy": 0.93, "memory_gib": 97.4}]
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

from aura_omni.errors import ConfigError

EVERY_S = 0.1  # the driver's own figure is of the last sixth of a second, or of a whole one, as the GPU has it


class Gpus:
    """busy: mean share of the time in which a kernel ran, whichever process's it was; memory_gib: the most that was taken."""

    def __init__(self) -> None:
        self._nvml = _nvml()
        self._handles = [
            self._nvml.nvmlDeviceGetHandleByIndex(number) for number in range(self._nvml.nvmlDeviceGetCount())
        ]
        self._samples: list[list[tuple[int, int]]] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._samples, self._over = [], threading.Event()
        self._thread = threading.Thread(target=self._look, name="gpus", daemon=True)
        self._thread.start()

    def end(self) -> list[dict[str, Any]]:
        """Of each GPU, since `begin`."""
        assert self._thread is not None, "nothing has begun"
        self._over.set()
        self._thread.join()
        self._samples.append(self._sample())  # however short the load was
        found = []
        for handle, samples in zip(self._handles, zip(*self._samples, strict=True), strict=True):
            busy, memory = zip(*samples, strict=True)
            name = self._nvml.nvmlDeviceGetName(handle)
            found.append(
                {
                    "name": name.decode() if isinstance(name, bytes) else name,
                    "busy": round(sum(busy) / len(busy) / 100, 3),
                    "memory_gib": round(max(memory) / 2**30, 2),
                }
            )
        return found

    def _look(self) -> None:
        while not self._over.wait(EVERY_S):
            self._samples.append(self._sample())

    def _sample(self) -> list[tuple[int, int]]:
        """Of each GPU: busy in percent, bytes taken."""
        return [
            (self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu, self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
            for handle in self._handles
        ]


def _nvml() -> ModuleType:
    try:
        import pynvml
    except ImportError:
        raise ConfigError("--gpu needs nvidia-ml-py: pip install nvidia-ml-py, or leave it out") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ConfigError(
            f"--gpu measures the GPUs of this machine, and the driver has none: {error}. Leave it out"
        ) from None
    return pynvml
