"""Reading AURA's answer: token ids in, text that may leave out, and the decision to be silent.

Knows ids and text; nothing of voices, turns or the engine. The rules:

* Silent is an answer that starts with the marker or the end of the message, or that ends by itself without anything worth
  showing: empty, white space, punctuation (a stray " ﹑" is what a long session drifts into). One that was cut before it
  showed anything is no choice: its text is empty.
* The marker, ChatML markers and think blocks are never part of the text, spelled as control tokens or letter by letter.
* Text leaves as soon as it cannot turn into one of these, nor into a stop string.

    reader = AnswerReader(tokenizer, silent_text="<|silent|>", stop=sampling.stop)
    for token in ids:
        delta = reader.push(token)     # "" while nothing may leave
    delta = reader.end(chosen=True)    # then reader.decision is "speak" or "silent"
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Literal

from aura_omni.stages.tokenizer import Detokenizer, TextTokenizer

Decision = Literal["silent", "speak"]

THINK, END_THINK = "<think>", "</think>"
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


class AnswerReader:
    """One answer. Not thread-safe; push it from one place.

    decision  None until it is known; "silent" as soon as the first token says so, "speak" with the first delta
    stopped   True once a stop string was met: the text is complete and the generation can be cancelled
    """

    def __init__(self, tokenizer: TextTokenizer, *, silent_text: str | None, stop: tuple[str, ...] = ()) -> None:
        markers = (*CHATML, silent_text) if silent_text else CHATML
        ends = (*CHATML[1:], silent_text) if silent_text else CHATML[1:]
        self._ends = {tokenizer.find(marker) for marker in ends}
        self._tags = {tokenizer.find(tag): tag for tag in (THINK, END_THINK)}
        self._detokenizer = Detokenizer(tokenizer)
        self._cleaner = _Cleaner(markers)
        self._stopper = _Stopper(stop)
        self._held = ""  # clean text without anything worth showing so far
        self.decision: Decision | None = None

    @property
    def stopped(self) -> bool:
        return self._stopper.met

    @property
    def _waiting(self) -> str:
        """All text that has not left, whatever holds it."""
        return self._held + self._stopper.held + self._cleaner.held

    def push(self, token: int) -> str:
        """The text that this token lets leave. Delta."""
        if self.decision == "silent" or self.stopped:
            return ""
        if token in self._ends and self.decision is None and not _shows(self._waiting):
            self.decision = "silent"
            return ""
        if token in self._tags:
            text = self._detokenizer.flush() + self._tags[token]
        else:
            text = self._detokenizer.push(token)
        return self._leave(self._stopper.push(self._cleaner.push(text)))

    def end(self, *, chosen: bool) -> str:
        """What was still held back, now that no token follows. Settles the decision.

        chosen: the model ended the answer, neither a budget nor a stop of the request did.
        """
        if self.decision == "silent":
            return ""
        text = ""
        if not self.stopped:
            text = self._stopper.push(self._cleaner.push(self._detokenizer.flush()) + self._cleaner.end())
            text += self._stopper.end()
        text = self._held + text
        if self.decision is None:
            text = text.lstrip()
            shows = _shows(text)
            self.decision = "silent" if chosen and not self.stopped and not shows else "speak"
            text = text if shows else ""
        self._held = ""
        return text if self.decision == "speak" else ""

    def _leave(self, text: str) -> str:
        if self.decision == "speak":
            return text
        self._held = (self._held + text).lstrip()
        if not speakable(self._held):
            return ""
        self.decision = "speak"
        text, self._held = self._held, ""
        return text


class _Cleaner:
    """Takes markers and think blocks out of a text in pieces, also those that come into being when another one is taken out."""

    def __init__(self, markers: Iterable[str]) -> None:
        self._tags = (*markers, THINK, END_THINK)
        self.held = ""  # the start of what may become a tag
        self._thought: str | None = None  # inside a think block: its end so far

    def push(self, text: str) -> str:
        while text:
            if self._thought is not None:
                inside, closed, text = (self._thought + text).partition(END_THINK)
                self._thought = None if closed else inside[-len(END_THINK) + 1 :]
                continue
            self.held += text
            text = ""
            found = _first(self.held, self._tags)
            if found is not None:
                at, tag = found
                self.held, text = self.held[:at], self.held[at + len(tag) :]
                if tag == THINK:
                    self._thought = ""
        start = len(self.held)
        # Not only the last start of a tag: when that tag is complete and gone, the one before may go on ("<|sil<think>").
        while size := _open(self.held[:start], self._tags):
            start -= size
        ready, self.held = self.held[:start], self.held[start:]
        return ready

    def end(self) -> str:
        """The held start of a tag that never came. An unclosed think block is dropped."""
        ready, self.held = self.held, ""
        return ready


class _Stopper:
    """Cuts the text before the first stop string, as vLLM does, and holds back what may be the start of one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self.held = ""
        self.met = False

    def push(self, text: str) -> str:
        if self.met:
            return ""
        self.held += text
        found = _first(self.held, self._stop)
        if found is not None:
            self.met = True
            ready, self.held = self.held[: found[0]], ""
            return ready
        keep = _open(self.held, self._stop)
        ready, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return ready

    def end(self) -> str:
        ready, self.held = self.held, ""
        return ready


def _first(text: str, words: Iterable[str]) -> tuple[int, str] | None:
    """Where the earliest of the words starts, and which it is."""
    found = [(at, word) for word in words if (at := text.find(word)) >= 0]
    return min(found) if found else None


def _open(text: str, words: Iterable[str]) -> int:
    """Length of the longest end of text that is the start of one of the words, without being all of it."""
    return max(
        (size for word in words for size in range(1, min(len(word), len(text) + 1)) if text.endswith(word[:size])),
        default=0,
    )


def speakable(text: str) -> bool:
    """Whether it holds a letter, digit or character of any script."""
    return any(unicodedata.category(character)[0] in "LN" for character in text)


def _shows(text: str) -> bool:
    """Whether it holds anything beyond white space and punctuation. An emoji counts: it is an answer, though unspoken."""
    return speakable(text) or any(unicodedata.category(mark) == "So" and mark != "\ufffd" for mark in text)
