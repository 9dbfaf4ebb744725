"""The product's network over a padded batch, with gradients: the same mathematics, one launch for many clips.

    model = Trainee(config).to(device)
    mel, frames = model.log_mel(waves, samples)
    hidden, rows = model.hear(mel, frames)
    loss = model.text_loss(hidden, rows, targets)

Every clip comes out as the product computes it for itself (a test compares the two): its mel has its own floor and its own
reflected ends, its last chunk is filled up with zeros, its rows see nothing of the padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.qwen3_asr import HOP_SAMPLES, SAMPLE_RATE, AsrConfig, Qwen3Asr, Windows
from aura_omni.stages.tokenizer import TextTokenizer
from aura_omni.stages.transcript import TEXT_TAG
from training.asr.ctc import CtcLoss, scanned

CHARACTERS = "abcdefghijklmnopqrstuvwxyz' "
SLOTS = 3  # letters that one row of 80 ms can spell
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids around the sound, and what ends a transcript; as `AsrStage.prompt` lays them out."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    tag: int
    end: int

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> Prompt:
        start, end, text = tokenizer.id("<|im_start|>"), tokenizer.id("<|im_end|>"), tokenizer.encode
        before = (start, *text("system\n"), end, *text("\n"), start, *text("user\n"), tokenizer.id("<|audio_start|>"))
        after = (tokenizer.id("<|audio_end|>"), end, *text("\n"), start, *text("assistant\n"))
        return cls(before, after, tokenizer.id(TEXT_TAG), end)


def target(tokenizer: TextTokenizer, prompt: Prompt, text: str) -> list[int]:
    """What is to be written: head, tag, text, end."""
    head = "language English" if text else "language None"
    return [*tokenizer.encode(head), prompt.tag, *tokenizer.encode(text), prompt.end]


def letters(text: str) -> list[int]:
    """The text as classes of the auxiliary head, 0 being the blank."""
    return [CHARACTERS.index(letter) + 1 for letter in text.lower().replace("-", " ") if letter in CHARACTERS]


class Causal:
    """The `KeyValues` of a whole batch at once: [batch * length] rows, each sequence seeing only its own past."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, heads, dim = q.shape
        group = heads // k.shape[1]

        def batched(x: Tensor) -> Tensor:
            return x.view(self._batch, rows // self._batch, -1, dim).transpose(1, 2)

        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        kind = v.dtype  # under autocast the projection's; norm and rotation went back to float32
        out = F.scaled_dot_product_attention(batched(q).to(kind), batched(k).to(kind), batched(v), is_causal=True)
        return out.transpose(1, 2).reshape(rows, heads, dim)


class Trainee(nn.Module):
    def __init__(self, config: AsrConfig, prompt: Prompt) -> None:
        super().__init__()
        self.prompt = prompt
        self.net = Qwen3Asr(config)
        nn.init.normal_(self.net.embed_tokens.weight, std=0.05)
        self.spell = nn.Linear(config.encoder.hidden, SLOTS * (1 + len(CHARACTERS)))  # thrown away in the end

    def prepare(self) -> None:
        """Once the weights are on their device."""
        self.net.audio_tower.prepare()
        device = self.spell.weight.device
        self._before = torch.tensor(self.prompt.before, device=device)
        self._after = torch.tensor(self.prompt.after, device=device)

    # ------------------------------------------------------------ sound to rows

    def log_mel(self, waves: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """waves float32 [B, L], samples int64 [B] <= L -> float32 [B, mel, F], zeros after the end; frames int64 [B]."""
        return self.net.audio_tower.log_mels(waves, samples), samples // HOP_SAMPLES

    def rows(self, frames: Tensor) -> Tensor:
        config = self.net.config.encoder
        rest = frames % config.chunk_frames
        return config.chunk_tokens * (frames // config.chunk_frames) + (rest + 7) // 8

    def hear(
        self, mel: Tensor, frames: Tensor, *, skipped: float = 0.0, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """-> [B, T, hidden] after the encoder's last norm, rows int64 [B] that count. T is whole chunks, whole windows if many.

        skipped: the chance that a clip goes past a layer, so that none relies on all the others.
        """
        tower, config = self.net.audio_tower, self.net.config.encoder
        width, batch = config.chunk_frames, len(mel)
        chunks = -(-mel.shape[2] // width)
        if chunks * config.chunk_tokens > config.window_tokens:
            chunks += -chunks % (config.window_frames // width)
        mel = F.pad(mel, (0, chunks * width - mel.shape[2]))
        x = mel.unflatten(2, (chunks, width)).transpose(1, 2).flatten(0, 1)[:, None]
        x = x.contiguous(memory_format=torch.channels_last)
        # A clip shorter than a chunk is not filled up: its convolutions end where it ends.
        left = torch.where(frames < width, frames, width)[:, None].expand(batch, chunks).reshape(-1, 1)
        for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            x = F.gelu(convolution(x))
            left = (left + 1) // 2
            x = x * (torch.arange(x.shape[3], device=x.device) < left)[:, None, None]
        x = tower.conv_out(x.permute(0, 3, 1, 2).flatten(2)) + tower._places
        length = chunks * config.chunk_tokens
        rows = self.rows(frames)
        window = min(length, config.window_tokens)
        mask = (torch.arange(length, device=x.device) < rows[:, None]).view(-1, window)
        mask = mask | ~mask.any(1, keepdim=True)  # a window of padding may see itself: it must see something
        windows = Windows(len(mask), window, None, mask[:, None, None])
        x = x.reshape(batch * length, -1)
        for layer in tower.layers:
            stream, more = layer(x, None, windows)
            after = stream + more
            if skipped:
                past = torch.rand(batch, 1, device=x.device, generator=generator) < skipped
                after = torch.where(past.expand(batch, length).reshape(-1, 1), x, after)
            x = after
        return tower.ln_post(x).view(batch, length, -1), rows

    def project(self, hidden: Tensor) -> Tensor:
        tower = self.net.audio_tower
        return tower.proj2(F.gelu(tower.proj1(hidden)))

    # ------------------------------------------------------------ rows to text

    def spelling_loss(
        self, hidden: Tensor, rows: Tensor, spelled: Tensor, lengths: Tensor, ctc: CtcLoss = scanned
    ) -> Tensor:
        """CTC over letters, SLOTS a row; spelled int64 [B, S] padded; rows and lengths int64 [B]. Mean over letters."""
        scores = self.spell(hidden).unflatten(-1, (SLOTS, -1)).flatten(1, 2).float().log_softmax(-1)
        return ctc(scores, SLOTS * rows, spelled, lengths).sum() / lengths.sum().clamp_min(1)

    def decode(self, sound: Tensor, rows: Tensor, written: Tensor) -> Tensor:
        """sound [B, T, H], written int64 [B, W] (after the prompt) -> [B, W + 1, H]: what follows the prompt and each of written."""
        batch, longest = sound.shape[0], sound.shape[1]
        before, after = self._before, self._after.expand(batch, -1)
        tail = torch.cat((after, written), 1)
        length = len(before) + int(longest) + tail.shape[1]
        place = torch.arange(length, device=sound.device).expand(batch, -1) - len(before)
        first = rows[:, None]
        in_tail = (place - first).clamp(0, tail.shape[1] - 1)
        x = self.net.embed_tokens(tail.flatten()).view(batch, tail.shape[1], -1)
        x = x.gather(1, in_tail[..., None].expand(-1, -1, x.shape[2]))
        heard = sound.gather(1, place.clamp(0, longest - 1)[..., None].expand(-1, -1, sound.shape[2]))
        x = torch.where((place < first)[..., None], heard.to(x.dtype), x)
        x = torch.cat((self.net.embed_tokens(before).expand(batch, -1, -1), x[:, len(before) :]), 1)
        positions = torch.arange(length, device=sound.device).repeat(batch)
        out = self.net(x.flatten(0, 1), positions, Causal(batch)).view(batch, length, -1)
        wanted = len(before) + first + after.shape[1] - 1 + torch.arange(written.shape[1] + 1, device=sound.device)
        return out.gather(1, wanted[..., None].expand(-1, -1, out.shape[2]))

    def text_loss(
        self, sound: Tensor, rows: Tensor, targets: Tensor, written: Tensor, *, smoothing: float = 0.0
    ) -> Tensor:
        """targets int64 [B, W], IGNORED behind the end; written int64 [B, W]: what the decoder believes to have written.

        Mean over targets.
        """
        hidden = self.decode(sound, rows, written[:, :-1])
        logits = self.net.logits(hidden.flatten(0, 1)).float()
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)

    @torch.no_grad()
    def write(self, waves: Tensor, samples: Tensor) -> list[list[int]]:
        """Greedy ids of each clip, without the end; at most 7 a second."""
        longest = 12 + 7 * waves.shape[1] // SAMPLE_RATE
        mel, frames = self.log_mel(waves, samples)
        hidden, rows = self.hear(mel, frames)
        sound = self.project(hidden)
        written = torch.zeros(len(waves), 0, dtype=torch.long, device=waves.device)
        ended = torch.zeros(len(waves), dtype=torch.bool, device=waves.device)
        for _ in range(longest):
            hidden = self.decode(sound, rows, written)[:, -1]
            written = torch.cat((written, self.net.logits(hidden).argmax(-1, keepdim=True)), 1)
            ended |= written[:, -1] == self.prompt.end
            if bool(ended.all()):
                break
        return [ids[: ids.index(self.prompt.end)] if self.prompt.end in ids else ids for ids in written.tolist()]
