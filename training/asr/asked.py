"""What people say to the small AURA, in all phrasings of its own grammar, spelt as the recogniser spells.

    python -m training.asr.asked DATA/asked.txt [--lines 60000]

With fillers before and after; British, numbers as words, one spelling of each sentence, no slips.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from training.aura import small_talk
from training.aura.dialogue import live, look
from training.aura.words import spoken
from training.aura.world import Scene

SEED = 4_021
_FIRST_PERSON = re.compile(r"\bi\b")
_ASKS = re.compile(
    r"((please|hey|so|okay|um|uh|and|now|well|hello|aura),? )*"
    r"(what|where|which|who|why|when|how|is|are|do|does|did|can|could|will|should|has|have|am)\b"
)


def written(text: str) -> str | None:
    """As ASR's own grammar is spelt: one capital, British, a mark at the end; None for what is no plain sentence."""
    words = text.strip().lower().replace("color", "colour").replace("gray", "grey").rstrip(".?! ")
    if not words or not re.fullmatch(r"[a-z' ,-]+", words):
        return None
    words = _FIRST_PERSON.sub("I", words)
    return f"{words[0].upper()}{words[1:]}{'?' if _ASKS.match(words) else '.'}"


def scene(random: Random) -> Scene:
    made = Scene(random, 144, 256)
    made.slips = 0.0
    return made


def texts(random: Random) -> Iterator[str]:
    while True:
        for made in (
            live(random, scene(random), chunks=6, ask=0.6),
            look(random, scene(random), frames=2, still=False, card=random.choice((None, 3)), rounds=4),
        ):
            yield from (said.text for said in made.rounds if said.text)
        yield spoken(random, small_talk.greeting(random)[0], slips=0.0)
        yield spoken(random, small_talk.outside(random)[0], slips=0.0)


def lines(count: int) -> list[str]:
    """The first so many, always the same ones."""
    found: dict[str, None] = {}
    for text in texts(Random(SEED)):
        if (line := written(text)) is not None:
            found[line] = None
        if len(found) >= count:
            break
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lines", type=int, default=60_000)
    options = parser.parse_args()
    options.out.write_text("\n".join(lines(options.lines)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
