"""Qwen3-TTS's Talker: text and codes in, one frame of 16 codes per step out.

The decoder predicts codebook 0 of a frame; the code predictor, a second small decoder, adds codebooks 1..15 one after
another. The sum of a frame's 16 embeddings, plus one text embedding, is the next input row. Knows no prompts, voices
or sampling rules.

    hidden = talker.decoder(talker.text(ids), positions, kv)          # [N, H]
    codes, embedding = talker.frame(hidden[-1:], code0, choose)       # [1, 16], [1, H]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.fields import whole
from aura_omni.models.layers import DenseKV, fused, fusible, normed_linear
from aura_omni.models.qwen3 import Decoder, DecoderConfig
from aura_omni.models.weights import Layout, Prepared

# Logits [B, V] of codebook `group` (1..15), its number, and what the predictor reads of its codes [V, H] -> codes int64 [B], and their
# rows of that table [B, H].
Choose = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor]]


def looked_up(draw: Callable[[Tensor, int], Tensor]) -> Choose:
    """A Choose of a function that only draws: from logits and the codebook's number to codes."""

    def choose(logits: Tensor, group: int, table: Tensor) -> tuple[Tensor, Tensor]:
        codes = draw(logits, group)
        return codes, F.embedding(codes, table)

    return choose


TALKER_LAYOUT = Layout(
    renames=(
        ("decoder.", "talker.model."),
        ("codec_embedding.", "talker.model.codec_embedding."),
        ("text_embedding.", "talker.model.text_embedding."),
        ("code_predictor.decoder.", "talker.code_predictor.model."),
        ("code_predictor.codec_embedding.", "talker.code_predictor.model.codec_embedding."),
        ("", "talker."),
    )
)


@dataclass(frozen=True, slots=True)
class TalkerConfig:
    decoder: DecoderConfig
    codec_vocab: int  # rows of codebook 0's table and head: codes, then control, language and speaker ids
    text_vocab: int
    text_hidden: int
    groups: int  # codebooks of a frame
    predictor: DecoderConfig
    predictor_vocab: int

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> TalkerConfig:
        """From a published config.json, whole. Raises ValueError for an architecture we do not compute, KeyError for a gap."""
        talker = config["talker_config"]
        predictor = talker["code_predictor_config"]
        for name, section in (("talker_config", talker), ("code_predictor_config", predictor)):
            _refuse_unknown(name, section)
        if predictor["num_code_groups"] != talker["num_code_groups"]:
            raise ValueError(
                f"talker_config has num_code_groups {talker['num_code_groups']}, "
                f"its code_predictor_config {predictor['num_code_groups']}; they must be equal"
            )
        return cls(
            # The published rope_scaling has three position rows, but here they are always equal: plain RoPE.
            decoder=DecoderConfig.from_json(talker),
            codec_vocab=whole(talker, "vocab_size"),
            text_vocab=whole(talker, "text_vocab_size"),
            text_hidden=whole(talker, "text_hidden_size"),
            groups=whole(talker, "num_code_groups"),
            predictor=DecoderConfig.from_json(predictor),
            predictor_vocab=whole(predictor, "vocab_size"),
        )


def _refuse_unknown(name: str, section: Mapping[str, Any]) -> None:
    """What DecoderConfig has no field for must have the one value that the decoder computes."""
    rope = section.get("rope_parameters") or section.get("rope_scaling") or {}
    found = {
        "hidden_act": (section.get("hidden_act", "silu"), "silu"),
        "attention_bias": (section.get("attention_bias", False), False),
        "use_sliding_window": (section.get("use_sliding_window", False), False),
        "layer_types": (sorted(set(section.get("layer_types") or ["full_attention"])), ["full_attention"]),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
    }
    for field, (value, known) in found.items():
        if value != known:
            raise ValueError(f"{name} has {field} {value!r}; only {known!r} is known here")


class TextProjection(nn.Module):
    def __init__(self, text_hidden: int, hidden: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(text_hidden, text_hidden)
        self.linear_fc2 = nn.Linear(text_hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(x)))


class CodePredictor(nn.Module):
    """Weights of codebooks 1..15: a decoder, and per codebook an embedding table (Talker's width) and a head."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        wide, narrow, vocab = config.decoder.hidden, config.predictor.hidden, config.predictor_vocab
        self.decoder = Decoder(config.predictor)
        self.codec_embedding = nn.ModuleList(nn.Embedding(vocab, wide) for _ in range(config.groups - 1))
        self.lm_head = nn.ModuleList(nn.Linear(narrow, vocab, bias=False) for _ in range(config.groups - 1))
        self.small_to_mtp_projection = nn.Identity() if wide == narrow else nn.Linear(wide, narrow)


class Talker(Prepared):
    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        hidden = config.decoder.hidden
        self.config = config
        self.text_embedding = nn.Embedding(config.text_vocab, config.text_hidden)
        self.text_projection = TextProjection(config.text_hidden, hidden)
        self.codec_embedding = nn.Embedding(config.codec_vocab, hidden)
        self.decoder = Decoder(config.decoder)
        self.codec_head = nn.Linear(hidden, config.codec_vocab, bias=False)
        self.code_predictor = CodePredictor(config)

    @torch.no_grad()
    def prepare(self) -> None:
        """Stack the 16 code tables, so that a frame is one gather, and project them once to the predictor's width.

        The predictor's positions are the same in every frame: their rotations are made once.
        """
        tables = [self.codec_embedding, *self.code_predictor.codec_embedding]
        stacked = torch.cat([table.weight for table in tables])
        offsets = [0]
        for table in tables:
            start, stop = offsets[-1], offsets[-1] + table.weight.shape[0]
            table.weight.data = stacked[start:stop]  # the same memory: the stack replaces the tables
            offsets.append(stop)
        self._stacked = stacked
        projected = self.code_predictor.small_to_mtp_projection(stacked)  # the stack itself where widths are equal
        # What the predictor reads of each codebook's codes.
        self._books = [projected[start:stop] for start, stop in pairwise(offsets)]
        self._offsets = torch.tensor(offsets[:-1], device=stacked.device)
        places = torch.arange(self.config.groups + 1, device=stacked.device)
        self._cos, self._sin = self.code_predictor.decoder.rope.tables(places, stacked.dtype)

    def text(self, ids: Tensor) -> Tensor:
        """Text ids int64 [N] -> rows [N, H] in the Talker's width."""
        return self.text_projection(self.text_embedding(ids))

    def frames(self, codes: Tensor) -> Tensor:
        """Codes int64 [N, 16] of whole frames -> the sum of each frame's 16 embeddings [N, H].

        One sum over the stacked 16, accumulated in float32 and rounded once, as in the reference: in bf16 the order counts.
        """
        if fusible(self._stacked):
            return fused().summed_rows(codes, self._offsets, self._stacked)
        return F.embedding(codes + self._offsets, self._stacked).sum(1)

    def new_kv(self, batch: int) -> DenseKV:
        """Keys and values of the code predictor for one frame of `batch` sequences."""
        config = self.config.predictor
        return DenseKV(
            config.layers,
            batch,
            self.config.groups,
            config.kv_heads,
            config.head_dim,
            dtype=self._stacked.dtype,
            device=self._stacked.device,
        )

    def frame(self, hidden: Tensor, code0: Tensor, choose: Choose, kv: DenseKV | None = None) -> tuple[Tensor, Tensor]:
        """Complete a frame from its first code.

        hidden [B, H] final-normed, the rows that code0 int64 [B] was drawn from; kv from `new_kv(B)`, reused between
        frames (None: made here). Returns codes int64 [B, 16] and `frames(codes)` [B, H]. No host round trip: every
        shape and position is known beforehand.
        """
        batch = hidden.shape[0]
        kv = kv if kv is not None else self.new_kv(batch)
        kv.reset()
        predictor = self.code_predictor
        first = torch.stack((predictor.small_to_mtp_projection(hidden), F.embedding(code0, self._books[0])), dim=1)
        x = first.flatten(0, 1)
        cos, sin = self._cos[:2].repeat(batch, 1), self._sin[:2].repeat(batch, 1)
        codes = [code0]
        for group in range(1, self.config.groups):
            # Of each sequence's rows, two in the first pass, the last one is asked.
            out, more = (
                part if part is None else part.view(batch, -1, part.shape[-1])[:, -1]
                for part in predictor.decoder.stream(x, cos, sin, kv)
            )
            kv.advance()
            assert out is not None
            logits = normed_linear(predictor.decoder.norm, cast(nn.Linear, predictor.lm_head[group - 1]), out, more)
            code, x = choose(logits, group, self._books[group])
            codes.append(code)
            cos, sin = (table[group + 1 : group + 2].expand(batch, -1) for table in (self._cos, self._sin))
        frame = torch.stack(codes, dim=1)
        return frame, self.frames(frame)
