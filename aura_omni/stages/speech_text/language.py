"""Which language a text is in, as far as it has come.

By script where that decides: kana, hangul, Cyrillic, Han. Among languages in Latin letters by their most common words. Where
none of them stands, letters that English has are taken for English, unless what came before was in another script; where two
languages are level, and beside letters that English does not have, there is no answer. Addresses, file names and versions are
of no language: the "com" of example.com is no Portuguese. It is used to choose how numbers are read, and a number that is
left as it is written does less harm than one that is read in the wrong language.
"""

from __future__ import annotations

import re
from collections import Counter

_COMMON = {
    "english": """the of and is are were you your that this these with for have has had not be been will would can could
        should what when where which who how there they their we our from by it its it's i'm don't my she his her but or than
        then about just please hello thanks thank yes to at an a i as do no so in on me come""",
    "german": """der die das und ist nicht ein eine einen ich du sie wir mit auf für dem den des von zu zum im auch wie es sind
        war wird haben hat aber oder um am an hallo guten danke bitte ja nein kostet kosten habe kann gibt noch nur schon sehr
        heute morgen uhr mein meine kein keine bei nach vor bis aus sich wenn""",
    "french": """le la les des et est une un vous je nous pas que qui dans pour sur avec ce c'est il elle au aux du de en à
        bonjour salut merci oui tu ne ça coûte coûtent mon mes suis sont avez très bien où quand combien heures j'ai""",
    "spanish": """el la los las y es un una que de en no por con para se lo su como más está del al hola gracias sí cuesta
        cuestan tengo tiene hay muy bien cuando pero porque mi tu este esta años horas""",
    "italian": """il lo la gli e è un una che di non per con sono come si della del nel alle da i ciao grazie sì costa
        costano ho ha molto bene quando ma perché mi ti questo questa anni""",
    "portuguese": """o a os as e é um uma que de não por com para se em do da dos no na como mais está olá obrigado obrigada
        sim custa custam tenho tem muito bem quando mas porque meu minha você isso são anos horas""",
}
_LANGUAGES: dict[str, list[str]] = {}
for _language, _words in _COMMON.items():
    for _word in _words.split():
        _LANGUAGES.setdefault(_word, []).append(_language)
_KANA, _HANGUL, _CYRILLIC = re.compile("[\u3041-\u30ff]"), re.compile("[\uac00-\ud7a3]"), re.compile("[\u0400-\u04ff]")
_ENOUGH_HAN = 20  # characters; a sentence
_HAN, _LATIN = re.compile("[\u3400-\u9fff]"), re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")


# What is written in Latin letters without a space, and the signs that join its parts where it is an address or a file's name.
_JOINTS = r"[.@/\\:?=&#~_]"
_RUN = re.compile(rf"[^\W_\u0370-\U0003ffff]+(?:(?:['’+%-]|{_JOINTS}+)[^\W_\u0370-\U0003ffff]+)*")
_JOINED = re.compile(rf"{_JOINTS}|\d")


class LanguageGuess:
    """Text in, the best guess so far out."""

    def __init__(self, prior: str | None = None) -> None:
        """prior: the guess as long as the text itself speaks for none."""
        self._prior = prior
        self._letters: Counter[str] = Counter()  # of scripts; Latin ones count by words
        self._words: Counter[str] = Counter()  # common ones, by language
        self._foreign = 0  # Latin words with letters that English does not have

    def add(self, text: str) -> None:
        """Whole words; a cut word is counted as two."""
        for script, pattern in (("japanese", _KANA), ("korean", _HANGUL), ("russian", _CYRILLIC), ("chinese", _HAN)):
            self._letters[script] += len(pattern.findall(text))
        for word in (word for run in _RUN.findall(text) if not _JOINED.search(run) for word in _LATIN.findall(run)):
            self._letters["latin"] += 2
            self._foreign += not word.replace("’", "'").isascii()
            for language in _LANGUAGES.get(word.lower().replace("’", "'"), ()):
                self._words[language] += 1

    @property
    def language(self) -> str | None:
        """Lower-case English name; None while nothing speaks for one more than for the others."""
        if not self._letters.total():
            return self._prior
        kana, han = self._letters["japanese"], self._letters["chinese"]
        if kana * 8 > han and kana + han > self._letters["latin"]:
            return "japanese"
        script = max(self._letters, key=self._letters.__getitem__)
        if script == "chinese" and self._prior == "japanese" and han < _ENOUGH_HAN:
            return "japanese"  # the first words may be written without kana
        return self._latin() if script == "latin" else script

    def _latin(self) -> str | None:
        if self._prior is not None:
            unsure = self._prior if self._prior in _COMMON else None
        else:
            unsure = "english" if not self._foreign and not self._spoken_for_others() else None
        ranked = self._words.most_common(2)
        if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
            return unsure
        language, count = ranked[0]
        return unsure if language == "english" and count <= self._foreign else language

    def _spoken_for_others(self) -> bool:
        """Whether the most common words are those of other languages alone."""
        return self._words["english"] < max(self._words.values(), default=0)


def guess(text: str) -> str | None:
    """Of a whole text."""
    found = LanguageGuess()
    found.add(text)
    return found.language
