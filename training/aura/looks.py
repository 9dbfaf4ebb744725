"""How a scene looks: its background, light, camera, and the card in a hand. Gives the arrays that `draw` reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from training.aura import draw
from training.aura.world import CARD, COLOURS, DIRECTIONS, HAND, MOST, RGB, Thing

SLOTS = MOST + 2
SKIN = ((0.90, 0.72, 0.60), (0.78, 0.57, 0.44), (0.55, 0.38, 0.28), (0.36, 0.24, 0.18))
TEXTURES = len(draw.textures())
WAYS = tuple(DIRECTIONS)


@dataclass(frozen=True, slots=True)
class Album:
    """Photographs: the mean brightness of each and which ones follow each other (first, count) in time."""

    brightness: tuple[float, ...]
    films: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Look:
    """One conversation's. `banned` are the colours that would not stand out from it."""

    random: Random
    ground: np.ndarray  # of the first frame
    film: tuple[int, int] | None
    drift: tuple[float, float]
    shake: float  # pixels
    banned: frozenset[int]
    skin: tuple[float, float, float]

    @classmethod
    def choose(cls, random: Random, album: Album) -> Look:
        ground = np.zeros(draw.GROUND_VALUES, np.float32)
        scale = random.uniform(0.6, 1.0)
        mirror = random.choice((-1, 1))
        ground[draw.AFFINE : draw.AFFINE + 6] = (
            scale * mirror, 0, random.uniform(-1, 1) * (1 - scale), 0, scale, random.uniform(-1, 1) * (1 - scale),
        )  # fmt: skip
        film, banned = None, frozenset[int]()
        drift = (0.0, 0.0)
        if random.random() < 0.4 and album.films:
            ground[draw.PHOTO] = 1
            start, count = random.choice(album.films)
            ground[draw.BANK] = start + random.randrange(count)
            film = (start, count) if random.random() < 0.5 else None
            light = album.brightness[int(ground[draw.BANK])]
            dark, bright = COLOURS.index("black"), COLOURS.index("white")
            banned = frozenset({dark} if light < 0.42 else {bright} if light > 0.58 else ())
        else:
            ground[draw.BANK] = 0 if random.random() < 0.35 else random.randrange(TEXTURES)
            first = [random.random() for _ in range(3)]
            spread = random.choice((0.1, 0.25, 0.4))
            if random.random() < 0.5:  # walls and tables are rarely colourful
                grey = random.uniform(0.1, 0.95)
                first = [min(1.0, max(0.0, grey + random.uniform(-0.08, 0.08))) for _ in range(3)]
            second = [min(1.0, max(0.0, v + random.uniform(-spread, spread))) for v in first]
            ground[draw.FIRST : draw.FIRST + 3], ground[draw.SECOND : draw.SECOND + 3] = first, second
            ends = (first, second) if ground[draw.BANK] else (first,)
            banned = frozenset(n for n, rgb in enumerate(RGB) if min(math.dist(rgb, end) for end in ends) < 0.38)
            if len(banned) > 4:
                return cls.choose(random, album)
            if random.random() < 0.2:
                drift = (random.uniform(-0.05, 0.05), random.uniform(-0.03, 0.03))
        gain = random.choice((1.0, random.uniform(0.7, 1.15)))
        for channel in range(3):
            ground[draw.GAIN + channel] = gain * random.uniform(0.96, 1.04)
        ground[draw.OFFSET] = random.choice((0.0, random.uniform(-0.03, 0.06)))
        ground[draw.NOISE] = random.choice((0.0, 0.01, random.uniform(0.0, 0.05)))
        ground[draw.BLUR] = random.choice((0.0, 0.0, random.uniform(0.2, 1.6)))
        ground[draw.QUANT] = random.choice((0.0, 0.0, random.uniform(0.5, 4.0)))
        shake = random.choice((0.0, 0.0, 0.0, random.uniform(0.3, 1.5)))
        return cls(random, ground, film, drift, shake, banned, random.choice(SKIN))

    def nameless(self) -> tuple[tuple[float, float, float], ...]:
        """Some colours that are none of the named ones, and stand out as those do."""
        ends = (self.ground[draw.FIRST : draw.FIRST + 3], self.ground[draw.SECOND : draw.SECOND + 3])
        found: list[tuple[float, float, float]] = []
        while len(found) < MOST:
            rgb = (self.random.random(), self.random.random(), self.random.random())
            if min(math.dist(rgb, named) for named in RGB) < 0.22:
                continue
            if self.ground[draw.PHOTO] or min(math.dist(rgb, end) for end in ends) > 0.38:
                found.append(rgb)
        return tuple(found)

    def arrays(
        self, frames: Sequence[tuple[Thing, ...]], *, first: int, height: int, width: int, card: int | None, unit: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(slots [n, SLOTS, SLOT_VALUES], ground [n, GROUND_VALUES]) of frames number `first`, `first` + 1, ... of the conversation."""
        slots = np.zeros((len(frames), SLOTS, draw.SLOT_VALUES), np.float32)
        ground = np.repeat(self.ground[None], len(frames), 0)
        for index, things in enumerate(frames):
            at = first + index
            if self.film is not None:
                start, count = self.film
                ground[index, draw.BANK] = start + (int(self.ground[draw.BANK]) - start + at) % count
            ground[index, draw.AFFINE + 2] += self.drift[0] * at
            ground[index, draw.AFFINE + 5] += self.drift[1] * at
            sway = [self.random.gauss(0, self.shake) if self.shake else 0.0 for _ in range(2)]
            if card is not None:
                self._hold(slots[index], things, card, height, width, unit)
            for number, thing in enumerate(things, 2):
                slots[index, number] = (
                    thing.shape, thing.x * width + sway[0], thing.y * height + sway[1], thing.radius, thing.turn, *thing.tint,
                    thing.outline, 1, thing.colour, 0 if thing.motion is None else 1 + WAYS.index(thing.motion),
                )  # fmt: skip
        return slots, ground

    def _hold(
        self, slots: np.ndarray, things: tuple[Thing, ...], card: int, height: int, width: int, unit: float
    ) -> None:
        """A card around the thing, if there is one, and three fingers over its lower edge."""
        if things:
            x, y, radius = things[0].x * width, things[0].y * height, 2.3 * things[0].radius
        else:
            x, y, radius = (
                width * (0.5 + 0.13 * math.sin(card)),
                height * (0.48 + 0.05 * math.cos(3 * card)),
                0.36 * unit,
            )
        turn = 0.2 * math.sin(7.0 * x + card)
        rgb = RGB[card]
        slots[0] = (CARD, x, y, radius, turn, *rgb, 0.0, 1, card, 0)
        slots[1] = (HAND, x, y + 0.12 * radius, radius, turn, *self.skin, 0.0, 1, 0, 0)
