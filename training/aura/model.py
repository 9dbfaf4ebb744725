"""The served network in training: packed batches through the very weights that answer, and what else the tower learns.

The tower is also taught, by throw-away heads, what each of its cells shows in both frames, which way it moves, and where in the
picture and how large the thing is that it is a part of. Without them it learns to see only once the decoder has learnt to read,
which costs most of the training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.qwen3_vl import Qwen3VL, VisionBlock, VisionTower, VLConfig, _turn
from aura_omni.models.vision_input import PixelRules
from aura_omni.nano.published import AURA_TOKENS, CONTROL_TOKENS, NANO, PLAIN_ADDED_TOKENS, Sizes, Text, aura_files
from training.aura import draw
from training.aura.data import LARGEST, LONGEST, Batch, Room
from training.aura.draw import Painter
from training.aura.packed import PackedKV, Pieces
from training.aura.vocabulary import PIECES, ROWS
from training.aura.world import CARD, COLOURS, CORE, EDGE, unit_of

NOTHING_WEIGHT = 0.15  # of a cell without anything in it, in the tower's own loss
# Root mean square of the learned positions; that of an embedded patch is 0.6 untrained and 2 trained.
# At 0.02 a first run never learnt to say where.
POSITIONS = 1.0
IGNORED = -100  # a cell of no picture
WAVES = 4  # half waves over the picture that positions start from


@dataclass(slots=True)
class Pictures:
    """Patches of all pictures, those of one after those of another.

    patches [P, values]; spots float32 [P, positions of the table]: the share of each learned position; cos, sin float32 [P, head dim]
    pads int64 [P / 4]: the rows of the batch that are these pixels
    cells int64 [8, P / 4]: shape and colour in the first frame, in the second, motion, and of the second frame's thing which third
    of the width and of the height it is in, and its size; 0 for nothing, IGNORED for no picture
    """

    patches: Tensor
    spots: Tensor
    cos: Tensor
    sin: Tensor
    pieces: Pieces
    pads: Tensor
    cells: Tensor


@dataclass(slots=True)
class Inputs:
    """A batch on the device."""

    tokens: Tensor
    positions: Tensor
    pieces: Pieces
    said: Tensor  # int64, the rows of the tokens that have a weight
    weights: Tensor  # of those, in that order, as decisions
    decisions: Tensor
    pictures: Pictures | None

    def tensors(self) -> list[Tensor]:
        """All of them, always in the same order."""
        mine = [self.tokens, self.positions, self.pieces.starts, self.said, self.weights, self.decisions]
        if self.pictures is None:
            return mine
        seen = self.pictures
        return [*mine, seen.patches, seen.spots, seen.cos, seen.sin, seen.pieces.starts, seen.pads, seen.cells]


# Of the smoke run: seconds a hundred steps on a CPU.
SMOKE = replace(
    NANO,
    aura=Text(128, 256, 3, 4, 2, 32, (6, 5, 5)),
    vision_layers=2, vision_width=96, vision_heads=3, vision_intermediate=192, vision_deepstack=(0,),
)  # fmt: skip


def network(seed: int, sizes: Sizes = NANO) -> Qwen3VL:
    """An untrained AURA."""
    config = VLConfig.from_json(aura_files(sizes, control_ids(), ROWS)["config.json"])
    torch.manual_seed(seed)
    made = Qwen3VL(config)
    with torch.no_grad():
        deep = (2 * config.text.layers) ** -0.5
        for name, weight in made.named_parameters():
            if weight.dim() < 2:
                continue
            if "pos_embed" in name:
                weight.copy_(smooth_positions(config.vision.position_side, weight.shape[1]))
            elif "embed" in name and "patch" not in name:
                weight.normal_(0, 0.5)
            elif "patch_embed" in name:
                weight.normal_(0, 0.03)
            else:
                weight.normal_(
                    0, weight.shape[1] ** -0.5 * (deep if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.8)
                )
        for name, bias in made.named_parameters():
            if name.endswith("bias") and bias.dim() == 1:
                bias.zero_()
    return made


def smooth_positions(side: int, width: int) -> Tensor:
    """float32 [side * side, width] of root mean square POSITIONS: long waves along rows and columns, mixed at random.

    Learned positions that start as noise are read cell by cell; of waves, a thing's place is nearly a linear function.
    """
    at = torch.linspace(0, math.pi, side)
    axis = torch.stack([wave(n * at) for n in range(1, WAVES + 1) for wave in (torch.cos, torch.sin)], dim=-1)
    rows = axis[:, None].expand(-1, side, -1)
    both = torch.cat((rows, rows.transpose(0, 1)), dim=-1).flatten(0, 1)
    mixed = both @ torch.nn.init.orthogonal_(torch.empty(both.shape[1], width))
    return mixed * (POSITIONS / mixed.square().mean().sqrt())


def control_ids() -> dict[str, int]:
    """As `vocabulary.write` gives them."""
    return {name: PIECES + n for n, name in enumerate((*CONTROL_TOKENS, *PLAIN_ADDED_TOKENS, *AURA_TOKENS))}


class Tutor(nn.Module):
    """The throw-away heads."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        shapes, colours = CARD + 2, len(COLOURS) + 1
        self.sizes = (shapes, colours, shapes, colours, 5)
        self.heads = nn.Linear(hidden, sum(self.sizes))
        self.places = nn.Linear(hidden, 12)  # across, down, size
        for name, count in (("few", 4), ("five", 5), ("shapes", shapes), ("colours", colours)):
            weight = torch.ones(count)
            weight[0] = NOTHING_WEIGHT
            self.register_buffer(name, weight, persistent=False)

    def loss(self, features: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, how many of the cells with something in the second frame have both names right)."""
        rows = features.float()
        parts = self.heads(rows).split(self.sizes, dim=-1) + self.places(rows).split(4, dim=-1)
        weights = (self.shapes, self.colours, self.shapes, self.colours, self.five, self.few, self.few, self.few)
        total = features.new_zeros((), dtype=torch.float32)
        for logits, target, weight in zip(parts, cells, weights, strict=True):
            total = total + F.cross_entropy(logits, target, weight, ignore_index=IGNORED)
        right = (parts[2].argmax(-1) == cells[2]) & (parts[3].argmax(-1) == cells[3])
        there = cells[2] > 0
        return total, (right & there).sum() / there.sum().clamp_min(1)


class Feeder:
    """Batches of arrays to inputs on the device: draws the frames and puts them through the server's pixel path."""

    def __init__(self, painter: Painter) -> None:
        files = aura_files(NANO, control_ids(), ROWS)
        self._rules = {
            True: PixelRules.from_json(files["preprocessor_config.json"]),
            False: PixelRules.from_json(files["video_preprocessor_config.json"]),
        }
        self._places = Places(VLConfig.from_json(files["config.json"]), painter.device)
        self._painter = painter
        self._dtype = torch.bfloat16 if painter.device.type == "cuda" else torch.float32  # what autocast makes of them

    @property
    def device(self) -> torch.device:
        return self._painter.device

    def inputs(self, batch: Batch, room: Room | None = None) -> Inputs:
        """room: what the batch is filled up to, with rows that count for nothing; None: it is as large as it is."""
        said = np.flatnonzero(batch.weights)
        rows = len(batch.tokens) if room is None else room.rows
        count = len(said) if room is None else room.said

        def moved(array: np.ndarray, length: int, filling: int = 0) -> Tensor:
            return draw.moved(_filled(array, length, filling), self.device)

        return Inputs(
            moved(batch.tokens, rows), moved(batch.positions, rows), self._pieces(batch.starts, rows, None if room is None else room.conversations, LONGEST),
            moved(said, count, 1), moved(batch.weights[said], count), moved(batch.decisions[said].astype(np.int64), count),
            self._pictures(batch, room),
        )  # fmt: skip

    def _pieces(self, starts: np.ndarray, rows: int, count: int | None, longest: int) -> Pieces:
        """Pieces that cover all rows; with a count so many of them, and more for what fills a batch up."""
        if count is None:
            return Pieces(draw.moved(starts, self.device), int(np.diff(starts).max()))
        filling = np.arange(starts[-1] + longest, rows + longest, longest)
        starts = np.concatenate((starts, np.minimum(filling, rows))).astype(np.int32)
        return Pieces(draw.moved(_filled(starts, count + rows // longest + 2, rows), self.device), longest)

    def _pictures(self, batch: Batch, room: Room | None) -> Pictures | None:
        if room is None and not batch.sights:
            return None
        device, places = self.device, self._places
        frames = self._painter.frames(batch.spec, seed=batch.seed) if batch.sights else None
        patches, cells = list[Tensor](), list[Tensor]()
        tables: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        lengths = [0]
        for sight in batch.sights:
            assert frames is not None
            rules, groups = self._rules[sight.still], len(sight.group_frames)
            pairs = draw.moved(sight.group_frames, device)
            patches.append(rules.patches(frames[pairs.flatten()], sight.size).flatten(0, 1).to(self._dtype))
            cells.append(self._cells(batch, pairs, (sight.size[0] // rules.factor, sight.size[1] // rules.factor)))
            place = places.of((sight.size[0] // rules.patch, sight.size[1] // rules.patch))
            for parts, table in zip(tables, place, strict=True):
                parts.append(table.expand(groups, -1, -1).flatten(0, 1))
            lengths += [len(place[0])] * groups
        total = sum(lengths) if room is None else room.patches
        missing = total - sum(lengths)
        if missing:
            values = self._rules[True].patch ** 2 * 3 * self._rules[True].temporal_patch
            patches.append(torch.zeros(missing, values, dtype=self._dtype, device=device))
            for parts, table in zip(tables, places.of((2, 2)), strict=True):
                parts.append(table.new_zeros(missing, table.shape[1]))
            cells.append(torch.full((8, missing // 4), IGNORED, device=device))
        pads = np.concatenate([np.zeros(0, np.int64), *(sight.pads for sight in batch.sights)])
        return Pictures(
            torch.cat(patches), *(torch.cat(parts) for parts in tables),
            self._pieces(np.cumsum(lengths, dtype=np.int32), total, None if room is None else room.pictures, LARGEST),
            draw.moved(_filled(pads, total // 4, len(batch.tokens) if room is None else room.rows - 1), device),
            torch.cat(cells, dim=1),
        )  # fmt: skip

    def _cells(self, batch: Batch, pairs: Tensor, cells: tuple[int, int]) -> Tensor:
        owner = self._painter.owners(batch.spec, cells).flatten(1)
        slots = draw.moved(batch.spec.slots, owner.device)

        def read(column: int) -> Tensor:
            return slots[:, :, column].gather(1, owner.clamp_min(0)).long()

        thing = (owner >= 0) & (read(draw.SHAPE) <= CARD)
        shape, colour = ((read(column) + 1) * thing for column in (draw.SHAPE, draw.COLOUR))
        colour = colour.masked_fill(colour > len(COLOURS), IGNORED)
        motion = read(draw.MOTION) * thing
        named = (owner >= 0) & (read(draw.SHAPE) < CARD)

        def third(column: int, low: float, high: float) -> Tensor:
            value = slots[:, :, column].gather(1, owner.clamp_min(0))
            return (1 + (value > low).long() + (value > high).long()) * named

        unit = unit_of(batch.spec.height, batch.spec.width)
        border = (CORE + EDGE) / 2
        across = third(draw.X, border * batch.spec.width, (1 - border) * batch.spec.width)
        down = third(draw.Y, border * batch.spec.height, (1 - border) * batch.spec.height)
        large = third(draw.RADIUS, 0.13 * unit, 0.2 * unit)
        first, second = pairs[:, 0], pairs[:, 1]
        return torch.stack(
            (shape[first], colour[first], shape[second], colour[second], motion[second], across[second], down[second],
             large[second])
        ).flatten(1)  # fmt: skip


def _filled(array: np.ndarray, length: int, filling: int) -> np.ndarray:
    """[..., n] to [..., length]."""
    missing = length - array.shape[-1]
    if not missing:
        return array
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)], constant_values=filling)


class Places:
    """What the tower's position tables are made of, for each size of a picture in patches."""

    def __init__(self, config: VLConfig, device: torch.device) -> None:
        with torch.device("meta"):
            self._tower = VisionTower(replace(config.vision, depth=0, deepstack_layers=()))
        self._side, self._device = config.vision.position_side, device
        self._tower.pos_embed = nn.Embedding(1, 1, device=device)
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def of(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """(share of each learned position [P, positions], cos, sin [P, head dim]), all float32."""
        if grid not in self._kept:
            rows, columns = (self._shares(size) for size in grid)
            both = torch.einsum("ri,cj->rcij", rows, columns).flatten(2)
            self._kept[grid] = (self._tower._block_order(both), *self._tower._rotary(grid))
        return self._kept[grid]

    def _shares(self, size: int) -> Tensor:
        at = torch.linspace(0, self._side - 1, size, device=self._device)
        return (1 - (at[:, None] - torch.arange(self._side, device=self._device)).abs()).clamp_min(0)


@dataclass(slots=True)
class Outcome:
    """logits [n, vocabulary] of the weighted tokens in order, the tokens and their weights and decisions."""

    logits: Tensor
    targets: Tensor
    weights: Tensor
    decisions: Tensor
    features: Tensor | None


def see(tower: VisionTower, seen: Pictures) -> Tensor:
    """As `VisionTower.forward` sees each picture: [1 + K, P / 4, hidden]."""
    with torch.autocast(seen.spots.device.type, enabled=False):
        position = seen.spots @ tower.pos_embed.weight
    x = tower.patch_embed(seen.patches) + position
    cos, sin = seen.cos[:, None], seen.sin[:, None]
    taps: list[Tensor] = []
    for number, block in enumerate(tower.blocks):
        assert isinstance(block, VisionBlock)
        q, k, v = block.attn.qkv(block.norm1(x)).view(len(x), 3, block.attn.heads, -1).unbind(1)
        out = seen.pieces.attention(_turn(q, cos, sin), _turn(k, cos, sin), v, causal=False)
        x = x + block.attn.proj(out.flatten(1))
        x = x + block.mlp(block.norm2(x))
        if number in tower.config.deepstack_layers:
            taps.append(tower.deepstack_merger_list[len(taps)](x[None])[0])
    return torch.stack((tower.merger(x[None])[0], *taps))


def outcome(made: Qwen3VL, inputs: Inputs) -> Outcome:
    x = made.embed_tokens(inputs.tokens)
    features, pads = None, None
    adds: list[Tensor] = []
    if inputs.pictures is not None:
        features, *adds = see(made.visual, inputs.pictures).to(x.dtype)
        pads = inputs.pictures.pads
        x = x.index_copy(0, pads, features)
    hidden = made.decoder(x, inputs.positions, PackedKV(inputs.pieces), adds, pads)
    return Outcome(
        made.head(hidden.index_select(0, inputs.said - 1)).float(),  # a token is decided in the row before it
        inputs.tokens.index_select(0, inputs.said),
        inputs.weights,
        inputs.decisions,
        features,
    )


def right_decisions(result: Outcome, count: int) -> Tensor:
    """bool [count]: every token of the message is the likeliest after those before it, so greedy decoding says just this."""
    wrong = (result.logits.argmax(-1) != result.targets).long()
    return torch.zeros(count, dtype=torch.long, device=wrong.device).index_add_(0, result.decisions, wrong) == 0
