"""The small world of nano AURA: coloured shapes that appear, move, change and leave, one second at a time.

Knows positions and names, no pixels and no words. Plain Python, so that worker processes are cheap.

    scene = Scene(random, height=144, width=256)
    scene.populate(3)
    chunk = scene.step(Appear(2, 1))     # one second later: two frames, the state at its end, what happened
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from random import Random

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black", "white")
RGB = (
    (0.86, 0.10, 0.10), (0.96, 0.50, 0.06), (0.97, 0.88, 0.14), (0.12, 0.64, 0.20), (0.11, 0.30, 0.86),
    (0.48, 0.15, 0.66), (0.98, 0.55, 0.75), (0.04, 0.04, 0.05), (0.96, 0.96, 0.95),
)  # fmt: skip
NAMELESS = len(COLOURS)  # the colour of a thing whose colour has no name
SHAPES = ("circle", "square", "triangle", "star", "heart", "cross", "ring", "moon")
TURNS = (180, 20, 25, 180, 25, 20, 180, 180)  # degrees that a shape may be rotated by and stay what it is
CARD, HAND = len(SHAPES), len(SHAPES) + 1  # rows of the shape table that are no shapes to talk about
MOST = 5
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}

SMALL, MEDIUM, BIG = (0.10, 0.125), (0.14, 0.18), (0.215, 0.26)  # radius in units of Scene.unit
EDGE = 0.38  # of the frame: closer to its side than this is "left", "right", "top" or "bottom"
CORE = 0.42  # from here to its mirror is "middle"; what lies between EDGE and CORE is not asked about


def unit_of(height: int, width: int) -> float:
    """Pixels that sizes are fractions of."""
    return 0.75 * math.sqrt(height * width)


def held_out(colour: int, shape: int) -> bool:
    """Eight of the 72 pairs, one of each shape, that training never shows or names."""
    return colour < len(COLOURS) and shape < len(SHAPES) and (colour + 2 * shape) % 9 == 4


@dataclass(frozen=True, slots=True)
class Thing:
    """x, y in fractions of the frame; radius in pixels; motion is that within the last chunk."""

    ident: int
    colour: int
    shape: int
    radius: float
    x: float
    y: float
    turn: float  # radians
    tint: tuple[float, float, float]
    outline: float  # 0: none; else how dark the rim is
    motion: str | None = None
    speed: float = 0.0  # fraction of the frame's side per half second


@dataclass(frozen=True, slots=True)
class Appear:
    colour: int
    shape: int


@dataclass(frozen=True, slots=True)
class Leave:
    ident: int


@dataclass(frozen=True, slots=True)
class Start:
    ident: int
    direction: str


@dataclass(frozen=True, slots=True)
class Stop:
    ident: int


@dataclass(frozen=True, slots=True)
class Recolour:
    ident: int
    colour: int


Action = Appear | Leave | Start | Stop | Recolour


@dataclass(frozen=True, slots=True)
class Event:
    """What an action came to. before and after are the thing; None where there is none."""

    kind: str  # appear | leave | start | stop | turn
    before: Thing | None
    after: Thing | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """frames: the things of each frame, in drawing order; things: those at the end."""

    frames: tuple[tuple[Thing, ...], ...]
    things: tuple[Thing, ...]
    event: Event | None


@dataclass
class Scene:
    """Scene.unit is the pixel length that sizes are fractions of; a wide and a tall frame of one area have the same."""

    random: Random
    height: int
    width: int
    unseen: float | None = 0.0  # share of the pairs that training never shows; None: any pair is as likely as any other
    banned: frozenset[int] = frozenset()  # colours that would not stand out from the background
    slips: float = 0.02  # of words in what is said, as a recogniser makes them
    lesson: bool = False  # more of what is hard to learn: two and three things, and questions of where and which
    nameless: tuple[
        tuple[float, float, float], ...
    ] = ()  # if any, all things have one of these colours, and NAMELESS for a name
    things: list[Thing] = field(default_factory=list)
    _next: int = 0

    @property
    def unit(self) -> float:
        return unit_of(self.height, self.width)

    # ------------------------------------------------------------ what there is

    def pair(self, colour: int | None = None, shape: int | None = None) -> tuple[int, int]:
        """A colour and a shape that may be shown or named here, with one of them given or none."""
        if self.nameless:
            return NAMELESS, self.random.randrange(len(SHAPES)) if shape is None else shape
        wanted = None if self.unseen is None else self.random.random() < self.unseen
        for attempt in range(200):
            pair = (
                self.random.randrange(len(COLOURS)) if colour is None else colour,
                self.random.randrange(len(SHAPES)) if shape is None else shape,
            )
            if pair[0] in self.banned:
                continue
            if wanted is None or held_out(*pair) == wanted or (self.unseen and attempt > 50):
                return pair
        raise ValueError(f"no pair of colour {colour} and shape {shape}")

    def populate(self, count: int, *, alike: float = 0.3) -> None:
        """Put `count` things down; with probability `alike` the next one shares its colour or shape with another."""
        for _ in range(count):
            colour = shape = None
            if self.things and self.random.random() < alike:
                model = self.random.choice(self.things)
                if self.random.random() < 0.5:
                    colour = model.colour
                else:
                    shape = model.shape
            thing = self.new(*self.pair(colour, shape))
            if thing is not None:
                self.things.append(thing)

    def new(self, colour: int, shape: int) -> Thing | None:
        """A thing somewhere free, or None where there is no room."""
        crowded = len(self.things) >= 3
        for _ in range(30):
            low, high = self.random.choice((SMALL, MEDIUM) if crowded else (SMALL, MEDIUM, BIG, BIG))
            radius = self.random.uniform(low, high) * self.unit
            x, y = (self._place(radius / side) for side in (self.width, self.height))
            if self._free(x, y, radius):
                self._next += 1
                spread = 0.05
                plain = self.random.choice(self.nameless) if self.nameless else RGB[colour]
                tint = tuple(min(1.0, max(0.0, v + self.random.uniform(-spread, spread))) for v in plain)
                return Thing(
                    ident=self._next,
                    colour=colour,
                    shape=shape,
                    radius=radius,
                    x=x,
                    y=y,
                    turn=math.radians(self.random.uniform(-TURNS[shape], TURNS[shape])),
                    tint=(tint[0], tint[1], tint[2]),
                    outline=self.random.choice((0.0, 0.0, self.random.uniform(0.2, 0.7))),
                )
        return None

    def _place(self, margin: float) -> float:
        zone = self.random.choice(((0.10, EDGE - 0.04), (CORE + 0.02, 0.98 - CORE), (1.04 - EDGE, 0.90)))
        return min(1 - margin - 0.01, max(margin + 0.01, self.random.uniform(*zone)))

    def _free(self, x: float, y: float, radius: float, but: int = -1) -> bool:
        return all(
            math.hypot((x - o.x) * self.width, (y - o.y) * self.height) > 1.08 * (radius + o.radius)
            for o in self.things
            if o.ident != but
        )

    def _inside(self, x: float, y: float, radius: float) -> bool:
        across, down = radius / self.width, radius / self.height
        return across <= x <= 1 - across and down <= y <= 1 - down

    # ------------------------------------------------------------ one second

    def step(self, action: Action | None = None) -> Chunk:
        """One chunk. An action that finds no room, or no thing, comes to nothing (`event` is None)."""
        event, early = None, self.random.random() < 0.5  # early: already in the first of the two frames
        for thing in self.blocked():
            if not isinstance(action, Stop) or action.ident != thing.ident:
                self._turn_back(thing)
        if isinstance(action, Start):
            event = self._start(action)
        elif isinstance(action, Stop):
            event = self._stop(action)
        self._move()
        first = list(self.things)
        if isinstance(action, Appear):
            thing = self.new(action.colour, action.shape) if len(self.things) < MOST else None
            if thing is not None:
                event = Event("appear", None, thing)
                self.things.append(thing)
        elif isinstance(action, Leave | Recolour):
            before = self.find(action.ident)
            if before is not None and isinstance(action, Leave):
                self.things.remove(before)
                event = Event("leave", before, None)
            elif before is not None and isinstance(action, Recolour):
                after = replace(before, colour=action.colour, tint=RGB[action.colour])
                self.things[self.things.index(before)] = after
                event = Event("turn", before, after)
        if early and not isinstance(action, Start | Stop):
            first = list(self.things)
        self._move()
        if event is not None and event.after is not None:
            event = replace(event, after=self.find(event.after.ident))
        return Chunk((tuple(first), tuple(self.things)), tuple(self.things), event)

    def find(self, ident: int) -> Thing | None:
        return next((thing for thing in self.things if thing.ident == ident), None)

    def _start(self, action: Start) -> Event | None:
        before = self.find(action.ident)
        if before is None or before.motion is not None:
            return None
        for direction in (action.direction, *self.random.sample(list(DIRECTIONS), 4)):
            dx, dy = DIRECTIONS[direction]
            least = 0.055 * self.unit / (self.width if dx else self.height)
            speed = least * self.random.uniform(1.0, 2.2)
            x, y = before.x + 4 * dx * speed, before.y + 4 * dy * speed
            if self._inside(x, y, before.radius) and self._free(x, y, before.radius, before.ident):
                after = replace(before, motion=direction, speed=speed)
                self.things[self.things.index(before)] = after
                return Event("start", before, after)
        return None

    def _stop(self, action: Stop) -> Event | None:
        before = self.find(action.ident)
        if before is None or before.motion is None:
            return None
        after = replace(before, motion=None, speed=0.0)
        self.things[self.things.index(before)] = after
        return Event("stop", before, after)

    def _move(self) -> None:
        """Half a second."""
        for index, thing in enumerate(self.things):
            if thing.motion is None:
                continue
            dx, dy = DIRECTIONS[thing.motion]
            x, y = thing.x + dx * thing.speed, thing.y + dy * thing.speed
            self.things[index] = replace(thing, x=x, y=y)

    def blocked(self) -> list[Thing]:
        """Movers that cannot go on for another chunk."""
        return [thing for thing in self.things if thing.motion is not None and not self._goes_on(thing)]

    def _goes_on(self, thing: Thing) -> bool:
        dx, dy = DIRECTIONS[str(thing.motion)]
        x, y = thing.x + 2 * dx * thing.speed, thing.y + 2 * dy * thing.speed
        return self._inside(x, y, thing.radius) and self._free(x, y, thing.radius, thing.ident)

    def _turn_back(self, thing: Thing) -> None:
        """Between chunks, so that the motion within each is one way; what is boxed in stops."""
        back = replace(thing, motion=OPPOSITE[str(thing.motion)])
        if not self._goes_on(back):
            back = replace(thing, motion=None, speed=0.0)
        self.things[self.things.index(thing)] = back
