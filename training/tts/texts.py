"""What is read aloud: the answers of the small world, everyday small talk, numbers, and general English.

for text in domain(seed=0): ...        # endless, with repetitions
for text in general(0): ...            # finite, as lexicon(0) is; they need Debian's wordnet-base and fortunes
for text, unseen in clips("domain", 0): ...    # each once, and whether it is held out
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

COLOURS = ["red", "green", "blue", "yellow", "orange", "purple", "pink", "brown", "black", "white", "grey", "cyan"]
SHAPES = [
    "circle",
    "square",
    "triangle",
    "star",
    "rectangle",
    "ball",
    "box",
    "cross",
    "diamond",
    "heart",
    "ring",
    "cube",
    "oval",
    "card",
    "hexagon",
    "pentagon",
    "arrow",
    "line",
]
SIZES = ["small", "large", "big", "tiny", "huge", "little", "medium"]
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SIDES = [
    "left",
    "right",
    "top",
    "bottom",
    "middle",
    "centre",
    "top left",
    "top right",
    "bottom left",
    "bottom right",
    "upper left",
    "lower right",
]
MOVES = ["moving left", "moving right", "moving up", "moving down", "standing still", "not moving", "growing", "shrinking", "getting bigger", "getting smaller", "turning", "rotating", "bouncing", "moving to the left", "moving to the right", "falling", "rising", "moving in a circle", "blinking"]  # fmt: skip
RELATIONS = [
    "above",
    "below",
    "next to",
    "left of",
    "right of",
    "to the left of",
    "to the right of",
    "under",
    "over",
    "near",
    "inside",
    "behind",
    "in front of",
    "between",
]
EVENTS = [
    "appears",
    "disappears",
    "moves",
    "stops",
    "changes colour",
    "comes back",
    "leaves",
    "grows",
    "shrinks",
    "shows up",
    "goes away",
]
PAST = [
    "appeared",
    "disappeared",
    "moved",
    "stopped",
    "changed colour",
    "come back",
    "left",
    "grown",
    "shrunk",
    "gone away",
    "turned {c}",
]
GREETINGS = ["Hello!", "Hi there!", "Good morning!", "Good evening!", "Good afternoon!", "Hello, how can I help you?", "Hi! What would you like to know?", "I'm fine, thank you.", "I am doing well, thanks for asking.", "You're welcome!", "My pleasure.", "Goodbye!", "See you later!", "Bye bye.", "Nice to meet you.", "Good night!", "Thank you!", "Thanks a lot.", "Yes.", "No.", "Sure.", "Of course.", "Okay.", "All right.", "Got it.", "I see.", "Let me look.", "One moment, please.", "Sorry, I did not hear you.", "I'm ready.", "I'm listening.", "Ready when you are.", "I am Aura.", "My name is Aura.", "I am an assistant that can see and hear.", "Aura is watching."]  # fmt: skip
CAN = ["I can tell you what I see.", "I can name colours, shapes and numbers.", "I can tell you where things are.", "I can count things.", "I can watch and tell you when something changes.", "I can see shapes, colours and motion.", "Ask me about the colours and shapes in front of the camera.", "I watch the camera and answer your questions.", "You can ask me what has changed.", "You can ask me to watch for something.", "I can describe what the camera shows."]  # fmt: skip
OUTSIDE = ["I don't know that.", "I am sorry, I don't know.", "I can only talk about what I see.", "That is outside of what I know.", "I can't tell you about that.", "I cannot see that.", "I'm afraid I can't help with that.", "I do not know the {t}.", "I can't tell you the {t}.", "Sorry, I only know shapes and colours.", "I don't know anything about the {t}."]  # fmt: skip
TOPICS = [
    "weather",
    "time",
    "news",
    "price",
    "score",
    "capital",
    "president",
    "train",
    "traffic",
    "music",
    "answer",
    "date",
    "stock",
    "market",
    "temperature",
    "recipe",
    "song",
    "film",
    "football",
    "game",
]
ACKNOWLEDGE = ["Okay, I will tell you when {e}.", "Sure, I'll let you know when {e}.", "I'll watch for that.", "All right, I will let you know.", "I'm watching.", "Okay, watching for {a}.", "Yes, I will say so when {e}.", "Got it. I'll tell you as soon as {e}.", "I will tell you every time {e}.", "Okay, I'll keep an eye on {a}.", "Will do."]  # fmt: skip


def domain(seed: int) -> Iterator[str]:
    """Short spoken answers, acknowledgements, alerts, greetings and numbers; endless."""
    pick = random.Random(seed)
    makers = (_answer, _answer, _answer, _answer, _fixed, _watch, _alert, _alert, _number, _two)
    while True:
        text = pick.choice(makers)(pick)
        yield _styled(text, pick)


def _styled(text: str, pick: random.Random) -> str:
    chance = pick.random()
    if chance < 0.06:
        return text.lower()
    if chance < 0.12:
        return text.rstrip(".!?")
    if chance < 0.15:
        return text.rstrip(".!?").lower()
    if chance < 0.18 and text.endswith("."):
        return text[:-1] + "!"
    return text


def _count(pick: random.Random) -> tuple[str, bool]:
    number = pick.choice([1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    return (str(number) if pick.random() < 0.3 else WORDS[number]), number == 1


def plural(shape: str) -> str:
    return shape + ("es" if shape.endswith(("s", "x")) else "s")


def _thing(pick: random.Random, article: str | None = None) -> str:
    words = [pick.choice(SIZES)] if pick.random() < 0.25 else []
    if pick.random() < 0.9:
        words.append(pick.choice(COLOURS))
    words.append(pick.choice(SHAPES))
    if article is None:
        article = pick.choice(["a", "a", "the"])
    if article == "a" and words[0][0] in "aeiou":
        article = "an"
    return f"{article} {' '.join(words)}".strip()


def _things(pick: random.Random) -> str:
    number, single = _count(pick)
    thing = _thing(pick, "")
    if single:
        return _thing(pick, "a")
    head, _, shape = thing.rpartition(" ")
    return f"{number} {head} {plural(shape)}".replace("  ", " ")


def _list(pick: random.Random) -> str:
    parts = [pick.choice((_things, _thing))(pick) for _ in range(pick.choice([1, 1, 2, 2, 3]))]
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _place(pick: random.Random) -> str:
    side = pick.choice(SIDES)
    return pick.choice(("on the {}", "in the {}", "at the {}")).format(side)


def _answer(pick: random.Random) -> str:
    the, a = _thing(pick, "the"), _thing(pick, "a")
    colour, shape = pick.choice(COLOURS), pick.choice(SHAPES)
    number, single = _count(pick)
    many = shape if single else plural(shape)
    be = "is" if single else "are"
    said = pick.choice(
        (
            f"I see {_list(pick)}.",
            f"I can see {_list(pick)}.",
            f"There is {a}.",
            f"There {be} {number} {many}.",
            f"There {be} {number} {colour} {many}.",
            f"There {be} {number} {colour} {many} {_place(pick)}.",
            f"There is {a} {_place(pick)}.",
            f"It is {colour}.",
            f"It's {colour}.",
            f"{the} is {colour}.",
            f"{the} is {_place(pick)}.",
            f"{the} is {pick.choice(RELATIONS[:-1])} {_thing(pick, 'the')}.",
            f"{the} is {pick.choice(MOVES)}.",
            f"It is {pick.choice(MOVES)}.",
            f"It is {_place(pick)}.",
            f"It is {a}.",
            f"That is {a}.",
            f"A {shape}.",
            f"{number}.",
            f"{number} {many}.",
            f"The {shape} is {pick.choice(SIZES)}.",
            f"{the} is {pick.choice(('bigger', 'smaller', 'larger'))} than {_thing(pick, 'the')}.",
            f"The {pick.choice(('biggest', 'smallest', 'largest'))} shape is {_thing(pick, 'the')}.",
            f"You are holding {a}.",
            f"I don't see {pick.choice(('any', 'a'))} {colour} {shape}.",
            f"No, there is no {colour} {shape}.",
            f"Yes, there is {a}.",
            f"Yes, I see {_list(pick)}.",
            f"No, it is {colour}.",
            f"No, I see {_list(pick)}.",
            "I see nothing.",
            "I don't see anything.",
            "Nothing has changed.",
            f"{the} has {_past(pick)}.",
            f"{the} {pick.choice(EVENTS)}.",
            f"Before, it was {colour}. Now it is {pick.choice(COLOURS)}.",
            f"{the} was {_place(pick)}, and now it is {_place(pick)}.",
            f"There were {number} {plural(shape)}, and now there are {_count(pick)[0]}.",
            f"The background is {colour}.",
            f"A {pick.choice(SIZES)} {colour} {shape} {_place(pick)}.",
        )
    )
    return said[0].upper() + said[1:]


def _past(pick: random.Random) -> str:
    return pick.choice(PAST).format(c=pick.choice(COLOURS))


def _fixed(pick: random.Random) -> str:
    return pick.choice(pick.choice((GREETINGS, GREETINGS, CAN, OUTSIDE))).format(t=pick.choice(TOPICS))


def _watch(pick: random.Random) -> str:
    the, a = _thing(pick, "the"), _thing(pick, "a")
    event = pick.choice(
        (f"{the} {pick.choice(EVENTS)}", f"I see {a}", f"{a} {pick.choice(EVENTS)}", f"there are {_things(pick)}")
    )
    return pick.choice(ACKNOWLEDGE).format(e=event, a=a)


def _alert(pick: random.Random) -> str:
    the = _thing(pick, "the")
    said = pick.choice(
        (
            f"{the} has {_past(pick)}.",
            f"{the} is here.",
            f"{the} just {pick.choice(PAST[:5])}.",
            f"Now I see {_list(pick)}.",
            f"I see {_thing(pick, 'the')} now.",
            f"Look, {the} has {_past(pick)}!",
            f"There it is: {_thing(pick, 'a')}.",
            f"{the} is {pick.choice(MOVES)} now.",
            f"{the} is gone.",
            f"There are now {_things(pick)}.",
        )
    )
    return said[0].upper() + said[1:]


def _number(pick: random.Random) -> str:
    number = pick.choice((pick.randrange(20), pick.randrange(100), pick.randrange(1000), pick.randrange(1900, 2100)))
    noun = pick.choice(
        ("seconds", "minutes", "shapes", "times", "frames", "people", "things", "percent", "metres", "days", "dollars")
    )
    return pick.choice(
        (
            f"{number}.",
            f"It took {number} {noun}.",
            f"I counted {number} {noun}.",
            f"{number} {noun} ago.",
            f"There are {number} of them.",
            f"The number is {number}.",
            f"{number} plus {pick.randrange(20)} is {number + 3}.",
            f"That was {number} {noun} ago.",
        )
    )


def _two(pick: random.Random) -> str:
    """Two sentences, as answers with a greeting or a second remark have."""
    return f"{pick.choice((_fixed, _answer, _alert))(pick)} {_answer(pick)}"


# ---------------------------------------------------------------- general English

_WORDNET, _FORTUNES = Path("/usr/share/wordnet"), Path("/usr/share/games/fortunes")
_ALLOWED = re.compile(r"[A-Za-z0-9 ,.!?';:\-]+")
_LONGEST = 110  # characters


def general(seed: int) -> list[str]:
    """Sentences of the example sentences of WordNet and of the fortunes, each once, shuffled."""
    found: dict[str, None] = {}
    for name in ("adj", "adv", "noun", "verb"):
        for line in (_WORDNET / f"data.{name}").read_text(encoding="utf-8").splitlines():
            for example in re.findall(r'"([^"]+)"', line.partition("|")[2]):
                _keep(example, found)
    for name in ("computers", "cookie", "education", "food", "humorists", "kids", "law", "literature", "love", "medicine", "men-women",
                 "miscellaneous", "news", "people", "pets", "platitudes", "politics", "riddles", "science", "sports", "startrek", "wisdom", "work"):  # fmt: skip
        path = _FORTUNES / name
        if path.is_file():
            for quote in path.read_text(encoding="utf-8", errors="ignore").split("\n%\n"):
                for sentence in re.findall(r"[A-Z][^.!?]*[.!?]", " ".join(quote.split())):
                    _keep(sentence, found)
    texts = list(found)
    random.Random(seed).shuffle(texts)
    return texts


def lexicon(seed: int) -> list[str]:
    """Every single word of WordNet, most of them a few at a time, some alone; letters and numbers alone."""
    words: dict[str, None] = {}
    for name in ("adj", "adv", "noun", "verb"):
        for line in (_WORDNET / f"index.{name}").read_text(encoding="utf-8").splitlines():
            word = line.split(" ", 1)[0]
            if re.fullmatch("[a-z]{2,14}", word):
                words[word] = None
    order = list(words)
    pick = random.Random(seed)
    pick.shuffle(order)
    found = [letter.upper() for letter in "abcdefghijklmnopqrstuvwxyz"] + [str(number) for number in range(121)]
    found += [word + pick.choice((".", "", "!", "?")) for word in order[:2_500]]
    while order:
        some = [order.pop() for _ in range(min(len(order), pick.randrange(2, 6)))]
        text = pick.choice((", ", " ", " ")).join(some)
        found.append(text[0].upper() + text[1:] + ".")
    return list(dict.fromkeys(found))


def _keep(text: str, found: dict[str, None]) -> None:
    text = text.strip().replace("`", "'")
    if 3 < len(text) <= _LONGEST and _ALLOWED.fullmatch(text) and re.search("[a-z]{2}", text):
        if text[-1] not in ".!?":
            text = text[0].upper() + text[1:] + "."
        found[text] = None


def clips(kind: str, seed: int) -> Iterator[tuple[str, bool]]:
    """(text, held out) without repetition. Every 40th text is held out by its number, whatever the split in time."""
    seen: set[str] = set()
    sources = {"domain": domain, "general": general, "lexicon": lexicon}
    source = iter(sources[kind](seed))
    for text in source:
        if text.lower() not in seen:
            seen.add(text.lower())
            yield text, _hash(text) % 40 == 0


def _hash(text: str) -> int:
    return zlib.crc32(text.lower().rstrip(".!?").encode())
