"""Held-out conversations: what share of the decisions is right, by kind and topic.

    python -m training.aura.evaluate CHECKPOINT --words FOLDER --photos FILE [--conversations 200]

Here every decision is made after the true history, and counted right when greedy decoding says exactly the one answer
(the argmax of every token after the right ones before it is the same thing). `serve.py` asks the server's own stage.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch

from aura_omni.engine.loader import Checkpoint
from aura_omni.models.qwen3_vl import LAYOUT, Qwen3VL, VLConfig
from training.aura import photos
from training.aura.data import KINDS, Maker, Plan
from training.aura.draw import Painter
from training.aura.model import Feeder, outcome, right_decisions

# Looks at every size, clips, images, live sessions of the training's length and longer.
PLANS = (
    Plan(256, 144, rounds=4), Plan(320, 240, rounds=4), Plan(640, 360, rounds=4), Plan(640, 480, still=True, frames=1, rounds=4),
    Plan(256, 144, still=True, frames=1, rounds=4), Plan(256, 192, frames=8, rounds=4), Plan(256, 144, chunks=8), Plan(320, 180, chunks=12),
    Plan(256, 144, chunks=12), Plan(256, 144, chunks=40),
)  # fmt: skip
# Scenes of any pairs (one in nine was never shown in training), and of only those never shown; see Scene.unseen.
TITLES = {"any pairs": None, "pairs never shown": 1.0}


class Tally:
    """[right, all] by name."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def add(self, name: str, right: bool) -> None:
        self.counts[name][0] += right
        self.counts[name][1] += 1

    def shares(self) -> dict[str, str]:
        return {name: f"{100 * right / count:.1f}% of {count}" for name, (right, count) in sorted(self.counts.items())}


@torch.no_grad()
def evaluate(
    made: Qwen3VL,
    feeder: Feeder,
    maker: Maker,
    *,
    rows: int,
    batches: int = 1,
    plans: tuple[Plan, ...] = PLANS,
) -> Tally:
    """`batches` batches of each plan."""
    tally = Tally()
    for plan in plans * batches:
        batch = maker.batch(plan, rows=rows, vary=False)
        inputs = feeder.inputs(batch)
        with torch.autocast(inputs.tokens.device.type, torch.bfloat16, enabled=inputs.tokens.device.type == "cuda"):
            result = outcome(made, inputs)
        right = right_decisions(result, len(batch.kinds)).tolist()
        first = torch.full((len(batch.kinds),), result.targets.shape[0], device=result.targets.device)
        first = first.scatter_reduce(
            0, result.decisions, torch.arange(len(result.decisions), device=first.device), "amin"
        )
        silent = (result.logits.argmax(-1)[first] == maker.silent_id).tolist()
        where = "image" if plan.still else "look" if plan.chunks is None else "live" if plan.chunks < 20 else "long"
        for number, kind in enumerate(batch.kinds):
            name = KINDS[kind]
            tally.add(name, right[number])
            tally.add("silence decision", silent[number] == (name == "silent"))
            if name in ("answer", "outside", "ack"):
                tally.add("all answers", right[number])
                tally.add(f"answers, {where} {plan.width}x{plan.height}", right[number])
            if name == "alert":
                tally.add("alert in the right chunk", not silent[number])
            if name == "silent" and batch.hard[number]:
                tally.add("silent at an event", silent[number])
            tally.add(f"topic {batch.topics[number]}", right[number])
    return tally


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--slips", type=float, default=0.0)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = Checkpoint.find(str(arguments.checkpoint))
    made = Qwen3VL(checkpoint.parse(VLConfig.from_json))
    checkpoint.load(made, LAYOUT, device=device, dtype=torch.float32)
    pictures, album = photos.read(arguments.photos, "unseen")
    feeder = Feeder(Painter(pictures, device))
    for title, share in TITLES.items():
        maker = Maker(arguments.checkpoint, album, seed=arguments.seed, unseen=share, slips=arguments.slips)
        tally = evaluate(made, feeder, maker, rows=arguments.rows, batches=arguments.batches)
        print(json.dumps({title: tally.shares()}, indent=1))


if __name__ == "__main__":
    main()
