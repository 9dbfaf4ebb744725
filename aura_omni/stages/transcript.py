"""From what the ASR model writes to a Transcript, whole or as it comes, and the languages it can be told.

The model writes `language English<asr_text>What is this?`, or `language None<asr_text>` when nobody speaks, or the text
alone when the prompt already forced a language.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aura_omni.errors import BadRequest
from aura_omni.flow import Transcript
from aura_omni.spacing import space_between
from aura_omni.stages.tokenizer import Detokenizer, TextTokenizer

TEXT_TAG = "<asr_text>"

# The names the model was trained with, by ISO 639 code.
_LANGUAGES = {
    "ar": "Arabic",
    "yue": "Cantonese",
    "zh": "Chinese",
    "cs": "Czech",
    "da": "Danish",
    "nl": "Dutch",
    "en": "English",
    "fil": "Filipino",
    "fi": "Finnish",
    "fr": "French",
    "de": "German",
    "el": "Greek",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "mk": "Macedonian",
    "ms": "Malay",
    "fa": "Persian",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "es": "Spanish",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "vi": "Vietnamese",
}
LANGUAGES = tuple(_LANGUAGES.values())
_BY_SPELLING = {name.lower(): name for name in LANGUAGES} | _LANGUAGES | {"tl": "Filipino"}

_HEAD = "language "
_LONGEST_HEAD = 50  # characters; the longest real one has 19


def language_name(value: str) -> str:
    """The model's name of a language given as English name or ISO 639 code, in any case, a region tag ignored.

    Raises BadRequest listing the 30 names.
    """
    spelling = value.strip().lower()
    name = _BY_SPELLING.get(spelling) or _BY_SPELLING.get(re.split("[-_]", spelling)[0])
    if name is None:
        raise BadRequest(
            f"language {value!r} is not one that ASR knows; it must be one of {', '.join(LANGUAGES)}, or its ISO 639 code",
            param="language",
        )
    return name


def parse_transcript(text: str, forced_language: str | None = None) -> Transcript:
    """The model's whole output, with TEXT_TAG spelled out, as a Transcript.

    Runaway repetitions are collapsed first. With a forced language everything is text. Without a tag everything is text
    of unknown language, but for a bare `language English`: that is a head whose text never came.
    """
    text = _without_repetitions(text.strip())
    if forced_language is not None:
        return Transcript(text, forced_language)
    head, tag, tail = text.partition(TEXT_TAG)
    if not tag:
        bare = text.removeprefix(_HEAD)
        if bare != text and (bare in LANGUAGES or bare == "None"):
            return Transcript("", None)
        return Transcript(text)
    return Transcript(tail.strip(), _language_of(head))


def joined(transcripts: Sequence[Transcript]) -> Transcript:
    """One Transcript of consecutive parts of a clip; languages in order, separated by commas, repeats left out.

    A space goes between two parts unless the writing on either side of the joint does without.
    """
    text, languages = "", list[str]()
    for part in transcripts:
        text += space_between(text, part.text) + part.text
        if part.language is not None and part.language not in languages[-1:]:
            languages.append(part.language)
    return Transcript(text, ",".join(languages) or None, all(part.complete for part in transcripts))


def before_stop(transcript: Transcript, stop: Sequence[str]) -> tuple[Transcript, bool]:
    """The transcript cut before the first of the stop strings, and whether there was one. What is cut off needs no end."""
    ends = [at for word in stop if (at := transcript.text.find(word)) >= 0]
    if not ends:
        return transcript, False
    return Transcript(transcript.text[: min(ends)].rstrip(), transcript.language), True


class TranscriptReader:
    """Token ids in, text deltas out, for one output of the model.

    Nothing comes out while it can still be a head. Joined deltas are `transcript().text`, except that a runaway
    repetition is only collapsed in the whole, and that a tag after 50 characters of text is overlooked in the deltas.
    """

    def __init__(self, tokenizer: TextTokenizer, forced_language: str | None = None) -> None:
        self._tokenizer, self._forced = tokenizer, forced_language
        self._tag = tokenizer.id(TEXT_TAG)
        self._ids: list[int] = []
        self._detokenizer = Detokenizer(tokenizer)
        self._in_head = forced_language is None
        self._held = ""  # what may be a head, or white space that may be the end
        self._begun = False

    def push(self, token: int) -> str:
        """The delta that this id completes; often empty."""
        self._ids.append(token)
        if self._in_head and token == self._tag:
            self._in_head, self._held = False, ""
            self._detokenizer = Detokenizer(self._tokenizer)
            return ""
        self._held += self._detokenizer.push(token)
        if self._in_head and _may_be_head(self._held):
            return ""
        self._in_head = False
        return self._release()

    def flush(self) -> str:
        """The last delta, when no more ids come."""
        if self._in_head:
            return self.transcript().text
        self._held += self._detokenizer.flush()
        return self._release()

    def transcript(self) -> Transcript:
        """What all ids so far say."""
        ids = self._ids
        if self._forced is None and self._tag in ids:
            at = ids.index(self._tag)
            text = self._tokenizer.decode(ids[:at]) + TEXT_TAG + self._tokenizer.decode(ids[at + 1 :])
        else:
            text = self._tokenizer.decode(ids)
        return parse_transcript(text, self._forced)

    def _release(self) -> str:
        """All held text but white space at the start of the transcript and, for now, at its end."""
        text = self._held if self._begun else self._held.lstrip()
        body = text.rstrip()
        self._begun = self._begun or bool(body)
        self._held = text[len(body) :]
        return body


def _may_be_head(text: str) -> bool:
    text = text.lstrip().lower()
    line = text.rstrip()  # a head may end in a line break, but has no second line
    return _HEAD.startswith(text) or (text.startswith(_HEAD) and len(text) <= _LONGEST_HEAD and "\n" not in line)


def _language_of(head: str) -> str | None:
    """The language that the first line of a head names; the model's "None" is no language."""
    lines = [line.strip() for line in head.splitlines() if line.strip()]
    if not lines or not lines[0].lower().startswith(_HEAD):
        return None
    name = lines[0][len(_HEAD) :].strip().capitalize()
    return None if name == "None" else name or None


def _without_repetitions(text: str) -> str:
    """A character more than 20 times in a row is written once; then so is a pattern of up to 20 characters 20 or more
    times in a row, if it starts at least 40 characters before the end (as the published package has it)."""
    text = re.sub(r"(?s)(.)\1{20,}", r"\1", text)
    return re.sub(r"(?s)(?=.{40})(.{1,20}?)\1{19,}", r"\1", text)
