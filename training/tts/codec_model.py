"""The codec's decoder as it is trained: all books are given (`phones`, `contour`), their rows and the product's decoder are learned.

First as a mel model: the decoder's own front (books, pre_conv, transformer, upsampling, first convolution) and a linear head
to two mel frames per 20 ms. Then, the same front going on, as a vocoder (`train_wave`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aura_omni.models.codec import CodecDecoder
from aura_omni.models.codec_layers import CausalUpsample
from training.tts import shape
from training.tts.contour import EDGES
from training.tts.grad import FreshMemory
from training.tts.phones import CODES, PHONES
from training.tts.spectrum import MELS

WIDTH = shape.SIZES.codec_book // 2


class TrainedCodec(nn.Module):
    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.decoder: CodecDecoder = shape.codec()[0]
        outputs = shape.SIZES.codec_book
        # Rows of a book are sums of parts that many rows share, so that rare rows are good ones too.
        self.rows0 = nn.Parameter(torch.zeros(CODES, WIDTH))
        self.phone0 = nn.Parameter(torch.randn(2, PHONES, WIDTH) * 0.5)
        self.rows = nn.Parameter(torch.randn(shape.ACOUSTIC_BOOKS, shape.BOOK_ROWS, WIDTH) * 0.1)
        self.slopes = nn.Parameter(torch.randn(shape.ACOUSTIC_BOOKS, WIDTH) * 0.3)
        self.edges = nn.Parameter(torch.randn(2, EDGES, WIDTH) * 0.3)
        self.first = nn.Linear(WIDTH, outputs, bias=False)
        self.rest = nn.Linear(WIDTH, outputs, bias=False)
        self.head = nn.Linear(shape.SIZES.codec_decoder, 2 * MELS)
        for name, weight in self.decoder.named_parameters():
            if name.endswith(("layer_scale.scale", "gamma")):
                nn.init.constant_(weight, 0.2)
        for part in self.decoder.modules():
            if isinstance(part, CausalUpsample):  # its forward wants the memory order that `prepare` would give it
                part.conv.weight.data = part.conv.weight.data.permute(2, 1, 0).contiguous().permute(2, 1, 0)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Rows of book 0 [CODES, WIDTH], and of the acoustic books [books, BOOK_ROWS, WIDTH]."""
        code = torch.arange(CODES, device=self.rows0.device)
        # index_select: its gradient is a plain sum of rows, which a captured graph can hold.
        phones = self.phone0[0].index_select(0, code // PHONES) + self.phone0[1].index_select(0, code % PHONES)
        row = torch.arange(shape.BOOK_ROWS, device=self.rows0.device)
        slope = (row / shape.BOOK_ROWS - 0.5)[None, :, None] * self.slopes[:, None]
        edges = (self.edges[0].index_select(0, row // EDGES) + self.edges[1].index_select(0, row % EDGES))[None]
        book = torch.arange(shape.ACOUSTIC_BOOKS, device=row.device)[:, None, None]
        return self.rows0 + phones, self.rows + torch.where(book == 2, edges, slope)

    def embed(self, codes: Tensor) -> Tensor:
        """codes int64 [B, T, 1 + ACOUSTIC_BOOKS] -> the decoder's input [B, T, codebook_dim]."""
        b, frames, _ = codes.shape
        table0, tables = self.tables()
        into = self.first(table0).index_select(0, codes[..., 0].flatten())
        number = codes[..., 1:] + torch.arange(shape.ACOUSTIC_BOOKS, device=codes.device) * shape.BOOK_ROWS
        more = self.rest(tables.flatten(0, 1)).index_select(0, number.flatten())
        return into.view(b, frames, -1) + more.view(b, frames, shape.ACOUSTIC_BOOKS, -1).sum(2)

    def front(self, codes: Tensor) -> Tensor:
        """codes int64 [B, T, 1 + ACOUSTIC_BOOKS] -> what the decoder's waveform half starts from, [B, 4 T, width]."""
        memory = FreshMemory()
        x = self.decoder.pre_conv(self.embed(codes), memory)
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
