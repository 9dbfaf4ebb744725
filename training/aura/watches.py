"""Watch requests: "tell me when the red ball appears", what is said at once, and when the alert is due.

A request names a colour, a shape or both, and one of four kinds of event. An alert is due at the end of the chunk in
which the event happens: the first time, or each time if so asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from training.aura.questions import View, named
from training.aura.words import a, expand
from training.aura.world import COLOURS, SHAPES, Event, Thing

WORDS = ("stop", "now", "go", "hello", "yes", "look")
CANCELLED = "Okay, I will stop watching."
CANCEL = "[stop watching|never mind|forget it|you can stop watching|do not watch any more|stop looking|cancel that|no more alerts|forget about it]"

_KINDS = {
    "appear": "[appears|comes|shows up|is there|is here|comes back|arrives|you see {x}|comes into view]",
    "leave": "[leaves|goes away|disappears|is gone|vanishes|is not there any more]",
    "start": "[moves|starts moving|starts to move|begins to move|is moving]",
    "turn": "[changes colour|turns another colour|gets another colour|changes its colour|changes color]",
}


@dataclass(frozen=True, slots=True)
class Watch:
    kind: str
    colour: int | None
    shape: int | None
    each: bool
    word: str | None  # to be said as the alert

    def fits(self, thing: Thing | None) -> bool:
        return (
            thing is not None
            and (self.colour is None or thing.colour == self.colour)
            and (self.shape is None or thing.shape == self.shape)
        )

    def due(self, event: Event | None) -> bool:
        """Whether an event is what was asked for. A thing that takes the watched colour has appeared, one that loses it left."""
        if event is None:
            return False
        was, now = self.fits(event.before), self.fits(event.after)
        if self.kind == "appear":
            return now and not was
        if self.kind == "leave":
            return was and not now
        return event.kind == self.kind and was

    @property
    def what(self) -> str:
        if self.shape is None:
            return f"something {COLOURS[self.colour or 0]}"
        return a(SHAPES[self.shape] if self.colour is None else f"{COLOURS[self.colour]} {SHAPES[self.shape]}")

    def alert(self, event: Event) -> str:
        if self.word is not None:
            return f"{self.word[0].upper()}{self.word[1:]}!"
        thing = event.after or event.before
        assert thing is not None
        if self.shape is None:
            the = f"The {COLOURS[self.colour or 0]} shape"
        else:
            the = (
                f"The {SHAPES[self.shape]}"
                if self.colour is None
                else f"The {COLOURS[self.colour]} {SHAPES[self.shape]}"
            )
        if self.kind == "appear":
            return f"I see {self.what} now."
        if self.kind == "leave":
            return f"{the} is gone."
        if self.kind == "start":
            return f"{the} is moving now."
        return f"{the} turned {COLOURS[thing.colour]}."

    def answer(self, view: View) -> tuple[str, bool]:
        """(what is said when asked, whether the watch begins)."""
        there = any(self.fits(thing) for thing in view.things)
        if self.kind == "appear" and there and not self.each:
            return f"I see {self.what} already.", False
        if self.kind != "appear" and not there:
            return f"I do not see {self.what.replace('something', 'anything')}.", False
        if self.word is not None:
            return f"Okay, I will say {self.word}{' each time' if self.each else ''}.", True
        return ("Okay, I will tell you each time.", True) if self.each else ("Okay, I will tell you.", True)


def request(random: Random, view: View) -> tuple[str, Watch] | None:
    """(what is said, the watch), or None when the scene would make its meaning a matter of taste."""
    kind = random.choices(("appear", "leave", "start", "turn"), (5, 2.5, 2.0, 1.5))[0]
    # A red star that turned is no red star, so of what may turn only the shape is named.
    ref = named(random, view, present=0.12 if kind == "appear" else 0.92, kinds="s" if kind == "turn" else "csb")
    if len(ref.found) > 1:
        return None  # "the star leaves" with two stars
    if kind == "start" and any(t.motion is not None for t in ref.found):
        return None
    each = random.random() < 0.35 and kind in ("appear", "leave", "start")
    word = random.choice(WORDS) if random.random() < 0.2 else None
    thing = f"something {COLOURS[ref.colour or 0]}" if ref.shape is None else f"[the|a] {ref.said}"
    if thing.endswith("orange") or ref.said.startswith("orange"):
        thing = thing.replace("[the|a]", "[the|an]")
    event = expand(random, _KINDS[kind], x=thing)
    clause = event if event.startswith("you see") else f"{thing} {event}"
    when = "[each time|every time|whenever]" if each else "[when|when|as soon as|once|if]"
    if word is not None:
        text = f"[say {word} {when} {clause}|{when} {clause} say {word}|can you say {word} {when} {clause}]"
    else:
        verb = "[tell me|let me know|alert me|notify me|warn me|inform me|can you tell me|could you let me know|i want to know|give me a sign]"
        text = f"{verb} {when} {clause}"
        if not each and kind == "appear" and random.random() < 0.25:
            text = f"[watch for|look out for|wait for|keep an eye out for] {thing}[| and tell me]"
    return expand(random, text), Watch(kind, ref.colour, ref.shape, each, word)
