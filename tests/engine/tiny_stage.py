"""A stage model small enough for tests: an embedding, a decoder with random weights, a tied head; and its dense reference."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.engine.runner import ArRunner
from aura_omni.engine.sampler import Draw, pick
from aura_omni.engine.sequence import Batch, MediaSpan, Sequence
from aura_omni.engine.stage_model import Rows, StageModel
from aura_omni.flow import Sampling
from aura_omni.models.layers import DenseKV
from aura_omni.models.qwen3 import Decoder, DecoderConfig

VOCABULARY = 97
STOP = 96
GREEDY = Sampling(temperature=0.0, max_tokens=8)


class TinyStage(StageModel):
    """Rows of a medium are not the embeddings of their ids but a function of its key, as in ASR and AURA.

    With mrope, rows of a medium all have the same T, so positions are no function of the row's number either.
    """

    def __init__(
        self, *, seed: int = 0, mrope: bool = False, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        self.decoder_config = DecoderConfig(
            layers=3,
            hidden=32,
            intermediate=48,
            heads=4,
            kv_heads=2,
            head_dim=16,
            rms_eps=1e-6,
            rope_theta=1e4,
            max_positions=1024,
            mrope_section=(4, 2, 2) if mrope else None,
        )
        self.device, self.dtype = torch.device(device), dtype
        self.stop_ids = frozenset({STOP})
        self.penalise_prompt = True
        self.decoder = Decoder(self.decoder_config).requires_grad_(False)
        for name, weight in self.decoder.named_parameters():
            nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2, generator=random)
        # Small beside what the layers add: else the tied head would only repeat the last token.
        self.embedding = 0.1 * torch.randn(VOCABULARY, 32, generator=random)
        self.embedding[STOP] = 0.0  # never the best: tests that want a stop ask for it
        self.embedding = self.embedding.to(self.device, dtype)
        self.head = self.embedding.T
        self.decoder.to(self.device, dtype)
        self.poison: int | None = None  # a token id whose row makes forward raise
        self.not_a_number: int | None = None  # a token id whose row is not finite
        self.last_logits = torch.empty(0)
        self.batches: list[Batch] = []

    def made(self, sequence: Sequence, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Embeddings [n, H] and positions [n] or [3, n] of rows [start, stop)."""
        x = self.embedding[sequence.tokens[start:stop]].float().cpu()
        positions = torch.arange(max(sequence.length, stop)).repeat(3, 1)  # also of a row that is being drawn
        for span in sequence.media:
            noise = torch.Generator().manual_seed(int.from_bytes(sha256(span.key).digest()[:7], "big"))
            features = torch.randn(span.length, 32, generator=noise)
            for row in range(max(span.start, start), min(span.start + span.length, stop)):
                x[row - start] = features[row - span.start]
            inside = torch.arange(span.length)
            positions[0, span.start :] = positions[0, span.start :] - span.length + 1
            positions[0, span.start : span.start + span.length] = span.start
            positions[1, span.start : span.start + span.length] = span.start + inside // 2
            positions[2, span.start : span.start + span.length] = span.start + inside % 2
        if self.not_a_number in sequence.tokens[start:stop]:
            x[sequence.tokens[start:stop].index(self.not_a_number)] = torch.nan
        picked = positions[:, start:stop] if self.decoder_config.mrope_section else torch.arange(start, stop)
        return x.to(self.device, self.dtype), picked.to(self.device)

    def rows(self, batch: Batch) -> Rows:
        self.batches.append(batch)
        if self.poison in batch.tokens():
            raise RuntimeError("poisoned")
        rows = [
            self.made(sequence, start, start + count)
            for sequence, start, count in zip(batch.sequences, batch.starts, batch.counts, strict=True)
        ]
        ids = np.array(batch.tokens())[:, None]
        positions = torch.cat([positions for _, positions in rows], dim=-1).reshape(-1, len(ids)).T.cpu().numpy()
        x = torch.cat([x for x, _ in rows])
        special = self.special(batch)
        if not special:
            return Rows(ids, positions)
        ids[special] = -1
        return Rows(ids, positions, x[special][:, None], np.array(special))

    def special(self, batch: Batch) -> list[int]:
        """Which rows are not the embeddings of their ids."""
        found: list[int] = []
        begin = 0
        for sequence, start, count in zip(batch.sequences, batch.starts, batch.counts, strict=True):
            for row in range(start, start + count):
                inside = any(span.start <= row < span.start + span.length for span in sequence.media)
                if inside or sequence.tokens[row] == self.not_a_number:
                    found.append(begin + row - start)
            begin += count
        return found

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids[:, 0].clamp_min(0), self.embedding).masked_fill(ids < 0, 0)

    def position(self, sequence: Sequence, row: int) -> tuple[int, ...]:
        return tuple(self.made(sequence, row, row + 1)[1].flatten().tolist())

    def logits(self, hidden: Tensor) -> Tensor:
        self.last_logits = 3 * (hidden @ self.head).float()
        return self.last_logits

    def complete(self, hidden: Tensor, ids: Tensor, draw: Draw, numbers: Tensor) -> tuple[Tensor, Tensor]:
        assert len(hidden) == len(ids) == len(draw.floats) == len(draw.integers) == len(numbers)
        return ids[:, None], F.embedding(ids, self.embedding)

    def heard(self, sequence: Sequence, values: np.ndarray) -> int:
        return int(values[0])

    def dense(self, sequence: Sequence) -> Tensor:
        """Hidden [rows, H] of all rows of the sequence, computed at once with `DenseKV`."""
        config = self.decoder_config
        kv = DenseKV(
            config.layers,
            1,
            sequence.length,
            config.kv_heads,
            config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        x, positions = self.made(sequence, 0, sequence.length)
        return self.decoder(x, positions, kv)

    def dense_outputs(self, sequence: Sequence) -> list[int]:
        """What the sequence must say, one token after another, each from a whole forward; it is not changed."""
        sampling = sequence.sampling
        copy = Sequence(list(sequence.tokens), sampling, print, print, media=sequence.media)
        while copy.generated < sampling.max_tokens:
            draw = Draw.of([sampling], [sampling.seed or 0], [copy.generated], self.device)
            token = int(pick(self.logits(self.dense(copy)[-1:]), draw))
            copy.tokens.append(token)
            if token == STOP:
                break
        return copy.outputs


class Request:
    """A sequence, and what its listeners heard."""

    def __init__(
        self,
        tokens: Seq[int],
        sampling: Sampling = GREEDY,
        *,
        media: tuple[MediaSpan, ...] = (),
        priority: int = 0,
        cacheable: bool = True,
    ) -> None:
        self.heard: list[int] = []
        self.ends: list[tuple[str, Exception | None]] = []
        self.sequence = Sequence(
            list(tokens),
            sampling,
            self.heard.append,
            lambda reason, error: self.ends.append((reason, error)),
            media=media,
            priority=priority,
            cacheable=cacheable,
        )

    @property
    def reason(self) -> str:
        ((reason, _),) = self.ends  # exactly once
        return reason

    @property
    def error(self) -> Exception | None:
        ((_, error),) = self.ends
        return error


def make_runner(model: TinyStage, **changes: Any) -> ArRunner:
    options: dict[str, Any] = {
        "pages": 64,
        "page_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "max_waiting": 64,
        "prefix_caching": True,
    }
    return ArRunner(model, **(options | changes))


def run(runner: ArRunner, *requests: Request, limit: int = 2000) -> None:
    """Add the requests and step until nothing is left to do, looking for lost pages after each step."""
    for request in requests:
        runner.add(request.sequence)
    for _ in range(limit):
        if not runner.busy:
            break
        runner.step()
        runner.check_integrity()
    assert not runner.busy
    assert runner.counters.pages_used == 0


Whole = tuple[list[int], tuple[MediaSpan, ...]]


def opened(request: Request, known: int) -> Whole:
    """The request with only so many tokens known, which cut no medium; returns all of it."""
    sequence = request.sequence
    whole = list(sequence.tokens), sequence.media
    sequence.tokens, sequence.prompt_length, sequence.open = sequence.tokens[:known], known, True
    sequence.media = tuple(span for span in sequence.media if span.start < known)
    return whole


def close(runner: ArRunner, sequence: Sequence, whole: Whole) -> None:
    sequence.tokens, sequence.media = whole
    sequence.prompt_length = sequence.length
    runner.close(sequence)
    runner.check_integrity()


def reading(tokens: list[int], *, media: tuple[MediaSpan, ...] = ()) -> Request:
    request = Request(tokens, media=media)
    request.sequence.open = request.sequence.only_read = True
    return request


def prompt(length: int, *, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY - 1, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SAMPLINGS = [
    GREEDY,
    Sampling(temperature=0.7),
    Sampling(temperature=0.8, top_k=20, repetition_penalty=1.2, min_tokens=3),
    Sampling(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={5: 2.0}),
    Sampling(temperature=1.2, top_p=0.8, min_p=0.02),
]


def requests_of(count: int) -> list[Request]:
    """Of all lengths and ways to sample."""
    return [
        Request(
            prompt(5 + 3 * seed, seed=seed),
            replace(SAMPLINGS[seed % len(SAMPLINGS)], max_tokens=9 + seed, seed=seed),
        )
        for seed in range(count)
    ]
