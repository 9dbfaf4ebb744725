"""Free-running Talker: many texts at once, with the product's decoder and `Talker.frame`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aura_omni.models.qwen3_tts import Talker, looked_up
from training.tts.corpus import NOBODY
from training.tts.phones import CODES
from training.tts.talker_batch import BOS, EOS, PAD, Rows


class _GrowingKV:
    """Keys and values of B sequences whose rows may be padding: a row attends to the rows of its sequence that are real."""

    def __init__(self, layers: int, batch: int) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]
        self.batch, self.mask = batch, torch.empty(0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, heads, dim = q.shape

        def by_sequence(x: Tensor) -> Tensor:
            return x.view(self.batch, rows // self.batch, -1, dim).transpose(1, 2)

        self.keys[layer] = [torch.cat([*self.keys[layer], by_sequence(k)], 2)]
        self.values[layer] = [torch.cat([*self.values[layer], by_sequence(v)], 2)]
        out = F.scaled_dot_product_attention(
            by_sequence(q), self.keys[layer][0], self.values[layer][0], attn_mask=self.mask, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(rows, heads, dim)


@torch.no_grad()
def speak(
    talker: Talker,
    rows: Rows,
    texts: Sequence[str],
    speakers: Sequence[int],
    *,
    streaming: bool,
    temperature: float = 0.0,
    book_temperature: float = 0.0,
    most: int = 400,
    books: bool = True,
    vectors: Tensor | None = None,
    seed: int = 0,
) -> list[np.ndarray]:
    """Codes int64 [T, 16] of each text ([T, 1] without books); T = most when it did not end by itself. talker is prepared.

    vectors [texts, H]: of the voices of texts whose speaker is NOBODY.
    """
    device = talker.codec_head.weight.device
    random = torch.Generator(device).manual_seed(seed)
    prompts, tails = [], []
    voice_rows = []
    for ids, speaker in zip(rows.tokens(texts), speakers, strict=True):
        words, codec = rows.prompt(speaker, tagged=False)
        voice_rows.append(len(codec) - 2 if speaker == NOBODY else None)
        body = [*ids, rows.eos]
        if streaming:
            words, tail = [*words, body[0]], body[1:]
        else:
            words, codec, tail = [*words, *body, rows.pad], codec + [PAD] * len(body), []
        prompts.append((words, [*codec, BOS]))
        tails.append(tail)
    batch, longest = len(texts), max(len(words) for words, _ in prompts)
    text = torch.full((batch, longest), rows.pad, device=device)
    control = torch.full((batch, longest), -1, device=device)
    real = torch.zeros(batch, longest, dtype=torch.bool, device=device)
    positions = torch.zeros(batch, longest, dtype=torch.int64, device=device)
    for row, (words, codec) in enumerate(prompts):  # padded on the left
        gap = longest - len(words)
        text[row, gap:] = torch.tensor(words, device=device)
        control[row, gap:] = torch.tensor(codec, device=device)
        real[row, gap:] = True
        positions[row, gap:] = torch.arange(len(words), device=device)
    x = talker.text(text.flatten())
    x = x + talker.codec_embedding(control.flatten().clamp_min(0)) * (control.flatten() >= 0)[:, None]
    for row, at in enumerate(voice_rows):
        if at is not None:
            assert vectors is not None
            x.view(batch, longest, -1)[row, longest - len(prompts[row][0]) + at] += vectors[row]
    kv = _GrowingKV(talker.config.decoder.layers, batch)
    kv.mask = (real[:, None] & torch.ones(longest, longest, dtype=torch.bool, device=device).tril())[:, None]
    kv.mask = kv.mask | torch.eye(longest, dtype=torch.bool, device=device)
    hidden = talker.decoder(x, positions.flatten(), kv).view(batch, longest, -1)[:, -1]
    at = torch.tensor([len(words) for words, _ in prompts], device=device)
    beside = torch.full((batch, most), rows.pad, device=device)
    for row, tail in enumerate(tails):
        beside[row, : len(tail)] = torch.tensor(tail[:most], dtype=torch.int64, device=device)

    def draw(logits: Tensor, warmth: float) -> Tensor:
        if warmth <= 0:
            return logits.argmax(-1)
        noise = -torch.empty_like(logits).exponential_(generator=random).log()
        return (logits / warmth + noise).argmax(-1)

    ended = torch.zeros(batch, dtype=torch.bool, device=device)
    frames: list[Tensor] = []
    lengths = torch.full((batch,), most, device=device)
    small = talker.new_kv(batch)
    for step in range(most):
        logits = talker.codec_head(hidden).float()
        logits[:, CODES:EOS] = -torch.inf
        logits[:, EOS + 1 :] = -torch.inf
        if step < 2:
            logits[:, EOS] = -torch.inf
        code = draw(logits, temperature)
        lengths = torch.where(~ended & (code == EOS), torch.full_like(lengths, step), lengths)
        ended = ended | (code == EOS)
        if bool(ended.all()):
            break
        code = code.clamp_max(CODES - 1)
        if books:
            frame, row = talker.frame(hidden, code, looked_up(lambda logits, _: draw(logits, book_temperature)), small)
        else:
            frame, row = code[:, None], talker.codec_embedding(code)
        frames.append(frame)
        x = row + talker.text(beside[:, step])
        real = F.pad(real, (0, 1), value=True)
        kv.mask = real[:, None, None]
        hidden = talker.decoder(x, at + step, kv)
    made = torch.stack(frames, 1).cpu().numpy()
    return [made[row, : int(length)] for row, length in enumerate(lengths)]
