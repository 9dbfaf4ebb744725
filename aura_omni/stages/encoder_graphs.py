"""The encoders of frames and of sound as CUDA graphs, for the shapes that come again and again.

    tower = TowerGraphs(network.visual)
    features = tower(patches, grid)              # as network.visual(patches, grid)
    hearing = HearingGraphs(network)
    rows = hearing.encode(clips)                 # as network.encode(clips)

Groups of frames of one size are a batch, so padding is groups more. Sound is cut into windows that do not see each other: a
clip is filled up to whole windows, whose empty places nobody attends to, and padding is windows more. All in one lane.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aura_omni.engine.graphs import Graphed, GraphPool
from aura_omni.engine.lane import sent
from aura_omni.models.qwen3_asr import EncoderConfig, Qwen3Asr
from aura_omni.models.qwen3_vl import VisionConfig, VisionTower

GROUPS = (1, 2, 4, 8)  # pairs of frames of one call
MOST_PATCHES = 8_192  # of one call: beyond, launching takes less time than computing
MOST_GRIDS = 4  # frame sizes that get graphs; each holds its inputs and outputs, 150 MB for 640x360 at true size
WINDOWS = (1, 2, 4, 8)  # of 8 s


class TowerGraphs:
    """A `VisionTower`. A frame size gets its graphs the second time it comes: a single picture is not worth them."""

    @staticmethod
    def bytes(config: VisionConfig, dtype: torch.dtype) -> int:
        """What all graphs there can be hold on to: patches that go in, features that come out, and what they compute with."""
        patch = config.channels * config.temporal_patch * config.patch**2
        features = (1 + len(config.deepstack_layers)) * config.out_hidden // config.merge**2
        # Twice the largest call of each frame size, as each call of GROUPS is half of the next; what lies between is shared.
        numbers = MOST_GRIDS * 2 * (patch + features) + 4 * config.intermediate
        return MOST_PATCHES * numbers * dtype.itemsize

    def __init__(self, tower: VisionTower) -> None:
        self._tower, self._pool = tower, GraphPool()
        self._seen: set[tuple[int, int]] = set()
        self._graphs: dict[tuple[int, int], Graphed] = {}

    @torch.inference_mode()
    def prepare(self, grid: tuple[int, int]) -> None:
        """Capture the graphs of a frame size now."""
        if grid not in self._graphs and _groups_of(grid):
            self._graphs[grid] = self._graphed(grid)
            self._graphs[grid].prepare()

    def __call__(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        groups = _groups_of(grid)
        if grid in self._seen and grid not in self._graphs and groups and len(self._graphs) < MOST_GRIDS:
            self._graphs[grid] = self._graphed(grid)
        self._seen.add(grid)
        if grid not in self._graphs or len(patches) > groups[-1]:
            features: Tensor = self._tower(patches, grid)
            return features
        # A copy, because features wait for their rows to be computed and the next call overwrites the original.
        return self._graphs[grid](patches)[:, : len(patches)].clone()

    def _graphed(self, grid: tuple[int, int]) -> Graphed:
        # The tower forgets tables of sizes that have not come for long; the graphs hold on to theirs.
        tables, weight = self._tower.tables(grid), self._tower.patch_embed.proj.weight
        row = weight.new_zeros(1, grid[0] * grid[1], weight[0].numel())
        return Graphed(
            lambda patches: self._tower.encoded(patches, *tables), rows=(row,), sizes=_groups_of(grid), pool=self._pool
        )


def _groups_of(grid: tuple[int, int]) -> tuple[int, ...]:
    return tuple(groups for groups in GROUPS if groups * grid[0] * grid[1] <= MOST_PATCHES)


class HearingGraphs:
    """`Qwen3Asr.encode`. Clips of less than a chunk, which are not filled up, and very many windows are computed as written."""

    @staticmethod
    def bytes(config: EncoderConfig, dtype: torch.dtype) -> int:
        """What the graphs hold on to: nearly all of it is what the first convolution makes of the largest call."""
        image = config.conv_channels * (config.mel_bins // 2) * (config.window_frames // 2)
        return 4 * WINDOWS[-1] * image * dtype.itemsize

    def __init__(self, network: Qwen3Asr) -> None:
        self._encoder = encoder = network.audio_tower
        config = encoder.config
        weight = encoder.conv_out.weight
        chunks = config.window_frames // config.chunk_frames
        images = torch.zeros(1, chunks, config.mel_bins, config.chunk_frames, device=weight.device)
        inside = torch.ones(1, config.window_tokens, dtype=torch.bool, device=weight.device)
        self._graph = Graphed(encoder.windows, rows=(images, inside), sizes=WINDOWS, pool=GraphPool())

    def prepare(self) -> None:
        self._graph.prepare()

    def encode(self, clips: Sequence[Tensor]) -> list[Tensor]:
        config, mels = self._encoder.config, [self._encoder.log_mel(clip) for clip in clips]
        frames = [mel.shape[1] for mel in mels]
        counts = [-(-count // config.window_frames) for count in frames]
        if min(frames) < config.chunk_frames or sum(counts) > WINDOWS[-1]:
            rows: list[Tensor] = self._encoder(mels)
            return rows
        filled = [F.pad(mel, (0, -mel.shape[1] % config.window_frames)) for mel in mels]
        images = torch.cat(filled, dim=1).unflatten(1, (sum(counts), -1, config.chunk_frames)).permute(1, 2, 0, 3)
        tokens = [config.tokens_of(count) for count in frames]
        inside = np.zeros((sum(counts), config.window_tokens), np.bool_)
        firsts = [sum(counts[:clip]) for clip in range(len(mels))]
        for first, count in zip(firsts, tokens, strict=True):
            inside[first:].reshape(-1)[:count] = True
        out = self._graph(images, sent(inside, images.device))
        return [out[first:].flatten(0, 1)[:count].clone() for first, count in zip(firsts, tokens, strict=True)]
