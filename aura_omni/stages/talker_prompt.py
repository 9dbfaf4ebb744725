"""What the Talker reads before its first frame, as ids: one text id per row, and beside most rows something of the codec.

Pure and on the host. The rows become embeddings in `stages.talker`; how many there are follows from counts alone
(`prefill_length`).

Each row is text(id) plus nothing, C(codec id), the speaker's vector, or the sum of a reference frame's codes:

    instruct   the user turn that says how to speak, if any                    text alone
    role       <|im_start|> assistant newline                                  text alone
    control    pad ... pad bos      over  think tags, language, speaker, pad
    then, without a reference to continue from,
      non-streaming   body, eos     over  codec pad;        pad  over  codec bos
      streaming       body[0]       over  codec bos         the rest of the body and eos follow, one per step
    or with one: text = reference text, body, eos; codes = codec bos, reference frames
      non-streaming   text          over  codec pad;        pad  over  codes
      streaming       text          over  codes, side by side; text that is left follows, one per step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aura_omni.engine.loader import Checkpoint
from aura_omni.errors import BadRequest, CheckpointError, PromptTooLong
from aura_omni.flow import FRAME_SAMPLES
from aura_omni.models.fields import whole
from aura_omni.stages.speech_text import SpeechText
from aura_omni.stages.spoken_ids import SpokenIds
from aura_omni.stages.tokenizer import Encoder, TextTokenizer
from aura_omni.stages.voices import Speaking

MOST_WRITTEN = 16  # characters of a written text for each token that can be read; words have 4 or 5, the rest is markup
_AT_ONCE = 4_096  # characters
_WAY_OUT = "Send less, or raise max_model_len of the Talker."
_ROLE_ROWS = 3
LEAST_PREFILL = _ROLE_ROWS + 6  # rows of the shortest prompt: no language, no speaker, streaming


@dataclass(frozen=True, slots=True)
class ControlIds:
    """Ids that prompts are built with: `text_*` of the text vocabulary, the others of the codec's."""

    text_pad: int
    text_bos: int
    text_eos: int
    pad: int
    bos: int
    eos: int
    think: int
    no_think: int
    think_bos: int
    think_eos: int

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> ControlIds:
        """Raises ValueError for an id that its vocabulary does not have, KeyError for a missing one."""
        talker = config["talker_config"]

        def text(name: str) -> int:
            return _id_of(config, name, talker["text_vocab_size"])

        def codec(name: str) -> int:
            return _id_of(talker, name, talker["vocab_size"])

        return cls(
            text_pad=text("tts_pad_token_id"),
            text_bos=text("tts_bos_token_id"),
            text_eos=text("tts_eos_token_id"),
            pad=codec("codec_pad_id"),
            bos=codec("codec_bos_id"),
            eos=codec("codec_eos_token_id"),
            think=codec("codec_think_id"),
            no_think=codec("codec_nothink_id"),
            think_bos=codec("codec_think_bos_id"),
            think_eos=codec("codec_think_eos_id"),
        )


@dataclass(frozen=True, slots=True)
class Prefill:
    """The rows before the first frame, and the text that follows them.

    text_ids has one id per row; rows codec_rows[i] also get C(codec_ids[i]), row speaker_row the speaker's vector, and
    the rows from frames_row on one reference frame each. trailing_ids are read one per step; empty: all text is in the rows.
    """

    text_ids: tuple[int, ...]
    codec_rows: tuple[int, ...]
    codec_ids: tuple[int, ...]
    speaker_row: int | None = None
    frames_row: int | None = None
    frames: int = 0
    trailing_ids: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return len(self.text_ids)


def prefill_length(
    *,
    instruct_ids: int,
    body_ids: int,
    language: bool,
    speaker: bool,
    non_streaming: bool,
    reference_ids: int = 0,
    reference_frames: int | None = None,
) -> int:
    """Rows of the prompt from the counts of its token ids. reference_frames: None when no reference is continued."""
    rows = instruct_ids + _ROLE_ROWS + (4 if language else 3) + (1 if speaker else 0) + 1
    codes = 1 + (reference_frames or 0)
    if non_streaming:
        return rows + reference_ids + body_ids + 1 + codes
    return rows + codes


def _id_of(section: Mapping[str, Any], name: str, vocabulary: int) -> int:
    number = whole(section, name, least=0)
    if number >= vocabulary:
        raise ValueError(f"{name} is {number}; its vocabulary has {vocabulary} ids")
    return number


@dataclass(slots=True)
class _Rows:
    text_ids: list[int] = field(default_factory=list)
    codec: dict[int, int] = field(default_factory=dict)

    def add(self, text_id: int, codec_id: int | None = None) -> None:
        if codec_id is not None:
            self.codec[len(self.text_ids)] = codec_id
        self.text_ids.append(text_id)


class PromptWriter:
    """Text and voices to rows, for one checkpoint. Holds no state between calls; safe from any thread."""

    def __init__(
        self, tokenizer: TextTokenizer, config: Mapping[str, Any], checkpoint: str, *, max_model_len: int | None = None
    ) -> None:
        """max_model_len: rows of a sequence; a text that can only be more tokens is not encoded. None: the model's own."""
        self.ids = ControlIds.from_json(config)
        self.tokenizer = tokenizer
        # One row is for the answer
        self._longest = (max_model_len or config["talker_config"]["max_position_embeddings"]) - 1
        self._text_vocab: int = config["talker_config"]["text_vocab_size"]
        self._im_start, self._im_end = tokenizer.id("<|im_start|>"), tokenizer.id("<|im_end|>")
        self._think = (tokenizer.find("<think>"), tokenizer.find("</think>"))
        self.role_ids = [self._im_start, *tokenizer.encode("assistant\n")]
        wanted = [config["im_start_token_id"], config["assistant_token_id"], *tokenizer.encode("\n")]
        if self.role_ids != wanted or len(wanted) != _ROLE_ROWS or self._im_end != config["im_end_token_id"]:
            raise CheckpointError(
                f"checkpoint {checkpoint}: its tokenizer spells the assistant turn {self.role_ids} and its end "
                f"{self._im_end}, its config.json {wanted} and {config['im_end_token_id']}"
            )

    @classmethod
    def load(cls, checkpoint: Checkpoint, *, max_model_len: int | None = None) -> PromptWriter:
        tokenizer = TextTokenizer.load(checkpoint)
        return checkpoint.parse(lambda config: cls(tokenizer, config, checkpoint.name, max_model_len=max_model_len))

    def body(self, text: str, param: str = "messages") -> list[int]:
        """Text to speak -> ids. Raises BadRequest when nothing is left of it, PromptTooLong when it cannot be read to its end.

        White space at the front goes: the published template puts a newline before the text, and a text that began with
        one would melt into the same token. Without it, the text alone has the ids that it has inside the template.
        """
        ids = self._encode(text.lstrip(), param)
        if not ids:
            raise BadRequest("there is no text to speak")
        return ids

    def spoken(self, text: str, *, language: str | None, context: str) -> list[int] | None:
        """A whole text as it is written -> ids of its spoken form; None: there is no word in it.

        language, context: as SpeechText has them. Raises PromptTooLong for a text that cannot be read to its end, as soon as
        that is sure: what is left of it is not looked at.
        """
        most = MOST_WRITTEN * self._longest
        if len(text) > most:
            raise PromptTooLong(
                f"the text has {len(text):,} characters; to be spoken in a clean form it may have {most:,}, {MOST_WRITTEN} for "
                f"each of the {self._longest:,} tokens that this model takes. {_WAY_OUT}",
                param="messages",
            )
        ids: list[int] = []
        spoken = SpokenIds(self.encoder(), SpeechText(language, context=context))
        for start in range(0, len(text), _AT_ONCE):
            ids += spoken.push(text[start : start + _AT_ONCE])
            if len(ids) > self._longest:
                raise PromptTooLong(
                    f"the first {min(start + _AT_ONCE, len(text)):,} of the text's {len(text):,} characters are {len(ids):,} tokens; this model "
                    f"takes {self._longest:,}. {_WAY_OUT}",
                    param="messages",
                )
        ids += spoken.end()
        return ids if spoken.speakable else None

    def encoder(self) -> Encoder:
        """For a body that arrives in pieces: its ids joined are `body` of the whole text (stripped at the front)."""
        return Encoder(self.tokenizer)

    def body_of_ids(self, ids: Sequence[int]) -> list[int]:
        """Ids of a language model's answer (same vocabulary) -> ids to speak.

        Goes: an assistant prefix, all from the first <|im_end|> on, think blocks (an open one to its end), other control
        tokens, white space at both ends. Raises BadRequest for an id outside of the text vocabulary, or when nothing is left.
        """
        spoken = list(ids)
        for token in spoken:
            if not 0 <= token < self._text_vocab:
                raise BadRequest(
                    f"token id {token} is not of the Talker's text vocabulary (0 to {self._text_vocab - 1})"
                )
        if spoken[:_ROLE_ROWS] == self.role_ids:
            spoken = spoken[_ROLE_ROWS:]
        if self._im_end in spoken:
            spoken = spoken[: spoken.index(self._im_end)]
        spoken = [token for token in self._without_thinking(spoken) if token not in self.tokenizer.added]
        while spoken and not self.tokenizer.decode(spoken[-1:]).strip():
            spoken.pop()
        while spoken and not self.tokenizer.decode(spoken[:1]).strip():
            spoken.pop(0)
        if not spoken:
            raise BadRequest("there is no text to speak")
        return spoken

    def _without_thinking(self, ids: list[int]) -> list[int]:
        opened, closed = self._think
        kept, depth = [], 0
        for token in ids:
            if token == opened:
                depth += 1
            elif token == closed:
                depth = max(0, depth - 1)
            elif not depth:
                kept.append(token)
        return kept

    def instruct(self, text: str) -> list[int]:
        """A whole user turn that says how to speak; no ids for no text. Raises PromptTooLong as `body` does."""
        if not text:
            return []
        newline = self.tokenizer.encode("\n")
        return [self._im_start, *self._encode("user\n" + text, "instruct"), self._im_end, *newline]

    def least_length(
        self, speaking: Speaking, *, body_ids: int, ref_text: str | None = None, reference_samples: int = 0
    ) -> int:
        """Rows of the prompt, before the reference (at VOICE_RATE) is encoded: exact but for its last frame.

        Raises BadRequest or PromptTooLong for an instruct or ref_text that cannot be read.
        """
        reference_ids = self.body(ref_text, "ref_text") if ref_text is not None else []
        return prefill_length(
            instruct_ids=len(self.instruct(speaking.instruct)),
            body_ids=body_ids,
            language=speaking.language_id is not None,
            speaker=speaking.task != "VoiceDesign",
            non_streaming=speaking.non_streaming,
            reference_ids=len(reference_ids),
            reference_frames=reference_samples // FRAME_SAMPLES if ref_text is not None else None,
        )

    def _encode(self, text: str, param: str) -> list[int]:
        self.tokenizer.refuse_endless([text], limit=self._longest, way_out=_WAY_OUT, param=param)
        return self.tokenizer.encode(text)

    def prefill(
        self,
        speaking: Speaking,
        body: Sequence[int],
        *,
        reference_ids: Sequence[int] = (),
        reference_frames: int | None = None,
    ) -> Prefill:
        """The rows of one prompt. body is not empty; reference_frames: None when no reference is continued."""
        ids, rows = self.ids, _Rows()
        instruct = self.instruct(speaking.instruct)
        for text_id in [*instruct, *self.role_ids]:
            rows.add(text_id)

        if speaking.language_id is None:
            tags = [ids.no_think, ids.think_bos, ids.think_eos]
        else:
            tags = [ids.think, ids.think_bos, speaking.language_id, ids.think_eos]
        for tag in tags:
            rows.add(ids.text_pad, tag)
        speaker_row = None
        if speaking.speaker_id is not None:
            rows.add(ids.text_pad, speaking.speaker_id)
        elif speaking.clone is not None:
            speaker_row = len(rows.text_ids)
            rows.add(ids.text_pad)
        rows.add(ids.text_bos, ids.pad)

        text = [*reference_ids, *body, ids.text_eos]
        codes = 1 + (reference_frames or 0)
        if speaking.non_streaming:
            for text_id in text:
                rows.add(text_id, ids.pad)
            beside, trailing = [ids.text_pad] * codes, []
        else:
            beside, trailing = text[:codes], text[codes:]
            beside += [ids.text_pad] * (codes - len(beside))
        frames_row = len(rows.text_ids) + 1
        for number, text_id in enumerate(beside):
            rows.add(text_id, None if number else ids.bos)

        prefill = Prefill(
            text_ids=tuple(rows.text_ids),
            codec_rows=tuple(rows.codec),
            codec_ids=tuple(rows.codec.values()),
            speaker_row=speaker_row,
            frames_row=frames_row if reference_frames else None,
            frames=reference_frames or 0,
            trailing_ids=tuple(trailing),
        )
        assert prefill.length == prefill_length(
            instruct_ids=len(instruct),
            body_ids=len(body),
            language=speaking.language_id is not None,
            speaker=speaking.task != "VoiceDesign",
            non_streaming=speaking.non_streaming,
            reference_ids=len(reference_ids),
            reference_frames=reference_frames,
        )
        return prefill
