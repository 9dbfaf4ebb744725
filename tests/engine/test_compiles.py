"""Every kernel is accepted by Triton's compiler, not only by its interpreter, also where no GPU is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_kernels_compile_for_the_gpus_they_are_meant_for(tmp_path: Path) -> None:
    # In a process of its own: who has imported Triton as an interpreter has no compiler.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3_000:]
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert {
        "_decode_kernel",
        "paged_head_kernel",
        "paged_row_kernel",
        "_prefill_kernel",
        "_store_eight_kernel",
        "_tiles_kernel",
        "_row_kernel",
        "_dense_kernel",
        "_pick_kernel",
        "_begin_kernel",
        "_gather_kernel",
        "_part_kernel",
        "_end_kernel",
        "_choose_kernel",
        "_keep_kernel",
        "_fill_kernel",
        "_summed_rows_kernel",
        "_conv_kernel",
        "_attend_kernel",
    } <= names
