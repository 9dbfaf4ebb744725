"""Batches of conversations: token ids as the server's own prompt writer lays them out, weights of the loss, and what to draw.

batch = Maker(writer, album, seed=1).batch(plan)       # NumPy only; runs in worker processes
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from aura_omni.engine.loader import Checkpoint
from aura_omni.flow import SILENT_TEXT, Message, Text, Video
from aura_omni.models.vision_input import PixelRules
from aura_omni.nano.published import NANO, aura_files
from aura_omni.stages.aura_prompt import AuraPrompt, Profile, PromptWriter
from aura_omni.stages.tokenizer import TextTokenizer
from training.aura import dialogue, draw
from training.aura.dialogue import Dialogue, Round
from training.aura.looks import SLOTS, Album, Look
from training.aura.vocabulary import ROWS
from training.aura.world import Scene

# (width, height) and how often. The first is what most of the training looks at.
SIZES = (
    ((256, 144), 8), ((320, 180), 2), ((256, 192), 2), ((320, 240), 2.5), ((192, 256), 1), ((384, 216), 1), ((640, 360), 1),
    ((640, 480), 0.7),
)  # fmt: skip
KINDS = ("silent", "answer", "outside", "ack", "alert")

# Of the loss. AURA's own recipe gives all silent messages of a conversation the weight of one answer; the square root keeps
# more of them, since a false alarm costs as much here as a missed one.
FIRST, REST, ALERT, SILENT, EVENT = 1.0, 0.5, 3.0, 1.5, 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What one batch is made of. frames: of one medium in a look; chunks: of a live conversation, None for a look."""

    width: int
    height: int
    still: bool = False
    frames: int = 2
    chunks: int | None = None
    rounds: int = 3
    toy: bool = False  # one thing, and only its colour and shape are asked for: what a CPU learns in minutes


@dataclass(slots=True)
class Batch:
    """Arrays of B conversations of at most T rows. groups G, frames F.

    tokens int64 [B, T], positions int32 [3, B, T]
    weights float32 [B, T]  of each token as something to be said, 0 for what is only read
    decisions int32 [B, T]  the number of the message a weighted token belongs to, -1 elsewhere
    kinds int8 [decisions], index into KINDS; topics of the same length; hard bool, silence although something happened
    pads int64 [rows]  flat indices (b * T + t) of the rows that are pixels, group by group
    group_frames int64 [G, 2], spec of F frames, size (height, width) in pixels after resizing, still
    """

    tokens: np.ndarray
    positions: np.ndarray
    weights: np.ndarray
    decisions: np.ndarray
    kinds: np.ndarray
    topics: list[str]
    hard: np.ndarray
    pads: np.ndarray
    group_frames: np.ndarray
    spec: draw.Spec
    size: tuple[int, int]
    still: bool
    seed: int


def writer_of(words: Path) -> PromptWriter:
    """The server's prompt writer with nano's pixel limits. words: the folder of tokenizer.json."""
    tokenizer = TextTokenizer.load(Checkpoint.find(str(words)))
    files = aura_files(NANO, {token.content: number for number, token in tokenizer.added.items()}, ROWS)
    return PromptWriter(
        tokenizer,
        Profile(),
        video_rules=PixelRules.from_json(files["video_preprocessor_config.json"]),
        image_rules=PixelRules.from_json(files["preprocessor_config.json"]),
        max_model_len=1 << 20,
    )


class Maker:
    def __init__(
        self, words: Path, album: Album, *, seed: int, unseen: bool = False, slips: float = 0.02, lesson: bool = False
    ) -> None:
        """words: the folder of the tokenizer. unseen: show the pairs of colour and shape that training never shows.

        lesson: see Scene.
        """
        self.random = Random(seed)
        self._writer, self._album = writer_of(words), album
        self._tokenizer = TextTokenizer.load(Checkpoint.find(str(words)))
        self._header = tuple(self._tokenizer.encode("assistant\n"))
        self.silent_id = self._writer.controls.silent or 0
        self._unseen, self._slips, self._lesson = unseen, slips, lesson

    # ------------------------------------------------------------ what to make

    def plan(self, progress: float) -> Plan:
        """Looks first, whole sessions more and more. progress: of the training, 0 to 1."""
        random = self.random
        live = min(0.62, 0.1 + 3 * progress)
        draw_ = random.random()
        if draw_ < live:
            if progress > 0.15 and random.random() < 0.2:
                return Plan(*random.choice(((256, 144), (256, 144), (192, 144))), chunks=random.randint(13, 46))
            ((width, height),) = random.choices([size for size, _ in SIZES[:4]], [often for _, often in SIZES[:4]])
            return Plan(width, height, chunks=random.randint(2, 12))
        ((width, height),) = random.choices([size for size, _ in SIZES], [often for _, often in SIZES])
        rounds = random.randint(2, 12)  # questions cost fewer rows than pictures
        kind = random.random()
        if kind < 0.25:
            return Plan(width, height, still=True, frames=1, rounds=rounds)
        if kind < 0.45:
            return Plan(width, height, frames=random.randint(1, 16), rounds=rounds)
        return Plan(width, height, rounds=rounds)

    def conversation(self, plan: Plan) -> tuple[Dialogue, Look | None]:
        random = self.random
        look = Look.choose(random, self._album)
        scene = Scene(random, plan.height, plan.width, self._unseen, look.banned, self._slips, self._lesson)
        if plan.chunks is not None:
            return dialogue.live(random, scene, chunks=plan.chunks, ask=random.choice((0.15, 0.35, 0.6))), look
        if random.random() < 0.1 and not plan.toy:
            return dialogue.talk(random, scene, rounds=plan.rounds), None
        if plan.toy:
            return dialogue.toy(random, scene, rounds=plan.rounds), look
        card = None
        if random.random() < 0.12 and plan.frames <= 2:
            card = random.choice([colour for colour in range(9) if colour not in look.banned])
            scene.banned |= {card}
        made = dialogue.look(random, scene, frames=plan.frames, still=plan.still, card=card, rounds=plan.rounds)
        return made, look

    # ------------------------------------------------------------ one batch

    def batch(self, plan: Plan, *, rows: int, vary: bool = True) -> Batch:
        """As many conversations as make about `rows` rows, one at least.

        vary: frame times a little off, and gaps in the positions; False: exactly as a camera at 2 frames a second is served.
        """
        written: list[tuple[Dialogue, Look | None, AuraPrompt]] = []
        longest = 0
        while True:
            made, look = self.conversation(plan)
            gap_s = self.random.choice((0.5, 0.5, 0.5, 0.48, 0.52)) if vary else 0.5
            prompt = self._writer.write(messages(made, plan, gap_s=gap_s), system_prompt=made.system)
            longest = max(longest, len(prompt.tokens))
            if written and (len(written) + 1) * longest > rows:
                break
            written.append((made, look, prompt))
        return self._collated(plan, written, vary)

    def _collated(self, plan: Plan, written: list[tuple[Dialogue, Look | None, AuraPrompt]], vary: bool) -> Batch:
        tail = len(self._header) + 1  # the header of an answer that is not asked for
        width = -(-max(len(prompt.tokens) - tail for _, _, prompt in written) // 32) * 32
        shape = (len(written), width)
        tokens = np.full(shape, self._writer.controls.end_of_text, np.int64)
        positions = np.zeros((3, *shape), np.int32)
        weights, decisions = np.zeros(shape, np.float32), np.full(shape, -1, np.int32)
        kinds: list[int] = []
        topics: list[str] = []
        hard: list[bool] = []
        pads, group_frames, slots, ground = [], [], [], []
        frames = 0
        size = (0, 0)
        for b, (made, look, prompt) in enumerate(written):
            count = len(prompt.tokens) - tail
            tokens[b, :count] = prompt.tokens[:count]
            positions[:, b, :count] = self._stretched(prompt, count) if vary else prompt.positions[:, :count]
            self._weigh(made.rounds, tokens[b, :count], weights[b], decisions[b], len(kinds), len(made.before))
            kinds += [KINDS.index(done.kind) for done in made.rounds]
            topics += [done.topic for done in made.rounds]
            hard += [done.hard for done in made.rounds]
            for group in prompt.groups:
                pads.append(np.arange(group.start, group.start + group.length) + b * width)
                visual = prompt.visuals[group.visual]
                size = visual.size
            first = 0
            for shown in (done.shown for done in made.rounds if done.shown is not None):
                assert look is not None
                assert made.scene is not None
                s, g = look.arrays(
                    shown.frames,
                    first=first,
                    height=plan.height,
                    width=plan.width,
                    card=made.card,
                    unit=made.scene.unit,
                )
                slots.append(s)
                ground.append(g)
                for at in range(0, len(shown.frames), 2):
                    group_frames.append((frames + at, frames + min(at + 1, len(shown.frames) - 1)))
                frames += len(shown.frames)
                first += len(shown.frames)
        spec = draw.Spec(
            plan.height,
            plan.width,
            np.concatenate(slots) if slots else np.zeros((0, SLOTS, draw.SLOT_VALUES), np.float32),
            np.concatenate(ground) if ground else np.zeros((0, draw.GROUND_VALUES), np.float32),
        )
        return Batch(
            tokens=tokens,
            positions=positions,
            weights=weights,
            decisions=decisions,
            kinds=np.array(kinds, np.int8),
            topics=topics,
            hard=np.array(hard, bool),
            pads=np.concatenate(pads) if pads else np.zeros(0, np.int64),
            group_frames=np.array(group_frames, np.int64).reshape(-1, 2),
            spec=spec,
            size=size,
            still=plan.still,
            seed=self.random.getrandbits(62),
        )

    def _stretched(self, prompt: AuraPrompt, count: int) -> np.ndarray:
        """Positions, a third of the time with gaps between rounds, as if more had been said: long sessions are rare here."""
        positions = prompt.positions[:, :count].copy()
        if self.random.random() < 0.33:
            reach = self.random.choice((20, 100, 400))
            for row in np.flatnonzero(np.array(prompt.tokens[:count]) == self._writer.controls.im_start)[1::2]:
                if self.random.random() < 0.3:
                    positions[:, row:] += self.random.randrange(reach)
        return positions

    def _weigh(
        self,
        rounds: tuple[Round, ...],
        tokens: np.ndarray,
        weights: np.ndarray,
        decisions: np.ndarray,
        number: int,
        skip: int,
    ) -> None:
        controls, length = self._writer.controls, len(self._header)
        silent = sum(done.answer is None for done in rounds)
        starts = [
            row + 1 + length
            for row in np.flatnonzero(tokens == controls.im_start)
            if tuple(tokens[row + 1 : row + 1 + length]) == self._header
        ]
        ends = np.flatnonzero(tokens == controls.im_end)
        assert len(starts) == len(rounds) + skip
        for index, (done, start) in enumerate(zip(rounds, starts[skip:], strict=True)):
            stop = int(ends[ends >= start][0]) + 1
            if done.answer is None:
                stop = start + 1
                weights[start] = SILENT / math.sqrt(silent) * (EVENT if done.hard else 1.0)
            else:
                weights[start] = ALERT if done.kind == "alert" else FIRST
                weights[start + 1 : stop] = REST
            decisions[start:stop] = number + index


def messages(made: Dialogue, plan: Plan, *, gap_s: float) -> list[Message]:
    """The conversation as the server is sent it, with frames of the right shape, gap_s apart, and no pixels."""
    said: list[Message] = []
    for text, answer in made.before:
        said += [Message("user", (Text(text),)), Message("assistant", (Text(answer),))]
    for done in made.rounds:
        parts: list[Text | Video] = []
        if done.shown is not None:
            count = len(done.shown.frames)
            blank = np.broadcast_to(np.zeros(1, np.uint8), (count, plan.height, plan.width, 3))
            times_s = tuple(gap_s * n for n in range(count))
            parts.append(Video(blank, times_s, 2.0, b"", still=done.shown.still))
        parts.append(Text(done.text))
        said.append(Message("user", tuple(parts)))
        said.append(Message("assistant", (Text(SILENT_TEXT if done.answer is None else done.answer),)))
    return said
