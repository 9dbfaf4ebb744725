"""The Talker as it is trained: its own class, with tables that know that a code of book 0 is two phones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.qwen3_tts import Talker
from training.tts import shape
from training.tts.grad import WholeKV
from training.tts.phones import CODES, PHONES
from training.tts.talker_batch import EOS, Batch


@dataclass
class Corruption:
    """How the history is spoilt, so that text and not memory is what the model goes by. Shares of frames."""

    wrong: float = 0.15  # another frame's codes
    missing: float = 0.15  # no codes at all
    silent_books: float = 0.3  # of clips: no acoustic codes
    dropped: float = 0.1  # of the values of input rows, and of what the code predictor is given


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
        first = torch.arange(CODES, device=self.phone_in.device) // PHONES
        second = torch.arange(CODES, device=self.phone_in.device) % PHONES
        more = [part[0][first] + part[1][second] for part in (self.phone_in, self.phone_out)]
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
        x = talker.text(batch.text.flatten())
        control = batch.codec.flatten()
        x = x + F.embedding(control.clamp_min(0), into) * (control >= 0)[:, None]
        frame = batch.frame.flatten()
        there = frame >= 0
        quiet = torch.zeros(b * length, dtype=torch.bool, device=x.device)
        if corruption is not None:
            chance = torch.rand(b * length, device=x.device)
            other = frame[torch.randint(0, b * length, (b * length,), device=x.device)]
            frame = torch.where((chance < corruption.wrong) & (other >= 0) & there, other, frame)
            there = there & (chance < 1.0 - corruption.missing)
            quiet = (torch.rand(b, 1, device=x.device) < corruption.silent_books).expand(b, length).flatten()
        history = codes[frame.clamp_min(0)]
        rows = F.embedding(history[:, 0], into)
        for book in range(shape.ACOUSTIC_BOOKS):
            known = (history[:, book + 1] >= 0) & ~quiet
            table = talker.code_predictor.codec_embedding[book].weight
            rows = rows + F.embedding(history[:, book + 1].clamp_min(0), table) * known[:, None]
        x = x + rows * there[:, None]
        if corruption is not None:
            x = F.dropout(x, corruption.dropped)
        positions = torch.arange(length, device=x.device).repeat(b)
        return talker.decoder(x, positions, WholeKV(b))

    def losses(self, batch: Batch, codes: Tensor, corruption: Corruption | None) -> dict[str, Tensor]:
        """Cross-entropy of book 0 (and of the end), and of the acoustic books of batch.spoken."""
        into, out = self.tables()
        hidden = self.hidden(batch, codes, into, corruption)
        # Ids after the end are never drawn.
        logits = F.linear(hidden[batch.wanted], out[: EOS + 1]).float()
        target = batch.target.flatten()[batch.wanted]
        found = {"c0": F.cross_entropy(logits, target, label_smoothing=0.02 if corruption else 0.0)}
        if len(batch.spoken):
            frames = batch.next_frame.flatten()[batch.spoken]
            seen = hidden[batch.spoken]
            if corruption is not None:
                seen = F.dropout(seen, corruption.dropped)
            for book, loss in enumerate(self.acoustic(seen, codes[frames], into), 1):
                found[f"c{book}"] = loss
        return found

    def acoustic(
        self,
        hidden: Tensor,
        codes: Tensor,
        into: Tensor,
        *,
        wrong: float = 0.0,
        dropped: float = 0.0,
        smooth: float = 0.0,
    ) -> list[Tensor]:
        """Teacher-forced losses of books 1.. : hidden [N, H], codes [N, 1 + ACOUSTIC_BOOKS].

        wrong: share of the books read that are random; dropped: of the values of the predictor's rows; smooth: of the targets.
        """
        predictor = self.talker.code_predictor
        read = codes
        if wrong:
            spoilt = torch.rand(codes.shape, device=codes.device) < wrong
            spoilt[:, 0] = False
            read = torch.where(spoilt, torch.randint_like(codes, shape.BOOK_ROWS), codes)
        rows = [hidden, F.embedding(read[:, 0], into)]
        for book in range(shape.ACOUSTIC_BOOKS - 1):
            rows.append(F.embedding(read[:, book + 1], predictor.codec_embedding[book].weight))
        x = F.dropout(predictor.small_to_mtp_projection(torch.stack(rows, 1)), dropped)
        n, length, width = x.shape
        positions = torch.arange(length, device=x.device).repeat(n)
        x = predictor.decoder(x.flatten(0, 1), positions, WholeKV(n)).view(n, length, width)
        return [
            F.cross_entropy(predictor.lm_head[book](x[:, book + 1]).float(), codes[:, book + 1], label_smoothing=smooth)
            for book in range(shape.ACOUSTIC_BOOKS)
        ]
