"""The codec as it is trained: a mel encoder with four acoustic books, and the product's decoder.

First as a mel model: the decoder's own front (books, pre_conv, transformer, upsampling, first convolution) and a linear head
to two mel frames per 20 ms. Book 0 is given (see `phones`), the acoustic books learn what it does not say: who speaks, pitch,
loudness, and where in the frame the phones meet. Then, with the codes fixed, as a vocoder (`train_wave`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.codec import CodecDecoder
from aura_omni.models.codec_layers import CausalUpsample
from training.tts import shape
from training.tts.grad import FreshMemory
from training.tts.phones import CODES, PHONES
from training.tts.spectrum import FRAMES_A_CODE, MELS

WIDTH = shape.SIZES.codec_book // 2
_USAGE = 0.98


class MelEncoder(nn.Module):
    """Log-mel and phones of a frame and its two neighbours -> what the acoustic books shall say, [B, T, WIDTH]."""

    def __init__(self, hidden: int = 320) -> None:
        super().__init__()
        self.enter = nn.Conv1d(FRAMES_A_CODE * MELS, hidden, 3, padding=1)
        self.phones = nn.Embedding(2 * PHONES, hidden)
        self.inner = nn.ModuleList(nn.Sequential(nn.GELU(), nn.Linear(hidden, hidden)) for _ in range(3))
        self.leave = nn.Linear(hidden, WIDTH)

    def forward(self, mel: Tensor, book0: Tensor) -> Tensor:
        b, frames = book0.shape
        x = self.enter(mel.reshape(b, frames, -1).transpose(1, 2)).transpose(1, 2)
        x = x + self.phones(book0 // PHONES) + self.phones(PHONES + book0 % PHONES)
        for layer in self.inner:
            x = x + layer(x)
        return self.leave(F.layer_norm(x, x.shape[-1:]))


class Books(nn.Module):
    """Residual vector quantisation whose rows follow running means of what they stand for."""

    def __init__(self) -> None:
        super().__init__()
        rows = (shape.ACOUSTIC_BOOKS, shape.BOOK_ROWS)
        self.register_buffer("table", torch.zeros(*rows, WIDTH))
        self.register_buffer("sums", torch.zeros(*rows, WIDTH))
        self.register_buffer("usage", torch.ones(rows))

    @torch.no_grad()
    def start(self, x: Tensor) -> None:
        """Rows from live latents [N, WIDTH], N >= BOOK_ROWS, by a few rounds of k-means per book."""
        rest = x.clone()
        for book in range(shape.ACOUSTIC_BOOKS):
            table = rest[torch.randperm(len(rest), device=x.device)[: shape.BOOK_ROWS]].clone()
            for _ in range(10):
                near = torch.cdist(rest, table).argmin(1)
                total = torch.zeros_like(table).index_add_(0, near, rest)
                number = _counts(near, len(table))[:, None]
                table = torch.where(number > 0, total / number.clamp_min(1), table)
            self.table[book], self.sums[book] = table, table
            rest = rest - table[torch.cdist(rest, table).argmin(1)]

    def codes(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """x [N, WIDTH] -> codes [N, books], and the sum of the rows of the first 0, 1, .. books."""
        rest, sums, codes = x, [torch.zeros_like(x)], []
        for table in self.table:
            codes.append(torch.cdist(rest, table).argmin(1))
            row = table[codes[-1]]
            rest = rest - row
            sums.append(sums[-1] + row)
        return torch.stack(codes, 1), sums

    @torch.no_grad()
    def follow(self, x: Tensor, codes: Tensor) -> None:
        """Move the rows towards what was coded with them, and give unused ones a new start."""
        rest = x
        for book in range(shape.ACOUSTIC_BOOKS):
            near = codes[:, book]
            number = _counts(near, shape.BOOK_ROWS)
            total = torch.zeros_like(self.sums[book]).index_add_(0, near, rest)
            self.usage[book].mul_(_USAGE).add_(number, alpha=1 - _USAGE)
            self.sums[book].mul_(_USAGE).add_(total, alpha=1 - _USAGE)
            before = self.table[book][near]
            dead = self.usage[book] < 0.1 * len(x) / shape.BOOK_ROWS * 0.5
            fresh = rest[torch.randint(0, len(rest), (shape.BOOK_ROWS,), device=x.device)]
            self.sums[book] = torch.where(dead[:, None], fresh, self.sums[book])
            self.usage[book] = torch.where(dead, torch.ones_like(self.usage[book]), self.usage[book])
            self.table[book] = self.sums[book] / self.usage[book].clamp_min(1e-5)[:, None]
            rest = rest - before


def _counts(numbers: Tensor, size: int) -> Tensor:
    """float32 [size]; unlike bincount it does not make the host wait for the device."""
    return torch.zeros(size, device=numbers.device).index_add_(
        0, numbers, torch.ones(len(numbers), device=numbers.device)
    )


class MelCodec(nn.Module):
    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder, self.books = MelEncoder(), Books()
        self.decoder: CodecDecoder = shape.codec()[0]
        outputs = shape.SIZES.codec_book
        self.rows0 = nn.Parameter(torch.randn(CODES, WIDTH) * 0.1)
        self.phone0 = nn.Parameter(torch.randn(2, PHONES, WIDTH) * 0.5)
        self.first = nn.Linear(WIDTH, outputs, bias=False)
        self.rest = nn.Linear(WIDTH, outputs, bias=False)
        self.head = nn.Linear(shape.SIZES.codec_decoder, 2 * MELS)
        for name, weight in self.decoder.named_parameters():
            if name.endswith(("layer_scale.scale", "gamma")):
                nn.init.constant_(weight, 0.2)
        for part in self.decoder.modules():
            if isinstance(part, CausalUpsample):  # its forward wants the memory order that `prepare` would give it
                part.conv.weight.data = part.conv.weight.data.permute(2, 1, 0).contiguous().permute(2, 1, 0)

    def table0(self) -> Tensor:
        """Rows of book 0, [CODES, WIDTH]."""
        code = torch.arange(CODES, device=self.rows0.device)
        return self.rows0 + self.phone0[0][code // PHONES] + self.phone0[1][code % PHONES]

    def embed(self, book0: Tensor, acoustic: Tensor) -> Tensor:
        """Codes [B, T] and the sum of the acoustic rows [B, T, WIDTH] -> the decoder's input [B, T, codebook_dim]."""
        return self.first(F.embedding(book0, self.table0())) + self.rest(acoustic)

    def rows_of(self, codes: Tensor, books: Tensor | int = shape.ACOUSTIC_BOOKS) -> Tensor:
        """Acoustic codes [B, T, books] -> the sum of the rows of the first `books` (int, or [B]) of them, [B, T, WIDTH]."""
        total = torch.zeros(*codes.shape[:2], WIDTH, device=codes.device)
        for book in range(shape.ACOUSTIC_BOOKS):
            used = torch.as_tensor(books, device=codes.device) > book
            total = total + self.books.table[book][codes[..., book]] * used.view(-1, 1, 1)
        return total

    @torch.no_grad()
    def codes(self, mel: Tensor, book0: Tensor, *, mean: float, spread: float) -> Tensor:
        """Log-mel [T, 8, 80] and phone codes [T] of one clip -> acoustic codes [T, books]. mean, spread: of codec.pt."""
        return self.books.codes(self.encoder((mel[None] - mean) / spread, book0[None])[0])[0]

    def front(self, x: Tensor) -> Tensor:
        """The decoder's input [B, T, codebook_dim] -> what its waveform half starts from, [B, 4 T, width]."""
        memory = FreshMemory()
        x = self.decoder.pre_conv(x, memory)
        x = self.decoder.pre_transformer(x, memory, torch.zeros(x.shape[0], dtype=torch.int64, device=x.device))
        for block in self.decoder.upsample:
            x = block(x, memory)
        return self.decoder.decoder[0](x, memory)

    def mel(self, features: Tensor) -> Tensor:
        """[B, 4 T, width] -> log-mel [B, 8 T, 80]."""
        b, steps, _ = features.shape
        return self.head(features).view(b, 2 * steps, MELS)

    def wave(self, features: Tensor) -> Tensor:
        """[B, n, width] -> samples [B, n * 480]; not bounded."""
        memory = FreshMemory()
        _, *layers, leave = self.decoder.decoder
        for layer in layers[:-1]:
            features = layer(features, memory)
        return leave(layers[-1](features), memory).squeeze(2)
