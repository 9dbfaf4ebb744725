"""Held-out conversations through the server's own AURA stage and engine, greedy: what a user would get.

    python -m training.aura.serve CHECKPOINT --photos FILE [--looks 60] [--sessions 30] [--chunks 12] [--ways 0]

A session is run round by round and its history holds what the model itself said, so an early mistake is seen later. An
alert counts when something is said in the chunk in which it is due; the words are counted apart. --ways: so many looks
more, each of which has the question which way a thing moves.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.runner import ArRunner
from aura_omni.flow import SILENT_TEXT, Message, Sampling, Text, Video
from aura_omni.media.video import video_of
from aura_omni.stages.aura import AuraStage
from training.aura import photos
from training.aura.data import Maker, Plan
from training.aura.dialogue import Dialogue, Round
from training.aura.draw import Painter, Spec
from training.aura.evaluate import Tally
from training.aura.looks import Look

WAY = re.compile(r".* is moving (to the left|to the right|up|down)\.")  # the answer, where something moves
GREEDY = Sampling(temperature=0.0, max_tokens=64)
LOOKS = (
    Plan(256, 144, rounds=3), Plan(320, 240, rounds=3), Plan(640, 360, rounds=3), Plan(640, 480, still=True, frames=1, rounds=3),
    Plan(256, 192, frames=6, rounds=3),
)  # fmt: skip


class Answers(Protocol):
    def answer(self, messages: list[Message], system: str | None) -> str | None:
        """None: silence."""


class Asked:
    """A stage in its engine, asked one thing at a time."""

    def __init__(self, stage: AuraStage) -> None:
        self.stage = stage
        self._runner = ArRunner(
            stage,
            pages=2048,
            page_size=16,
            max_num_seqs=4,
            max_num_batched_tokens=2048,
            max_model_len=16384,
            max_waiting=4,
            prefix_caching=True,
        )

    def answer(self, messages: list[Message], system: str | None) -> str | None:
        """None: silence."""
        ids: list[int] = []
        sequence = self.stage.sequence(
            self.stage.prompt(messages, system_prompt=system), GREEDY, on_output=ids.append, on_end=lambda *_: None
        )
        self._runner.add(sequence)
        while self._runner.busy:
            self._runner.step()
        return self.stage.tokenizer.decode([token for token in ids if token not in self.stage.stop_ids]) or None


def run(
    asked: Answers, painter: Painter, plan: Plan, made: Dialogue, look: Look | None, tally: Tally, *, seed: int
) -> None:
    """One conversation, the model's own words in its history."""
    said: list[Message] = []
    for text, answer in made.before:
        said += [Message("user", (Text(text),)), Message("assistant", (Text(answer),))]
    shown = 0
    for number, done in enumerate(made.rounds):
        parts: list[Text | Video] = []
        if done.shown is not None:
            assert look is not None
            assert made.scene is not None
            slots, ground = look.arrays(
                done.shown.frames,
                first=shown,
                height=plan.height,
                width=plan.width,
                card=made.card,
                unit=made.scene.unit,
            )
            frames = painter.frames(Spec(plan.height, plan.width, slots, ground), seed=seed + number).cpu().numpy()
            times_s = tuple(n / 2 for n in range(len(frames)))
            parts.append(video_of(frames, times_s, fps=2.0, still=done.shown.still))
            shown += len(frames)
        said.append(Message("user", (*parts, Text(done.text))))
        got = asked.answer(said, made.system)
        said.append(Message("assistant", (Text(SILENT_TEXT if got is None else got),)))
        tally.add("silence decision", (got is None) == (done.answer is None))
        tally.add(done.kind, got == done.answer)
        if done.kind == "alert":
            tally.add("alert in the right chunk", got is not None)
        elif done.answer is not None:
            tally.add("all answers", got == done.answer)
        tally.add(f"topic {done.topic}", got == done.answer)
        if asks_which_way(done):
            tally.add("which way", got == done.answer)


def asks_which_way(done: Round) -> bool:
    return done.answer is not None and WAY.fullmatch(done.answer) is not None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--looks", type=int, default=60)
    parser.add_argument("--sessions", type=int, default=30)
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument("--ways", type=int, default=0)
    parser.add_argument("--seed", type=int, default=4711)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stage = AuraStage.load(Checkpoint.find(str(arguments.checkpoint)), device=device, dtype=torch.float32)
    pictures, album = photos.read(arguments.photos, "unseen")
    maker = Maker(arguments.checkpoint, album, seed=arguments.seed, unseen=None, slips=0.0)
    painter, asked, tally = Painter(pictures, device), Asked(stage), Tally()
    plans = [LOOKS[n % len(LOOKS)] for n in range(arguments.looks)]
    plans += [replace(Plan(256, 144), chunks=arguments.chunks)] * arguments.sessions
    for number, plan in enumerate(plans):
        made, look = maker.conversation(plan)
        run(asked, painter, plan, made, look, tally, seed=1000 * number)
    for number in range(len(plans), len(plans) + arguments.ways):
        made, look = maker.conversation(LOOKS[0])
        while not any(map(asks_which_way, made.rounds)):
            made, look = maker.conversation(LOOKS[0])
        run(asked, painter, LOOKS[0], made, look, tally, seed=1000 * number)
    print(json.dumps(tally.shares(), indent=1))


if __name__ == "__main__":
    main()
