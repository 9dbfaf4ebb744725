"""What steps.py can leave out: everything that it names is there, and nothing of its kind is forgotten."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def features(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import features

    yield features
    sys.modules.pop("features")


def test_whatever_can_be_left_out_is_there(features):
    with features.without(features.FEATURES):
        pass


def test_early_starts_are_left_out_wherever_they_are_decided(features):
    """A name that a module has imported is its own: to change it where it came from changes nothing there."""
    deciding = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "aura_omni").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id == "starts_early"
    }
    assert {target.rpartition(".")[0] for target in features.FEATURES["early-starts"]} == deciding
