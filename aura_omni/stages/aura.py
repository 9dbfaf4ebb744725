"""AURA: messages to the token ids of an answer, or of silence.

    prompt = stage.prompt(messages)                        # any thread, no device
    sequence = stage.sequence(prompt, SAMPLING, on_output=..., on_end=...)
    reader = stage.reader(SAMPLING)                        # fed with what on_output gets

or, while the end of the prompt is not known, stage.sequence(draft, ..., known=rows) and stage.close(sequence, prompt).
`stage.reading(prompt, ...)` leaves all but a prompt's last message in the prefix cache and says nothing.

Frames stay uint8 until a step needs their rows; then they are resized, cut into patches and encoded on the device, each
pair of frames once. Rows found in the prefix cache never ask for theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aura_omni.engine.lane import staged
from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.sequence import Batch, FinishReason, Sequence
from aura_omni.engine.stage_model import Rows, StageModel
from aura_omni.errors import CheckpointError
from aura_omni.flow import Message, Sampling
from aura_omni.models.layers import looked_up
from aura_omni.models.qwen3_vl import LAYOUT, Qwen3VL, VLConfig
from aura_omni.models.vision_input import Framing, PixelRules
from aura_omni.models.weights import in_eight_bits, shapes_only
from aura_omni.stages.aura_prompt import AuraPrompt, Profile, PromptWriter, Visual
from aura_omni.stages.encoder_graphs import TowerGraphs, features_of
from aura_omni.stages.picture_cache import PictureCache
from aura_omni.stages.prompt_memory import Group
from aura_omni.stages.silent import AnswerReader
from aura_omni.stages.tokenizer import TextTokenizer

SAMPLING = Sampling(temperature=0.5, max_tokens=256)

USUAL_FRAME = (360, 640)  # height and width, in pixels, that clients send most
ENCODED_PATCHES = 16_384  # of one call of the vision tower, which bounds its memory: 18 pairs of 640x352
FIRST_WORD = 8  # ids that the first word of an answer may have
AHEAD_PATCHES = 1_024  # of an open sequence, encoded before their rows are due: one pair of 640x352


@dataclass(slots=True, eq=False)
class _Seen:
    """The prompt stays as long as the sequence, so that it can be prefilled again; features only while rows are missing.

    features: group index -> [1 + K, rows, H], main and deepstack.
    ahead: indices of groups behind what is known of an open sequence's prompt, worth encoding with its last known rows.
    urgent: as `AuraStage.sequence` has it.
    """

    prompt: AuraPrompt
    ahead: tuple[int, ...] = ()
    urgent: Callable[[], bool] = lambda: False
    features: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Need:
    """Rows [first, stop) of a group, counted from its start, that are rows [row, ...) of the step."""

    seen: _Seen
    index: int
    first: int
    stop: int
    row: int

    @property
    def group(self) -> Group:
        return self.seen.prompt.groups[self.index]

    @property
    def visual(self) -> Visual:
        return self.seen.prompt.visuals[self.group.visual]

    @property
    def key(self) -> bytes:
        return self.seen.prompt.media[self.index].key


class AuraStage(StageModel):
    """An `engine.stage_model.StageModel`. `prompt` and `reader` may be called from any thread."""

    penalise_prompt = True

    def __init__(
        self,
        network: Qwen3VL,
        tokenizer: TextTokenizer,
        *,
        video_rules: PixelRules,
        image_rules: PixelRules,
        profile: Profile,
        max_model_len: int | None = None,
        picture_cache_bytes: int = 0,
    ) -> None:
        """network: filled and prepared, on its device. max_model_len: tokens of prompt and answer; None: the model's own.
        picture_cache_bytes: on the device, for what encoded pictures have become.

        Raises CheckpointError when the tokenizer lacks a control token of the profile, `<|silent|>` above all.
        """
        self.network, self.tokenizer, self.profile = network, tokenizer, profile
        self.max_model_len = min(max_model_len or network.config.max_positions, network.config.max_positions)
        self._writer = PromptWriter(
            tokenizer, profile, video_rules=video_rules, image_rules=image_rules, max_model_len=self.max_model_len
        )
        self.controls = self._writer.controls
        self.decoder, self.decoder_config = network.decoder, network.config.text
        self.adds = len(network.config.vision.deepstack_layers)
        self._graphs: TowerGraphs | None = None
        self._pictures = PictureCache(picture_cache_bytes)
        self._video_rules = video_rules
        self.embeddings = weight = network.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        ends = (self.controls.silent, self.controls.im_end, self.controls.end_of_text)
        self.stop_ids = frozenset(token for token in ends if token is not None)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        dtype: torch.dtype,
        profile: Profile | None = None,
        max_model_len: int | None = None,
        max_video_pixels: int | None = None,
        picture_cache_bytes: int = 0,
        fp8: bool = False,
    ) -> AuraStage:
        """fp8 as `network_of` has it. max_video_pixels: of all frames of a clip together; None: as the checkpoint says.

        Raises CheckpointError naming what is missing, unused, misshaped or unsupported.
        """
        network = cls.network_of(checkpoint, fp8=fp8)
        config = network.config
        video_rules = _pixel_rules(checkpoint, "video_preprocessor_config.json", config)
        if max_video_pixels is not None:
            video_rules = replace(video_rules, max_pixels=max_video_pixels)
        image_rules = _pixel_rules(checkpoint, "preprocessor_config.json", config)
        tokenizer = TextTokenizer.load(checkpoint)
        if tokenizer.size > config.vocabulary:
            raise CheckpointError(
                f"checkpoint {checkpoint.name}: the tokenizer has {tokenizer.size} tokens, the model {config.vocabulary}"
            )
        checkpoint.load(network, LAYOUT, device=device, dtype=dtype)
        return cls(
            network,
            tokenizer,
            video_rules=video_rules,
            image_rules=image_rules,
            profile=profile or Profile(),
            max_model_len=max_model_len,
            picture_cache_bytes=picture_cache_bytes,
        )

    @staticmethod
    def ahead_bytes(config: VLConfig, dtype: torch.dtype, *, known_rows: int) -> int:
        """Device memory of the features that one open sequence may hold, of fewer than known_rows and of what lies behind them."""
        rows = known_rows + AHEAD_PATCHES // config.vision.merge**2
        return rows * (1 + len(config.vision.deepstack_layers)) * config.text.hidden * dtype.itemsize

    @staticmethod
    def network_of(checkpoint: Checkpoint, *, fp8: bool = False) -> Qwen3VL:
        """The network that its configuration describes, on the meta device; fp8: the decoder's matrices in eight bits."""
        with shapes_only():
            network = checkpoint.parse(lambda config: Qwen3VL(VLConfig.from_json(config)))
        if fp8:
            in_eight_bits(network.decoder)
        return network

    def prompt(self, messages: Seq[Message], *, system_prompt: str | None = None) -> AuraPrompt:
        """See `PromptWriter.write`."""
        return self._writer.write(messages, system_prompt=system_prompt)

    def sequence(
        self,
        prompt: AuraPrompt,
        sampling: Sampling,
        *,
        on_output: Callable[[Any], None],
        on_end: Callable[[FinishReason, Exception | None], None],
        known: int | None = None,
        urgent: Callable[[], bool] = lambda: False,
    ) -> Sequence:
        """on_output gets token ids, one at a time. The answer is at most what the context has room for.

        known: only so many rows are sure, and the sequence is open until `close` brings the prompt as it is, with the same
        pictures. Pictures of the last message that lie behind the known rows are encoded ahead, up to AHEAD_PATCHES;
        those of earlier messages are likely in the prefix cache.
        urgent: whether another stage begins with what the next ids say; see `foresees`.
        """
        seen = _Seen(prompt, () if known is None else tuple(_ahead(prompt, known)), urgent)

        def ended(reason: FinishReason, error: Exception | None) -> None:
            seen.features.clear()
            on_end(reason, error)

        return Sequence(
            tokens=prompt.tokens[:known],
            sampling=self._bounded(sampling, prompt),
            on_output=on_output,
            on_end=ended,
            stop_ids=self.stop_ids,
            media=prompt.media,
            # Rows that are not known may become others.
            beginning=prompt.beginning if known is None or known >= prompt.beginning.rows else None,
            state=seen,
            open=known is not None,
        )

    def reading(
        self, prompt: AuraPrompt, *, due_s: float, on_end: Callable[[FinishReason, Exception | None], None]
    ) -> Sequence:
        """All but the prompt's last message, for the prefix cache alone. due_s: when it is needed; what is needed first goes first."""
        sequence = self.sequence(prompt, SAMPLING, on_output=_unheard, on_end=on_end, known=prompt.beginning.rows)
        sequence.state.ahead, sequence.only_read, sequence.priority = (), True, due_s
        return sequence

    def close(self, sequence: Sequence, prompt: AuraPrompt, sampling: Sampling) -> None:
        """All of the prompt of an open sequence, for `ArRunner.close`, which follows. Engine thread."""
        assert prompt.tokens[: sequence.length] == sequence.tokens, "the rows that were known have changed"
        sequence.state.prompt, sequence.state.ahead = prompt, ()
        sequence.sampling, sequence.media = self._bounded(sampling, prompt), prompt.media
        sequence.tokens = list(prompt.tokens)
        sequence.prompt_length = sequence.length

    def _bounded(self, sampling: Sampling, prompt: AuraPrompt) -> Sampling:
        return replace(sampling, max_tokens=min(sampling.max_tokens, self.max_model_len - len(prompt.tokens)))

    def reader(self, sampling: Sampling) -> AnswerReader:
        return AnswerReader(self.tokenizer, silent_text=self.profile.silent_token, stop=sampling.stop)

    # ------------------------------------------------------------ on the engine thread

    def prepare_graphs(self) -> None:
        """Those of the usual frames."""
        rules = self._video_rules
        size = rules.size(rules.temporal_patch, *USUAL_FRAME, still=False)
        self._graphs = TowerGraphs(self.network.visual)
        self._graphs.prepare(Framing(rules, USUAL_FRAME, size))

    def prepare(self, batch: Batch) -> bool:
        """The pictures of one sequence at a time."""
        return any(self._encode([*_needs(one), *_needs_ahead(one)]) for one in batch.split())

    def rows(self, batch: Batch) -> Rows:
        needs = list(_needs(batch))
        ahead = list(_needs_ahead(batch))
        self._encode([*needs, *ahead])
        for need in ahead:
            # A copy: all that was encoded in the same call would stay with a part of it.
            need.seen.features[need.index] = need.seen.features[need.index].clone()
        ids = np.array(batch.tokens(), np.int64)
        features = [need.seen.features[need.index][:, need.first : need.stop] for need in needs]
        _forget(batch)
        if not features:
            return Rows(ids[:, None], _positions(batch).T)
        places = np.concatenate([np.arange(need.row, need.row + need.stop - need.first) for need in needs])
        ids[places] = -1
        media = features[0] if len(features) == 1 else torch.cat(features, dim=1)
        return Rows(ids[:, None], _positions(batch).T, media.transpose(0, 1), places)

    def embed(self, ids: Tensor) -> Tensor:
        return looked_up(self.network.embed_tokens, ids[:, 0])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.network.head(hidden)

    def position(self, sequence: Sequence, row: int) -> tuple[int, ...]:
        prompt: AuraPrompt = sequence.state.prompt
        if row < len(prompt.tokens):
            return tuple(prompt.positions[:, row].tolist())
        return (row + prompt.delta,) * 3

    @property
    def in_step(self) -> bool:
        return True

    def foresees(self, sequence: Sequence) -> bool:
        # The first id is silence more often than not, and a step for it would be in vain. One that was launched before the Talker's
        # first would slow it down: it takes twice as long beside one of AURA's.
        urgent = sequence.generated < FIRST_WORD and sequence.state.urgent()
        return sequence.generated > 0 and not urgent

    def heard(self, sequence: Sequence, values: np.ndarray) -> int:
        return int(values[0])

    def _encode(self, needs: list[_Need]) -> bool:
        """Features of the groups that have none yet, those of one framing encoded together; whether any had to be."""
        waiting: dict[Framing, list[_Need]] = {}
        for need in needs:
            if need.index in need.seen.features:
                continue
            if (known := self._pictures.find(need.key)) is not None:
                need.seen.features[need.index] = known
            else:
                waiting.setdefault(need.visual.framing, []).append(need)
        for framing, alike in waiting.items():
            at_once = max(1, ENCODED_PATCHES // (framing.grid[0] * framing.grid[1]))
            for first in range(0, len(alike), at_once):
                some = alike[first : first + at_once]
                features = self._features(some, framing)
                for number, need in enumerate(some):
                    need.seen.features[need.index] = self._pictures.keep(need.key, features[:, number])
        return bool(waiting)

    def _features(self, needs: list[_Need], framing: Framing) -> Tensor:
        """[1 + K, groups, rows, H] of groups of one framing."""
        parts = [frames for need in needs for frames in need.visual.frames(need.group.number)]
        frames = staged(parts, self.device).unflatten(0, (len(needs), -1))
        if self._graphs is None:
            return features_of(self.network.visual, frames, framing)
        return self._graphs(frames, framing)


def _unheard(token: int) -> None:
    raise AssertionError(f"a sequence that is only read said {token}")


def _needs(batch: Batch) -> Iterator[_Need]:
    """What the rows of the step need of the groups of their prompts, in row order."""
    offset = 0
    for sequence, start, count in zip(batch.sequences, batch.starts, batch.counts, strict=True):
        seen: _Seen = sequence.state
        if start < len(seen.prompt.tokens):
            for index, group in enumerate(seen.prompt.groups):
                first, stop = max(start, group.start), min(start + count, group.start + group.length)
                if first < stop:
                    yield _Need(seen, index, first - group.start, stop - group.start, offset + first - start)
        offset += count


def _needs_ahead(batch: Batch) -> Iterator[_Need]:
    """Whole groups whose rows are in no step yet."""
    for sequence, start, count in zip(batch.sequences, batch.starts, batch.counts, strict=True):
        if sequence.open and start + count == sequence.length:
            for index in sequence.state.ahead:
                yield _Need(sequence.state, index, 0, sequence.state.prompt.groups[index].length, row=-1)


def _ahead(prompt: AuraPrompt, known: int) -> Iterator[int]:
    """The groups of the last message that lie behind the known rows, as far as the limit allows."""
    last_message = prompt.before_text[-2] if len(prompt.before_text) > 1 else 0  # it begins somewhere behind
    patches = 0
    for index, group in enumerate(prompt.groups):
        if group.start >= max(known, last_message):
            patches += group.length * prompt.visuals[group.visual].rules.merge ** 2
            if patches > AHEAD_PATCHES:
                break
            yield index


def _forget(batch: Batch) -> None:
    """The features of groups whose rows end in this step, or were found in the prefix cache."""
    for sequence, start, count in zip(batch.sequences, batch.starts, batch.counts, strict=True):
        seen: _Seen = sequence.state
        for index in list(seen.features):
            group = seen.prompt.groups[index]
            if group.start + group.length <= start + count:
                del seen.features[index]


def _positions(batch: Batch) -> np.ndarray:
    """int32 [3, rows]: the prompt's own, then index + delta on all axes."""
    parts = []
    for sequence, start, count in zip(batch.sequences, batch.starts, batch.counts, strict=True):
        prompt: AuraPrompt = sequence.state.prompt
        parts.append(prompt.positions[:, start : start + count])
        after = np.arange(max(start, len(prompt.tokens)), start + count, dtype=np.int32) + prompt.delta
        parts.append(np.broadcast_to(after, (3, len(after))))
    return np.concatenate(parts, axis=1)


def _pixel_rules(checkpoint: Checkpoint, name: str, config: VLConfig) -> PixelRules:
    rules = checkpoint.parse(PixelRules.from_json, name)
    vision = config.vision
    if (rules.patch, rules.temporal_patch, rules.merge) != (vision.patch, vision.temporal_patch, vision.merge):
        raise CheckpointError(
            f"{name} of checkpoint {checkpoint.name} has patch, temporal and merge sizes "
            f"{rules.patch}, {rules.temporal_patch}, {rules.merge}; its config.json has "
            f"{vision.patch}, {vision.temporal_patch}, {vision.merge}"
        )
    return rules
