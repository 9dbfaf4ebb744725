"""The words of nano AURA: byte pairs learnt from conversations of the small world.

python -m training.aura.vocabulary FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from aura_omni.nano.published import AURA_TOKENS
from aura_omni.nano.random_family import write_tokenizer
from aura_omni.stages.aura_prompt import live_system_prompt
from training.aura import small_talk
from training.aura.dialogue import SYSTEMS, live, look
from training.aura.world import Scene

PIECES = 1536
ROWS = 1600  # of the embedding: pieces, control tokens, and a few to spare


def texts(seed: int = 11, conversations: int = 3000) -> Iterator[str]:
    random = Random(seed)
    for _ in range(conversations):
        for made in (
            live(random, Scene(random, 144, 256), chunks=6, ask=0.6),
            look(random, Scene(random, 144, 256), frames=2, still=False, card=random.choice((None, 3)), rounds=4),
        ):
            for done in made.rounds:
                yield from (text for text in (done.text, done.answer) if text)
                yield from ("user\n<0.2 seconds>", "assistant\n", "\n")
        for _ in range(3):
            yield from small_talk.outside(random)
            yield from small_talk.greeting(random)
    for system in (live_system_prompt(), *filter(None, SYSTEMS)):
        yield from ["system\n" + system] * 200


def write(folder: Path) -> dict[str, int]:
    """tokenizer.json and tokenizer_config.json; ids of the control tokens."""
    return write_tokenizer(folder, AURA_TOKENS, texts=texts(), pieces=PIECES)


if __name__ == "__main__":
    ids = write(Path(sys.argv[1]))
    print(ids["<|endoftext|>"], ids["<|silent|>"])
