"""General English sentences from texts that Debian packages ship: examples in WordNet, and fortunes.

    apt-get install wordnet-base fortunes fortunes-min
    python -m training.text.english sentences.txt

One sentence a line, letters and simple punctuation only (so that every synthesizer reads it the same way), in a fixed order.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

WORDNET = Path("/usr/share/wordnet")
FORTUNES = Path("/usr/share/games/fortunes")
WORDS = range(2, 17)
_PLAIN = re.compile(r"[A-Za-z][A-Za-z' ,-]*[A-Za-z][.?!]?")
# Synthesizers spell or expand these in different ways.
_READ_DIFFERENTLY = re.compile(
    r"\b(?:[A-Z]{2,}|[b-hj-zB-HJ-NP-Z]|etc|vs|St|Dr|Mr|Mrs|Prof|Jr|Sr|No|Ave|Co|Inc|[IVXivx]{2,}|www|com|[^aeiouyAEIOUY' ]+)\b"
)

_COARSE = re.compile(r"(?i)\b(?:sex|fuck|shit|rape|nigg|cunt|whore|naked|breast|genus|kill|murder|suicide|nazi)")


def wordnet(folder: Path = WORDNET) -> Iterator[str]:
    """The quoted examples of all glosses, and short definitions read as phrases."""
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text(encoding="latin-1").splitlines():
            _, bar, gloss = line.partition(" | ")
            if not bar:
                continue
            yield from re.findall(r'"([^"]+)"', gloss)
            definition = gloss.partition(";")[0].strip()
            if "(" not in definition:
                yield definition


def fortunes(folder: Path = FORTUNES) -> Iterator[str]:
    for file in sorted(folder.glob("*")):
        if file.suffix or not file.is_file():
            continue
        for entry in file.read_text(encoding="utf-8", errors="replace").split("\n%\n"):
            text = re.sub(r"\s+", " ", entry.partition("--")[0].replace("\t", " "))
            yield from re.split(r"(?<=[.!?])\s+", text)


def cleaned(sentences: Iterator[str]) -> Iterator[str]:
    """Those that are read the same way everywhere, with a capital first and a mark last."""
    seen: set[str] = set()
    for text in sentences:
        text = text.strip().replace("`", "'").rstrip(";:,")
        key = text.lower().rstrip(".?!")
        if (
            key in seen
            or not _PLAIN.fullmatch(text)
            or _READ_DIFFERENTLY.search(text)
            or len(text.split()) not in WORDS
        ):
            continue
        if "--" in text or "''" in text or re.search(r"[a-z][A-Z]", text):
            continue
        seen.add(key)
        text = text[0].upper() + text[1:]
        yield text if text[-1] in ".?!" else text + "."


def common(sentences: list[str], least: int = 12) -> list[str]:
    """Those whose every word occurs `least` times in all of them, and is fit for a demonstration."""
    words = [re.findall(r"[a-z']+", text.lower()) for text in sentences]
    counts = Counter(word for line in words for word in line)
    return [
        text
        for text, line in zip(sentences, words, strict=True)
        if min(counts[word] for word in line) >= least and not _COARSE.search(text)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=int, default=80_000)
    options = parser.parse_args()
    sentences = common([*cleaned(wordnet()), *cleaned(fortunes())])
    random.Random(0).shuffle(sentences)
    options.out.write_text("\n".join(sentences[: options.limit]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
