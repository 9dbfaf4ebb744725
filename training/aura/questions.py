"""Questions about a scene and the one answer that each has.

A question is written so that its answer follows from what can be seen: where a position, a size or an order would be
a matter of taste, it is not asked. `ask` gives (kind, question, answer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from training.aura.words import NUMBERS, a, expand, joined, name, plural, shape_word
from training.aura.world import COLOURS, CORE, EDGE, SHAPES, Event, Scene, Thing

NOTHING = "I do not see any shapes."


@dataclass(frozen=True, slots=True)
class View:
    """What can be known at the end of a chunk. card: its colour; events: of each chunk so far, the last one last."""

    things: tuple[Thing, ...]
    scene: Scene
    card: int | None = None
    moving: bool = True  # more than one frame was shown, so motion can be known
    events: Sequence[Event | None] = field(default_factory=tuple)


Asked = tuple[str, str, str]


# ---------------------------------------------------------------- saying what is there


def listed(things: Sequence[Thing]) -> str | None:
    """ "a red circle and two blue stars", from left to right; None when the order would be a matter of taste."""
    groups: dict[tuple[int, int], list[Thing]] = {}
    for thing in sorted(things, key=lambda t: t.x):
        groups.setdefault((thing.colour, thing.shape), []).append(thing)
    edges = [group[0].x for group in groups.values()]
    if len(groups) > 4 or any(after - before < 0.05 for before, after in pairwise(edges)):
        return None
    return joined([counted(len(group), name(*pair)) for pair, group in groups.items()])


def counted(count: int, words: str) -> str:
    return a(words) if count == 1 else f"{NUMBERS[count]} {plural(words)}"


def across(thing: Thing) -> str | None:
    return _third(thing.x, "left", "right")


def upright(thing: Thing) -> str | None:
    return _third(thing.y, "top", "bottom")


def _third(place: float, low: str, high: str) -> str | None:
    if place < EDGE:
        return low
    if place > 1 - EDGE:
        return high
    return "middle" if CORE < place < 1 - CORE else None


def place(thing: Thing) -> str | None:
    x, y = across(thing), upright(thing)
    if x is None or y is None:
        return None
    if x == y:
        return "in the middle"
    if x == "middle":
        return f"at the {y}"
    return f"on the {x}" if y == "middle" else f"at the {y} {x}"


# ---------------------------------------------------------------- what may be named


@dataclass(frozen=True, slots=True)
class Named:
    """Some of the things by colour, shape or both; `said` as a person says it, `short` as we do."""

    colour: int | None
    shape: int | None
    said: str
    short: str
    found: tuple[Thing, ...]

    @property
    def none(self) -> str:
        return (
            "I do not see anything " + COLOURS[self.colour or 0] + "."
            if self.shape is None
            else f"I do not see {a(self.short)}."
        )


def named(random: Random, view: View, *, present: float = 0.75, kinds: str = "csb") -> Named:
    """A reference by (c)olour, (s)hape or (b)oth, to something there with probability `present`."""
    if view.things and random.random() < present:
        thing = random.choice(view.things)
        colour, shape = thing.colour, thing.shape
    elif view.things and random.random() < 0.5:  # nearly there
        thing = random.choice(view.things)
        colour, shape = view.scene.pair(thing.colour) if random.random() < 0.5 else view.scene.pair(shape=thing.shape)
    else:
        colour, shape = view.scene.pair()
    kind = random.choice("s" if view.scene.nameless else kinds)
    return refer(random, view, None if kind == "s" else colour, None if kind == "c" else shape)


def refer(random: Random, view: View, colour: int | None, shape: int | None) -> Named:
    found = tuple(
        t for t in view.things if (colour is None or t.colour == colour) and (shape is None or t.shape == shape)
    )
    if colour is None:
        assert shape is not None
        return Named(colour, shape, shape_word(random, shape), SHAPES[shape], found)
    if shape is None:
        noun = random.choice(("shape", "thing", "one", "object"))
        return Named(colour, shape, f"{COLOURS[colour]} {noun}", f"{COLOURS[colour]} shape", found)
    return Named(colour, shape, f"{COLOURS[colour]} {shape_word(random, shape)}", name(colour, shape), found)


# ---------------------------------------------------------------- kinds of questions


def describe(random: Random, view: View) -> Asked | None:
    question = expand(
        random,
        random.choice(
            (
                "what [do|can] you see[| right now| now| here| there]",
                "what is [this|that|there|in front of you|in the picture|in the video|on the screen|in the scene]",
                "what's [this|that|there|in front of you|in the picture|in the video|on the screen|here]",
                "[describe|tell me about] [the scene|the picture|what you see|the image|the video]",
                "tell me what [you see|is there|you can see]",
                "what are you [seeing|looking at]",
                "which [shapes|things] [do|can] you see",
                "what am i showing you",
                "what shapes are there",
            )
        ),
    )
    things = listed(view.things) if view.things else ""
    if things is None:
        return None
    if view.card is not None:
        card = a(f"{COLOURS[view.card]} card")
        return "describe", question, f"I see {card} with {things} on it." if things else f"I see {card}."
    return "describe", question, f"I see {things}." if things else NOTHING


def colour_of(random: Random, view: View) -> Asked | None:
    if random.random() < 0.35:
        if view.card is not None:
            return None
        question = expand(random, "what colour is [it|this|that|this shape|the shape|this thing|the object]")
        if len(view.things) == 1:
            return "colour", question, f"It is {COLOURS[view.things[0].colour]}."
        things = listed(view.things) if view.things else ""
        return None if things is None else ("colour", question, f"I see {things}." if things else NOTHING)
    ref = named(random, view, present=0.85, kinds="s")
    question = expand(
        random,
        "[what colour is the {x}|what colour is the {x}|which colour is the {x}|what's the colour of the {x}|what is the colour of the {x}|what colour does the {x} have|tell me the colour of the {x}|the {x} is what colour]",
        x=ref.said,
    )
    if not ref.found:
        return "colour", question, ref.none
    if len(ref.found) == 1:
        return "colour", question, f"The {ref.short} is {COLOURS[ref.found[0].colour]}."
    things = listed(ref.found)
    return None if things is None else ("colour", question, f"I see {things}.")


def shape_of(random: Random, view: View) -> Asked | None:
    if random.random() < 0.3:
        if view.card is not None:
            return None
        if len(view.things) == 1:
            return shape_alone(random, view)
        question = expand(random, "[what|which] [shape|form] is [it|this|that]")
        things = listed(view.things) if view.things else ""
        return None if things is None else ("shape", question, f"I see {things}." if things else NOTHING)
    ref = named(random, view, present=0.85, kinds="c")
    question = expand(
        random,
        "[what shape is the {x}|which shape is {c}|what is the {x}|what is {c}|what's the {x}|what kind of shape is the {x}|what shape does the {x} have]",
        x=ref.said,
        c=COLOURS[ref.colour or 0],
    )
    if not ref.found:
        return "shape", question, ref.none
    if len(ref.found) == 1:
        return "shape", question, f"The {ref.short} is {a(SHAPES[ref.found[0].shape])}."
    things = listed(ref.found)
    return None if things is None else ("shape", question, f"I see {things}.")


def shape_alone(random: Random, view: View) -> Asked | None:
    """The shape of one thing whose colour nobody asks for."""
    if len(view.things) != 1:
        return None
    question = expand(random, "[what|which] [shape|form] is [it|this|that]")
    return "shape", question, f"It is {a(SHAPES[view.things[0].shape])}."


def count(random: Random, view: View) -> Asked | None:
    if random.random() < 0.45:
        noun = random.choice(("shapes", "shapes", "things", "objects"))
        found, short, none = view.things, "shape", NOTHING
    else:
        ref = named(random, view, present=0.85)
        found, short = ref.found, ref.short
        if ref.shape is None:
            noun = f"{COLOURS[ref.colour or 0]} {random.choice(('shapes', 'things', 'ones', 'objects'))}"
        else:
            colour = "" if ref.colour is None else COLOURS[ref.colour] + " "
            noun = colour + shape_word(random, ref.shape, plural=True)
        none = f"I do not see any {plural(short)}."
    question = expand(
        random,
        "[how many {x} [are there|do you see|can you see|are you seeing|do i have|are in the picture]|how many {x}|count the {x}|what is the number of {x}]",
        x=noun,
    )
    if not found:
        return "count", question, none
    answer = f"I see one {short}." if len(found) == 1 else f"I see {NUMBERS[len(found)]} {plural(short)}."
    return "count", question, answer


def exists(random: Random, view: View) -> Asked | None:
    ref = named(random, view, present=0.5)
    thing = f"[anything|something] {COLOURS[ref.colour or 0]}" if ref.shape is None else a(ref.said)
    question = expand(
        random,
        f"[is there {thing}[| in the picture| here]|do you see {thing}|can you see {thing}|is {thing} [there|here]|do i have {thing}|have you got {thing}]",
    )
    if ref.shape is None:
        what = f"something {COLOURS[ref.colour or 0]}" if ref.found else f"anything {COLOURS[ref.colour or 0]}"
    else:
        what = counted(max(1, len(ref.found)), ref.short)
    return "exists", question, f"Yes, I see {what}." if ref.found else f"No, I do not see {what}."


def where(random: Random, view: View) -> Asked | None:
    ref = named(random, view, present=0.9)
    question = expand(
        random,
        "[where is the {x}[| now]|where's the {x}|in which place is the {x}|where do you see the {x}|where can i find the {x}|what is the position of the {x}]",
        x=ref.said,
    )
    if len(view.things) == 1 and random.random() < 0.3:
        spot = place(view.things[0])
        return (
            None
            if spot is None
            else ("where", expand(random, "where is [it|this|that|the shape|the thing]"), f"It is {spot}.")
        )
    if not ref.found:
        return "where", question, ref.none
    if len(ref.found) > 1:
        return "where", question, f"I see {NUMBERS[len(ref.found)]} {plural(ref.short)}."
    spot = place(ref.found[0])
    return None if spot is None else ("where", question, f"The {ref.short} is {spot}.")


def what_is_at(random: Random, view: View) -> Asked | None:
    side = random.choice(("left", "right", "top", "bottom", "middle"))
    if side == "middle":
        spots = [place(thing) for thing in view.things]
        if None in spots:
            return None
        found = [t for t, spot in zip(view.things, spots, strict=True) if spot == "in the middle"]
        said, short = random.choice(("in the middle", "in the center", "in the centre")), "in the middle"
    else:
        axis = across if side in ("left", "right") else upright
        sides = [axis(thing) for thing in view.things]
        if None in sides:
            return None
        found = [t for t, s in zip(view.things, sides, strict=True) if s == side]
        short = f"on the {side}" if axis is across else f"at the {side}"
        said = random.choice(
            (
                short,
                short,
                f"on the {side}",
                f"on the {side} side" if axis is across else f"at the {side} of the picture",
            )
        )
    if not found and random.random() < 0.5:
        return None
    question = expand(
        random,
        "[what is {x}|what's {x}|what do you see {x}|which shape is {x}|which shapes are {x}|what can you see {x}|is there anything {x}]",
        x=said,
    )
    things = listed(found) if found else "nothing"
    return None if things is None else ("at", question, f"I see {things} {short}.")


def size(random: Random, view: View) -> Asked | None:
    unit = view.scene.unit
    if len(view.things) >= 2 and not view.scene.nameless and random.random() < 0.5:
        order = sorted(view.things, key=lambda t: t.radius)
        small = random.random() < 0.5
        pick, rival = (order[0], order[1]) if small else (order[-1], order[-2])
        if max(pick.radius, rival.radius) < 1.35 * min(pick.radius, rival.radius):
            return None
        if sum((t.colour, t.shape) == (pick.colour, pick.shape) for t in view.things) > 1:
            return None
        word = random.choice(("smallest", "smaller", "smallest") if small else ("biggest", "bigger", "largest"))
        question = expand(
            random,
            "[which [shape|one|thing] is [the|the|] {w}|what is the {w} [shape|one|thing]|which is the {w}[| one| shape]]",
            w=word,
        )
        return "size", question, f"The {name(pick.colour, pick.shape)} is the {'smallest' if small else 'biggest'}."
    ref = named(random, view, present=0.95)
    question = expand(
        random,
        "[is the {x} [big or small|small or big|large or small]|how [big|large] is the {x}|what size is the {x}|what is the size of the {x}]",
        x=ref.said,
    )
    if not ref.found:
        return "size", question, ref.none
    if len(ref.found) > 1:
        return None
    ratio = ref.found[0].radius / unit
    if 0.13 < ratio < 0.21:
        return None
    return "size", question, f"The {ref.short} is {'small' if ratio < 0.17 else 'big'}."


def toward(direction: str) -> str:
    return f"to the {direction}" if direction in ("left", "right") else direction


def motion(random: Random, view: View) -> Asked | None:
    if not view.moving:
        return None
    movers = [t for t in view.things if t.motion is not None]
    nameless = bool(view.scene.nameless)
    if random.random() < 0.3 and not nameless:
        question = expand(
            random,
            "[what is moving|is anything moving|is something moving|what moves|which [shape|one] is moving|does anything move|what's moving]",
        )
        if not movers:
            return "motion", question, "Nothing is moving."
        things = listed(movers)
        if things is None or len(movers) > 2 or len({(t.colour, t.shape) for t in movers}) < len(movers):
            return None
        names = joined([f"the {name(t.colour, t.shape)}" for t in sorted(movers, key=lambda t: t.x)])
        return "motion", question, f"{names[0].upper()}{names[1:]} {'is' if len(movers) == 1 else 'are'} moving."
    if movers and random.random() < 0.7:
        target = random.choice(movers)
        kind = random.choice("s" if nameless else "csb")
        ref = refer(random, view, None if kind == "s" else target.colour, None if kind == "c" else target.shape)
    else:
        ref = named(random, view, present=0.97)
    if len(ref.found) > 1:
        return None
    if len(view.things) == 1 and ref.found and random.random() < 0.4:
        ref = Named(ref.colour, ref.shape, "it", "it", ref.found)
    the = "it" if ref.said == "it" else f"the {ref.said}"
    subject = "It" if ref.said == "it" else f"The {ref.short}"
    if random.random() < 0.4:
        question = expand(random, "[is {x} moving|does {x} move|is {x} [moving or still|in motion]]", x=the)
        if not ref.found:
            return "motion", question, ref.none
        way = ref.found[0].motion
        lower = subject[0].lower() + subject[1:]
        return (
            "motion",
            question,
            f"No, {lower} is not moving." if way is None else f"Yes, {lower} is moving {toward(way)}.",
        )
    question = expand(
        random,
        "[which way is {x} moving|where is {x} [moving|going]|in which direction is {x} moving|what direction is {x} moving|which direction is {x} going|which way does {x} [go|move]|what is {x} doing|how is {x} moving]",
        x=the,
    )
    if not ref.found:
        return "motion", question, ref.none
    way = ref.found[0].motion
    return "motion", question, f"{subject} is not moving." if way is None else f"{subject} is moving {toward(way)}."


RELATIONS = {
    "left of": "x<", "to the left of": "x<", "right of": "x>", "to the right of": "x>", "above": "y<", "over": "y<", "below": "y>", "under": "y>",
}  # fmt: skip


def relation(random: Random, view: View) -> Asked | None:
    if len(view.things) < 2:
        return None
    one, two = random.sample(view.things, 2)
    refs = []
    for thing in (one, two):
        kind = random.choice("s" if view.scene.nameless else "sbb")
        ref = refer(random, view, None if kind == "s" else thing.colour, thing.shape)
        if len(ref.found) > 1:
            return None
        refs.append(ref)
    words, test = random.choice(list(RELATIONS.items()))
    gap = (two.x - one.x) if test[0] == "x" else (two.y - one.y)
    if abs(gap) < 0.14:
        return None
    holds = gap > 0 if test[1] == "<" else gap < 0
    return "relation", f"is the {refs[0].said} {words} the {refs[1].said}", "Yes, it is." if holds else "No, it is not."


def check(random: Random, view: View) -> Asked | None:
    """Is the star red?"""
    ref = named(random, view, present=0.95, kinds="s")
    if len(ref.found) != 1:
        return None
    true = ref.found[0].colour
    asked = true if random.random() < 0.5 else view.scene.pair(shape=ref.shape)[0]
    question = expand(random, "[is the {x} {c}|does the {x} look {c}|is it a {c} {x}]", x=ref.said, c=COLOURS[asked])
    verdict = "Yes" if asked == true else "No"
    return "check", question, f"{verdict}, the {ref.short} is {COLOURS[true]}."


def happened(event: Event) -> str:
    thing = event.after or event.before
    assert thing is not None
    what = name(thing.colour, thing.shape)
    if event.kind == "appear":
        return f"{a(what)[0].upper()}{a(what)[1:]} appeared."
    if event.kind == "leave":
        return f"The {what} went away."
    if event.kind == "start":
        return f"The {what} started to move."
    if event.kind == "stop":
        return f"The {what} stopped."
    assert event.before is not None
    return f"The {name(event.before.colour, thing.shape)} turned {COLOURS[thing.colour]}."


RECENT, FORGOTTEN = 3, 5  # chunks: an event this young is news, one this old is not; between them nobody asks


def changed(random: Random, view: View) -> Asked | None:
    if not view.moving or len(view.events) < 2:
        return None
    question = expand(
        random,
        "[what [just|] [changed|happened]|what has changed|did [something|anything] [change|happen]|what is [different|new][| now]|what was that]",
    )
    for age, event in enumerate(reversed(view.events)):
        if event is not None:
            if age < RECENT:
                return "changed", question, happened(event)
            return None if age < FORGOTTEN else ("changed", question, "Nothing changed.")
    return "changed", question, "Nothing changed."


def card(random: Random, view: View) -> Asked | None:
    colour = None if view.card is None else COLOURS[view.card]
    kind = random.random()
    if kind < 0.45:
        question = expand(
            random,
            "[what colour is [the|my|this] card|which colour is [the|my] card|what card is this|what's the colour of the card]",
        )
        return "card", question, "I do not see a card." if colour is None else f"The card is {colour}."
    if kind < 0.7:
        question = expand(
            random,
            "[what am i holding[| up| in my hand]|what do i have in my hand|what is in my hand|what do you see in my hand|what's in my hand]",
        )
        return "card", question, "I do not see a card." if colour is None else f"You are holding {a(colour)} card."
    if kind < 0.85 or colour is None:
        question = expand(
            random, "[is there a card|do you see [a|my|the] card|can you see [a|my|the] card|am i holding a card]"
        )
        return "card", question, "No, I do not see a card." if colour is None else f"Yes, I see {a(colour)} card."
    question = expand(
        random,
        "[what is on [the|my] card|which shape is on [the|my] card|what's on the card|what do you see on [the|my] card]",
    )
    things = listed(view.things) if view.things else "nothing"
    return None if things is None else ("card", question, f"I see {things} on the card.")


KINDS: dict[Callable[[Random, View], Asked | None], float] = {
    describe: 2.0, colour_of: 2.0, shape_of: 1.6, count: 2.2, exists: 1.4, where: 1.8, what_is_at: 1.5, size: 1.5, motion: 2.2,
    relation: 1.5, check: 0.8, changed: 1.5, card: 0.25,
}  # fmt: skip
LESSON = KINDS | {
    where: 3.2,
    what_is_at: 2.6,
    colour_of: 3.0,
    shape_of: 2.6,
    changed: 6.0,
    relation: 2.2,
    size: 2.0,
    motion: 6.0,
}
ON_A_CARD = {describe: 2.0, colour_of: 0.7, shape_of: 0.7, exists: 0.6, card: 3.0}

# Of things whose colours have no names.
BY_SHAPE = {shape_alone: 2.0, count: 2.0, exists: 1.0, where: 3.0, size: 1.5, motion: 2.0, relation: 2.0}


def ask(random: Random, view: View) -> Asked:
    kinds = ON_A_CARD if view.card is not None else LESSON if view.scene.lesson else KINDS
    if view.scene.nameless:
        kinds = BY_SHAPE
    while True:
        asked = random.choices(list(kinds), list(kinds.values()))[0](random, view)
        if asked is not None:
            return asked
