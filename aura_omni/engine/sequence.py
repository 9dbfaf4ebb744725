"""One generation in the engine: its tokens, its pages, and what its stage model keeps beside it.

Knows token ids and pages. Knows neither tensors nor text; `state` belongs to the stage model and is opaque here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from aura_omni.flow import Sampling

_GREEDY = Sampling(temperature=0.0)

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Rows [start, start + length) of the prompt come from a medium; key is the hash of its content and options.

    The spans of a sequence are in order and do not overlap.
    """

    start: int
    length: int
    key: bytes


@dataclass(slots=True, eq=False)
class Beginning:
    """The first rows of a sequence, when later ones begin with the same rows and media: keys of their pages are computed once.

    like: what it begins with itself. Made on any thread, used on the engine's.
    """

    rows: int
    like: Beginning | None = None
    page_size: int = 0
    keys: list[bytes] = field(default_factory=list)  # of its full pages, as far as the cache has asked

    def longer(self, rows: int) -> Beginning:
        """Of more rows."""
        # What was never used leads on to what it is like itself, so nothing is held that is out of use.
        return Beginning(rows, like=self if self.keys else self.like)

    def known(self, page_size: int) -> list[bytes]:
        if self.like is not None:
            self.learn(self.like.known(page_size)[: self.like.rows // page_size], page_size)
            self.like = None
        return self.keys if page_size == self.page_size else []

    def learn(self, keys: list[bytes], page_size: int) -> None:
        """keys: of the pages of a sequence that begins like this."""
        if page_size != self.page_size or len(self.keys) < min(len(keys), self.rows // page_size):
            self.page_size, self.keys = page_size, keys[: self.rows // page_size]


@dataclass(slots=True, eq=False)
class Sequence:
    """tokens: prompt ids, then sampled ids; with `media` they are also the key of the prefix cache.

    on_output gets what the stage model made of one step (a token id; for the Talker a frame of 16 codes).
    on_end is called exactly once, after the pages are free: reason, and the error when reason is "error".
    Both are called on the engine thread.
    """

    tokens: list[int]
    sampling: Sampling
    on_output: Callable[[Any], None]
    on_end: Callable[[FinishReason, Exception | None], None]
    stop_ids: frozenset[int] = frozenset()  # of the stage; sampling.stop_token_ids come on top
    media: tuple[MediaSpan, ...] = ()
    beginning: Beginning | None = None
    state: Any = None
    inner: Sampling = _GREEDY  # of what the stage draws besides the id (Talker: codebooks 1..15)
    cacheable: bool = True  # False: rows are not a function of tokens and media (Talker)
    priority: float = 0  # lower goes first
    blocked: bool = False  # set by the stage: its next row is not known yet, so it must not be stepped
    open: bool = False  # the end of its prompt is not known: nobody waits for it, it draws nothing (`ArRunner.close`)
    only_read: bool = False  # open, and it ends as soon as others can find its rows in the prefix cache
    lasts_until_s: float = -math.inf  # on the clock: whoever listens has enough until then of what it has made
    paused: bool = False  # for that reason, since its last output; its listener takes it back
    carried: bool = False  # its next row is in its seat; the stage takes it back where that row will not do

    # Kept by the engine
    id: int = -1
    seed: int = 0
    prompt_length: int = field(init=False)
    computed: int = 0  # rows whose keys and values are in pages
    cached: int = 0  # rows of the prompt that were found in the prefix cache and not computed
    preempted: int = 0  # how often its pages were taken away and its rows had to be computed again
    seat: int = -1  # while it runs
    pages: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)  # of its full pages, as far as the cache has asked
    finished: FinishReason | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step: of sequences[i], rows [starts[i], starts[i] + counts[i]), one sequence after another."""

    sequences: tuple[Sequence, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def tokens(self) -> list[int]:
        """The token ids of all rows, in batch order."""
        return [
            token
            for sequence, start, count in zip(self.sequences, self.starts, self.counts, strict=True)
            for token in sequence.tokens[start : start + count]
        ]

    def sampled(self) -> list[int]:
        """Indices of the sequences whose last row is in this step, so that it yields a next token."""
        return [
            index
            for index, (sequence, start, count) in enumerate(zip(self.sequences, self.starts, self.counts, strict=True))
            if start + count == sequence.length and not sequence.open
        ]

    def part(self, indices: Iterable[int]) -> Batch:
        """The rows of the sequences at these indices."""
        chosen = list(indices)
        return Batch(
            tuple(self.sequences[index] for index in chosen),
            tuple(self.starts[index] for index in chosen),
            tuple(self.counts[index] for index in chosen),
        )

    @classmethod
    def of(cls, *batches: Batch) -> Batch:
        """One after another."""
        parts = [(batch.sequences, batch.starts, batch.counts) for batch in batches]
        return cls(*(tuple(chain.from_iterable(part)) for part in zip(*parts, strict=True)))

    def split(self) -> list[Batch]:
        """The same rows, each sequence in a batch of its own."""
        return [self.part([index]) for index in range(len(self.sequences))]
