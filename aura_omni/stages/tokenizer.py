"""Text to token ids and back, for one checkpoint.

Control tokens enter a prompt by id only (`ids["<|im_start|>"]`). Text from users, ASR and history goes through `encode`,
which knows no control tokens: "<|im_end|>" in it is seven ordinary characters and can inject nothing.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from aura_omni.engine.loader import Checkpoint
from aura_omni.errors import CheckpointError, PromptTooLong

# How Qwen2 splits text before byte-pair merging; part of the published tokenizer.json.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LONG = 4_096  # characters; from here on the time that encoding takes matters to other threads


class TextTokenizer:
    def __init__(self, full: Tokenizer, name: str) -> None:
        self._full = full
        self._name = name
        plain = json.loads(full.to_str())
        plain["added_tokens"] = []
        plain["post_processor"] = None
        self._plain = Tokenizer.from_str(json.dumps(plain))
        vocabulary = self._plain.get_vocab(with_added_tokens=False)
        # A token is spelled with one character per byte, so it stands for at most as many characters of text.
        self.longest_token_characters = max(map(len, vocabulary), default=1)
        self._pieces = hash(frozenset(vocabulary.items()))
        self.added: dict[int, AddedToken] = dict(full.get_added_tokens_decoder())

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> TextTokenizer:
        """From tokenizer.json, or from vocab.json + merges.txt + tokenizer_config.json (as Qwen3-TTS ships it)."""
        if checkpoint.has("tokenizer.json"):
            return cls._from(checkpoint, "tokenizer.json", _published)
        if not (checkpoint.has("vocab.json") and checkpoint.has("merges.txt")):
            raise CheckpointError(
                f"checkpoint {checkpoint.name} has neither tokenizer.json nor vocab.json and merges.txt"
            )
        added = checkpoint.parse(_added_tokens, "tokenizer_config.json")
        return cls._from(checkpoint, "vocab.json or merges.txt", lambda folder: _assembled(folder, added))

    @classmethod
    def _from(cls, checkpoint: Checkpoint, files: str, read: Callable[[Path], Tokenizer]) -> TextTokenizer:
        try:
            return cls(read(checkpoint.folder), checkpoint.name)
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(
                f"{files} of checkpoint {checkpoint.name} holds no tokenizer that can be read: {error}"
            ) from error

    @property
    def size(self) -> int:
        return self._full.get_vocab_size(with_added_tokens=True)

    def agrees_with(self, other: TextTokenizer) -> bool:
        """Whether ids of ordinary text mean the same to both."""
        return self._pieces == other._pieces

    def id(self, token: str) -> int:
        """The id of a control token. Raises CheckpointError when the tokenizer has none."""
        found = self._full.token_to_id(token)
        if found is None:
            raise CheckpointError(f"the tokenizer of {self._name} has no token {token!r}, which this stage needs")
        return found

    def find(self, token: str) -> int | None:
        return self._full.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Ordinary text; control tokens spelled out in it stay ordinary text."""
        if len(text) < _LONG:
            return self._plain.encode(text, add_special_tokens=False).ids
        # A batch, even of one, is encoded without the interpreter's lock, which 1 MB of text would hold for seconds.
        return self._plain.encode_batch([text], add_special_tokens=False)[0].ids

    def refuse_endless(self, texts: Iterable[str], *, limit: int, way_out: str, param: str = "messages") -> None:
        """Raises PromptTooLong when the texts together, whatever they say, are more than `limit` tokens.

        Costs next to nothing, unlike encoding them to find out. way_out: a sentence.
        """
        most = limit * self.longest_token_characters
        pieces = list(texts)
        characters = sum(map(len, pieces))
        if characters > most:
            characters = sum(len(unicodedata.normalize("NFC", piece)) for piece in pieces)  # which is what is encoded
        if characters > most:
            least = -(-characters // self.longest_token_characters)
            raise PromptTooLong(
                f"the text has {characters:,} characters, which are at least {least:,} tokens; "
                f"this model takes {limit:,}. {way_out}",
                param=param,
            )

    def decode(self, ids: list[int]) -> str:
        """Text of ids; control tokens and ids beyond the vocabulary come out as nothing, incomplete UTF-8 as U+FFFD."""
        return self._plain.decode([token for token in ids if token not in self.added], skip_special_tokens=False)


def _published(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _added_tokens(config: dict[str, Any]) -> list[tuple[int, AddedToken]]:
    """By id, from tokenizer_config.json."""
    added = config.get("added_tokens_decoder", {})
    return [
        (int(number), AddedToken(token["content"], normalized=False, special=token.get("special", False)))
        for number, token in sorted(added.items(), key=lambda item: int(item[0]))
    ]


def _assembled(folder: Path, added: list[tuple[int, AddedToken]]) -> Tokenizer:
    """What transformers makes of vocab.json and merges.txt. Raises ValueError for an added token that gets another id."""
    vocab, merges = models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    full = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    full.normalizer = normalizers.NFC()
    full.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    full.decoder = decoders.ByteLevel()
    for number, token in added:
        full.add_tokens([token])
        if full.token_to_id(token.content) != number:
            raise ValueError(f"added token {token.content!r} does not get its id {number}")
    return full


class Encoder:
    """Text in as it is written, ids out as soon as they are certain: joined, they are `encode` of the whole text.

    How a text is cut into tokens depends on what follows, but never across the end of a word: so all before the last place
    where a letter is followed by something else is certain, and a word leaves with the character behind it, or when it is
    known that such a one follows.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._open = ""  # text whose ids are not certain

    def push(self, text: str, *, apart: bool = False) -> list[int]:
        """apart: what follows the text begins neither with a letter nor with a mark that belongs to one."""
        seen = max(len(self._open), 1)  # no word ends before: it would have left
        self._open += text
        if apart and self._open[-1:].isalpha():
            return self.flush()
        for at in range(len(self._open) - 1, seen - 1, -1):
            after = self._open[at]
            # A combining mark belongs to the letter before it.
            if self._open[at - 1].isalpha() and not after.isalpha() and not unicodedata.category(after).startswith("M"):
                certain, self._open = self._open[:at], self._open[at:]
                return self._tokenizer.encode(certain)
        return []

    def flush(self) -> list[int]:
        """The rest, when no more text comes."""
        rest, self._open = self._open, ""
        return self._tokenizer.encode(rest) if rest else []


class Detokenizer:
    """Ids in, text deltas out. A delta never ends inside a character, and joined deltas equal `decode` of all ids."""

    _CONTEXT = 6  # ids decoded again with the new one, so that joints come out as in the whole

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # first id of the window
        self._sent = 0  # ids whose text is out

    def push(self, token: int) -> str:
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._start : self._sent])
        now = self._tokenizer.decode(self._ids[self._start :])
        if now.endswith("�"):
            return ""
        self._sent = len(self._ids)
        self._start = max(self._start, self._sent - self._CONTEXT)
        return now[len(before) :]

    def flush(self) -> str:
        """What is still held back, incomplete characters as U+FFFD."""
        before = self._tokenizer.decode(self._ids[self._start : self._sent])
        now = self._tokenizer.decode(self._ids[self._start :])
        self._sent = len(self._ids)
        self._start = self._sent
        return now[len(before) :]
