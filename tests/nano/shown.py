"""What the trained checkpoints are asked in the tests: scenes in words, drawn, and questions with their right answers."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import torch

from aura_omni.flow import Video
from aura_omni.media.video import CHUNK_FPS, video_of
from training.aura.draw import Painter, Spec
from training.aura.looks import Album, Look
from training.aura.world import COLOURS, DIRECTIONS, RGB, SHAPES, Thing, unit_of

ACROSS, DOWN = {"left": 0.2, "right": 0.8}, {"top": 0.24, "bottom": 0.76}
WAYS = {"leftwards": "left", "rightwards": "right", "upwards": "up", "downwards": "down"}
RADII = {"small": 0.115, "medium": 0.16, "big": 0.235}  # of Scene.unit

# Scene -> questions and answers. A thing is its size (medium), colour, shape, place (middle), and which way it moves if it does.
CASES = {
    "red circle left, blue square right": (
        ("What do you see?", "I see a red circle and a blue square."),
        ("What colour is the circle?", "The circle is red."),
        ("Where is the square?", "The square is on the right."),
        ("Is the circle left of the square?", "Yes, it is."),
    ),
    "big green star": (
        ("What colour is it?", "It is green."),
        ("What shape is it?", "It is a star."),
        ("Where is the star?", "The star is in the middle."),
        ("Is the star big or small?", "The star is big."),
    ),
    "yellow triangle left, yellow triangle right, purple heart": (
        ("How many triangles are there?", "I see two triangles."),
        ("How many shapes do you see?", "I see three shapes."),
        ("What colour is the heart?", "The heart is purple."),
        ("Is there a blue circle?", "No, I do not see a blue circle."),
    ),
    "small black moon top left, big pink ring right": (
        ("Which shape is the biggest?", "The pink ring is the biggest."),
        ("Which is the smallest?", "The black moon is the smallest."),
        ("What colour is the ring?", "The ring is pink."),
        ("Where is the moon?", "The moon is at the top left."),
    ),
    "orange cross bottom": (
        ("What do you see?", "I see an orange cross."),
        ("Where is the cross?", "The cross is at the bottom."),
        ("How many shapes are there?", "I see one shape."),
        ("Is the cross red?", "No, the cross is orange."),
    ),
    "": (
        ("What do you see?", "I do not see any shapes."),
        ("How many shapes are there?", "I do not see any shapes."),
        ("Do you see a red square?", "No, I do not see a red square."),
    ),
    "white heart top, red star bottom": (
        ("Is the heart above the star?", "Yes, it is."),
        ("What colour is the star?", "The star is red."),
        ("What is at the top?", "I see a white heart at the top."),
        ("Where is the heart?", "The heart is at the top."),
    ),
    "blue circle left, blue circle, blue circle right": (
        ("How many circles do you see?", "I see three circles."),
        ("How many blue circles are there?", "I see three blue circles."),
        ("Is there a red circle?", "No, I do not see a red circle."),
        ("What do you see?", "I see three blue circles."),
    ),
    "green square left rightwards, yellow star right": (
        ("What is moving?", "The green square is moving."),
        ("Is the star moving?", "No, the star is not moving."),
        ("What colour is the square?", "The square is green."),
        ("What shapes do you see?", "I see a green square and a yellow star."),
        ("Which way is the square moving?", "The square is moving to the right."),
    ),
    "orange ring bottom upwards": (
        ("Which way is it moving?", "It is moving up."),
        ("Is the ring moving?", "Yes, the ring is moving up."),
    ),
    "white circle top downwards, purple moon left": (
        ("Where is the circle going?", "The circle is moving down."),
        ("In which direction is the white circle moving?", "The white circle is moving down."),
    ),
    "blue heart right leftwards, red cross left": (
        ("What is the heart doing?", "The heart is moving to the left."),
        ("Which direction is the blue heart going?", "The blue heart is moving to the left."),
    ),
    "pink heart left, black cross right": (
        ("Is anything moving?", "Nothing is moving."),
        ("What is on the left?", "I see a pink heart on the left."),
        ("What is on the right?", "I see a black cross on the right."),
        ("Is there a heart?", "Yes, I see a heart."),
    ),
    "purple ring left, orange triangle right": (
        ("What do you see?", "I see a purple ring and an orange triangle."),
        ("What colour is the triangle?", "The triangle is orange."),
        ("Is the ring purple?", "Yes, the ring is purple."),
        ("Do you see a star?", "No, I do not see a star."),
    ),
    "red square": (
        ("Who is the president?", "I can only talk about the simple shapes and colours I see."),
        ("What is the weather like today?", "I can only talk about the simple shapes and colours I see."),
        ("Hello.", "Hello! Ask me about the shapes you show me."),
        ("Thank you.", "You are welcome."),
    ),
}

PAINTER = Painter(np.zeros((1, 8, 8, 3), np.uint8), torch.device("cpu"))


def things(scene: str, *, height: int, width: int) -> list[Thing]:
    found = []
    for number, words in enumerate(scene.split(", ") if scene else ()):
        given = words.split()
        found.append(
            Thing(
                ident=number,
                colour=next(n for n, name in enumerate(COLOURS) if name in given),
                shape=next(n for n, name in enumerate(SHAPES) if name in given),
                radius=next((r for name, r in RADII.items() if name in given), RADII["medium"])
                * unit_of(height, width),
                x=next((x for name, x in ACROSS.items() if name in given), 0.5),
                y=next((y for name, y in DOWN.items() if name in given), 0.5),
                turn=0.1,
                tint=RGB[next(n for n, name in enumerate(COLOURS) if name in given)],
                outline=0.0,
                motion=next((way for word, way in WAYS.items() if word in given), None),
                speed=0.06,
            )
        )
    return found


class Camera:
    """Chunks of one background, with noise, light and blur of its own."""

    def __init__(
        self, seed: int, *, height: int = 144, width: int = 256, colours: frozenset[int] = frozenset()
    ) -> None:
        """colours: those that must stand out from the background."""
        random = Random(seed)
        self._look = Look.choose(random, Album((), ()))
        while self._look.banned & colours:
            self._look = Look.choose(random, Album((), ()))
        self._height, self._width, self._seed, self._shown = height, width, seed, 0

    def chunk(self, scene: str, *, frames: int = 2) -> np.ndarray:
        """The next frames uint8 [frames, height, width, 3]."""
        there = things(scene, height=self._height, width=self._width)
        moved = []
        for _ in range(frames):
            moved.append(tuple(there))
            there = [_moved(thing) for thing in there]
        slots, ground = self._look.arrays(
            moved,
            first=self._shown,
            height=self._height,
            width=self._width,
            card=None,
            unit=unit_of(self._height, self._width),
        )
        self._shown += frames
        spec = Spec(self._height, self._width, slots, ground)
        return PAINTER.frames(spec, seed=self._seed + self._shown).numpy()


def _moved(thing: Thing) -> Thing:
    across, down = DIRECTIONS[thing.motion] if thing.motion else (0, 0)
    return replace(thing, x=thing.x + across * thing.speed, y=thing.y + down * thing.speed)


def colours_of(scene: str) -> frozenset[int]:
    return frozenset(n for n, name in enumerate(COLOURS) if name in scene.replace(",", " ").split())


def seen(scene: str, seed: int, *, still: bool = False) -> Video:
    """A picture of 640x480, or a chunk of 256x144."""
    height, width = (480, 640) if still else (144, 256)
    frames = Camera(seed, height=height, width=width, colours=colours_of(scene)).chunk(scene, frames=1 if still else 2)
    return video_of(frames, (0.0,) if still else (0.0, 0.5), fps=CHUNK_FPS, still=still)


# Watch requests: what is said with the first chunk, what is shown, and what is to be said in which chunk. Else silence.
# A scene may stay for some chunks: (scene, how many).
WATCHES: tuple[tuple[str, tuple[tuple[str, int], ...], dict[int, str]], ...] = (
    (
        "Tell me when the red circle appears.",
        (("blue square left", 3), ("blue square left, red circle right", 4)),
        {3: "I see a red circle now."},
    ),
    (
        "Tell me when the green star is gone.",
        (("green star, pink heart left", 4), ("pink heart left", 3)),
        {4: "The green star is gone."},
    ),
    (
        "Let me know when you see a yellow triangle.",
        (("", 4), ("yellow triangle", 3)),
        {4: "I see a yellow triangle now."},
    ),
    (
        "Tell me when the blue square moves.",
        (("blue square left, white moon right", 4), ("blue square left rightwards, white moon right", 1)),
        {4: "The blue square is moving now."},
    ),
    (
        "Tell me every time a black ring appears.",
        (
            ("orange cross right", 2),
            ("orange cross right, black ring left", 1),
            ("orange cross right", 2),
            ("orange cross right, black ring left", 1),
            ("orange cross right", 1),
        ),
        {2: "I see a black ring now.", 5: "I see a black ring now."},
    ),
    (
        "Tell me when something purple appears.",
        (("red square", 2), ("red square, purple heart left", 4)),
        {2: "I see something purple now."},
    ),
    (
        "Tell me when a star appears.",
        (("green square left", 3), ("green square left, red star right", 4)),
        {3: "I see a star now."},
    ),
    (
        "Tell me when the pink circle disappears.",
        (("pink circle left", 3), ("", 3)),
        {3: "The pink circle is gone."},
    ),
)

# What is shown in one chunk and in the next, and what is to be said of it.
CHANGED = "What changed?"
CHANGES = {
    ("red circle left", "red circle left, blue square right"): "A blue square appeared.",
    ("green star left, pink heart right", "pink heart right"): "The green star went away.",
    ("yellow triangle", "yellow triangle rightwards"): "The yellow triangle started to move.",
    ("black ring left, orange moon right", "black ring left, white moon right"): "The orange moon turned white.",
    ("purple cross", "purple cross"): "Nothing changed.",
}


def texts() -> list[str]:
    """Everything that is said, once each, in order."""
    asked = [question for questions in CASES.values() for question, _ in questions]
    return list(dict.fromkeys([*asked, *(request for request, *_ in WATCHES), CHANGED]))
