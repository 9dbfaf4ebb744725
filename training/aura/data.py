"""Batches of conversations: token ids as the server's own prompt writer lays them out, weights of the loss, and what to draw.

batch = Maker(writer, album, seed=1).batch(plan)       # NumPy only; runs in worker processes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
# Of the conversations of a lesson, in colours that nobody names. Without them the tower learns which pairs there are: of those never
# shown, it named the shape of every fourth cell.
NAMELESS = 0.2
SMALLEST, LARGEST = 128, 1280  # patches of a picture of the cameras above
LONGEST = 3072  # rows of a conversation in a batch that is filled up
MISFITS = 3  # conversations that a batch has no room for, before it is full
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


@dataclass(frozen=True, slots=True)
class Room:
    """What a batch may hold at most. A step of a run has just this shape, filled up with rows that count for nothing."""

    rows: int
    patches: int  # of 16x16 pixels in two frames; four of them are one row
    said: int  # tokens that have a weight

    @classmethod
    def of(cls, rows: int) -> Room:
        """As much of each as conversations of `rows` rows usually need."""
        return cls(rows, 3 * rows // 2 // 4 * 4, rows // 5)

    @property
    def conversations(self) -> int:
        return self.rows // 96

    @property
    def pictures(self) -> int:
        return self.patches // SMALLEST + 1


@dataclass(frozen=True, slots=True)
class Sight:
    """All media that are resized to one size (height, width) in pixels, by the rules of images or of clips.

    group_frames int64 [G, 2], pads int64 [rows]: the rows of the batch that are their pixels, group by group
    """

    still: bool
    size: tuple[int, int]
    group_frames: np.ndarray
    pads: np.ndarray


@dataclass(slots=True)
class Batch:
    """Arrays of B conversations that lie one after another in N rows. spec: of all frames.

    tokens int64 [N], positions int32 [3, N], starts int32 [B + 1]
    weights float32 [N]  of each token as something to be said, 0 for what is only read
    decisions int32 [N]  the number of the message a weighted token belongs to, -1 elsewhere
    kinds int8 [decisions], index into KINDS; topics of the same length; hard bool, silence although something happened
    """

    tokens: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    weights: np.ndarray
    decisions: np.ndarray
    kinds: np.ndarray
    topics: list[str]
    hard: np.ndarray
    sights: tuple[Sight, ...]
    spec: draw.Spec
    seed: int


@dataclass(slots=True)
class Written:
    """One conversation, laid out."""

    plan: Plan
    made: Dialogue
    look: Look | None
    prompt: AuraPrompt
    rows: int
    patches: int
    weights: np.ndarray
    decisions: np.ndarray  # numbered from 0

    @property
    def said(self) -> int:
        return np.count_nonzero(self.weights)


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
        self,
        words: Path,
        album: Album,
        *,
        seed: int,
        unseen: float | None = 0.0,
        slips: float = 0.02,
        lesson: bool = False,
    ) -> None:
        """words: the folder of the tokenizer. unseen, lesson: see Scene."""
        self.random = Random(seed)
        self._writer, self._album = writer_of(words), album
        self._tokenizer = TextTokenizer.load(Checkpoint.find(str(words)))
        self._header = tuple(self._tokenizer.encode("assistant\n"))
        self.silent_id = self._writer.controls.silent or 0
        self._unseen, self._slips, self._lesson = unseen, slips, lesson

    # ------------------------------------------------------------ what to make

    def live(self, camera: tuple[int, int], progress: float) -> Plan:
        """A session; long ones come later. progress: of the training, 0 to 1."""
        random = self.random
        if progress > 0.15 and camera == SIZES[0][0] and random.random() < 0.2:
            return Plan(*camera, chunks=random.randint(13, 46))
        return Plan(*camera, chunks=random.randint(2, 12))

    def look(self, camera: tuple[int, int]) -> Plan:
        random = self.random
        rounds = random.randint(2, 12)  # questions cost fewer rows than pictures
        kind = random.random()
        if kind < 0.25:
            return Plan(*camera, still=True, frames=1, rounds=rounds)
        if kind < 0.45:
            return Plan(*camera, frames=random.randint(1, 16), rounds=rounds)
        return Plan(*camera, rounds=rounds)

    def conversation(self, plan: Plan) -> tuple[Dialogue, Look | None]:
        random = self.random
        look = Look.choose(random, self._album)
        scene = Scene(random, plan.height, plan.width, self._unseen, look.banned, self._slips, self._lesson)
        if plan.toy:
            return dialogue.toy(random, scene, rounds=plan.rounds), look
        if self._lesson and random.random() < NAMELESS:
            scene.nameless = look.nameless()
        if plan.chunks is not None:
            watch, ask = (0.0, 0.0) if scene.nameless else (0.75, random.choice((0.15, 0.35, 0.6)))
            return dialogue.live(random, scene, chunks=plan.chunks, ask=ask, watch=watch), look
        if random.random() < 0.1:
            return dialogue.talk(random, scene, rounds=plan.rounds), None
        card = None
        if random.random() < 0.12 and plan.frames <= 2 and not scene.nameless:
            card = random.choice([colour for colour in range(9) if colour not in look.banned])
            scene.banned |= {card}
        made = dialogue.look(random, scene, frames=plan.frames, still=plan.still, card=card, rounds=plan.rounds)
        return made, look

    # ------------------------------------------------------------ one batch

    def batch(self, plan: Plan, *, rows: int, vary: bool = True) -> Batch:
        """As many conversations of one plan as make about `rows` rows, one at least.

        vary: frame times a little off, and gaps in the positions; False: exactly as a camera at 2 frames a second is served.
        """
        some: list[Written] = []
        total = 0
        while True:
            one = self._written(plan, vary)
            total += one.rows
            if some and total > rows:
                return self._collated(some, vary)
            some.append(one)

    def mixed(self, room: Room, progress: float) -> Batch:
        """Looks and sessions of one camera, so many of each that rows and pictures fill up together."""
        ((camera,),) = [self.random.choices([size for size, _ in SIZES], [often for _, often in SIZES])]
        lives = camera in [size for size, _ in SIZES[:4]]
        some: list[Written] = []
        rows, patches, said, misfits = 1, 0, 0, 0  # one row is always left over, for pixels that are none
        while misfits < MISFITS and len(some) < room.conversations:
            live = lives and not misfits and patches * room.rows < rows * room.patches
            one = self._written(self.live(camera, progress) if live else self.look(camera), True)
            if rows + one.rows > room.rows or patches + one.patches > room.patches or said + one.said > room.said:
                misfits += 1
                continue
            some.append(one)
            rows, patches, said = rows + one.rows, patches + one.patches, said + one.said
        return self._collated(some, True)

    def _written(self, plan: Plan, vary: bool) -> Written:
        made, look = self.conversation(plan)
        gap_s = self.random.choice((0.5, 0.5, 0.5, 0.48, 0.52)) if vary else 0.5
        prompt = self._writer.write(messages(made, plan, gap_s=gap_s), system_prompt=made.system)
        rows = len(prompt.tokens) - len(self._header) - 1  # without the header of an answer that is not asked for
        weights, decisions = np.zeros(rows, np.float32), np.full(rows, -1, np.int32)
        self._weigh(made.rounds, np.array(prompt.tokens[:rows]), weights, decisions, len(made.before))
        patches = 4 * sum(group.length for group in prompt.groups)
        return Written(plan, made, look, prompt, rows, patches, weights, decisions)

    def _collated(self, some: Sequence[Written], vary: bool) -> Batch:
        starts = np.cumsum([0, *(one.rows for one in some)], dtype=np.int32)
        count = int(starts[-1])
        tokens, positions = np.empty(count, np.int64), np.empty((3, count), np.int32)
        weights, decisions = np.empty(count, np.float32), np.empty(count, np.int32)
        kinds: list[int] = []
        topics: list[str] = []
        hard: list[bool] = []
        sights: dict[tuple[bool, tuple[int, int]], tuple[list[tuple[int, int]], list[np.ndarray]]] = {}
        slots, ground = [], []
        frames = 0
        for one, start in zip(some, starts.tolist(), strict=False):
            made, prompt, here = one.made, one.prompt, slice(start, start + one.rows)
            tokens[here] = prompt.tokens[: one.rows]
            positions[:, here] = self._stretched(prompt, one.rows) if vary else prompt.positions[:, : one.rows]
            weights[here] = one.weights
            decisions[here] = np.where(one.decisions < 0, -1, one.decisions + len(kinds))
            kinds += [KINDS.index(done.kind) for done in made.rounds]
            topics += [done.topic for done in made.rounds]
            hard += [done.hard for done in made.rounds]
            groups = iter(prompt.groups)
            first = 0
            for shown in (done.shown for done in made.rounds if done.shown is not None):
                assert one.look is not None
                assert made.scene is not None
                s, g = one.look.arrays(
                    shown.frames,
                    first=first,
                    height=one.plan.height,
                    width=one.plan.width,
                    card=made.card,
                    unit=made.scene.unit,
                )
                slots.append(s)
                ground.append(g)
                for at in range(0, len(shown.frames), 2):
                    group = next(groups)
                    pairs, pads = sights.setdefault((shown.still, prompt.visuals[group.visual].size), ([], []))
                    pairs.append((frames + at, frames + min(at + 1, len(shown.frames) - 1)))
                    pads.append(np.arange(group.start, group.start + group.length) + start)
                frames += len(shown.frames)
                first += len(shown.frames)
            assert next(groups, None) is None
        plan = some[0].plan
        spec = draw.Spec(
            plan.height,
            plan.width,
            np.concatenate(slots) if slots else np.zeros((0, SLOTS, draw.SLOT_VALUES), np.float32),
            np.concatenate(ground) if ground else np.zeros((0, draw.GROUND_VALUES), np.float32),
        )
        return Batch(
            tokens=tokens,
            positions=positions,
            starts=starts,
            weights=weights,
            decisions=decisions,
            kinds=np.array(kinds, np.int8),
            topics=topics,
            hard=np.array(hard, bool),
            sights=tuple(
                Sight(still, size, np.array(pairs, np.int64), np.concatenate(pads))
                for (still, size), (pairs, pads) in sights.items()
            ),
            spec=spec,
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
            decisions[start:stop] = index


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
