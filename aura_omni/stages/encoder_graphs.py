"""The encoders of frames and of sound as CUDA graphs, for the shapes that come again and again.

    tower = TowerGraphs(network.visual)
    features = tower(frames, framing)            # as features_of(network.visual, frames, framing)
    hearing = HearingGraphs(network)
    rows = hearing.encode(clips)                 # as network.encode(clips)

Groups of frames of one framing are a batch, so padding is groups more; resizing and patches are in the graph, which spares
twenty launches. Sound is cut into windows that do not see each other: a
clip is filled up to whole windows, whose empty places nobody attends to, and padding is windows more. All in one lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aura_omni.engine.graphs import Graphed, GraphPool
from aura_omni.engine.lane import sent, staged_padded
from aura_omni.models.qwen3_asr import HOP_SAMPLES, EncoderConfig, Qwen3Asr
from aura_omni.models.qwen3_vl import VisionConfig, VisionTower
from aura_omni.models.vision_input import RESIZED_AT_ONCE, Framing

GROUPS = (1, 2, 4, 8)  # pairs of frames of one call
MOST_PATCHES = 8_192  # of one call: beyond, launching takes less time than computing
MOST_GRIDS = 4  # framings that get graphs; each holds its inputs and outputs, 130 MB for 640x360 at true size
MOST_SEEN = 16  # framings that came once and are remembered, whatever sizes clients think of
WINDOWS = (1, 2, 4, 8)  # of 8 s, of one call
MOST_WHOLE = 4  # of a clip that is one graph from its samples on


def features_of(tower: VisionTower, frames: Tensor, framing: Framing) -> Tensor:
    """frames uint8 [G, T, h, w, 3], groups of T frames of one framing, on the device or pinned -> features as the tower has them."""
    weight = tower.patch_embed.proj.weight
    frames = frames.flatten(0, 1).to(weight.device, non_blocking=True)
    patches = framing.patches(frames, framing.tables(weight.device))
    features: Tensor = tower(patches.to(weight.dtype), framing.grid)
    return features


class TowerGraphs:
    """`features_of` one tower. A framing gets its graphs the second time it comes: a single picture is not worth them."""

    @staticmethod
    def bytes(config: VisionConfig, dtype: torch.dtype) -> int:
        """What all graphs there can be hold on to: frames that go in, features that come out, and what they compute with."""
        values = config.channels * config.temporal_patch * config.patch**2  # of a patch
        features = (1 + len(config.deepstack_layers)) * config.out_hidden // config.merge**2
        # Twice the largest call of each framing, as each call of GROUPS is half of the next; what lies between is shared.
        held = MOST_GRIDS * 2 * (values + features * dtype.itemsize)
        between = max(4 * config.intermediate * dtype.itemsize, values * (2 * 4 + dtype.itemsize))
        return MOST_PATCHES * (held + between) + 4 * 8 * RESIZED_AT_ONCE

    def __init__(self, tower: VisionTower) -> None:
        self._tower, self._pool = tower, GraphPool()
        self._seen: deque[Framing] = deque(maxlen=MOST_SEEN)  # once
        self._graphs: dict[Framing, Graphed] = {}

    @torch.inference_mode()
    def prepare(self, framing: Framing) -> None:
        """Capture the graphs of a framing now."""
        if framing not in self._graphs and _groups_of(framing):
            self._graphs[framing] = self._graphed(framing)
            self._graphs[framing].prepare()

    def __call__(self, frames: Tensor, framing: Framing) -> Tensor:
        groups, graph = _groups_of(framing), self._graphs.get(framing)
        if graph is None and groups and len(self._graphs) < MOST_GRIDS:
            if framing in self._seen:
                graph = self._graphs[framing] = self._graphed(framing)
            else:
                self._seen.append(framing)
        if graph is None or len(frames) > groups[-1]:
            return features_of(self._tower, frames, framing)
        # A copy, because features wait for their rows to be computed and the next call overwrites the original.
        return graph(frames)[:, : len(frames)].clone()

    def _graphed(self, framing: Framing) -> Graphed:
        tower, weight = self._tower, self._tower.patch_embed.proj.weight
        # Tables of sizes that have not come for long are forgotten; the graphs hold on to theirs.
        tables, places = framing.tables(weight.device), tower.tables(framing.grid)

        def seen(frames: Tensor) -> Tensor:
            patches = framing.patches(frames.flatten(0, 1), tables)
            return tower.encoded(patches.to(weight.dtype), *places)

        group = torch.zeros(
            1, framing.rules.temporal_patch, *framing.source, 3, dtype=torch.uint8, device=weight.device
        )
        return Graphed(seen, rows=(group,), sizes=_groups_of(framing), pool=self._pool)


def _groups_of(framing: Framing) -> tuple[int, ...]:
    """How many groups a graph may take, by their patches, and by as many pixels where they are made smaller."""
    (height, width), (tall, wide) = framing.source, framing.size
    patches = max(height * width, tall * wide) // framing.rules.patch**2
    return tuple(groups for groups in GROUPS if groups * patches <= MOST_PATCHES)


class HearingGraphs:
    """`Qwen3Asr.encode`. Clips of up to four windows, 32 s, which is what recordings are cut into, are heard from their samples on in
    one graph, with those of as many; the windows of longer ones go through another; clips of less than a chunk, which are not filled
    up, are computed as written."""

    @staticmethod
    def bytes(config: EncoderConfig, dtype: torch.dtype) -> int:
        """What the graphs hold on to: nearly all of it is what the first convolution makes of the largest call."""
        image = config.conv_channels * (config.mel_bins // 2) * (config.window_frames // 2)
        return 4 * WINDOWS[-1] * image * dtype.itemsize

    def __init__(self, network: Qwen3Asr) -> None:
        self._encoder = encoder = network.audio_tower
        config = encoder.config
        weight, pool = encoder.conv_out.weight, GraphPool()
        chunks = config.window_frames // config.chunk_frames
        images = torch.zeros(1, chunks, config.mel_bins, config.chunk_frames, device=weight.device)
        inside = torch.ones(1, config.window_tokens, dtype=torch.bool, device=weight.device)
        self._graph = Graphed(encoder.windows, rows=(images, inside), sizes=WINDOWS, pool=pool)
        self._whole: dict[int, Graphed] = {}  # by windows of a clip
        for windows in range(1, MOST_WHOLE + 1):
            longest = HOP_SAMPLES * (windows * config.window_frames + 1)
            wave = torch.zeros(1, 1 + longest, device=weight.device)
            wave[:, 0] = longest
            self._whole[windows] = Graphed(
                lambda waves: encoder.heard(waves[:, 1:], waves[:, 0].long()),
                rows=(wave,),
                sizes=[clips for clips in WINDOWS if clips * windows <= WINDOWS[-1]],
                pool=pool,
            )

    def prepare(self) -> None:
        for graph in (self._graph, *self._whole.values()):
            graph.prepare()

    def encode(self, clips: Sequence[np.ndarray]) -> list[Tensor]:
        """clips: float32 [n_i] at 16 kHz on the host, n_i >= 400. Those of as many windows are encoded together."""
        config = self._encoder.config
        alike: dict[int, list[int]] = {}
        for number, clip in enumerate(clips):
            frames = len(clip) // HOP_SAMPLES
            windows = -(-frames // config.window_frames) if frames >= config.chunk_frames else 0
            alike.setdefault(windows, []).append(number)
        rows: dict[int, Tensor] = {}
        for windows, numbers in alike.items():
            rows.update(zip(numbers, self._encoded([clips[number] for number in numbers], windows), strict=True))
        return [rows[number] for number in range(len(clips))]

    def _encoded(self, clips: Sequence[np.ndarray], windows: int) -> list[Tensor]:
        """Of clips of so many windows; 0: of less than a chunk."""
        config, device = self._encoder.config, self._encoder.conv_out.weight.device
        samples = np.array([len(clip) for clip in clips])
        frames = (samples // HOP_SAMPLES).tolist()
        tokens = [config.tokens_of(count) for count in frames]
        waves = staged_padded(clips, device)
        if windows in self._whole:
            out = _in_calls(self._whole[windows], waves)  # so short that float32 holds their lengths, too
        else:
            mels = self._encoder.log_mels(waves.to(device, non_blocking=True)[:, 1:], sent(samples, device))
            if not windows:
                rows: list[Tensor] = self._encoder([mel[:, :count] for mel, count in zip(mels, frames, strict=True)])
                return rows
            filled = F.pad(mels, (0, windows * config.window_frames - mels.shape[2]))
            images = filled.unflatten(2, (windows, -1, config.chunk_frames)).permute(0, 2, 3, 1, 4).flatten(0, 1)
            inside = np.arange(windows * config.window_tokens) < np.array(tokens)[:, None]
            out = _in_calls(self._graph, images, sent(inside.reshape(-1, config.window_tokens), device))
            out = out.unflatten(0, (len(clips), windows)).flatten(1, 2)
        return [own[:count] for own, count in zip(out, tokens, strict=True)]


def _in_calls(graph: Graphed, *tensors: Tensor) -> Tensor:
    """A batch of any size, in calls of as many rows as there are graphs for.

    A copy, because features wait for their rows and the next call overwrites the original.
    """
    if len(tensors[0]) <= graph.most:
        return graph(*tensors)[: len(tensors[0])].clone()
    parts = zip(*(tensor.split(graph.most) for tensor in tensors), strict=True)
    return torch.cat([graph(*part)[: len(part[0])].clone() for part in parts])
