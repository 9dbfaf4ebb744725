"""What a trained state cannot do yet, and why: one chunk with so many things of one size, and five questions about it.

    python -m training.aura.probe STATE --words FOLDER --photos FILE [--rows 6000]

STATE is where training.aura.train left its state files. Last come how faint the learned positions are beside the pictures, and how
much of a cell's column and row a ridge regression reads from the tower's features (R2 on cells of other pictures, 1 is all).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file
from torch import Tensor

from aura_omni.models.qwen3_vl import Qwen3VL
from training.aura import photos, questions
from training.aura.data import Maker, Plan
from training.aura.dialogue import Dialogue, Round, Shown
from training.aura.draw import Painter
from training.aura.evaluate import Tally
from training.aura.looks import Album, Look
from training.aura.model import Feeder, network, outcome, right_decisions, see
from training.aura.questions import Asked, View
from training.aura.words import spoken
from training.aura.world import BIG, COLOURS, MEDIUM, SHAPES, SMALL, Scene, held_out

ASKED: tuple[Callable[[Random, View], Asked | None], ...] = (
    questions.where, questions.what_is_at, questions.colour_of, questions.shape_of, questions.describe,
)  # fmt: skip
TRIES = 20  # at a question that has one answer here
LOOK = Plan(256, 144)
CELL = 32  # pixels


@dataclass(frozen=True, slots=True)
class Case:
    things: int
    sizes: tuple[float, float] | None = None  # of the radius in units of the scene
    unseen: bool = False  # only pairs that training never shows
    plan: Plan = LOOK

    def __str__(self) -> str:
        size = {None: "any size", SMALL: "small", MEDIUM: "medium", BIG: "big"}[self.sizes]
        pairs = "never shown" if self.unseen else "shown"
        return f"{self.things} {size}, pairs {pairs}, {self.plan.width}x{self.plan.height}"


CASES = (
    *(Case(1, sizes, unseen) for sizes in (SMALL, MEDIUM, BIG) for unseen in (False, True)),
    *(Case(things) for things in (2, 3, 4)),
    *(Case(1, BIG, plan=Plan(*size)) for size in ((320, 240), (640, 360), (640, 480))),
)  # fmt: skip


class CaseMaker(Maker):
    """Conversations of one case."""

    def __init__(self, words: Path, album: Album, *, seed: int, case: Case) -> None:
        super().__init__(words, album, seed=seed, slips=0.0)
        self._case, self._pictures = case, album

    def conversation(self, plan: Plan) -> tuple[Dialogue, Look | None]:
        look = Look.choose(self.random, self._pictures)
        scene = self._scene(plan, look)
        view = View(tuple(scene.things), scene)
        shown: Shown | None = Shown((view.things, view.things), False)
        done = []
        for question in ASKED:
            asked = next(filter(None, (question(self.random, view) for _ in range(TRIES))), None)
            if asked is not None:
                topic, text, answer = asked
                done.append(Round(shown, spoken(self.random, text, slips=0.0), answer, "answer", topic))
                shown = None
        return Dialogue(tuple(done), None, scene, None), look

    def _scene(self, plan: Plan, look: Look) -> Scene:
        case = self._case
        pairs = [(c, s) for c in range(len(COLOURS)) for s in range(len(SHAPES)) if c not in look.banned]
        pairs = [pair for pair in pairs if held_out(*pair) == case.unseen]
        while True:
            scene = Scene(self.random, plan.height, plan.width, banned=look.banned, slips=0.0)
            for _ in range(TRIES * case.things):
                thing = scene.new(*self.random.choice(pairs))
                low, high = case.sizes or (0.0, 1.0)
                if thing is not None and low * scene.unit <= thing.radius <= high * scene.unit:
                    scene.things.append(thing)
                if len(scene.things) == case.things:
                    return scene


@torch.no_grad()
def positions_read(made: Qwen3VL, feeder: Feeder, maker: Maker, *, rows: int) -> tuple[float, tuple[float, float]]:
    """(root mean square of the learned positions over that of the embedded patches, R2 of column and row)."""
    tower = made.visual
    features, places, faint = [], [], 0.0
    for _ in range(2):
        batch = maker.batch(Plan(256, 144), rows=rows, vary=False)
        seen, (sight,) = feeder.inputs(batch).pictures, batch.sights
        assert seen is not None
        table = seen.spots @ tower.pos_embed.weight
        faint = float(table.square().mean().sqrt() / tower.patch_embed(seen.patches).square().mean().sqrt())
        rows_of = see(tower, seen).permute(1, 0, 2).flatten(1).unflatten(0, (len(sight.group_frames), -1))
        high, wide = (side // CELL for side in sight.size)
        cell = torch.arange(high * wide).expand(len(rows_of), -1)
        features.append(rows_of.flatten(0, 1))
        places.append(torch.stack((cell % wide, cell // wide), dim=-1).flatten(0, 1).double())
    (x, held_x), (y, held_y) = features, places
    return faint, _explained(x.double(), y, held_x.double(), held_y)


def _explained(x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor) -> tuple[float, float]:
    centre, spread, mean = x.mean(0), x.std(0) + 1e-6, y.mean(0)
    x, held_x = (x - centre) / spread, (held_x - centre) / spread
    weights = torch.linalg.solve(x.T @ x + 10.0 * torch.eye(x.shape[1], dtype=x.dtype), x.T @ (y - mean))
    wrong = (held_x @ weights + mean - held_y).square().mean(0) / held_y.var(0)
    column, row = (1 - wrong).tolist()
    return column, row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("state", type=Path)
    parser.add_argument("--words", type=Path, required=True)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    made = network(0)
    made.load_state_dict(load_file(arguments.state / "state_average.safetensors"))
    made.float()
    pictures, album = photos.read(arguments.photos, "unseen")
    feeder = Feeder(Painter(pictures, torch.device("cpu")))
    for case in CASES:
        maker = CaseMaker(arguments.words, album, seed=arguments.seed, case=case)
        batch = maker.batch(case.plan, rows=arguments.rows, vary=False)
        tally = Tally()
        with torch.no_grad():
            right = right_decisions(outcome(made, feeder.inputs(batch)), len(batch.kinds)).tolist()
        for topic, well in zip(batch.topics, right, strict=True):
            tally.add(topic, well)
        print(f"{case!s:44}", "  ".join(f"{topic} {share}" for topic, share in tally.shares().items()), flush=True)
    maker = CaseMaker(arguments.words, album, seed=arguments.seed, case=Case(1))
    faint, (column, row) = positions_read(made, feeder, maker, rows=arguments.rows)
    print(f"positions are {faint:.3f} of the patches; R2 of the column {column:.2f}, of the row {row:.2f}")


if __name__ == "__main__":
    main()
