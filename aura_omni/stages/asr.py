"""ASR: a clip of sound to the token ids of what was said, and what they say.

    prompt = stage.prompt(audio, language="en")            # any thread, no device
    sequence = stage.sequence(prompt, SAMPLING, on_output=..., on_end=...)
    transcript = stage.transcript(prompt, ids)             # ids: all that on_output got

The mel and the encoder run on the device, in `forward`, for clips of which a row is really needed: on a CPU thread the
mel alone of 5 s takes 18 ms, on the device it is a few launches, and 5 s of samples are only 320 kB to copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aura_omni.engine.lane import sent
from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.sequence import Batch, FinishReason, MediaSpan, Sequence
from aura_omni.engine.stage_model import Rows, StageModel
from aura_omni.errors import BadMedia, CheckpointError, PromptTooLong
from aura_omni.flow import Audio, Sampling, Transcript
from aura_omni.models.layers import looked_up
from aura_omni.models.qwen3_asr import FFT_SAMPLES, HOP_SAMPLES, SAMPLE_RATE, AsrConfig, Qwen3Asr
from aura_omni.models.weights import in_eight_bits, shapes_only
from aura_omni.stages.clips import MAX_CLIP_S, SEARCH_S, at_speech_rate, media_key, split_long
from aura_omni.stages.encoder_graphs import HearingGraphs
from aura_omni.stages.tokenizer import TextTokenizer
from aura_omni.stages.transcript import TEXT_TAG, language_name, transcript_of

SAMPLING = Sampling(temperature=0.0, max_tokens=512)

SOUND_TOKENS_PER_S = 13
ANSWER_TOKENS_PER_S = 12  # fast speech is 7 words, or 10 characters of Chinese, in a second
SPARE_TOKENS = 16  # what the answer says before the text, and the end
_LANGUAGE_TOKENS = 16  # of a forced language, and of a last second that is not full
CONTEXTS_KEPT = 16  # whose ids are remembered

# Shorter clips get zeros behind them, which then count as sound: so do the converted models. (The original package does
# it only to parts of a long file, and fails on the shortest clips otherwise.)
MIN_SAMPLES = 8_000  # 0.5 s at 16 kHz


@dataclass(frozen=True, slots=True, eq=False)
class AsrPrompt:
    """tokens: the whole prompt; audio: its rows that are sound; samples float32 [n >= 8000] at 16 kHz."""

    tokens: tuple[int, ...]
    audio: MediaSpan
    samples: np.ndarray
    language: str | None  # forced, one of transcript.LANGUAGES


@dataclass(slots=True, eq=False)
class _Heard:
    """samples stay as long as the sequence, so that it can be prefilled again; features only while rows are missing."""

    samples: np.ndarray
    features: Tensor | None = None


class AsrStage(StageModel):
    """An `engine.stage_model.StageModel`. `prompt` and `transcript` may be called from any thread."""

    penalise_prompt = True

    def __init__(self, network: Qwen3Asr, tokenizer: TextTokenizer, *, max_model_len: int | None = None) -> None:
        """network: filled and prepared, on its device. max_model_len: tokens of prompt and answer; None: the model's own.

        Raises CheckpointError when the tokenizer lacks a control token.
        """
        self.network, self.tokenizer = network, tokenizer
        self.max_model_len = max_model_len or network.config.decoder.max_positions
        self.decoder, self.decoder_config = network.decoder, network.config.decoder
        self._hearing: HearingGraphs | None = None
        self.embeddings = weight = network.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        start, end, self._tag = tokenizer.id("<|im_start|>"), tokenizer.id("<|im_end|>"), tokenizer.id(TEXT_TAG)
        self.stop_ids = frozenset({end, tokenizer.id("<|endoftext|>")})
        self._pad = tokenizer.id("<|audio_pad|>")
        text = tokenizer.encode
        self._system = [start]
        # One context is that of many clips, of a request or of a recording.
        self._encoded = lru_cache(maxsize=CONTEXTS_KEPT)(lambda context: tuple(text("system\n" + context)))
        self._before = [end, *text("\n"), start, *text("user\n"), tokenizer.id("<|audio_start|>")]
        self._after = [tokenizer.id("<|audio_end|>"), end, *text("\n"), start, *text("assistant\n")]

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int | None = None,
        fp8: bool = False,
    ) -> AsrStage:
        """Either published layout; fp8 as `network_of` has it. Raises CheckpointError naming what is missing, unused, misshaped or unsupported."""
        network = cls.network_of(checkpoint, fp8=fp8)
        checkpoint.load(network, network.config.layout, device=device, dtype=dtype)
        stage = cls(network, TextTokenizer.load(checkpoint), max_model_len=max_model_len)
        if stage._pad != network.config.audio_token_id:
            raise CheckpointError(
                f"config.json of checkpoint {checkpoint.name}: audio_token_id is {network.config.audio_token_id}, "
                f"but its tokenizer gives <|audio_pad|> the id {stage._pad}"
            )
        return stage

    @staticmethod
    def network_of(checkpoint: Checkpoint, *, fp8: bool = False) -> Qwen3Asr:
        """The network that its configuration describes, on the meta device; fp8: the decoder's matrices in eight bits."""
        with shapes_only():
            network = checkpoint.parse(lambda config: Qwen3Asr(AsrConfig.from_json(config)))
        if fp8:
            in_eight_bits(network.decoder)
        _check_front_end(checkpoint, network.config)
        return network

    def parts(self, audio: Audio, *, context: str = "", max_tokens: int | None = None) -> tuple[Audio, ...]:
        """The clip, cut into what fits the model one by one: sound, context and what is said in it (`answer_tokens`).

        max_tokens: of the answer, where it is set; a part then may be as long as that leaves room for.
        Raises PromptTooLong when the context leaves no room for sound.
        """
        return split_long(audio, limit_s=self.longest_part_s(context=context, max_tokens=max_tokens))

    def longest_part_s(self, *, context: str = "", max_tokens: int | None = None) -> float:
        """Seconds of sound beside which the context and the answer fit; at most MAX_CLIP_S. Raises PromptTooLong."""
        self.tokenizer.refuse_endless([context], limit=self.max_model_len, way_out="Send less context.")
        overhead = len(self._head(context)) + len(self._after) + _LANGUAGE_TOKENS
        room = self.max_model_len - overhead
        longest = (room - SPARE_TOKENS) / (SOUND_TOKENS_PER_S + ANSWER_TOKENS_PER_S)
        if max_tokens is not None:
            longest = max(longest, (room - max_tokens) / SOUND_TOKENS_PER_S)
        if longest < 1:
            raise PromptTooLong(
                f"the context leaves {max(room, 0)} of ASR's {self.max_model_len:,} tokens, which is no second of sound and "
                "its answer. Send less context, or raise max_model_len of the ASR stage.",
                param="messages",
            )
        return min(MAX_CLIP_S, longest - min(SEARCH_S, longest / 5))  # a cut may lie that much later

    @staticmethod
    def answer_tokens(audio: Audio) -> int:
        """More than anybody says in the clip: the budget of a transcript when nobody sets one."""
        return SPARE_TOKENS + int(ANSWER_TOKENS_PER_S * max(audio.duration_s, 1.0))

    def _head(self, context: str) -> list[int]:
        """All that comes before the rows of sound."""
        return [*self._system, *self._encoded(context), *self._before]

    def prompt(self, audio: Audio, *, context: str = "", language: str | None = None) -> AsrPrompt:
        """context: names and words to expect, ordinary text; language: forced, in any spelling; None lets the model say.

        Raises BadRequest for an unknown language, BadMedia for a clip that `parts` must cut first, PromptTooLong.
        """
        if audio.duration_s > MAX_CLIP_S + SEARCH_S:
            raise BadMedia(
                f"the audio is {audio.duration_s:,.1f} s long; ASR takes {MAX_CLIP_S:,g} s at once. Send it in parts"
            )
        forced = None if language is None else language_name(language)
        self.tokenizer.refuse_endless([context], limit=self.max_model_len, way_out="Send less context.")
        samples = at_speech_rate(audio)
        if len(samples) < MIN_SAMPLES:
            samples = np.pad(samples, (0, MIN_SAMPLES - len(samples)))
        head = self._head(context)
        span = MediaSpan(len(head), self.network.config.encoder.tokens(len(samples)), media_key(audio, "asr"))
        tokens = [*head, *[self._pad] * span.length, *self._after]
        if forced is not None:
            tokens += [*self.tokenizer.encode(f"language {forced}"), self._tag]
        return AsrPrompt(tuple(tokens), span, samples, forced)

    def sequence(
        self,
        prompt: AsrPrompt,
        sampling: Sampling,
        *,
        on_output: Callable[[Any], None],
        on_end: Callable[[FinishReason, Exception | None], None],
    ) -> Sequence:
        """on_output gets token ids, one at a time."""
        return Sequence(
            tokens=list(prompt.tokens),
            sampling=sampling,
            on_output=on_output,
            on_end=on_end,
            stop_ids=self.stop_ids,
            media=(prompt.audio,),
            state=_Heard(prompt.samples),
        )

    def transcript(self, prompt: AsrPrompt, ids: list[int]) -> Transcript:
        """What was said in the clip, from the ids that the model wrote."""
        return transcript_of(ids, self.tokenizer, prompt.language)

    # ------------------------------------------------------------ on the engine thread

    def prepare_graphs(self) -> None:
        self._hearing = HearingGraphs(self.network)
        self._hearing.prepare()

    def rows(self, batch: Batch) -> Rows:
        self._encode(batch)
        ids = np.array(batch.tokens(), np.int64)
        positions: list[int] = []
        sound: list[Tensor] = []
        places: list[int] = []
        for sequence, start, count in zip(batch.sequences, batch.starts, batch.counts, strict=True):
            heard, span = sequence.state, sequence.media[0]
            rows, span_rows = _shared(span, start, count)
            if span_rows:
                sound.append(heard.features[span_rows.start : span_rows.stop])
                places += range(len(positions) + rows.start, len(positions) + rows.stop)
            if start + count >= span.start + span.length:
                heard.features = None
            positions += range(start, start + count)
        where = np.array(positions, np.int64)[:, None]
        if not sound:
            return Rows(ids[:, None], where)
        ids[places] = -1
        features = sound[0] if len(sound) == 1 else torch.cat(sound)
        return Rows(ids[:, None], where, features[:, None], np.array(places, np.int64))

    def embed(self, ids: Tensor) -> Tensor:
        return looked_up(self.network.embed_tokens, ids[:, 0])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.network.logits(hidden)

    def heard(self, sequence: Sequence, values: np.ndarray) -> int:
        return int(values[0])

    def _encode(self, batch: Batch) -> None:
        """Encode, in one call, the clips that this step needs rows of and that are not encoded yet."""
        clips: list[_Heard] = [
            sequence.state
            for sequence, start, count in zip(batch.sequences, batch.starts, batch.counts, strict=True)
            if sequence.state.features is None and _shared(sequence.media[0], start, count)[1]
        ]
        if not clips:
            return
        if self._hearing is None:
            encoded = self.network.encode([sent(clip.samples, self.device) for clip in clips])
        else:
            encoded = self._hearing.encode([clip.samples for clip in clips])
        for clip, features in zip(clips, encoded, strict=True):
            clip.features = features


def _shared(span: MediaSpan, start: int, count: int) -> tuple[range, range]:
    """The rows that the step's [start, start + count) has in common with the span, counted from start and from span.start."""
    first, stop = max(start, span.start), min(start + count, span.start + span.length)
    return range(first - start, stop - start), range(first - span.start, stop - span.start)


def _check_front_end(checkpoint: Checkpoint, config: AsrConfig) -> None:
    """Refuse a checkpoint that was trained on another kind of mel."""
    published = checkpoint.json("preprocessor_config.json", default={})
    ours = {
        "sampling_rate": SAMPLE_RATE,
        "hop_length": HOP_SAMPLES,
        "n_fft": FFT_SAMPLES,
        "feature_size": config.encoder.mel_bins,
        "dither": 0.0,
    }
    for name, value in ours.items():
        if name in published and published[name] != value:
            raise CheckpointError(
                f"preprocessor_config.json of checkpoint {checkpoint.name}: {name} is {published[name]!r}; it must be {value}"
            )
