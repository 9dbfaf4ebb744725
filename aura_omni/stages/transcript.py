"""From what the ASR model writes to a Transcript, and the languages it can be told.

The model writes `language English<asr_text>What is this?`, or `language None<asr_text>` when nobody speaks, or the text
alone when the prompt already forced a language.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aura_omni.errors import BadRequest, field_name, shown
from aura_omni.flow import Transcript
from aura_omni.spacing import space_between
from aura_omni.stages.tokenizer import TextTokenizer

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


def language_name(value: str) -> str:
    """The model's name of a language given as English name or ISO 639 code, in any case, a region tag ignored.

    Raises BadRequest listing the 30 names.
    """
    spelling = value.strip().lower()
    name = _BY_SPELLING.get(spelling) or _BY_SPELLING.get(re.split("[-_]", spelling)[0])
    if name is None:
        raise BadRequest(
            f"{field_name('language')} {shown(value)} is not one that ASR knows; it must be one of {', '.join(LANGUAGES)}, or its ISO 639 code",
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


def transcript_of(ids: list[int], tokenizer: TextTokenizer, forced_language: str | None = None) -> Transcript:
    """What the ids that the model wrote say. Read when all are there: nobody hears of a transcript before."""
    tag = tokenizer.id(TEXT_TAG)
    if forced_language is None and tag in ids:
        at = ids.index(tag)
        text = tokenizer.decode(ids[:at]) + TEXT_TAG + tokenizer.decode(ids[at + 1 :])
    else:
        text = tokenizer.decode(ids)
    return parse_transcript(text, forced_language)


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
