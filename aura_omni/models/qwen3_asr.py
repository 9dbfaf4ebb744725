"""Qwen3-ASR: from a waveform to rows that stand in a prompt, and the decoder that reads them.

    network = Qwen3Asr(AsrConfig.from_json(config))
    (rows,) = network.encode([samples])          # [audio_tokens(len(samples)), H], replaces the audio_pad embeddings

Every clip is encoded for itself: neither its mel nor its convolutions nor its attention depend on who shares the call.
Attention of the encoder is windowed (104 tokens, 8 s), as in training; the original package loses the windows outside
FlashAttention. Knows no prompt, no text, no cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.fields import whole
from aura_omni.models.layers import KeyValues, fused_audio, fused_mel, fusible, layer_normed_sum
from aura_omni.models.qwen3 import Decoder, DecoderConfig
from aura_omni.models.weights import Layout, Prepared, StackedLinear

Count = TypeVar("Count", int, Tensor)

SAMPLE_RATE = 16_000  # Hz, what the encoder hears
HOP_SAMPLES = 160  # one mel frame, 10 ms
FFT_SAMPLES = 400
TOP_HZ = 8_000.0

# Chunks (1 s) that go through the convolutions at once: their first output is 3 MB per chunk in bfloat16.
CONV_CHUNKS = 64

# A tied head is stored all the same; where the configuration unties it, the head is wanted and this has no effect.
LAYOUT = Layout(
    renames=(
        ("audio_tower.", "thinker.audio_tower."),
        ("embed_tokens.", "thinker.model.embed_tokens."),
        ("decoder.", "thinker.model."),
        ("lm_head.", "thinker.lm_head."),
    ),
    ignore=(r"thinker\.lm_head\.weight",),
)
HF_LAYOUT = Layout(
    renames=(
        ("audio_tower.proj1.", "model.multi_modal_projector.linear_1."),
        ("audio_tower.proj2.", "model.multi_modal_projector.linear_2."),
        ("audio_tower.", "model.audio_tower."),
        ("embed_tokens.", "model.language_model.embed_tokens."),
        ("decoder.", "model.language_model."),
    ),
    ignore=(r"lm_head\.weight",),
)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    mel_bins: int
    layers: int
    hidden: int
    heads: int
    intermediate: int
    conv_channels: int
    output: int  # the decoder's hidden size
    chunk_frames: int  # mel frames that are convolved together, 100
    window_frames: int  # mel frames that attend to each other, 800

    @property
    def chunk_tokens(self) -> int:
        return _thrice_halved(self.chunk_frames)

    @property
    def window_tokens(self) -> int:
        return self.chunk_tokens * (self.window_frames // self.chunk_frames)

    def tokens(self, samples: int) -> int:
        """Rows that a clip of `samples` at 16 kHz becomes: 13 per second, and the started eighths of the rest."""
        return self.tokens_of(samples // HOP_SAMPLES)

    def tokens_of(self, frames: Count) -> Count:
        """The same for so many mel frames, of a clip or of each."""
        return self.chunk_tokens * (frames // self.chunk_frames) + _thrice_halved(frames % self.chunk_frames)

    @classmethod
    def from_json(cls, audio: Mapping[str, Any]) -> EncoderConfig:
        """Raises ValueError naming what this encoder does not compute, KeyError for what is missing."""
        _refuse(audio, activation_function="gelu", scale_embedding=False)
        config = cls(
            mel_bins=whole(audio, "num_mel_bins"),
            layers=whole(audio, "encoder_layers"),
            hidden=whole(audio, "d_model"),
            heads=whole(audio, "encoder_attention_heads"),
            intermediate=whole(audio, "encoder_ffn_dim"),
            conv_channels=whole(audio, "downsample_hidden_size"),
            output=whole(audio, "output_dim"),
            chunk_frames=2 * whole(audio, "n_window"),
            window_frames=whole(audio, "n_window_infer"),
        )
        if config.window_frames % config.chunk_frames:
            raise ValueError(
                f"n_window_infer is {config.window_frames}; it must be a multiple of 2 * n_window, {config.chunk_frames}"
            )
        if config.hidden % config.heads or config.hidden % 2:
            raise ValueError(f"d_model is {config.hidden}; it must be even and a multiple of {config.heads} heads")
        return config


@dataclass(frozen=True, slots=True)
class AsrConfig:
    encoder: EncoderConfig
    decoder: DecoderConfig
    vocabulary: int
    tied: bool  # the head is the embedding table
    audio_token_id: int  # what stands in a prompt where rows of sound go
    layout: Layout  # of the checkpoint that this configuration came with

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> AsrConfig:
        """From config.json of the original checkpoints (`thinker_config`) or of the converted ones (flat, "-hf").

        Rotary positions are the ordinary kind in both: the three rows of the original are always equal.
        """
        original = "thinker_config" in config
        inner: Mapping[str, Any] = config["thinker_config"] if original else config
        text = inner["text_config"]
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        _refuse(text, hidden_act="silu", attention_bias=False, use_sliding_window=False)
        _refuse(rope, rope_type="default", type="default")
        # Which of the two flags decides differs: the original reads the inner one, the converted files set only the outer.
        first, second = (text, inner) if original else (inner, text)
        tied = (first if "tie_word_embeddings" in first else second)["tie_word_embeddings"]
        encoder, decoder = EncoderConfig.from_json(inner["audio_config"]), DecoderConfig.from_json(text)
        if encoder.output != decoder.hidden:
            raise ValueError(f"output_dim of the encoder is {encoder.output}, hidden_size is {decoder.hidden}")
        return cls(
            encoder=encoder,
            decoder=decoder,
            vocabulary=whole(text, "vocab_size"),
            tied=bool(tied),
            audio_token_id=whole(inner, "audio_token_id", least=0),
            layout=LAYOUT if original else HF_LAYOUT,
        )


class Qwen3Asr(nn.Module):
    """Published names below the prefixes of the layout; `decoder` and `embed_tokens` share one there."""

    def __init__(self, config: AsrConfig) -> None:
        super().__init__()
        self.config = config
        self.audio_tower = AudioEncoder(config.encoder)
        self.embed_tokens = nn.Embedding(config.vocabulary, config.decoder.hidden)
        self.decoder = Decoder(config.decoder)
        if not config.tied:
            self.lm_head = nn.Linear(config.decoder.hidden, config.vocabulary, bias=False)

    def encode(self, clips: Sequence[Tensor]) -> list[Tensor]:
        """clips: float32 [n_i] at 16 kHz, n_i >= 400 -> one [tokens(n_i), H] each, in the weights' dtype."""
        rows: list[Tensor] = self.audio_tower([self.audio_tower.log_mel(clip) for clip in clips])
        return rows

    def forward(self, x: Tensor, positions: Tensor, kv: KeyValues) -> Tensor:
        """x [N, H], positions int64 [N] -> final-normed hidden [N, H]."""
        return self.decoder(x, positions, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, H] -> [B, V] in the weights' dtype."""
        head = self.embed_tokens if self.config.tied else self.lm_head
        return F.linear(hidden, head.weight)


class AudioEncoder(Prepared):
    """Log-mel, three strided convolutions per chunk, a pre-norm transformer over windows, a two-layer projection."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        channels, hidden = config.conv_channels, config.hidden
        self.conv2d1 = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.conv2d2 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.conv2d3 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.conv_out = nn.Linear(channels * _thrice_halved(config.mel_bins), hidden, bias=False)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.ln_post = nn.LayerNorm(hidden)
        self.proj1 = nn.Linear(hidden, hidden)
        self.proj2 = nn.Linear(hidden, config.output)

    def prepare(self) -> None:
        weight = self.conv_out.weight
        self._filters = mel_filters(self.config.mel_bins).to(weight.device)
        self._hann = torch.hann_window(FFT_SAMPLES, device=weight.device)
        self._places = sinusoids(self.config.chunk_tokens, self.config.hidden).to(weight.device, weight.dtype)
        # How many samples a window has at least when there is a row in each of its places.
        place = torch.arange(self.config.window_tokens)
        chunk, row = place // self.config.chunk_tokens, place % self.config.chunk_tokens
        self._fewest = (HOP_SAMPLES * (chunk * self.config.chunk_frames + 8 * row + 1)).to(weight.device)
        # The first convolution, of one channel, as a product of windows of 16, as many as tensor cores like; seven count nothing.
        self._first = F.pad(self.conv2d1.weight.detach()[:, 0], (0, 1, 0, 1)).flatten(1)
        # Channels last is how cuDNN's kernels have images; on a CPU it is a little faster, too, and rounds worse.
        self._images = torch.contiguous_format if weight.is_cpu else torch.channels_last
        for convolution in (self.conv2d2, self.conv2d3):
            convolution.weight.data = convolution.weight.data.contiguous(memory_format=self._images)

    def log_mel(self, samples: Tensor) -> Tensor:
        """samples float32 [n] in [-1, 1], n > 200 -> float32 [mel_bins, n // 160] on the weights' device.

        The floor is 8 decades of power below the clip's own maximum, so a mel is exact only for the whole clip.
        """
        return self.log_mels(samples.to(self._hann.device, torch.float32)[None])[0]

    def log_mels(self, waves: Tensor, lengths: Tensor | None = None) -> Tensor:
        """`log_mel` of N clips in as many operations as of one: float32 [N, mel_bins, L // 160], zeros behind the end of each.

        waves float32 [N, L], on the weights' device; lengths int64 [N], there too: of the clips, each over 200, what lies
        behind does not matter. None: all have L samples.
        """
        if lengths is not None and fusible(waves):
            return fused_mel().log_mels(waves, lengths, self._hann, self._filters, HOP_SAMPLES)
        half = FFT_SAMPLES // 2
        mirrored = F.pad(waves, (half, half), mode="reflect")
        if lengths is not None:
            # Each clip is mirrored at its own end; at that of the longest it has been.
            beyond = torch.arange(half, device=waves.device)
            mirrored.scatter_(1, lengths[:, None] + half + beyond, waves.gather(1, lengths[:, None] - 2 - beyond))
        spectrum = torch.stft(mirrored, FFT_SAMPLES, HOP_SAMPLES, window=self._hann, center=False, return_complex=True)
        power = (spectrum[..., :-1].abs() ** 2).contiguous()
        log = (self._filters @ power).clamp_min(1e-10).log10()
        if lengths is None:
            return (torch.maximum(log, log.amax((1, 2), keepdim=True) - 8.0) + 4.0) / 4.0
        behind = (torch.arange(log.shape[2], device=log.device) >= (lengths // HOP_SAMPLES)[:, None])[:, None]
        top = log.masked_fill(behind, -torch.inf).amax((1, 2), keepdim=True)
        return ((torch.maximum(log, top - 8.0) + 4.0) / 4.0).masked_fill(behind, 0.0)

    def forward(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """mels: float32 [mel_bins, F_i], F_i >= 1 -> one [tokens_i, output] each."""
        clips = self._convolved(mels)
        lengths = [len(rows) for rows in clips]
        windows = Windows.of(lengths, self.config.window_tokens, clips[0].device)
        return list(self._transformed(torch.cat(clips), windows).split(lengths))

    def windows(self, images: Tensor, inside: Tensor) -> Tensor:
        """Whole windows of sound: images float32 [W, chunks, mel_bins, chunk_frames], zeros behind the end of a clip.

        inside bool [W, window_tokens]: which rows are of a clip, at least one of each window. Returns [W, window_tokens,
        output], of no meaning where no row is. Tensors only: it may be recorded in a CUDA graph.
        """
        windows = Windows(len(images), self.config.window_tokens, None, inside[:, None, None])
        rows = self._chunks(images.flatten(0, 1)).flatten(0, 1)
        return self._transformed(rows, windows).unflatten(0, inside.shape)

    def heard(self, waves: Tensor, lengths: Tensor) -> Tensor:
        """Clips of W windows each, from their samples on: waves and lengths as `log_mels` has them, each a chunk or more.

        L is W windows and a hop, and no clip ends before its last window. Returns [N, W * window_tokens, output], of no meaning
        behind the rows of each. Tensors only, as `windows`.
        """
        config = self.config
        mels = self.log_mels(waves, lengths)
        count = mels.shape[2] // config.window_frames
        mels = mels[..., : count * config.window_frames]
        images = mels.unflatten(2, (count, -1, config.chunk_frames)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        begins = HOP_SAMPLES * config.window_frames * torch.arange(count, device=waves.device)
        inside = lengths[:, None, None] >= begins[:, None] + self._fewest
        rows = self.windows(images, inside.flatten(0, 1))
        return rows.view(len(waves), -1, rows.shape[-1])

    def _transformed(self, x: Tensor, windows: Windows) -> Tensor:
        more: Tensor | None = None
        for layer in self.layers:
            x, more = layer(x, more, windows)
        _, normed = layer_normed_sum(self.ln_post, x, more)
        out: Tensor = self.proj2(F.gelu(self.proj1(normed)))
        return out

    def _convolved(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Each clip's valid rows [tokens_i, hidden] with positions added.

        The last, incomplete chunk of a clip is filled up with zeros, whose convolutions the last rows see. A clip shorter
        than one chunk stays as short as it is: so does the original (the converted model fills it up as well).
        """
        width = self.config.chunk_frames
        long = [n for n, mel in enumerate(mels) if mel.shape[1] >= width]
        done: dict[int, Tensor] = {}
        if long:
            padded = [F.pad(mels[n], (0, -mels[n].shape[1] % width)) for n in long]
            images = [mel.unflatten(1, (-1, width)).transpose(0, 1) for mel in padded]
            groups = torch.cat(images).split(CONV_CHUNKS)
            chunks = torch.cat([self._chunks(group) for group in groups]).split([len(image) for image in images])
            done.update(zip(long, chunks, strict=True))
        for n, mel in enumerate(mels):
            rows = done[n] if n in done else self._chunks(mel[None])
            # Only the last chunk can be incomplete, so the valid rows are the first ones.
            done[n] = rows.flatten(0, 1)[: self.config.tokens_of(mel.shape[1])]
        return [done[n] for n in range(len(mels))]

    def _chunks(self, images: Tensor) -> Tensor:
        """images float32 [C, mel_bins, frames] -> [C, tokens, hidden]; positions start anew in each chunk."""
        if fusible(images):
            kernels, last = fused_audio(), self.conv2d3
            x = kernels.first_convolution(images, self._first, self.conv2d1.bias)
            x = kernels.bias_gelu(_unbiased(self.conv2d2, x), self.conv2d2.bias)
            return self._placed(kernels.bias_gelu(_unbiased(last, x), last.bias, rows=True))
        x = F.pad(images.to(self.conv_out.weight.dtype), (1, 2, 1, 2))
        windows = x.unfold(1, 4, 2).unfold(2, 4, 2).flatten(3)
        x = F.gelu(F.linear(windows, self._first, self.conv2d1.bias)).permute(0, 3, 1, 2)
        x = x.contiguous(memory_format=self._images)
        for convolution in (self.conv2d2, self.conv2d3):
            x = F.gelu(convolution(x))
        return self._placed(x.permute(0, 3, 1, 2).flatten(2))

    def _placed(self, x: Tensor) -> Tensor:
        """x [C, tokens, channels x bins], what the convolutions make of chunks -> [C, tokens, hidden]."""
        rows: Tensor = self.conv_out(x)
        return rows + self._places[: rows.shape[1]]


class EncoderLayer(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden)
        self.self_attn = EncoderAttention(config.hidden, config.heads)
        self.final_layer_norm = nn.LayerNorm(config.hidden)
        self.fc1 = nn.Linear(config.hidden, config.intermediate)
        self.fc2 = nn.Linear(config.intermediate, config.hidden)

    def forward(self, x: Tensor, more: Tensor | None, windows: Windows) -> tuple[Tensor, Tensor]:
        """The residual stream as two summands, before and after; whoever reads it adds them up and norms them at once."""
        x, normed = layer_normed_sum(self.self_attn_layer_norm, x, more)
        x, normed = layer_normed_sum(self.final_layer_norm, x, self.self_attn(normed, windows))
        return x, self.fc2(F.gelu(self.fc1(normed)))


class EncoderAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = StackedLinear(hidden, {"q_proj": hidden, "k_proj": hidden, "v_proj": hidden}, bias=True)
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, windows: Windows) -> Tensor:
        """x [N, hidden]; every row attends to its whole window, in both directions."""
        qkv = windows.apart(self.qkv_proj(x))
        # For each of its calls with a mask PyTorch makes another of it, which takes longer than attention to a single window.
        if windows.mask is not None and fusible(x) and windows.width <= fused_audio().MOST_WINDOW:
            out = fused_audio().window_attention(qkv, self.heads, windows.mask)
        else:
            q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=windows.mask).transpose(1, 2).flatten(2)
        return self.out_proj(windows.together(out))


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Consecutive rows cut into windows, seen as a batch of `count` windows of `width` rows.

    rows int64 [N]: where each row lies in the flattened batch; mask bool [count, 1, 1, width]: which places hold a row.
    No rows: every place has one, or is only filled up, and the batch is a view. No mask either: all windows have the same
    length, as for one clip of up to 8 s.
    """

    count: int
    width: int
    rows: Tensor | None
    mask: Tensor | None

    @classmethod
    def of(cls, lengths: Sequence[int], limit: int, device: torch.device) -> Windows:
        """Clips of `lengths` rows, each cut into windows of `limit` rows and what is left."""
        sizes = torch.tensor([min(limit, length - start) for length in lengths for start in range(0, length, limit)])
        count, width = len(sizes), int(sizes.max())
        taken = torch.arange(width) < sizes[:, None]
        if bool(taken.all()):
            return cls(count, width, None, None)
        # Without waiting for what is under way on the device.
        rows, mask = (x.to(device, non_blocking=True) for x in (taken.flatten().nonzero()[:, 0], taken[:, None, None]))
        return cls(count, width, rows, mask)

    def apart(self, x: Tensor) -> Tensor:
        """[N, D] -> [count, width, D], zeros where no row is."""
        if self.rows is not None:
            x = x.new_zeros(self.count * self.width, x.shape[1]).index_copy(0, self.rows, x)
        return x.view(self.count, self.width, -1)

    def together(self, x: Tensor) -> Tensor:
        """The inverse of `apart`."""
        x = x.flatten(0, 1)
        return x if self.rows is None else x.index_select(0, self.rows)


def _unbiased(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, convolution.weight, None, convolution.stride, convolution.padding)


def mel_filters(bins: int) -> Tensor:
    """float32 [bins, 201]: triangles on Slaney's mel scale from 0 to 8000 Hz, each of unit area in Hz.

    The scale is linear (3 mel per 200 Hz) up to 1 kHz and logarithmic (27 mel per factor 6.4) above.
    """
    knee_hz, knee_mel, mels_per_log = 1000.0, 15.0, 27.0 / math.log(6.4)
    top = knee_mel + math.log(TOP_HZ / knee_hz) * mels_per_log
    mels = torch.linspace(0.0, top, bins + 2, dtype=torch.float64)
    edges = torch.where(mels < knee_mel, mels * 200.0 / 3.0, knee_hz * ((mels - knee_mel) / mels_per_log).exp())
    lines = torch.linspace(0.0, SAMPLE_RATE / 2, FFT_SAMPLES // 2 + 1, dtype=torch.float64)
    left, centre, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = torch.minimum((lines - left) / (centre - left), (right - lines) / (right - centre)).clamp_min(0.0)
    return (triangles * (2.0 / (right - left))).float()


def sinusoids(length: int, channels: int) -> Tensor:
    """float32 [length, channels]: sines in the first half, cosines in the second, wavelengths from 2 pi to 20000 pi."""
    half = channels // 2
    rates = torch.exp(torch.arange(half).float() * -(math.log(10_000.0) / (half - 1)))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def _thrice_halved(n: Count) -> Count:
    """What three convolutions of stride 2 leave of n, rounded up each time."""
    return (n + 7) // 8


def _refuse(section: Mapping[str, Any], **supported: Any) -> None:
    for name, value in supported.items():
        if name in section and section[name] != value:
            raise ValueError(f"{name} is {section[name]!r}; only {value!r} is supported")
