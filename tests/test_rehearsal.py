"""What a start on a GPU will launch is known, and compiled, before; if that fails, the start goes on without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aura_omni import compiling
from aura_omni.compiling import compiled_ahead
from aura_omni.config import Options, load

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
CONFIG = load(Options(deploy_config="tiny.yaml"), environ={}, platform="cuda")


def test_a_launch_finds_what_was_compiled_ahead(tmp_path: Path) -> None:
    # In a process of its own: who has imported Triton as an interpreter has no compiler.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = Path(__file__).with_name("compile_ahead.py")
    done = subprocess.run(
        [sys.executable, script, "tiny.yaml", json.dumps({"1": {"quantization": "fp8", "kv_cache_dtype": "fp8"}})],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3_000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    known = next(names for first, *names in lines if first == "known")
    # One of every stage, of decoding, prefills, draws, encoders and eight bits.
    assert {
        "paged_head_kernel",
        "_prefill_kernel",
        "_conv_kernel",
        "_dense_kernel",
        "_pick_kernel",
        "_turn_patches_kernel",
        "_quantize_kernel",
        "_store_eight_kernel",
    } <= set(known)
    results = {tuple(line) for line in lines if line[0] in ("found", "missed")}
    assert results
    assert not [name for result, name in results if result == "missed"]


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that seems to have a GPU and cores enough."""
    monkeypatch.setattr(compiling, "platform", lambda environ: "cuda")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    return {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}


def test_a_start_goes_on_without_it_where_that_fails(
    gpu_machine: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Here nothing can tell for which GPU to compile."""
    with compiled_ahead(CONFIG, environ=gpu_machine) as process:
        assert process is not None
        assert process.wait(60) == 0
    assert "kernels are not compiled ahead" in capfd.readouterr().err


def test_it_ends_with_the_start(gpu_machine: dict[str, str]) -> None:
    with compiled_ahead(CONFIG, environ=gpu_machine) as process:
        assert process is not None
        assert process.poll() is None
    assert process.returncode is not None


def test_it_ends_with_the_process_that_has_started_it(gpu_machine: dict[str, str]) -> None:
    with compiled_ahead(CONFIG, environ=gpu_machine) as process:
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == -signal.SIGKILL


def test_nothing_is_compiled_ahead_without_a_gpu_or_graphs(
    gpu_machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = load(Options(deploy_config="tiny.yaml", enforce_eager=True), environ={}, platform="cuda")
    with compiled_ahead(eager, environ=gpu_machine) as process:
        assert process is None
    monkeypatch.setattr(compiling, "platform", lambda environ: "cpu")
    with compiled_ahead(CONFIG, environ=gpu_machine) as process:
        assert process is None


def test_modules_are_not_looked_for_where_the_server_was_started(
    gpu_machine: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import os; os._exit(7)")
    monkeypatch.chdir(tmp_path)
    config = load(Options(deploy_config="tiny.yaml"), environ={}, platform="cuda")
    with compiled_ahead(config, environ=gpu_machine) as process:
        assert process is not None
        assert process.wait(60) == 0


def test_a_start_goes_on_where_no_process_can_be_made(
    gpu_machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    config = load(Options(deploy_config="tiny.yaml"), environ={}, platform="cuda")
    with compiled_ahead(config, environ=gpu_machine) as process:
        assert process is None
