"""Clips to the rows that the Talker reads, in the layout of `stages.talker_prompt` (a test compares the two).

A row has one text id, and beside it a control id, the speaker's vector, or the codes of a frame. The text comes before the
frames, or beside them from the first one on. A clip in a voice of its own (Base) has the vector where a named speaker's id
is; two clips joined are also what continuing a reference looks like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from aura_omni.nano.published import LANGUAGES
from training.tts import shape
from training.tts.contour import BOOKS
from training.tts.corpus import NOBODY, Corpus, known
from training.tts.speakers import SPEAKERS

PAD, BOS, EOS, NO_THINK, THINK, THINK_BOS, THINK_EOS = 2148, 2149, 2150, 2155, 2154, 2156, 2157
IGNORE = -100


@dataclass
class Batch:
    """All [B, L]: text ids; codec ids of control rows (-1: none); frame, the flat number of the frame whose codes the row adds
    (-1: none); next_frame, the frame that the row must predict (-1: none); target, its book 0 or EOS (-100: none).
    voice int64 [B]: book 4 of a clip whose speaker row is a vector (-1: it has an id); voice_row int64 [B]: where that row is."""

    text: Tensor
    codec: Tensor
    frame: Tensor
    next_frame: Tensor
    target: Tensor
    voice: Tensor
    voice_row: Tensor


class Rows:
    def __init__(self, tokenizer: Tokenizer) -> None:
        plain = Tokenizer.from_str(tokenizer.to_str())
        ids = shape.ids_of(tokenizer)
        self._tokenizer = plain
        self.pad, self.bos, self.eos = ids["<tts_pad>"], ids["<tts_text_bos>"], ids["<tts_text_eod>"]
        self.role = [ids["<|im_start|>"], *tokenizer.encode("assistant\n", add_special_tokens=False).ids]
        self.speakers = [shape.SPEAKER_IDS[voice.name] for voice in SPEAKERS]

    def tokens(self, texts: Sequence[str], *, dropout: float = 0.0) -> list[list[int]]:
        self._tokenizer.model.dropout = dropout or None
        return [found.ids for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def prompt(self, speaker: int, *, tagged: bool) -> tuple[list[int], list[int]]:
        """Text and codec ids of the rows before the text. speaker: NOBODY for a voice of its own (-1 in its row)."""
        tags = [THINK, THINK_BOS, LANGUAGES["english"], THINK_EOS] if tagged else [NO_THINK, THINK_BOS, THINK_EOS]
        who = -1 if speaker == NOBODY else self.speakers[speaker]
        codec = [-1] * len(self.role) + tags + [who, PAD]
        return self.role + [self.pad] * (len(tags) + 1) + [self.bos], codec


class Deck:
    """All clips on one device, and batches of them made there, without the host: everything in a batch is drawn on the device."""

    def __init__(
        self, corpus: Corpus, rows: Rows, device: torch.device, *, spellings: int = 4, dropout: float = 0.1
    ) -> None:
        """spellings: ways of cutting each text into pieces; the first is the one without dropout."""
        self.rows, self.device, self.spellings = rows, device, spellings
        found = [rows.tokens(corpus.texts, dropout=dropout if n else 0.0) for n in range(spellings)]
        flat = [np.array([*way[clip], rows.eos]) for clip in range(len(corpus)) for way in found]
        sizes = np.array([len(ids) for ids in flat])
        self.length = corpus.starts[1:] - corpus.starts[:-1] + sizes.reshape(-1, spellings).max(1) + len(rows.role) + 7

        def put(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(device)

        self._ids, self._sizes = put(np.concatenate(flat)), put(sizes)
        self._begins = put(np.cumsum(sizes) - sizes)
        self._first, self._count = put(corpus.starts[:-1]), put(np.diff(corpus.starts))
        self._speaker = put(np.array([-1 if who == NOBODY else rows.speakers[who] for who in corpus.speaker]))
        self.codes = torch.from_numpy(known(corpus.codes, unknown=True)).to(device)  # -1 where not known
        self._voice = self.codes[self._first, BOOKS]
        tags = [[NO_THINK, THINK_BOS, THINK_EOS, 0], [THINK, THINK_BOS, LANGUAGES["english"], THINK_EOS]]
        self._tags, self._role = torch.tensor(tags, device=device), torch.tensor(rows.role, device=device)

    def batch(
        self, clips: Tensor, length: int, *, streaming: float = 0.5, vectors: float = 0.3, plain: bool = False
    ) -> Batch:
        """clips int64 [B] on the device; length: rows, at least every clip's own. plain: as in a test, nothing drawn.

        streaming: share of clips whose text comes beside the frames; vectors: of clips of named speakers that have a vector instead.
        """
        device, b = self.device, len(clips)
        chance = torch.rand(4, b, device=device)
        if plain:
            chance = torch.ones_like(chance)
        # No torch.where between a tensor and a number below: it copies the number from the host, which no graph may.
        tagged, beside = (chance[0] < 0.5).long(), chance[1] < streaming
        spelling = (chance[2] * 2 * self.spellings).long().masked_fill(chance[2] >= 0.5, 0)
        way = clips * self.spellings + spelling.clamp_max(self.spellings - 1)
        speaker = self._speaker[clips].masked_fill(chance[3] < vectors, -1)
        row = torch.arange(length, device=device)[None]
        head = len(self.rows.role)
        tags = (3 + tagged)[:, None]
        begin = head + tags + 2  # where the text begins
        size, count, first = self._sizes[way][:, None], self._count[clips][:, None], self._first[clips][:, None]
        bos = begin + size.masked_fill(beside[:, None], 0)
        at = row - begin
        words = self._ids[(self._begins[way][:, None] + at).clamp(0, len(self._ids) - 1)]
        text = words.masked_fill((at < 0) | (at >= size), self.rows.pad)
        text = text.masked_fill(row == begin - 1, self.rows.bos)
        text = torch.where(row < head, self._role[row.clamp_max(head - 1)], text)
        tag = self._tags[tagged].gather(1, (row - head).clamp(0, 3).expand(b, -1))
        codec = torch.full_like(text, -1).masked_fill((row >= begin - 1) & (row < bos), PAD)
        codec = torch.where((row >= head) & (row < head + tags), tag, codec)
        codec = torch.where(row == head + tags, speaker[:, None], codec)
        codec = codec.masked_fill(row == bos, BOS)
        told, wanted = row - bos - 1, row - bos
        frame = (first + told).masked_fill((told < 0) | (told >= count), -1)
        next_frame = (first + wanted).masked_fill((wanted < 0) | (wanted >= count), -1)
        target = self.codes[next_frame.clamp_min(0), 0].masked_fill(next_frame < 0, IGNORE)
        target = target.masked_fill(wanted == count, EOS)
        voice = self._voice[clips].masked_fill(speaker >= 0, -1)
        return Batch(text, codec, frame, next_frame, target, voice, (head + tags)[:, 0])


def chained(corpus: Corpus, wanted: int, random: np.random.Generator, *, longest: int, spoken: bool) -> Corpus:
    """Clips that are two or three training clips of one voice, one after the other, up to `longest` frames.

    spoken: in which all books are known, or those without sound.
    """
    known = corpus.codes[corpus.starts[:-1], 1] < shape.BOOK_ROWS
    pool = np.flatnonzero(~corpus.held_out & (known == spoken))
    key = corpus.speaker[pool].astype(np.int64) * 1_000 + corpus.codes[corpus.starts[pool], BOOKS]
    groups = [pool[key == value] for value in np.unique(key)]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return Corpus(
            [], *(np.zeros(0, dtype=np.int64),) * 3, np.zeros(1, dtype=np.int64), corpus.codes[:0], np.zeros(0)
        )
    share = np.array([len(group) for group in groups], dtype=float)
    texts, codes, speaker, domain = [], [], [], []
    for group in random.choice(len(groups), wanted, p=share / share.sum()):
        some: list[int] = []
        for clip in random.choice(groups[group], 3):
            room = sum(len(corpus.clip(n)) for n in [*some, clip]) <= longest
            if room and (not some or len(some) < random.integers(2, 4)):
                some.append(int(clip))
        texts.append(" ".join(corpus.texts[n] for n in some))
        codes.append(
            np.concatenate([corpus.clip(n)[:-1] for n in some] + [corpus.clip(some[0])[-1:]])
            if some
            else corpus.codes[:1]
        )
        speaker.append(corpus.speaker[some[0]] if some else 0)
        domain.append(bool(some) and bool(corpus.domain[some].all()))
    kept = [n for n, row in enumerate(codes) if len(row) > 1]
    return Corpus(
        [texts[n] for n in kept], np.array([speaker[n] for n in kept]), np.array([domain[n] for n in kept]),
        np.zeros(len(kept), dtype=bool), np.cumsum([0, *(len(codes[n]) for n in kept)]),
        np.concatenate([codes[n] for n in kept]), np.full(len(kept), -1),
    )  # fmt: skip
