"""A whole conversation in the small world: messages as the server would send them, and what every frame shows.

Three kinds. look: one picture, clip or chunk and a few questions. live: one round per chunk, mostly silent, with
questions, watch requests and alerts. talk: no picture at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from training.aura import questions, small_talk, watches
from training.aura.questions import View
from training.aura.words import expand, spoken
from training.aura.world import (
    BIG,
    COLOURS,
    DIRECTIONS,
    MOST,
    Action,
    Appear,
    Chunk,
    Event,
    Leave,
    Recolour,
    Scene,
    Start,
    Stop,
    Thing,
)

Kind = Literal["silent", "answer", "outside", "ack", "alert"]


@dataclass(frozen=True, slots=True)
class Shown:
    """Frames of one medium: what each shows, in drawing order. still: an image."""

    frames: tuple[tuple[Thing, ...], ...]
    still: bool


@dataclass(frozen=True, slots=True)
class Round:
    """One user message and what should be answered; answer None: silence. topic: the kind of question, for the tables."""

    shown: Shown | None
    text: str
    answer: str | None
    kind: Kind
    topic: str
    hard: bool = False  # silence although something happened


@dataclass(frozen=True, slots=True)
class Dialogue:
    """before: rounds that lost their video, as a long session keeps them. system: None is the profile's own prompt."""

    rounds: tuple[Round, ...]
    system: str | None
    scene: Scene | None
    card: int | None
    before: tuple[tuple[str, str], ...] = ()


# How often a look shows so many things. One alone is soon known; two and three teach which is which.
COUNTS, LESSON_COUNTS = (1, 6, 5, 4, 3, 3), (0.6, 3, 8, 6, 3, 2)
TRIES = 6  # at a watch request that means one thing in this scene
SYSTEMS = (
    None, None, None, None, None, "",
    "You are a helpful assistant.",
    "You are AURA, a live assistant. Answer questions about what you see.",
    "You are a virtual assistant that hears and sees. Be brief.",
)  # fmt: skip


def look(random: Random, scene: Scene, *, frames: int, still: bool, card: int | None, rounds: int) -> Dialogue:
    """One medium of `frames` frames (an image: 1), then `rounds` rounds about it."""
    scene.populate(
        min(1, random.randrange(2))
        if card is not None
        else random.choices(range(6), LESSON_COUNTS if scene.lesson else COUNTS)[0]
    )
    chunks: list[Chunk] = []
    for _ in range((frames + 1) // 2):
        chunks.append(scene.step(_action(random, scene, quiet=0.6) if not still and card is None else None))
    flat = tuple(frame for chunk in chunks for frame in chunk.frames)[:frames]
    things = flat[-1] if still or frames % 2 else chunks[-1].things
    if frames % 2 and not still:  # a frame repeated stands still
        moving = False
    else:
        moving = not still
    view = View(things, scene, card, moving, [chunk.event for chunk in chunks] if moving else [])
    shown: Shown | None = Shown(flat, still)
    done: list[Round] = []
    for number in range(rounds):
        draw = random.random()
        if number == 0 and draw < 0.12 and not still:
            text, answer, kind, topic = "" if draw < 0.08 else small_talk.noise(random), None, "silent", "silent"
            done.append(Round(shown, text, None, "silent", topic))
        else:
            text, answer, kind, topic = _said(random, view, outside=0.12)
            done.append(Round(shown, text, answer, kind, topic))  # type: ignore[arg-type]
        shown = None
    return Dialogue(tuple(done), random.choice(SYSTEMS), scene, card)


def talk(random: Random, scene: Scene, *, rounds: int) -> Dialogue:
    """No picture: greetings, the rest of the world, and questions that would need one."""
    done = []
    for _ in range(rounds):
        draw = random.random()
        if draw < 0.15:
            done.append(Round(None, small_talk.noise(random), None, "silent", "noise"))
        elif draw < 0.4:
            _, text, _ = questions.ask(random, View((), scene))
            done.append(
                Round(None, spoken(random, text, slips=scene.slips), small_talk.NO_PICTURE, "answer", "no picture")
            )
        else:
            text, answer = (small_talk.greeting if draw < 0.7 else small_talk.outside)(random)
            done.append(
                Round(
                    None,
                    spoken(random, text, slips=scene.slips),
                    answer,
                    "outside",
                    "talk" if draw < 0.7 else "outside",
                )
            )
    return Dialogue(tuple(done), random.choice(SYSTEMS), None, None)


def toy(random: Random, scene: Scene, *, rounds: int) -> Dialogue:
    """One chunk with one big thing in it, of four colours and three shapes; silence, or a question about its colour or shape."""
    scene.banned = frozenset(n for n, colour in enumerate(COLOURS) if colour not in ("red", "yellow", "green", "blue"))
    while not scene.things:
        thing = scene.new(*scene.pair(shape=random.choice((0, 1, 3))))
        scene.things = [] if thing is None or thing.radius < BIG[0] * scene.unit else [thing]
    view = View(scene.step().things, scene)
    shown: Shown | None = Shown((view.things, view.things), False)
    done: list[Round] = []
    while len(done) < rounds:
        if random.random() < 0.3:
            done.append(Round(shown, "", None, "silent", "silent"))
        else:
            asked = random.choice((questions.colour_of, questions.shape_of, questions.describe))(random, view)
            if asked is None:
                continue
            done.append(Round(shown, asked[1], asked[2], "answer", asked[0]))
        shown = None
    return Dialogue(tuple(done), "", scene, None)


def _said(random: Random, view: View, *, outside: float) -> tuple[str, str | None, Kind, str]:
    draw, scene = random.random(), view.scene
    if draw < outside:
        text, answer = (small_talk.greeting if draw < outside / 3 else small_talk.outside)(random)
        return spoken(random, text, slips=scene.slips), answer, "outside", "talk" if draw < outside / 3 else "outside"
    topic, text, answer = questions.ask(random, view)
    return spoken(random, text, slips=scene.slips), answer, "answer", topic


# ---------------------------------------------------------------- live


def live(random: Random, scene: Scene, *, chunks: int, ask: float = 0.3, watch: float = 0.75) -> Dialogue:
    """`chunks` rounds of one chunk each. ask: probability of a question in a round; watch: that of a watch request at all."""
    scene.populate(random.choices(range(5), (2, 5, 4, 2, 1))[0])
    wanted_at = random.randrange(max(1, min(chunks, 2 + chunks // 3))) if random.random() < watch else None
    current: watches.Watch | None = None
    pruned: list[tuple[str, str]] = []
    events: list[Event | None] = []
    done: list[Round] = []
    asked_early = wanted_at is not None and chunks > 3 and random.random() < 0.25
    if random.random() < 0.2:
        for _ in range(random.randint(1, 3)):
            pruned.append(_old_round(random, scene))
    if asked_early:  # the request has lost its video; only its text is left
        made = watches.request(random, View((), scene))
        if made is not None:
            text, asked = made
            if asked.kind == "appear":
                answer, begins = asked.answer(View((), scene))
                pruned.append((spoken(random, text, slips=scene.slips, statement=True), answer))
                current, wanted_at = asked if begins else None, None
                if current is not None and any(current.fits(t) for t in scene.things):
                    scene.things = [t for t in scene.things if not current.fits(t)]
                if current is not None and current.each and random.random() < 0.3:
                    pruned.append(
                        (
                            "",
                            f"I see {current.what} now."
                            if current.word is None
                            else f"{current.word[0].upper()}{current.word[1:]}!",
                        )
                    )
    rate = random.choice((0.25, 0.45, 0.6))
    for number in range(chunks):
        action = None if number == 0 else _action(random, scene, quiet=1 - rate, watch=current)
        chunk = scene.step(action)
        events.append(chunk.event)
        view = View(chunk.things, scene, None, True, events)
        shown = Shown(chunk.frames, False)
        if current is not None and current.due(chunk.event):
            done.append(Round(shown, "", current.alert(chunk.event), "alert", f"alert {current.kind}"))
            if not current.each:
                current = None
                if random.random() < 0.3:
                    wanted_at = number + 1
        elif wanted_at is not None and number >= wanted_at:
            made = next(filter(None, (watches.request(random, view) for _ in range(TRIES))), None)
            if made is None:
                done.append(_silent(shown, chunk))
                continue
            text, asked = made
            answer, begins = asked.answer(view)
            done.append(Round(shown, spoken(random, text, slips=scene.slips, statement=True), answer, "ack", "watch"))
            current, wanted_at = asked if begins else current, None
        elif current is not None and random.random() < 0.03:
            done.append(
                Round(
                    shown,
                    spoken(random, expand(random, watches.CANCEL), slips=scene.slips),
                    watches.CANCELLED,
                    "ack",
                    "cancel",
                )
            )
            current = None
        elif random.random() < ask:
            if random.random() < 0.12:
                done.append(Round(shown, small_talk.noise(random), None, "silent", "noise"))
                continue
            text, answer, kind, topic = _said(random, view, outside=0.12)
            if random.random() < 0.15:  # the question comes after the chunk, without frames of its own
                done.append(_silent(shown, chunk))
                shown = None
            done.append(Round(shown, text, answer, kind, topic))
        else:
            done.append(_silent(shown, chunk))
    return Dialogue(tuple(done), random.choice(SYSTEMS), scene, None, tuple(pruned))


def _silent(shown: Shown, chunk: Chunk) -> Round:
    return Round(shown, "", None, "silent", "event" if chunk.event else "silent", hard=chunk.event is not None)


def _old_round(random: Random, scene: Scene) -> tuple[str, str]:
    """A question and answer about something that is no longer in the window."""
    past = Scene(random, scene.height, scene.width, scene.unseen)
    past.populate(random.randint(0, 4))
    _, text, answer = questions.ask(random, View(tuple(past.things), past))
    return spoken(random, text, slips=scene.slips), answer


def _action(random: Random, scene: Scene, *, quiet: float, watch: watches.Watch | None = None) -> Action | None:
    """What happens next: nothing with probability `quiet`, else an event, often one that a watch is about or nearly."""
    stuck = scene.blocked()
    if stuck and random.random() < 0.5:
        return random.choice((Stop, Leave))(random.choice(stuck).ident)
    if random.random() < quiet:
        return None
    if watch is not None and random.random() < 0.75:
        wanted = _wanted(random, scene, watch)
        if wanted is not None:
            return wanted
    starts = 9 if scene.lesson else 3  # which way a thing moves is seldom asked and hard to see
    kind = random.choices(("appear", "leave", "start", "stop", "turn"), (3, 2, starts, 1, 0.7))[0]
    if kind == "appear" and len(scene.things) < MOST:
        return Appear(*scene.pair())
    if not scene.things:
        return Appear(*scene.pair())
    thing = random.choice(scene.things)
    movers = [t for t in scene.things if t.motion is not None]
    if kind == "start" and thing.motion is None and len(movers) < 2:
        return Start(thing.ident, random.choice(list(DIRECTIONS)))
    if kind == "stop" and movers:
        return Stop(random.choice(movers).ident)
    if kind == "turn":
        colour = scene.pair(shape=thing.shape)[0]
        return None if colour == thing.colour else Recolour(thing.ident, colour)
    return Leave(thing.ident) if kind == "leave" else None


def _wanted(random: Random, scene: Scene, watch: watches.Watch) -> Action | None:
    near = random.random() < 0.3  # the same kind of event, of another thing
    fitting = [t for t in scene.things if watch.fits(t)]
    if watch.kind == "appear":
        if fitting and not near:
            return Leave(random.choice(fitting).ident)
        if near and (watch.colour is None) == (watch.shape is None):
            return Appear(*(scene.pair(watch.colour) if random.random() < 0.5 else scene.pair(shape=watch.shape)))
        return Appear(*(scene.pair() if near else scene.pair(watch.colour, watch.shape)))
    targets = [t for t in scene.things if watch.fits(t) != near]
    if not targets:
        return Appear(*scene.pair(watch.colour, watch.shape)) if watch.each and watch.kind == "leave" else None
    thing = random.choice(targets)
    if watch.kind == "leave":
        return Leave(thing.ident)
    if watch.kind == "start":
        return Start(thing.ident, random.choice(list(DIRECTIONS))) if thing.motion is None else Stop(thing.ident)
    colour = scene.pair(shape=thing.shape)[0]
    return None if colour == thing.colour else Recolour(thing.ident, colour)
