"""What a figure was measured on, as every script here writes it beside its figures."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def machine() -> dict[str, str]:
    """Device with its driver, software, commit and date. Takes nothing of a GPU: a server may be measured on it."""
    return {
        "device": _said(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]) or f"{os.cpu_count()} CPU cores",
        "driver": _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": _version("triton"),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    """Of the checkout, with a "+" where files of it are changed; nothing outside one."""
    commit = _said(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    changed = commit and _said(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}+" if changed else commit


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _said(command: Sequence[str]) -> str:
    """What it prints, several lines as one; nothing where it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ", ".join(done.stdout.split("\n")).strip(", ") if done.returncode == 0 else ""
