"""The served network in training: padded batches through the very classes that answer, and what else the tower learns.

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

from aura_omni.models.qwen3_vl import Qwen3VL, VLConfig
from aura_omni.models.vision_input import PixelRules
from aura_omni.nano.published import AURA_TOKENS, CONTROL_TOKENS, NANO, PLAIN_ADDED_TOKENS, Sizes, Text, aura_files
from training.aura import draw
from training.aura.data import Batch
from training.aura.draw import Painter
from training.aura.vocabulary import PIECES, ROWS
from training.aura.world import CARD, COLOURS, CORE, EDGE, unit_of

NOTHING_WEIGHT = 0.15  # of a cell without anything in it, in the tower's own loss
# Root mean square of the learned positions; that of an embedded patch is 0.6 untrained and 2 trained.
# At 0.02 a first run never learnt to say where.
POSITIONS = 1.0
WAVES = 4  # half waves over the picture that positions start from


class PaddedKV:
    """B sequences of T rows, one after another; nothing is kept. Padding at the end is seen by nobody."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, heads, dim = q.shape
        q, k, v = (x.view(self._batch, rows // self._batch, -1, dim).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(rows, heads, dim)


@dataclass(slots=True)
class Inputs:
    """A batch on the device."""

    tokens: Tensor
    positions: Tensor
    said: Tensor  # int64, flat indices of the tokens that have a weight
    weights: Tensor  # of those, in that order, as decisions
    decisions: Tensor
    pads: Tensor
    patches: Tensor | None  # [G, P, values]
    grid: tuple[int, int]
    cells: (
        Tensor | None
    )  # int64 [8, G, cells]: shape and colour in the first frame, in the second, motion, and of the second
    # frame's thing which third of the width and of the height it is in, and its size; 0 for nothing


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

    def loss(self, features: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, how many of the cells with something in the second frame have both names right)."""
        rows = features.float()
        parts = self.heads(rows).split(self.sizes, dim=-1) + self.places(rows).split(4, dim=-1)
        total = features.new_zeros((), dtype=torch.float32)
        for logits, target in zip(parts, cells, strict=True):
            weight = torch.ones(logits.shape[-1], device=logits.device)
            weight[0] = NOTHING_WEIGHT
            total = total + F.cross_entropy(logits.flatten(0, -2), target.flatten(), weight)
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
        self._painter = painter

    @property
    def device(self) -> torch.device:
        return self._painter.device

    def inputs(self, batch: Batch) -> Inputs:
        device = self._painter.device
        said = np.flatnonzero(batch.weights)

        def moved(array: np.ndarray) -> Tensor:
            return draw.moved(array, device)

        patches, cells, grid = None, None, (0, 0)
        if len(batch.group_frames):
            rules = self._rules[batch.still]
            grid = (batch.size[0] // rules.patch, batch.size[1] // rules.patch)
            frames = self._painter.frames(batch.spec, seed=batch.seed)
            pairs = moved(batch.group_frames)
            patches = rules.patches(frames[pairs.flatten()], batch.size)
            cells = self._cells(batch, pairs, (batch.size[0] // rules.factor, batch.size[1] // rules.factor))
        return Inputs(
            moved(batch.tokens), moved(batch.positions), moved(said), moved(batch.weights.ravel()[said]),
            moved(batch.decisions.ravel()[said].astype(np.int64)), moved(batch.pads), patches, grid, cells,
        )  # fmt: skip

    def _cells(self, batch: Batch, pairs: Tensor, cells: tuple[int, int]) -> Tensor:
        owner = self._painter.owners(batch.spec, cells).flatten(1)
        slots = draw.moved(batch.spec.slots, owner.device)

        def read(column: int) -> Tensor:
            return slots[:, :, column].gather(1, owner.clamp_min(0)).long()

        thing = (owner >= 0) & (read(draw.SHAPE) <= CARD)
        shape, colour = ((read(column) + 1) * thing for column in (draw.SHAPE, draw.COLOUR))
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
        )  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """logits [n, vocabulary] of the weighted tokens in order, the tokens and their weights and decisions."""

    logits: Tensor
    targets: Tensor
    weights: Tensor
    decisions: Tensor
    features: Tensor | None


def outcome(made: Qwen3VL, inputs: Inputs) -> Outcome:
    batch = len(inputs.tokens)
    x = made.embed_tokens(inputs.tokens.flatten())
    adds: list[Tensor] = []
    main = None
    if inputs.patches is not None:
        made.visual.prepare()  # its tables come from weights that have changed
        features = made.visual(inputs.patches, inputs.grid).to(x.dtype)
        main = features[0]
        rows = features.flatten(1, 2)
        x = x.index_copy(0, inputs.pads, rows[0])
        adds = list(rows[1:])
    hidden = made.decoder(x, inputs.positions.flatten(1), PaddedKV(batch), adds, inputs.pads)
    return Outcome(
        made.head(hidden[inputs.said - 1]).float(),  # a token is decided in the row before it
        inputs.tokens.flatten()[inputs.said],
        inputs.weights,
        inputs.decisions,
        main,
    )


def right_decisions(result: Outcome, count: int) -> Tensor:
    """bool [count]: every token of the message is the likeliest after those before it, so greedy decoding says just this."""
    wrong = (result.logits.argmax(-1) != result.targets).long()
    return torch.zeros(count, dtype=torch.long, device=wrong.device).index_add_(0, result.decisions, wrong) == 0
