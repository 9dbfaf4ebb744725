"""Frames and sound from encoders that are padded to few shapes are what the encoders make of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aura_omni.engine import graphs
from aura_omni.models.qwen3_asr import Qwen3Asr
from aura_omni.models.qwen3_vl import TABLES_KEPT, VisionTower
from aura_omni.models.vision_input import Framing, PixelRules
from aura_omni.stages.encoder_graphs import (
    GROUPS,
    MOST_GRIDS,
    MOST_SEEN,
    MOST_WHOLE,
    WINDOWS,
    HearingGraphs,
    TowerGraphs,
    features_of,
)
from tests import asr_tiny, aura_tiny
from tests.aura_tiny import VIDEO_PIXELS
from tests.replayed import without_cuda
from tests.training.lasting import Reads

LIMIT = 2e-5
VIDEO = PixelRules.from_json(VIDEO_PIXELS)


def framing_of(height: int, width: int, *, source: tuple[int, int] | None = None) -> Framing:
    """Of so many patches."""
    size = (16 * height, 16 * width)
    return Framing(VIDEO, source or (size[0] + 8, size[1]), size)


FRAMING = framing_of(4, 6)


@pytest.fixture(scope="module")
def tower() -> VisionTower:
    return aura_tiny.network(aura_tiny.config_json()).visual


@pytest.fixture(scope="module")
def hearing() -> Qwen3Asr:
    return asr_tiny.network_of(asr_tiny.reference())


def frames(groups: int, framing: Framing = FRAMING) -> Tensor:
    return torch.randint(0, 256, (groups, 2, *framing.source, 3), dtype=torch.uint8)


@torch.inference_mode()
def test_frames_of_any_number_of_groups(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = without_cuda(monkeypatch)
    ours = TowerGraphs(tower)
    ours.prepare(FRAMING)
    assert len(recorded) == len(GROUPS)
    given = [frames(groups) for groups in (3, 8, 1, 2, GROUPS[-1] + 3)]
    found = [ours(some, FRAMING) for some in given]
    assert len(recorded) == len(GROUPS)
    for some, features in zip(given, found, strict=True):  # after the last call: none of them was overwritten
        assert (features - features_of(tower, some, FRAMING)).abs().max() < LIMIT


@torch.inference_mode()
def test_a_frame_size_gets_graphs_when_it_comes_again(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = without_cuda(monkeypatch)
    ours = TowerGraphs(tower)
    for time, captured in ((0, 0), (1, 1), (2, 1)):
        some = frames(2)
        assert (ours(some, FRAMING) - features_of(tower, some, FRAMING)).abs().max() < LIMIT
        assert len(recorded) == captured, time
    for width in range(2, 2 * MOST_GRIDS + 8, 2):
        framing = framing_of(2, width)
        for _ in range(2):
            some = frames(1, framing)
            assert (ours(some, framing) - features_of(tower, some, framing)).abs().max() < LIMIT
    assert len(recorded) == MOST_GRIDS


@torch.inference_mode()
def test_of_frame_sizes_that_came_once_only_some_are_remembered(
    tower: VisionTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = without_cuda(monkeypatch)
    ours = TowerGraphs(tower)
    sizes = [framing_of(2, 2 * width) for width in range(1, MOST_SEEN + 2)]
    for framing in (*sizes, sizes[0]):
        ours(frames(1, framing), framing)
    assert recorded == []
    ours(frames(1, sizes[-1]), sizes[-1])
    assert len(recorded) == 1


@torch.inference_mode()
@pytest.mark.parametrize("framing", [FRAMING, framing_of(2, 2, source=(64, 96))], ids=["as seen", "as given"])
def test_frames_too_large_for_a_graph(tower: VisionTower, framing: Framing, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = without_cuda(monkeypatch)
    monkeypatch.setattr("aura_omni.stages.encoder_graphs.MOST_PATCHES", 23)
    ours = TowerGraphs(tower)
    ours.prepare(framing)
    for _ in range(3):
        ours(frames(1, framing), framing)
    assert recorded == []


@torch.inference_mode()
def test_a_graph_keeps_the_tables_that_it_reads(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    functions: list[Callable[[], Tensor]] = []
    without_cuda(monkeypatch)
    replayed = graphs.recorded

    def watched(function: Callable[[], Tensor], pool: object) -> object:
        functions.append(function)
        return replayed(function, pool)

    monkeypatch.setattr(graphs, "recorded", watched)
    ours = TowerGraphs(tower)
    ours.prepare(FRAMING)
    first = Reads.of(functions[-1])
    for width in range(2, 2 * TABLES_KEPT + 40, 2):  # more than either kind of table is kept of
        framing = framing_of(2, width)
        features_of(tower, frames(1, framing), framing)
    again = Reads.of(functions[-1])
    assert first.gone == again.gone == ()
    assert first.places == again.places


@torch.inference_mode()
@pytest.mark.parametrize(
    "frames",
    [
        [500],
        [100],
        [101, 799, 800],
        [801],
        [2_433, 500],
        [1_601, 2_400, 3_200, 3_201],  # of three and four windows, and one too many for a graph from samples on
        [1_000] * (WINDOWS[-1] + 1),
        [99],
        [500, 60],
        [800 * WINDOWS[-1] + 1],
        [50] * 3,
        [500] * (2 * WINDOWS[-1] + 3),
    ],
)
def test_sound_of_any_length(hearing: Qwen3Asr, frames: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = without_cuda(monkeypatch)
    ours = HearingGraphs(hearing)
    ours.prepare()
    of_clips = [clips for windows in range(1, MOST_WHOLE + 1) for clips in WINDOWS if clips * windows <= WINDOWS[-1]]
    assert sorted(recorded) == sorted([*WINDOWS, *of_clips])
    rounds = [[0.1 * torch.randn(160 * count + 159) for count in order] for order in (frames, frames[::-1])]
    found = [ours.encode([clip.numpy() for clip in clips]) for clips in rounds]
    for clips, rows in zip(rounds, found, strict=True):
        expected = hearing.encode(clips)
        assert [row.shape for row in rows] == [row.shape for row in expected]
        for one, other in zip(rows, expected, strict=True):
            assert (one - other).abs().max() < LIMIT


@torch.inference_mode()
def test_what_fills_a_window_up_is_not_heard(hearing: Qwen3Asr) -> None:
    encoder = hearing.audio_tower
    images = torch.randn(2, 8, 128, 100)
    inside = torch.ones(2, 104, dtype=torch.bool)
    inside[1, 39:] = False  # three chunks
    before = encoder.windows(images, inside)
    images[1, 3:] = torch.randn(5, 128, 100) * 50
    after = encoder.windows(images, inside)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1, :39], after[1, :39])
    assert not torch.equal(before[1, 39:], after[1, 39:])


@torch.inference_mode()
def test_what_graphs_hold_is_counted(tower: VisionTower, hearing: Qwen3Asr, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(graphed: graphs.Graphed) -> int:
        captures = graphed._captures.values()
        return sum(tensor.nbytes for capture in captures for tensor in (*capture.inputs, capture.output))

    without_cuda(monkeypatch)
    monkeypatch.setattr("aura_omni.stages.encoder_graphs.MOST_PATCHES", 128)
    monkeypatch.setattr("aura_omni.stages.encoder_graphs.RESIZED_AT_ONCE", 0)  # which no graph keeps
    seeing = TowerGraphs(tower)
    for grid in ((4, 4), (2, 8), (8, 2), (2, 4))[:MOST_GRIDS]:
        seeing.prepare(framing_of(*grid, source=(16 * grid[0], 16 * grid[1])))
    most = TowerGraphs.bytes(tower.config, torch.float32)
    assert most / 3 < sum(held(graphed) for graphed in seeing._graphs.values()) < most
    ours = HearingGraphs(hearing)
    ours.prepare()
    assert sum(map(held, (ours._graph, *ours._whole.values()))) < HearingGraphs.bytes(
        hearing.audio_tower.config, torch.float32
    )
