"""Clips to the rows that the Talker reads, in the layout of `stages.talker_prompt` (a test compares the two)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from aura_omni.nano.published import LANGUAGES
from training.tts import shape
from training.tts.corpus import Corpus
from training.tts.speakers import SPEAKERS

PAD, BOS, EOS, NO_THINK, THINK, THINK_BOS, THINK_EOS = 2148, 2149, 2150, 2155, 2154, 2156, 2157
IGNORE = -100
MOST_SPOKEN = 3_072  # frames of a batch that the code predictor learns from


@dataclass
class Batch:
    """All [B, L]: text ids; codec ids of control rows (-1: none); frame, the flat number of the frame whose codes the row adds
    (-1: none); target, the codec id that the row must predict (-100: none), and next_frame, the frame it belongs to (-1: none)."""

    text: Tensor
    codec: Tensor
    frame: Tensor
    target: Tensor
    next_frame: Tensor
    wanted: Tensor  # int64 [n], the flat rows that have a target
    spoken: Tensor  # int64 [m], those whose frame has acoustic codes, at most MOST_SPOKEN of them

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.text, self.codec, self.frame, self.target, self.next_frame, self.wanted, self.spoken)

    def to(self, device: torch.device) -> Batch:
        return Batch(*(part.to(device, non_blocking=True) for part in self.parts))


class Rows:
    def __init__(self, tokenizer: Tokenizer) -> None:
        plain = Tokenizer.from_str(tokenizer.to_str())
        ids = shape.ids_of(tokenizer)
        self._tokenizer = plain
        self.pad, self.bos, self.eos = ids["<tts_pad>"], ids["<tts_text_bos>"], ids["<tts_text_eod>"]
        self.role = [ids["<|im_start|>"], *tokenizer.encode("assistant\n", add_special_tokens=False).ids]
        self._speakers = [shape.SPEAKER_IDS[voice.name] for voice in SPEAKERS]

    def tokens(self, text: str, *, dropout: float = 0.0) -> list[int]:
        self._tokenizer.model.dropout = dropout or None
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, speaker: int, *, tagged: bool) -> tuple[list[int], list[int]]:
        """Text and codec ids of the rows before the text."""
        if tagged:
            tags = [THINK, THINK_BOS, LANGUAGES["english"], THINK_EOS]
        else:
            tags = [NO_THINK, THINK_BOS, THINK_EOS]
        codec = [-1] * len(self.role) + tags + [self._speakers[speaker], PAD]
        return self.role + [self.pad] * (len(tags) + 1) + [self.bos], codec

    def batch(
        self,
        corpus: Corpus,
        numbers: Sequence[int],
        random: np.random.Generator,
        *,
        spoken_from: int,
        dropout: float = 0.1,
        streaming: float = 0.5,
    ) -> Batch:
        """spoken_from: the first frame that has acoustic codes; streaming: the share of clips whose text comes beside the frames, one piece a row, and not before them."""
        rows = []
        for number in numbers:
            text, codec = self.prompt(int(corpus.speaker[number]), tagged=random.random() < 0.5)
            body = [*self.tokens(corpus.texts[number], dropout=dropout if random.random() < 0.5 else 0.0), self.eos]
            codes = corpus.clip(number).astype(np.int64)
            count = len(codes)
            if random.random() < streaming:
                beside = (body + [self.pad] * (count + 1))[: count + 1]
            else:
                text, codec = text + body, codec + [PAD] * len(body)
                beside = [self.pad] * (count + 1)
            before = len(text)
            frames = np.arange(corpus.starts[number], corpus.starts[number + 1])
            none = [-1] * before
            rows.append(
                (
                    text + beside,
                    codec + [BOS] + [-1] * count,
                    np.concatenate((none, [-1], frames)),
                    np.concatenate(([IGNORE] * before, codes, [EOS])),
                    np.concatenate((none, frames, [-1])),
                )
            )
        length = max(len(row[0]) for row in rows)
        made = []
        for part, fill in enumerate((self.pad, -1, -1, IGNORE, -1)):
            table = np.full((len(rows), length), fill, dtype=np.int64)
            for row, values in enumerate(rows):
                table[row, : len(values[part])] = values[part]
            made.append(torch.from_numpy(table))
        frame = made[4].flatten()
        spoken = (frame >= spoken_from).nonzero()[:, 0]
        if len(spoken) > MOST_SPOKEN:
            spoken = spoken[torch.from_numpy(random.permutation(len(spoken))[:MOST_SPOKEN])]
        return Batch(*made, wanted=(made[3].flatten() != IGNORE).nonzero()[:, 0], spoken=spoken)


def batches_by_length(corpus: Corpus, numbers: np.ndarray, rows: int, random: np.random.Generator) -> list[np.ndarray]:
    """All of `numbers` once, in random batches of about `rows` frames, each of clips of similar length."""
    length = corpus.starts[numbers + 1] - corpus.starts[numbers] + 20
    order = numbers[np.argsort(length + random.uniform(0, 6, len(numbers)))]
    length = corpus.starts[order + 1] - corpus.starts[order] + 20
    made, start = [], 0
    while start < len(order):
        stop = start
        while stop < len(order) and (stop + 1 - start) * length[start : stop + 1].max() <= rows:
            stop += 1
        stop = max(stop, start + 1)
        made.append(order[start:stop])
        start = stop
    random.shuffle(made)
    return made
