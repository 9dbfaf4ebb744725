"""What all tests share: threads for small models, and which tests this machine can run."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # tests/engine/test_kernels.py; whoever imports Triton first decides for all
# The models of the tests are so small that a second thread only costs.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; run `pytest -m gpu` on one"))


@pytest.fixture(scope="module")
def pipeline():
    """All four stages on the tiny family, shared by the tests of a file; nothing may be left over in it at the end."""
    from tests.family import config, running  # only where it is used: it loads every network

    with running(config()) as pipeline:
        yield pipeline
