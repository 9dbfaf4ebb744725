"""How busy GPUs are, with a driver that is made up."""

import json
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from aura_omni import cli
from aura_omni.bench import gpu
from aura_omni.bench.gpu import Gpus
from aura_omni.errors import ConfigError
from tests.test_serve import server as server


class NVMLError(Exception):
    pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Of two GPUs: the first is busy for 40 and 80 percent in turn and takes up to 3 GiB, the second rests."""
    made = ModuleType("pynvml")
    state = {"busy": 40, "looks": 0}

    def rates(handle: int) -> SimpleNamespace:
        if handle:
            return SimpleNamespace(gpu=0)
        state["busy"] = 120 - state["busy"]
        state["looks"] += 1
        return SimpleNamespace(gpu=state["busy"])

    made.NVMLError = NVMLError
    made.nvmlInit = lambda: None
    made.nvmlDeviceGetCount = lambda: 2
    made.nvmlDeviceGetHandleByIndex = lambda number: number
    made.nvmlDeviceGetName = lambda handle: b"GPU %d" % handle
    made.nvmlDeviceGetUtilizationRates = rates
    made.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=0 if handle else min(state["looks"], 3) << 30)
    made.state = state
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(gpu, "EVERY_S", 0.001)
    return made


def test_the_share_is_the_mean_of_all_looks_and_memory_the_most(driver):
    gpus = Gpus()
    for _ in range(2):  # one load after another
        begun = driver.state["looks"]
        gpus.begin()
        while driver.state["looks"] < begun + 20:
            time.sleep(0.001)
        first, second = gpus.end()
        assert first["name"] == "GPU 0"
        assert first["busy"] == pytest.approx(0.6, abs=0.011)  # one look more of one kind than of the other
        assert first["memory_gib"] == 3.0
        assert second == {"name": "GPU 1", "busy": 0.0, "memory_gib": 0.0}


def test_a_load_that_is_over_at_once_has_a_share(driver, monkeypatch):
    monkeypatch.setattr(gpu, "EVERY_S", 60.0)
    gpus = Gpus()
    gpus.begin()
    assert gpus.end()[0]["busy"] in (0.4, 0.8)


def test_what_is_missing_is_said(driver, monkeypatch):
    def none() -> None:
        raise NVMLError("Driver Not Loaded")

    driver.nvmlInit = none
    with pytest.raises(ConfigError, match=r"this machine, and the driver has none: Driver Not Loaded\. Leave it out"):
        Gpus()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match="pip install nvidia-ml-py"):
        Gpus()


def test_it_is_asked_for_with_a_flag(driver, server, capsys):
    flags = ["bench", "transcript", "--audio-s", "1", "--each", "1", "--url", server.url]
    assert cli.main([*flags, "--gpu"]) == 0
    assert cli.main(flags) == 0
    watched, other = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [found["name"] for found in watched["gpus"]] == ["GPU 0", "GPU 1"]
    assert "gpus" not in other
