"""`aura-omni doctor`: what this machine offers to the server, for a bug report or a first look."""

from __future__ import annotations

import os
import platform
import shutil
import sys

import av
import torch

from aura_omni import __version__
from aura_omni.config.deploy_file import packaged_names


def report() -> str:
    """One finding a line, `name: value`."""
    lines = {
        "aura-omni": __version__,
        "Python": f"{sys.version.split()[0]} ({platform.platform()})",
        "torch": torch.__version__,
        "memory": _memory(),
        "CPU": f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads",
        "PyAV": f"{av.__version__}, libavcodec {'.'.join(map(str, av.library_versions['libavcodec']))}",
        "ffmpeg command": shutil.which("ffmpeg") or "not found (not needed: PyAV brings its own libraries)",
        "deploy files": ", ".join(packaged_names()),
    }
    return "\n".join([*(f"{name}: {value}" for name, value in lines.items()), *_devices()])


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        return [f"device: cpu ({why})"]
    lines = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        lines.append(
            f"device: cuda:{index}, {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, CUDA {torch.version.cuda}"
        )
    return lines


def _memory() -> str:
    try:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        free = os.sysconf("SC_AVPHYS_PAGES") * page_bytes
    except (AttributeError, OSError, ValueError):  # not every system tells
        return "unknown"
    return f"{free / 2**30:.1f} of {pages * page_bytes / 2**30:.1f} GiB free"
