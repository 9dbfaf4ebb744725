"""The Talker stage: a voice and text in, one frame of 16 codes per step out.

    stage = TalkerStage.load(checkpoint, device=device, dtype=torch.bfloat16)
    speaking = stage.voices.resolve(voice)                       # BadVoice, before anything runs
    prompt = stage.prompt(speaking, stage.writer.body("Hello"))  # any thread, no device
    sequence = stage.sequence(prompt, stage.sampling, on_output=on_frame, on_end=on_end)

Text reaches a running sequence through its track (`feed`, `close`), one id per step. Rows are kept as ids and codes, so
that a sequence whose pages were taken away can be computed again from its state alone. Knows nothing of audio output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aura_omni.engine.lane import sent
from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.sampler import Draw, pick_row
from aura_omni.engine.sequence import Batch, FinishReason, Sequence
from aura_omni.engine.stage_model import Rows, StageModel
from aura_omni.errors import BadRequest, CheckpointError
from aura_omni.flow import CODEBOOKS, Sampling
from aura_omni.models.layers import looked_up
from aura_omni.models.qwen3_tts import TALKER_LAYOUT, Talker, TalkerConfig
from aura_omni.models.speaker_encoder import SPEAKER_LAYOUT, SpeakerEncoder, SpeakerEncoderConfig, log_mel
from aura_omni.models.weights import shapes_only
from aura_omni.stages.talker_prompt import Prefill, PromptWriter
from aura_omni.stages.voices import Reference, Speaking, Voices

_MIN_FRAMES = 2  # of the published generate(); an end on the first frame would be silence
_RESERVED = 1_024  # ids at the end of the codec vocabulary that are no codes; of these only eos may be drawn


class TextTrack:
    """The text that a sequence still has to read, one id per step; padding once it is closed and empty."""

    def __init__(self, pad_id: int) -> None:
        self._pad_id = pad_id
        self._ids: deque[int] = deque()
        self.closed = False

    def feed(self, ids: Seq[int]) -> None:
        if self.closed:
            raise ValueError("this text track is closed")
        self._ids.extend(ids)

    def close(self) -> None:
        """No more text will come."""
        self.closed = True

    @property
    def ready(self) -> bool:
        """Whether the next step has something to read. A sequence that is not ready is blocked."""
        return self.known(1)

    def known(self, count: int) -> bool:
        """Whether the next `count` steps have something to read."""
        return self.closed or len(self._ids) >= count

    def peek(self, place: int) -> int:
        """What `take` will give after `place` others; padding while that is not there yet."""
        return self._ids[place] if place < len(self._ids) else self._pad_id

    def take(self) -> int:
        if self._ids:
            return self._ids.popleft()
        if not self.closed:
            raise LookupError("the Talker was stepped before its next text arrived")
        return self._pad_id


@dataclass(frozen=True, slots=True)
class TalkerPrompt:
    prefill: Prefill
    reference: Reference | None


@dataclass(slots=True, eq=False)
class TalkerState:
    """frames and text_ids: of every step so far, so row prompt_length + s is frames[s] with text_ids[s].

    late: the step under way was launched before the text of its next row was there.
    """

    prompt: TalkerPrompt
    track: TextTrack
    frames: list[np.ndarray] = field(default_factory=list)
    text_ids: list[int] = field(default_factory=list)
    prompt_rows: Rows | None = None  # while it is being prefilled
    late: bool = False


class TalkerStage(StageModel):
    """Implements `engine.stage_model.StageModel`."""

    penalise_prompt = False
    extra_numbers = 1  # the text id of the next row
    row_ids = 2

    def __init__(
        self,
        talker: Talker,
        speaker_encoder: SpeakerEncoder | None,
        writer: PromptWriter,
        voices: Voices,
        *,
        sampling: Sampling,
        predictor_sampling: Sampling,
    ) -> None:
        """sampling, predictor_sampling: the checkpoint's defaults; sampling.max_tokens is the frame budget."""
        self.talker = talker
        self.writer = writer
        self.voices = voices
        self.sampling = sampling
        self.predictor_sampling = predictor_sampling
        self.decoder, self.decoder_config = talker.decoder, talker.config.decoder
        self.device = talker.codec_head.weight.device
        self.dtype = talker.codec_head.weight.dtype
        self.stop_ids = frozenset({writer.ids.eos})
        self._speaker_encoder = speaker_encoder
        self._banned = torch.zeros(talker.config.codec_vocab, dtype=torch.bool, device=self.device)
        self._banned[-_RESERVED:] = True
        self._banned[writer.ids.eos] = False

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, max_model_len: int | None = None
    ) -> TalkerStage:
        """max_model_len: rows of prompt and frames; None: the model's own. Raises CheckpointError."""
        talker, encoder = cls.networks_of(checkpoint)
        if talker.config.groups != CODEBOOKS:
            raise CheckpointError(
                f"checkpoint {checkpoint.name} has {talker.config.groups} codebooks; frames here have {CODEBOOKS}"
            )
        if encoder and encoder.config.size != talker.config.decoder.hidden:
            raise CheckpointError(
                f"checkpoint {checkpoint.name}: speaker vectors have {encoder.config.size} values, "
                f"its Talker {talker.config.decoder.hidden}"
            )
        least_samples = encoder.config.least_samples if encoder else 0
        voices = checkpoint.parse(lambda config: Voices.from_json(config, checkpoint.name, least_samples=least_samples))
        writer = PromptWriter.load(checkpoint, max_model_len=max_model_len)
        checkpoint.load(talker, TALKER_LAYOUT, device=device, dtype=dtype, own="talker.")
        if encoder:
            checkpoint.load(encoder, SPEAKER_LAYOUT, device=device, dtype=dtype, own="speaker_encoder.")
        sampling, predictor = _sampling_of(checkpoint)
        return cls(talker, encoder, writer, voices, sampling=sampling, predictor_sampling=predictor)

    @staticmethod
    def networks_of(checkpoint: Checkpoint) -> tuple[Talker, SpeakerEncoder | None]:
        """What its configuration describes, on the meta device; only Base checkpoints have a speaker encoder."""
        clones = checkpoint.json("config.json").get("tts_model_type") == "base"
        with shapes_only():
            talker = checkpoint.parse(lambda config: Talker(TalkerConfig.from_json(config)))
            if not clones:
                return talker, None
            return talker, checkpoint.parse(lambda config: SpeakerEncoder(SpeakerEncoderConfig.from_json(config)))

    # ------------------------------------------------------------ what a request becomes

    @torch.no_grad()
    def speaker(self, samples: np.ndarray) -> Tensor:
        """samples float32 [n] mono at 24 kHz -> the voice's vector [H]. Runs on the stage's device, in the current lane.
        Beside the engine's thread, by one thread at a time."""
        if self._speaker_encoder is None:
            raise ValueError(f"checkpoint {self.voices.checkpoint} has no speaker encoder")
        mel = log_mel(torch.from_numpy(samples).to(self.device))
        return self._speaker_encoder(mel.to(self.dtype))

    def reference(
        self, speaking: Speaking, samples: np.ndarray, ref_text: str | None, encode: Callable[[np.ndarray], Tensor]
    ) -> Reference:
        """Build what `speaking.clone` asks for. samples as in `speaker`; encode: the codec's, samples -> codes int64 [T, 16].

        Runs both encoders, in the current lane, which takes seconds on a CPU: `References` does so beside the engine's thread
        and keeps the result, which is there and on the host when this returns.
        """
        vector = self.speaker(samples).cpu()
        if speaking.clone == "speaker" or ref_text is None:
            return Reference(vector)
        return Reference(vector, encode(samples).cpu(), tuple(self.writer.body(ref_text)))

    def prompt(self, speaking: Speaking, body: Seq[int], reference: Reference | None = None) -> TalkerPrompt:
        """body: ids of `writer.body` or `writer.body_of_ids`; reference: just when speaking.clone says so. Thread-safe."""
        if (reference is None) != (speaking.clone is None):
            raise ValueError("a cloned voice needs its reference, and no other voice takes one")
        if reference is None or speaking.clone == "speaker":
            return TalkerPrompt(self.writer.prefill(speaking, body), reference)
        if reference.codes is None or not reference.text_ids:
            raise ValueError("to continue a reference, its codes and its text are needed")
        prefill = self.writer.prefill(
            speaking, body, reference_ids=reference.text_ids, reference_frames=len(reference.codes)
        )
        return TalkerPrompt(prefill, reference)

    @staticmethod
    def bounded(sampling: Sampling) -> Sampling:
        """The sampling with the least number of frames that every sequence has.

        With ignore_eos that is all of its budget: the id that ends speech is no code, so it must not even be drawn.
        """
        least = sampling.max_tokens if sampling.ignore_eos else _MIN_FRAMES
        return replace(sampling, min_tokens=max(sampling.min_tokens, least))

    def sequence(
        self,
        prompt: TalkerPrompt,
        sampling: Sampling,
        *,
        predictor: Sampling | None = None,
        on_output: Callable[[np.ndarray], None],
        on_end: Callable[[FinishReason, Exception | None], None],
        open_ended: bool = False,
    ) -> Sequence:
        """sampling.max_tokens is the frame budget; when it runs out the sequence ends with "length".

        open_ended: more text follows through `feed`, until `close`; the prompt has `least_body` ids or more.

        predictor: of codebooks 1..15 (None: the checkpoint's); on_output gets int64 [16] per frame.
        """
        ids = self.writer.ids
        track = TextTrack(ids.text_pad)
        if open_ended:
            # All of the prompt's text but its end, which comes with `close`.
            assert prompt.prefill.trailing_ids[-1:] == (ids.text_eos,), (
                "text that goes on needs a prompt that waits for it"
            )
            track.feed(prompt.prefill.trailing_ids[:-1])
        else:
            track.feed(prompt.prefill.trailing_ids)
            track.close()
        return Sequence(
            tokens=[ids.pad] * prompt.prefill.length,
            sampling=self.bounded(sampling),
            on_output=on_output,
            on_end=on_end,
            stop_ids=self.stop_ids,
            state=TalkerState(prompt, track),
            inner=predictor or self.predictor_sampling,
            # Rows are not a function of tokens, and a prompt of ten rows costs one step with or without a cache.
            cacheable=False,
        )

    def least_body(self, speaking: Speaking, reference: Reference | None) -> int:
        """Ids of the body that the prompt of a streaming text needs: one, or as many as lie beside a reference's frames."""
        if reference is None or reference.codes is None:
            return 1
        return max(1, 1 + len(reference.codes) - len(reference.text_ids))

    def feed(self, sequence: Sequence, ids: Seq[int]) -> None:
        """More text of an open-ended sequence. Engine thread."""
        state: TalkerState = sequence.state
        state.track.feed(ids)
        self._unblock(sequence)

    def close(self, sequence: Sequence) -> None:
        """The text of an open-ended sequence has ended. Engine thread."""
        state: TalkerState = sequence.state
        state.track.feed([self.writer.ids.text_eos])
        state.track.close()
        self._unblock(sequence)

    def _unblock(self, sequence: Sequence) -> None:
        state: TalkerState = sequence.state
        if sequence.blocked and state.track.ready:
            state.text_ids.append(state.track.take())  # of the row that was waiting for it
            sequence.blocked = False

    # ------------------------------------------------------------ what the engine asks

    @torch.no_grad()
    def rows(self, batch: Batch) -> Rows:
        ids: list[np.ndarray] = []
        media: list[Tensor] = []
        places: list[np.ndarray] = []
        begin = 0
        for sequence, start, count in zip(batch.sequences, batch.starts, batch.counts, strict=True):
            for rows in self._rows(sequence, start, count):
                ids.append(rows.ids)
                if rows.media is not None and rows.places is not None:
                    media.append(rows.media)
                    places.append(rows.places + begin)
                begin += len(rows.ids)
        parts = zip(batch.starts, batch.counts, strict=True)
        positions = np.concatenate([np.arange(start, start + count) for start, count in parts])[:, None]
        if not media:
            return Rows(np.concatenate(ids), positions)
        return Rows(np.concatenate(ids), positions, torch.cat(media), np.concatenate(places))

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """ids [N, 2]: of the text, and of the codec or -1."""
        return self.talker.text(ids[:, 0]) + looked_up(self.talker.codec_embedding, ids[:, 1])

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, H] -> [B, codec vocabulary]; ids that are neither codes nor eos are at -inf."""
        # In place, as the head's output is nobody else's: one launch. Not added, as minus infinity and what is no number would be none.
        logits: Tensor = self.talker.codec_head(hidden)
        return logits.masked_fill_(self._banned, -torch.inf)

    @torch.no_grad()
    def complete(self, hidden: Tensor, ids: Tensor, draw: Draw, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The frames that start with ids [B]: codes int64 [B, 16], and the rows of these frames with the next text."""
        codes, embedding = self.talker.frame(
            hidden, ids, lambda logits, group, table: pick_row(logits, draw, table, stream=group)
        )
        return codes, embedding + self.talker.text(numbers[:, 0])

    def numbers(self, sequence: Sequence, *, ahead: int) -> tuple[int, ...]:
        state: TalkerState = sequence.state
        if not ahead:
            state.late = not state.track.ready
        return (state.track.peek(ahead),)

    def foresees(self, sequence: Sequence) -> bool:
        state: TalkerState = sequence.state
        return not state.late and state.track.known(2)

    def heard(self, sequence: Sequence, values: np.ndarray) -> np.ndarray:
        """int64 [16]. A sequence whose budget ends with this frame gets it too: N frames are N calls."""
        state: TalkerState = sequence.state
        state.frames.append(values)
        sequence.carried = not state.late
        if state.track.ready:
            state.text_ids.append(state.track.take())
        else:
            sequence.blocked = True
        return values

    # ------------------------------------------------------------ rows

    def _rows(self, sequence: Sequence, start: int, count: int) -> Iterator[Rows]:
        """Rows [start, start + count) of a sequence: those of its prompt, then those of frames it has said."""
        state: TalkerState = sequence.state
        prompt_length, stop = sequence.prompt_length, start + count
        if start < prompt_length:
            if state.prompt_rows is None:
                state.prompt_rows = self.prompt_rows(state.prompt)
            yield _part(state.prompt_rows, start, min(stop, prompt_length))
            if stop >= prompt_length:
                state.prompt_rows = None
        if stop > prompt_length:
            steps = slice(max(0, start - prompt_length), stop - prompt_length)
            text_ids = np.array(state.text_ids[steps], np.int64)
            yield self._of_frames(text_ids, np.stack(state.frames[steps]))

    def _of_frames(self, text_ids: np.ndarray, codes: np.ndarray) -> Rows:
        """Text ids int64 [n] over frames int64 [n, 16]."""
        ids = np.stack((text_ids, np.full(len(text_ids), -1)), axis=1)
        places = np.arange(len(ids))
        return Rows(ids, places[:, None], self.talker.frames(sent(codes, self.device))[:, None], places)

    @torch.no_grad()
    def prompt_rows(self, prompt: TalkerPrompt) -> Rows:
        """The rows before the first frame."""
        prefill, reference = prompt.prefill, prompt.reference
        ids = np.full((prefill.length, 2), -1, np.int64)
        ids[:, 0] = prefill.text_ids
        ids[list(prefill.codec_rows), 1] = prefill.codec_ids
        media: list[Tensor] = []
        places: list[int] = []
        if reference is not None and prefill.speaker_row is not None:
            media.append(reference.speaker.to(self.device, self.dtype, non_blocking=True)[None])
            places.append(prefill.speaker_row)
        if reference is not None and reference.codes is not None and prefill.frames_row is not None:
            media.append(self.talker.frames(sent(reference.codes.numpy(), self.device)))
            places += range(prefill.frames_row, prefill.frames_row + prefill.frames)
        positions = np.arange(prefill.length)[:, None]
        if not media:
            return Rows(ids, positions)
        return Rows(ids, positions, torch.cat(media)[:, None], np.array(places))


def _part(rows: Rows, start: int, stop: int) -> Rows:
    """Rows [start, stop) of them, whose places are in order."""
    ids, positions = rows.ids[start:stop], rows.positions[start:stop]
    if rows.media is None or rows.places is None:
        return Rows(ids, positions)
    first, last = np.searchsorted(rows.places, (start, stop)).tolist()
    if first == last:
        return Rows(ids, positions)
    return Rows(ids, positions, rows.media[first:last], rows.places[first:last] - start)


def _sampling_of(checkpoint: Checkpoint) -> tuple[Sampling, Sampling]:
    name = "generation_config.json"
    try:
        return published_sampling(checkpoint.json(name, default={}))
    except BadRequest as error:
        raise CheckpointError(f"{name} of checkpoint {checkpoint.name}: {error.message}") from error


def published_sampling(generation: Mapping[str, Any]) -> tuple[Sampling, Sampling]:
    """generation_config.json -> defaults of the Talker and of its code predictor; what it lacks is as published.

    Raises BadRequest naming a field whose value is out of its range.
    """
    given = {name: generation.get(name) for name in ("temperature", "top_k", "top_p", "repetition_penalty")}
    talker = Sampling(
        temperature=0.9, top_k=50, repetition_penalty=1.05, min_tokens=_MIN_FRAMES, max_tokens=2_048
    ).merged({**given, "max_tokens": generation.get("max_new_tokens")})
    if not generation.get("do_sample", True):
        talker = replace(talker, temperature=0.0)
    predictor = Sampling(temperature=0.9, top_k=50, top_p=1.0)
    return talker, predictor_sampling(
        predictor,
        {
            "do_sample": generation.get("subtalker_dosample"),
            "temperature": generation.get("subtalker_temperature"),
            "top_k": generation.get("subtalker_top_k"),
            "top_p": generation.get("subtalker_top_p"),
        },
    )


def predictor_sampling(base: Sampling, changes: Mapping[str, Any]) -> Sampling:
    """base with do_sample, temperature, top_k and top_p replaced where given. Raises BadRequest for anything else.

    do_sample false is greedy, whatever the temperature.
    """
    known = ("do_sample", "temperature", "top_k", "top_p")
    for name in changes:
        if name not in known:
            raise BadRequest(f"{name} is not a field of the code predictor's sampling; there are {', '.join(known)}")
    do_sample = changes.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise BadRequest(f"do_sample is {do_sample!r}; it must be true or false")
    merged = base.merged({name: value for name, value in changes.items() if name != "do_sample"})
    return replace(merged, temperature=0.0) if do_sample is False else merged
