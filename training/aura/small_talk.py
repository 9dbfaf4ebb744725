"""What people say that is not about the picture: greetings, questions about the assistant, the rest of the world, and noise."""

from __future__ import annotations

from random import Random

from training.aura.words import expand

OUTSIDE = "I can only talk about the simple shapes and colours I see."
NO_PICTURE = "I do not see any picture."
ABILITIES = "I can tell you about shapes, colours, numbers, places and movement, and I can watch for things."
ME = "I am a small assistant for shapes and colours."

TALK = (
    ("[hello|hi|hey|good morning|good evening|good afternoon|hi there|hello there|hey there|hello aura|greetings|hello hello]", "Hello! Ask me about the shapes you show me."),
    ("[how are you|how are you doing|how do you do|how is it going|are you okay|how are you today]", "I am fine, thank you."),
    ("[thanks|thank you|thank you very much|thanks a lot|many thanks|thank you so much|great thanks]", "You are welcome."),
    ("[bye|goodbye|bye bye|see you|see you later|good night|have a nice day]", "Goodbye!"),
    ("[who are you|what are you|what is your name|what's your name|are you a robot|are you human|are you a person|who is this|introduce yourself|are you an ai|tell me about yourself]", ME),
    ("[what can you do|what can i ask[| you]|how can you help[| me]|help|help me|can you help me|what do you know|what are you able to do|what are your abilities|what should i ask you|how does this work|what are you good at|what can you tell me]", ABILITIES),
    ("[can you hear me|do you hear me|are you listening|are you there|is this working|test|testing|hello can you hear me|are you awake]", "Yes, I can hear you."),
    ("[okay|ok|good|great|nice|well done|very good|perfect|cool|good job|all right|alright|wonderful|that is right|correct|excellent|yes|no|i see|fine]", "Okay."),
)  # fmt: skip

_NOUNS = (
    "weather", "time", "president", "capital of france", "news", "football game", "stock market", "dog", "cat", "car", "house", "tree",
    "person", "man", "woman", "baby", "phone", "computer", "music", "song", "movie", "book", "food", "pizza", "coffee", "breakfast",
    "meaning of life", "price of gold", "population of china", "distance to mars", "history of rome", "king of spain", "train station",
    "nearest restaurant", "recipe for bread", "temperature outside", "date today", "traffic", "war", "winner of the election",
    "best phone", "internet", "airport", "hospital", "doctor", "teacher", "school", "homework", "mathematics", "physics", "ocean",
    "mountain", "river", "tallest building", "fastest car", "bicycle", "airplane", "bird", "horse", "elephant", "lion", "fish", "table",
    "chair", "window", "door", "lamp", "shirt", "shoe", "hat", "bottle", "cup", "key", "money", "bank", "job", "company", "world cup",
    "laptop", "camera", "email", "letter", "language", "translation", "poem", "joke", "story", "secret", "dream", "brother", "sister",
    "mother", "father", "wife", "husband", "friend", "age", "birthday", "holiday", "winter", "summer", "rain", "snow", "wind", "universe",
)  # fmt: skip
_VERBS = (
    "eat", "drink", "sleep", "run", "cook", "drive", "fly", "swim", "sing", "dance", "write", "read", "buy", "sell", "love", "hate", "play",
    "win", "lose", "build", "repair", "learn", "teach", "visit", "call", "travel to", "invest in", "clean", "open", "close", "fix", "paint",
)  # fmt: skip
_NAMES = (
    "london", "paris", "tokyo", "berlin", "china", "america", "india", "africa", "mars", "einstein", "shakespeare", "mozart", "napoleon",
    "google", "amazon", "john", "mary", "peter", "anna", "monday", "sunday", "christmas", "new york", "obama", "elvis", "python",
)  # fmt: skip
_OUTSIDE = (
    "what is the {n}", "what's the {n}", "who is the {n}", "where is the {n}", "how is the {n}", "tell me about the {n}", "is there a {n}",
    "do you see a {n}", "do you have a {n}", "do you know the {n}", "what do you think about the {n}", "how old is the {n}", "how much is the {n}",
    "when is the {n}", "why is the {n} so [big|old|expensive|slow|loud|good|bad]", "can you [find|show me|get me|describe] the {n}",
    "what colour is the {n}", "is the {n} red", "how many {n}s are there", "where can i buy a {n}", "is the {n} [nice|good|far away|open]",
    "who is {p}", "what is {p}", "where is {p}", "tell me about {p}", "when was {p} born", "how far is {p}", "do you know {p}", "do you like {p}",
    "what is the weather in {p}", "how do i get to {p}", "what time is it in {p}", "who invented the {n}", "can you {v}", "do you {v}",
    "how do i {v} a {n}", "should i {v} the {n}", "can you {v} the {n}", "please {v} my {n}", "i want to {v} a {n}", "i like the {n}",
    "what is {d} plus {e}", "what is {d} times {e}", "what is {d} minus {e}", "calculate {d} plus {e}", "count to {d}", "spell {n}",
    "tell me a [joke|story|secret|poem]", "sing [a song|something]", "what time is it", "what day is it", "what is the date", "how old are you",
    "where do you live", "where are you from", "are you hungry", "do you like me", "i am [tired|hungry|happy|sad|bored|late|cold]",
    "translate {n} into [french|german|spanish|chinese]", "write [a poem|an email|a letter] about the {n}", "set a timer for {d} minutes",
    "play [some music|a song|a game]", "turn on the [light|lamp|radio|television]", "call my {n}", "what did i {v} yesterday",
    "remind me to {v}", "my {n} is [broken|gone|new|great]", "the {n} is in the {m}", "{p} is a {n}", "when does the {n} {v}",
    "do you believe in {n}", "what would you {v}", "why do people {v}", "who won the {n}", "how tall is {p}", "order me a {n}",
    "it is [cold|hot|late|early|raining] today", "i have a {n} and a {m}", "what is the difference between a {n} and a {m}",
)  # fmt: skip
_DIGITS = (
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "twelve",
    "twenty",
    "fifty",
    "a hundred",
)
_NOISE = (
    "um",
    "uh",
    "hmm",
    "mm",
    "ah",
    "eh",
    "er",
    "uhm",
    "hm",
    "mhm",
    "oh",
    "um um",
    "uh huh",
    "ähm",
    "mmm",
    "huh",
    "umm",
    "uh uh",
    "erm",
)
_SYLLABLES = ("ba", "con", "der", "el", "fi", "gra", "hol", "in", "ja", "ker", "lo", "men", "no", "or", "pre", "qui", "ro", "sta", "tion", "ul", "ver", "wi", "yo", "zen", "ing", "ly", "ed")  # fmt: skip


def greeting(random: Random) -> tuple[str, str]:
    """(what is said, answer)."""
    template, answer = random.choice(TALK)
    return expand(random, template), answer


def outside(random: Random) -> tuple[str, str]:
    """(a question or remark that the small world has no answer for, the honest answer)."""
    kind = random.random()
    if kind < 0.06:  # words that nobody knows
        words = ["".join(random.choices(_SYLLABLES, k=random.randint(1, 3))) for _ in range(random.randint(2, 7))]
        return " ".join(words), OUTSIDE
    digits = random.sample(_DIGITS, 2)
    noun = random.choice(_NOUNS) if random.random() < 0.85 else "".join(random.choices(_SYLLABLES, k=2))
    text = expand(
        random,
        random.choice(_OUTSIDE),
        n=noun,
        m=random.choice(_NOUNS),
        v=random.choice(_VERBS),
        p=random.choice(_NAMES),
        d=digits[0],
        e=digits[1],
    )
    if kind < 0.12:
        text += f" and {random.choice(_VERBS)} the {random.choice(_NOUNS)}"
    return text, OUTSIDE


def noise(random: Random) -> str:
    """What a recogniser makes of nothing: an empty text or a filler. It wants no answer."""
    text = random.choice(_NOISE)
    style = random.random()
    if style < 0.35:
        return ""
    return text[0].upper() + text[1:] + random.choice(("", ".", "...")) if style < 0.7 else text


def is_noise(text: str) -> bool:
    """Whether a text is one of those that `noise` gives."""
    return not text or text.lower().rstrip(".") in _NOISE
