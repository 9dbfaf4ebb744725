"""How people say things: templates, spoken variants, and the slips of a speech recogniser.

expand(random, "what colour is [the|that] {shape}[| please]", shape="star")
spoken(random, text)
"""

from __future__ import annotations

import re
from random import Random

from training.aura.world import COLOURS, SHAPES

NUMBERS = ("zero", "one", "two", "three", "four", "five")
SHAPE_WORDS = {
    "circle": ("circle", "circle", "circle", "ball", "dot"),
    "square": ("square", "square", "square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
    "heart": ("heart",),
    "cross": ("cross", "cross", "plus"),
    "ring": ("ring",),
    "moon": ("moon", "moon", "crescent"),
}
# What a recogniser writes for a word that sounds like it.
SOUNDS_LIKE = {
    "red": ("read", "bread"), "blue": ("blew",), "green": ("grain", "greene"), "star": ("start", "stair"), "heart": ("hart", "hard"),
    "ring": ("wring", "rink"), "moon": ("mood",), "circle": ("circles", "circa"), "square": ("squares", "where"), "white": ("wide", "why"),
    "there": ("their",), "see": ("sea", "c"), "two": ("to", "too"), "for": ("four",), "where": ("wear", "were"), "which": ("witch",),
    "colour": ("caller", "colours"), "is": ("his", "as"), "the": ("a", "that"), "do": ("to",), "pink": ("ping",), "black": ("back",),
    "cross": ("across", "crosses"), "what": ("but", "one"), "appears": ("appear",), "leaves": ("leave", "lives"), "triangle": ("triangles",),
}  # fmt: skip

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def expand(random: Random, template: str, **values: str) -> str:
    """One reading of a template: [a|b|] is one of its alternatives, {name} a value."""
    while True:
        text, count = _CHOICE.subn(lambda match: random.choice(match[1].split("|")), template, count=1)
        if not count:
            break
        template = text
    return " ".join(template.format(**values).split())


def shape_word(random: Random, shape: int, *, plural: bool = False) -> str:
    word = random.choice(SHAPE_WORDS[SHAPES[shape]])
    if not plural:
        return word
    return {"cross": "crosses", "box": "boxes", "plus": "pluses"}.get(word, word + "s")


def a(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def plural(words: str) -> str:
    return words + ("es" if words.endswith("s") else "s")


def name(colour: int, shape: int) -> str:
    return f"{COLOURS[colour]} {SHAPES[shape]}"


def joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


_BEFORE = (
    "please",
    "hey",
    "so",
    "okay",
    "um",
    "uh",
    "and",
    "now",
    "well",
    "can you tell me",
    "tell me",
    "hello",
    "aura",
    "and now",
)
_AFTER = ("please", "now", "right now", "then", "exactly", "for me", "aura")


def spoken(random: Random, text: str, *, slips: float, statement: bool = False) -> str:
    """A text as a recogniser or a keyboard gives it: fillers, spelling, case, punctuation, now and then a wrong word."""
    if random.random() < 0.25:
        text = f"{random.choice(_BEFORE)} {text}"
    if random.random() < 0.15:
        text = f"{text} {random.choice(_AFTER)}"
    if random.random() < 0.4:
        text = text.replace("colour", "color")
    words = text.split()
    for index, word in enumerate(words):
        if random.random() < slips:
            words[index] = random.choice(SOUNDS_LIKE.get(word, (_slip(random, word),)))
    text = " ".join(words)
    style = random.random()
    if style < 0.45:
        text = text[0].upper() + text[1:] + ("." if statement else random.choice("??."))
        text = text.replace(" i ", " I ")
    elif style < 0.52:
        text = text.upper()
    elif style < 0.65:
        text = text[0].upper() + text[1:]
    return text


def _slip(random: Random, word: str) -> str:
    place = random.randrange(len(word))
    kind = random.random()
    if kind < 0.4 and len(word) > 2:
        return word[:place] + word[place + 1 :]
    letter = random.choice("abcdefghiklmnoprstuvwy")
    return word[:place] + letter + word[place + (kind < 0.7) :]
