"""Code2Wav as a stage: the frames of many streams become audio, a few frames of each at a time.

    stream = runner.open(on_audio, on_end, reference=Reference(codes, key))
    runner.push(stream, [frame], due_s=pace.dry_at_s)        # as the Talker makes them
    runner.close(stream)                 # no more frames; ends once all are audio

Streams of any age share a step, and how frames are cut into steps does not change the audio but for rounding, so the runner is
free to decode whatever has come: one frame when that is all there is (the first audio), up to 16 when a stream is behind. A
step never waits for the device: what it made is found by a later one. On CUDA all are graphs. On a CPU every frame is
computed alone: then the sound is the same to the last bit, however it is cut and whoever else speaks.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from aura_omni.counters import Counters, UnderWay
from aura_omni.engine.graphs import Graphed, GraphPool
from aura_omni.engine.lane import Arrival, Lane, sent, staged
from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.sequence import FinishReason
from aura_omni.engine.stage_model import Runner
from aura_omni.errors import CheckpointError, CodeOutOfRange, EngineError, Overloaded
from aura_omni.flow import CODEBOOKS, FRAME_SAMPLES, VOICE_RATE
from aura_omni.models.codec import DECODER_LAYOUT, CodecConfig, CodecDecoder
from aura_omni.models.codec_encoder import ENCODER_LAYOUT, CodecEncoder, CodecEncoderConfig
from aura_omni.models.codec_state import CodecSnapshot
from aura_omni.models.weights import shapes_only

# Frames per stream and step. Few sizes, because each is a CUDA graph for every size of group; the last is the usual chunk of speech that goes on.
STEP_FRAMES = (1, 2, 4, 8, 16)
# Of all streams of a step together: some 5 ms on an H200, for which a first chunk that comes meanwhile has to wait. Steps of four times as
# many take 0.86 times as long for a frame.
MAX_STEP_FRAMES = 64
GRAPH_FRAMES = (
    4,
    8,
    16,
    32,
    48,
    MAX_STEP_FRAMES,
)  # of all streams together: up to 16 take about as long as 1, so padding is free


def load(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> tuple[CodecDecoder, CodecEncoder]:
    """Both halves from the `speech_tokenizer` folder. dtype is the decoder's.

    The encoder is always float32: it runs once per voice, and rounding would choose other codes near a tie.
    """
    decoder, encoder = networks_of(checkpoint)
    decoder_config, encoder_config = decoder.config, encoder.config
    for name, value, expected in (
        ("decoder's sample rate", decoder_config.sample_rate, VOICE_RATE),
        ("encoder's sample rate", encoder_config.sample_rate, VOICE_RATE),
        ("decoder's samples per frame", decoder_config.frame_samples, FRAME_SAMPLES),
        ("encoder's samples per frame", encoder_config.frame_samples, FRAME_SAMPLES),
        ("number of codebooks", decoder_config.codebooks, CODEBOOKS),
    ):
        if value != expected:
            raise CheckpointError(f"checkpoint {checkpoint.name}: the {name} is {value}, this server speaks {expected}")
    checkpoint.load(decoder, DECODER_LAYOUT, device=device, dtype=dtype, own="decoder.")
    checkpoint.load(encoder, ENCODER_LAYOUT, device=device, dtype=torch.float32, own="encoder.")
    return decoder, encoder


def networks_of(checkpoint: Checkpoint) -> tuple[CodecDecoder, CodecEncoder]:
    """What the `speech_tokenizer` folder's configuration describes, on the meta device."""
    with shapes_only():
        return (
            checkpoint.parse(lambda config: CodecDecoder(CodecConfig.from_json(config))),
            checkpoint.parse(lambda config: CodecEncoder(CodecEncoderConfig.from_json(config))),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What a stream has "said" before its first frame: codes int64 [n, 16], n >= 1; key identifies them (a hash)."""

    codes: np.ndarray
    key: bytes


@dataclass(frozen=True, slots=True)
class _Flight:
    """Frames that are being decoded: of each stream its next ones; arrival: their samples float32 [B, T * 1920]."""

    streams: list[Stream]
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Frames that were pushed together."""

    frames: int
    due_s: float


@dataclass(slots=True, eq=False)
class Stream:
    """One utterance on its way to audio. Made by `VocoderRunner.open`; opaque to everyone else."""

    on_audio: Callable[[np.ndarray], None]
    on_end: Callable[[FinishReason, Exception | None], None]
    reference: Reference | None
    start: CodecSnapshot | None = None  # what the reference leaves in the decoder
    pending: list[np.ndarray] = field(default_factory=list)
    chunks: deque[_Chunk] = field(default_factory=deque)  # those whose sound was not handed on
    made: list[np.ndarray] = field(default_factory=list)  # sound of the first of them, as far as it is there
    received: int = 0  # frames, for messages
    slot: int | None = None
    served: int = -1  # number of its last step; -1 until one was launched
    decoding: bool = False  # frames of it are under way
    closing: bool = False
    ended: bool = False
    error: Exception | None = None

    @property
    def made_frames(self) -> int:
        """Whose sound was not handed on."""
        return sum(map(len, self.made)) // FRAME_SAMPLES


class VocoderRunner(Runner):
    """Everything is called on the engine thread.

    A stream takes a slot with its first frame and keeps it to its end, so at most `max_num_seqs` streams make audio; up to
    `max_waiting` more are kept with their frames (whose number the Talker's budget bounds). Slots are free before on_end.
    """

    def __init__(
        self,
        decoder: CodecDecoder,
        *,
        max_num_seqs: int = 64,
        max_waiting: int = 256,
        max_step_frames: int = MAX_STEP_FRAMES,
        max_references: int = 32,
        graphs: bool = False,
        alone: bool = False,
        lane: Lane | None = None,
    ) -> None:
        """max_step_frames bounds streams times frames of one step, and with it the activations; max_references how many
        reference states are kept (the least recently used one goes first).

        graphs: steps are CUDA graphs, captured here. alone: every frame of every stream is computed by itself. lane: where steps are computed; None: a new one.
        """
        self.decoder = decoder
        self.max_num_seqs, self.max_waiting = max_num_seqs, max_waiting
        self.max_step_frames, self.max_references = max_step_frames, max_references
        self._alone = alone
        self._device = next(decoder.parameters()).device
        self._lane = lane or Lane(self._device)
        with self._lane.active():
            # The last slot is where references are decoded, and what steps are padded with.
            self._state = decoder.new_state(max_num_seqs + 1)
        self._flight: _Flight | None = None
        self._news = False  # something has come, gone or landed since `launch` found nothing to do
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._left: set[int] = set()  # free slots that hold what a stream has left there
        self._streams: dict[Stream, None] = {}  # all open ones, in the order they came
        self._references: OrderedDict[bytes, CodecSnapshot] = OrderedDict()
        self._steps = self._frames_in = self._frames_out = 0
        self._under_way = UnderWay()
        self._graphs: dict[int, Graphed] = {}  # by frames of each stream
        if graphs:
            with self._lane.active():
                self._capture()

    # ------------------------------------------------------------ streams

    def open(
        self,
        on_audio: Callable[[np.ndarray], None],
        on_end: Callable[[FinishReason, Exception | None], None],
        *,
        reference: Reference | None = None,
    ) -> Stream:
        """Start a stream.

        on_audio gets float32 [n * 1920], 24 kHz, a delta: the sound of n frames that were pushed together. on_end is called exactly once, after the last audio, with
        "stop", "cancelled" or "error" (and then the error).
        With a reference the audio continues it: the decoder is where it would be had it decoded the reference, whose own
        samples are not made. Raises Overloaded, or CodeOutOfRange when the reference holds a code that does not exist.
        """
        limit = self.max_num_seqs + self.max_waiting
        if len(self._streams) >= limit:
            raise Overloaded(f"{limit} streams are being spoken or wait for it, which is the limit; try again later")
        if reference is not None:
            self._check(self._frames(reference.codes), "frame {} of the reference")
        stream = Stream(on_audio, on_end, reference)
        self._streams[stream] = None
        self._news = True  # its reference is decoded before its frames come
        return stream

    def push(self, stream: Stream, frames: Sequence[Sequence[int]] | np.ndarray, *, due_s: float = -math.inf) -> None:
        """Add frames [n, 16]. A code that no codebook has ends this stream with CodeOutOfRange in the next step.

        due_s: when its listener will have heard all that was pushed before, on a clock that all streams share.

        An ended stream takes no frames and says nothing: its Talker may be one step behind the news.
        """
        if stream.ended or stream.error is not None:
            return
        if stream.closing:
            raise RuntimeError("frames were pushed to a stream after it was closed")
        self._news = True
        codes = self._frames(frames)
        try:
            self._check(codes, "frame {}", stream.received)
        except CodeOutOfRange as error:
            stream.error = error
            return
        stream.received += len(codes)
        self._frames_in += len(codes)
        stream.pending.extend(codes)
        if len(codes):
            stream.chunks.append(_Chunk(len(codes), due_s))

    def close(self, stream: Stream) -> None:
        """No more frames will come. The stream ends with "stop" when all it has are audio."""
        stream.closing = self._news = True

    def abort(self, stream: Stream) -> None:
        """End the stream now: its slot is free and on_end("cancelled") was called when this returns. Twice is once."""
        if not stream.ended:
            self._end(stream, "cancelled", None)

    # ------------------------------------------------------------ Runner

    @property
    def flying(self) -> bool:
        return self._flight is not None

    @property
    def busy(self) -> bool:
        return self.flying or any(stream.pending for stream in self._streams)

    @property
    def awaited(self) -> bool:
        flight = self._flight
        return flight is not None and any(
            stream.chunks and stream.chunks[0].due_s == -math.inf for stream in flight.streams
        )

    def land(self) -> bool:
        """Hand on the sound that has arrived."""
        flight = self._flight
        if flight is None or not flight.arrival.there:
            return False
        self._flight, self._news = None, True
        self._under_way.end()
        for stream in flight.streams:
            stream.decoding = False
        samples = flight.arrival.numpy()
        self._frames_out += samples.size // FRAME_SAMPLES
        for stream, row in zip(flight.streams, samples, strict=True):
            stream.made.append(row)
            self._hand_on(stream)
        return True

    def launch(self) -> bool:
        """At most one reference, and frames of as many streams as fit. Ends the streams that have all their sound."""
        if self._flight is not None or not self._news:
            return False
        self._news = False
        with self._lane.active(), torch.inference_mode():
            worked = self._end_finished()
            worked |= self._prime()
            self._admit()
            groups = self._next_groups()
            for group, count in groups:
                if self._flight is not None:
                    break
                # Another's on_audio may have aborted it.
                if going := [stream for stream in group if not stream.ended and stream.error is None]:
                    self._decode(going, count)
                    self.land()  # a CPU has computed it already
            if groups:
                worked = True
                self._end_finished()
            self._tidy()
        self._news |= worked
        return worked

    def abort_all(self, error: Exception) -> None:
        self._flight = None
        self._under_way.end()
        for stream in list(self._streams):
            if not stream.ended:
                self._end(stream, "error", error)
        self._lane.wait()

    def check_integrity(self) -> None:
        used = [stream.slot for stream in self._streams if stream.slot is not None]
        slots = sorted(used + self._free)
        assert self._left <= set(self._free), "a slot in use would be cleared"
        assert slots == list(range(self.max_num_seqs)), f"slots {slots} of {self.max_num_seqs}: lost or shared"
        assert not any(stream.ended for stream in self._streams), "an ended stream is still listed"
        assert len(self._streams) <= self.max_num_seqs + self.max_waiting, "more streams than admitted"
        assert len(self._references) <= self.max_references, "more reference states than allowed"

    @property
    def counters(self) -> Counters:
        """From any thread; frames that came in and that became sound."""
        running = self.slots_used
        return Counters(
            running=running,
            waiting=max(0, len(self._streams) - running),
            steps=self._steps,
            prompt_tokens=self._frames_in,
            generated_tokens=self._frames_out,
            step_s=self._under_way.total_s,
            computed_rows=self._frames_out,
        )

    @property
    def slots_used(self) -> int:
        return self.max_num_seqs - len(self._free)

    # ------------------------------------------------------------ inside a step

    def _end_finished(self) -> bool:
        done = [
            stream
            for stream in self._streams
            if stream.error is not None or (stream.closing and not stream.pending and not stream.decoding)
        ]
        for stream in done:
            if not stream.ended:  # another's on_end may have aborted it
                self._end(stream, "stop" if stream.error is None else "error", stream.error)
        return bool(done)

    def _end(self, stream: Stream, reason: FinishReason, error: Exception | None) -> None:
        del self._streams[stream]
        stream.ended = self._news = True
        stream.pending.clear()
        if stream.slot is not None:
            self._free.append(stream.slot)
            self._left.add(stream.slot)
            stream.slot = None
        stream.on_end(reason, error)

    def _prime(self) -> bool:
        """Decode the next reference that a stream needs and nobody has decoded yet. At most one per step."""
        for stream in self._streams:
            if stream.reference is None or stream.start is not None:
                continue
            key = stream.reference.key
            if key in self._references:
                self._references.move_to_end(key)
                stream.start = self._references[key]
                continue
            slot = self.max_num_seqs
            self._state.clear(slot)
            codes = sent(self._frames(stream.reference.codes)[None], self._device)
            try:
                self.decoder.prime(codes, self._state, sent([slot], self._device))
            except torch.AcceleratorError:
                raise  # the device itself has failed
            except RuntimeError as error:
                self._fail([stream], f"decode a reference of {codes.shape[1]} frames", error)
                return True
            stream.start = self._references[key] = self._state.snapshot(slot)
            if len(self._references) > self.max_references:
                self._references.popitem(last=False)
            return True
        return False

    def _admit(self) -> None:
        """Give free slots to streams that have frames, in the order the streams came."""
        for stream in self._streams:
            if not self._free:
                return
            primed = stream.reference is None or stream.start is not None
            if stream.slot is None and stream.pending and primed:
                stream.slot = self._free.pop()
                if stream.start is not None:
                    self._state.restore(stream.slot, stream.start)
                elif stream.slot in self._left:
                    self._state.clear(stream.slot)
                self._left.discard(stream.slot)

    def _tidy(self) -> None:
        """Clear the slots that are free, when all else is launched: nobody who comes waits for it."""
        for slot in self._left:
            self._state.clear(slot)
        self._left.clear()

    def _next_groups(self) -> list[tuple[list[Stream], int]]:
        """The streams that are computed together and the frames each decodes: first audio first, then whose listener runs out
        first, then who has waited longest."""
        ready = [stream for stream in self._streams if stream.slot is not None and stream.pending]
        if not ready:
            return []
        ready.sort(key=lambda stream: (stream.chunks[0].due_s, stream.served))
        if self._alone:
            # A chunk is heard when all of it is there, so a step makes all of it: other stages may take long until the next.
            return [([stream], 1) for stream in ready for _ in range(stream.chunks[0].frames - stream.made_frames)]
        count = _step_frames(len(ready[0].pending))
        group = [stream for stream in ready if _step_frames(len(stream.pending)) == count]
        return [(group[: self._most_streams(count)], count)]

    def _most_streams(self, count: int) -> int:
        """In a step of `count` frames of each."""
        return max(1, self.max_step_frames // count)

    def _decode(self, group: list[Stream], count: int) -> None:
        """Launch the next `count` frames of each stream of the group."""
        graph = self._graphs.get(count)
        codes = np.stack([stream.pending[:count] for stream in group]).reshape(len(group), -1)
        numbers = np.zeros((len(group) if graph is None else graph.size(len(group)), 1 + codes.shape[1]), np.int64)
        numbers[:, 0] = self.max_num_seqs
        numbers[: len(group), 0] = [stream.slot for stream in group if stream.slot is not None]
        numbers[: len(group), 1:] = codes
        for stream in group:
            del stream.pending[:count]
            stream.served, stream.decoding = self._steps, True
        self._steps += 1
        self._under_way.begin()
        try:
            samples = (
                self._decoded(sent(numbers, self._device)) if graph is None else graph(staged([numbers], self._device))
            )
            self._flight = _Flight(group, self._lane.home(samples[: len(group)]))
        except torch.AcceleratorError:
            raise  # the device itself has failed
        except RuntimeError as error:
            self._under_way.end()
            for stream in group:
                stream.decoding = False
            self._fail(group, f"decode {count} frames of each of {len(group)} streams", error)

    def _decoded(self, numbers: Tensor) -> Tensor:
        """numbers int64 [B, 1 + T * 16], slot and codes -> samples float32 [B, T * 1920]. Tensors only."""
        codes = numbers[:, 1:].unflatten(1, (-1, self.decoder.config.codebooks))
        return self.decoder.step(codes, self._state, numbers[:, 0].contiguous())

    def _capture(self) -> None:
        pool = GraphPool()
        for count in STEP_FRAMES:
            most = min(self.max_num_seqs, self._most_streams(count))
            sizes = {1, most, *(frames // count for frames in GRAPH_FRAMES if count <= frames <= most * count)}
            nobody = torch.zeros(1, 1 + count * self.decoder.config.codebooks, dtype=torch.int64, device=self._device)
            nobody[:, 0] = self.max_num_seqs
            self._graphs[count] = Graphed(self._decoded, rows=(nobody,), sizes=sizes, pool=pool)
            self._graphs[count].prepare()

    def _hand_on(self, stream: Stream) -> None:
        """The sound of what was pushed together, together."""
        # It may have been aborted since, also by an earlier stream's on_audio.
        while stream.chunks and not stream.ended:
            if stream.made_frames < stream.chunks[0].frames:
                return
            size = stream.chunks.popleft().frames * FRAME_SAMPLES
            sound = (
                stream.made[0] if len(stream.made) == 1 else np.concatenate(stream.made)
            )  # one: a chunk made in one step
            stream.made = [sound[size:]] if len(sound) > size else []
            stream.on_audio(sound[:size])

    def _fail(self, streams: list[Stream], what: str, error: RuntimeError) -> None:
        """The device refused (out of memory, say): these streams end in the next step, the others go on."""
        for stream in streams:
            stream.error = EngineError(f"Code2Wav could not {what}: {error}")
            stream.error.__cause__ = error

    def _frames(self, frames: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
        codes = np.asarray(frames, dtype=np.int64)
        if codes.ndim != 2 or codes.shape[1] != self.decoder.config.codebooks:
            raise ValueError(f"frames are of shape {codes.shape}, not [n, {self.decoder.config.codebooks}]")
        return codes

    def _check(self, codes: np.ndarray, where: str, before: int = 0) -> None:
        """On the host: an index out of range would end the device's context, and every stream with it."""
        size = self.decoder.config.codebook_size
        wrong = np.argwhere((codes < 0) | (codes >= size))
        if len(wrong):
            frame, book = wrong[0]
            raise CodeOutOfRange(
                f"{where.format(before + frame)} has code {codes[frame, book]} in codebook {book}; "
                f"codebooks have codes 0 to {size - 1}"
            )


def _step_frames(pending: int) -> int:
    """The most of STEP_FRAMES that a stream with `pending` frames can decode."""
    return max(count for count in STEP_FRAMES if count <= pending)
