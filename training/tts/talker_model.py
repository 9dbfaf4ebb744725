"""The Talker as it is trained: its own class, with tables that know that a code of book 0 is two phones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.qwen3_tts import Talker
from training.tts import shape
from training.tts.contour import told
from training.tts.grad import WholeKV
from training.tts.phones import CODES, PHONES
from training.tts.talker_batch import EOS, IGNORE, Batch

_SPOKEN = 2_048  # frames of a batch that the code predictor learns from


@dataclass
class Corruption:
    """How the history is spoilt, so that text and not memory is what the model goes by. Shares of frames."""

    wrong: float = 0.15  # another frame's codes
    missing: float = 0.15  # no codes at all
    silent_books: float = 0.2  # of clips: no acoustic codes
    dropped: float = 0.1  # of the values of input rows, and of what the code predictor is given


def voice_vector(level: Tensor, size: int) -> Tensor:
    """The speaker vector of a voice: level float [..], book 4 or between two of its codes -> [.., size].

    Given, not learned, so that the speaker encoder can be trained without the Talker.
    """
    rate = torch.logspace(-1.5, -0.2, size // 2, device=level.device)
    angle = level[..., None] * rate
    return 0.3 * torch.cat((angle.sin(), angle.cos()), -1)


class TrainedTalker(nn.Module):
    """rows of codec_embedding and codec_head below CODES = own + first phone's + second phone's; `fold` makes them plain."""

    def __init__(self, vocabulary: int, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.talker: Talker = shape.talker(vocabulary)
        hidden = self.talker.config.decoder.hidden
        self.phone_in = nn.Parameter(torch.randn(2, PHONES, hidden) * 0.02)
        self.phone_out = nn.Parameter(torch.randn(2, PHONES, hidden) * 0.02)
        for name, weight in self.talker.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * self.talker.config.decoder.layers) ** 0.5)
            if name.endswith(("linear_fc1.weight", "linear_fc2.weight")):
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        nn.init.normal_(self.talker.text_embedding.weight, std=0.3)
        nn.init.normal_(self.talker.code_predictor.small_to_mtp_projection.weight, std=hidden**-0.5)
        unused = self.talker.code_predictor
        for book in range(shape.ACOUSTIC_BOOKS, len(unused.lm_head)):
            for table in (unused.lm_head[book], unused.codec_embedding[book]):
                nn.init.zeros_(table.weight)
                table.weight.requires_grad_(False)

    def tables(self) -> tuple[Tensor, Tensor]:
        """codec_embedding and codec_head, folded."""
        code = torch.arange(CODES, device=self.phone_in.device)
        more = [
            part[0].index_select(0, code // PHONES) + part[1].index_select(0, code % PHONES)
            for part in (self.phone_in, self.phone_out)
        ]
        own = (self.talker.codec_embedding.weight, self.talker.codec_head.weight)
        into, out = (
            F.pad(extra, (0, 0, 0, len(table) - CODES)) + table for extra, table in zip(more, own, strict=True)
        )
        return into, out

    @torch.no_grad()
    def fold(self) -> None:
        """Move the phones' part into the plain tables, for the product to use. Training can go on from there."""
        into, out = self.tables()
        self.talker.codec_embedding.weight.copy_(into)
        self.talker.codec_head.weight.copy_(out)
        self.phone_in.zero_()
        self.phone_out.zero_()

    def hidden(self, batch: Batch, codes: Tensor, into: Tensor, corruption: Corruption | None) -> Tensor:
        """codes int64 [frames, 1 + ACOUSTIC_BOOKS], -1 in books that are not known -> final-normed hidden [B * L, H]."""
        talker = self.talker
        b, length = batch.text.shape
        device = codes.device
        # index_select: its gradient is a plain sum of rows, which a captured graph can hold.
        x = talker.text_projection(talker.text_embedding.weight.index_select(0, batch.text.flatten()))
        control = batch.codec.flatten()
        x = x + into.index_select(0, control.clamp_min(0)) * (control >= 0)[:, None]
        level = batch.voice.float()
        if corruption is not None:
            level = level + torch.randn(b, device=device)
        vector = voice_vector(level, x.shape[1])
        if corruption is not None:
            vector = vector + 0.05 * torch.randn_like(vector)
        here = (torch.arange(length, device=device) == batch.voice_row[:, None]) & (batch.voice >= 0)[:, None]
        x = x + (vector[:, None] * here[..., None]).flatten(0, 1)
        frame = batch.frame.flatten()
        there = frame >= 0
        history = codes[frame.clamp_min(0)]
        if corruption is not None:
            chance = torch.rand(b * length, device=device)
            pick = torch.randint(0, b * length, (b * length,), device=device)
            other = frame[pick]
            frame = torch.where((chance < corruption.wrong) & (other >= 0) & there, other, frame)
            there = there & (chance < 1.0 - corruption.missing)
            history = codes[frame.clamp_min(0)]
            quiet = (torch.rand(b, 1, device=device) < corruption.silent_books).expand(b, length).flatten()
            history = told(history.view(b, length, -1)).flatten(0, 1)
            history = history.masked_fill(quiet[:, None] & (torch.arange(history.shape[1], device=device) > 0), -1)
        x = x + self._rows(history, into) * there[:, None]
        if corruption is not None:
            x = F.dropout(x, corruption.dropped)
        positions = torch.arange(length, device=device).repeat(b)
        return talker.decoder(x, positions, WholeKV(b))

    def _rows(self, codes: Tensor, into: Tensor) -> Tensor:
        """[N, 1 + ACOUSTIC_BOOKS] -> the sum of the rows of the books that are known, [N, H]."""
        rows = into.index_select(0, codes[:, 0])
        for book in range(shape.ACOUSTIC_BOOKS):
            code = codes[:, book + 1]
            table = self.talker.code_predictor.codec_embedding[book].weight
            rows = rows + table.index_select(0, code.clamp_min(0)) * (code >= 0)[:, None]
        return rows

    def losses(
        self, batch: Batch, codes: Tensor, corruption: Corruption | None, *, weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Cross-entropy of book 0 (and of the end), and of the acoustic books of some frames. weight [B]: of clips, in book 0."""
        into, out = self.tables()
        hidden = self.hidden(batch, codes, into, corruption)
        target = batch.target.flatten()
        # Ids after the end are never drawn.
        each = F.cross_entropy(
            F.linear(hidden, out[: EOS + 1]).float(), target, reduction="none",
            ignore_index=IGNORE, label_smoothing=0.02 if corruption else 0.0,
        )  # fmt: skip
        share = (target != IGNORE).float()
        if weight is not None:
            share = share * weight[:, None].expand(batch.text.shape).flatten()
        found = {"c0": (each * share).sum() / share.sum().clamp_min(1.0)}
        frame = batch.next_frame.flatten()
        order = torch.rand(frame.shape, device=frame.device) + (frame >= 0)
        some = order.topk(min(_SPOKEN, len(frame))).indices
        wanted = codes[frame[some].clamp_min(0)]
        wanted = wanted.masked_fill((frame[some] < 0)[:, None], -1)
        for book, loss in enumerate(self.acoustic(hidden.index_select(0, some), wanted, into, corruption), 1):
            found[f"c{book}"] = loss
        return found

    def acoustic(self, hidden: Tensor, codes: Tensor, into: Tensor, corruption: Corruption | None) -> list[Tensor]:
        """Teacher-forced losses of books 1.. where they are known: hidden [N, H], codes [N, 1 + ACOUSTIC_BOOKS], -1 unknown."""
        predictor = self.talker.code_predictor
        read, target = codes, codes
        if corruption is not None:
            hidden = F.dropout(hidden, corruption.dropped)
            read = told(codes[:, None].clamp_min(0))[:, 0].masked_fill(codes < 0, -1)
            # A step more or less of pitch or loudness is no mistake.
            near = torch.randint(0, 10, codes.shape, device=codes.device)
            step = (near == 0).long() - (near == 1).long()
            column = torch.arange(codes.shape[1], device=codes.device)
            step = step * ((column == 1) | (column == 2))
            target = torch.where(codes > 0, (codes + step).clamp(1, shape.BOOK_ROWS - 1), codes)
        rows = [hidden, into.index_select(0, read[:, 0].clamp_min(0))]
        for book in range(shape.ACOUSTIC_BOOKS - 1):
            table, code = predictor.codec_embedding[book].weight, read[:, book + 1]
            rows.append(table.index_select(0, code.clamp_min(0)) * (code >= 0)[:, None])
        x = predictor.small_to_mtp_projection(torch.stack(rows, 1))
        if corruption is not None:
            x = F.dropout(x, corruption.dropped)
        n, length, width = x.shape
        positions = torch.arange(length, device=x.device).repeat(n)
        x = predictor.decoder(x.flatten(0, 1), positions, WholeKV(n)).view(n, length, width)
        found = []
        for book in range(shape.ACOUSTIC_BOOKS):
            wanted = target[:, book + 1]
            logits = predictor.lm_head[book](x[:, book + 1]).float()
            each = F.cross_entropy(logits, wanted.clamp_min(0), reduction="none")
            known = (wanted >= 0).float()
            found.append((each * known).sum() / known.sum().clamp_min(1.0))
        return found
