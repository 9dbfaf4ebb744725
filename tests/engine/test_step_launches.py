"""What begins early may read before its wait what earlier steps have left, because each step begins with a launch that waits for them all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str, list[str]]]:
    """Stage, step, kernels."""
    # In a process of its own: who has imported Triton as an interpreter has no compiler.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("step_launches.py")
    done = subprocess.run(
        [sys.executable, script, "tiny.yaml"],
        env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3_000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(stage, step, kernels) for stage, step, *kernels in lines if stage.endswith("Stage")]


def attending(steps: list[tuple[str, str, list[str]]]) -> Iterator[tuple[str, str, list[str]]]:
    """Those with attention that reads before its wait."""
    for stage, step, kernels in steps:
        if any(kernel in ("paged_head_kernel*", "paged_row_kernel*", "_decode_kernel*") for kernel in kernels):
            yield stage, step, kernels


def test_a_step_whose_attention_begins_early_begins_with_a_launch_that_does_not(
    steps: list[tuple[str, str, list[str]]],
) -> None:
    found = list(attending(steps))
    assert {stage for stage, _, _ in found} == {"AsrStage", "AuraStage", "TalkerStage"}
    assert {"_decoded", "_both"} <= {step for _, step, _ in found}
    for stage, step, kernels in found:
        assert not kernels[0].endswith("*"), (stage, step, kernels[:3])


def test_what_attention_reads_before_its_wait_is_written_by_launches_that_do_not_begin_early(
    steps: list[tuple[str, str, list[str]]],
) -> None:
    """Lengths, pages, slots and rotations are `_begin_kernel`'s, and between it and attention of its step nothing else writes them."""
    for stage, step, kernels in attending(steps):
        first = next(place for place, kernel in enumerate(kernels) if kernel.startswith("paged_") or "decode" in kernel)
        assert "_begin_kernel" in kernels[:first], (stage, step, kernels[:first])
