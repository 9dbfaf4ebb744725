"""AURA's prompt: messages to token ids, the rows that are video, and the three position rows.

Knows ids, frame sizes and times; touches no pixel and no device, so it may run on any thread.

A message is `<|im_start|>` role, its content, `<|im_end|>`. In it video and images come first, each pair of frames as
`<0.2 seconds><|vision_start|>` pads `<|vision_end|>`, then the texts joined by newlines. This is the layout of
transformers 4.57, with which AURA was trained; later versions put another pair of vision tokens around the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from aura_omni.engine.sequence import Beginning, MediaSpan
from aura_omni.errors import BadMedia, BadRequest, CheckpointError, PromptTooLong
from aura_omni.flow import SILENT_TEXT, Message, Text, Video
from aura_omni.models.vision_input import Framing, PixelRules
from aura_omni.stages.prompt_memory import Group, PromptMemory, Written
from aura_omni.stages.tokenizer import TextTokenizer

ROWS_REMEMBERED = 1 << 19  # of conversations: 64 of 8,000 rows

# Characters of texts whose ids are remembered: headers, time stamps and what was said before return in every round, and a
# prompt that was written before anything was heard is written again, on the engine's thread, with the transcript in it.
SHORT_TEXT, TEXTS_KEPT = 1_024, 4_096


def live_system_prompt(language: str | None = None) -> str:
    """What AURA was trained with, word for word; language adds a closing sentence, for example "Chinese"."""
    text = (
        "You are receiving a live video stream where the final frame is the present moment. "
        "Respond only when a response is needed based on the user's message or the visual context. "
        f"Otherwise, output '{SILENT_TEXT}' to signify silence."
    )
    return text if language is None else f"{text} Respond in {language}."


@dataclass(frozen=True, slots=True)
class Profile:
    """How one model family wants its prompt and shows its silence.

    spelling          newline: as the published chat template, a newline after the role and after `<|im_end|>`.
                      bare: none anywhere, as AURA's own live server writes it
    silent_token      the marker; None: the model has none, and only an empty answer is a silent one
    system_prompt     of conversations that bring none
    assistant_prefix  what follows the header of the answer: control tokens and texts, for example an empty think block
    """

    spelling: Literal["newline", "bare"] = "newline"
    silent_token: str | None = SILENT_TEXT
    system_prompt: str = live_system_prompt()
    assistant_prefix: tuple[str, ...] = ()

    @property
    def newline(self) -> str:
        return "\n" if self.spelling == "newline" else ""


@dataclass(frozen=True, slots=True)
class Controls:
    """Ids of the tokens that text can never spell."""

    im_start: int
    im_end: int
    vision_start: int
    vision_end: int
    image_pad: int
    video_pad: int
    end_of_text: int | None
    silent: int | None

    @classmethod
    def of(cls, tokenizer: TextTokenizer, profile: Profile) -> Controls:
        """By name. Raises CheckpointError naming the one that the tokenizer lacks."""
        silent = None
        if profile.silent_token is not None:
            silent = tokenizer.find(profile.silent_token)
            if silent is None:
                raise CheckpointError(
                    f"the tokenizer has no token {profile.silent_token!r}, so this model could never be silent. "
                    "Give an AURA checkpoint, or a profile whose silent_token is None."
                )
        return cls(
            im_start=tokenizer.id("<|im_start|>"),
            im_end=tokenizer.id("<|im_end|>"),
            vision_start=tokenizer.id("<|vision_start|>"),
            vision_end=tokenizer.id("<|vision_end|>"),
            image_pad=tokenizer.id("<|image_pad|>"),
            video_pad=tokenizer.id("<|video_pad|>"),
            end_of_text=tokenizer.find("<|endoftext|>"),
            silent=silent,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Visual:
    """One medium of a prompt. size is (height, width) in pixels after resizing; frames are the source's, untouched."""

    video: Video
    size: tuple[int, int]
    rules: PixelRules

    @property
    def groups(self) -> int:
        return -(-len(self.video.frames) // self.rules.temporal_patch)

    @property
    def cells(self) -> tuple[int, int]:
        """(height, width) in tokens of each group."""
        return self.size[0] // self.rules.factor, self.size[1] // self.rules.factor

    @property
    def framing(self) -> Framing:
        height, width = self.video.frames.shape[1:3]
        return Framing(self.rules, (height, width), self.size)

    def frames(self, group: int) -> list[np.ndarray]:
        """Of a group, uint8 [n, h, w, 3] each, not copied; the last frame fills up a group that is not full."""
        first, each = group * self.rules.temporal_patch, self.rules.temporal_patch
        own = self.video.frames[first : first + each]
        return [own, *[self.video.frames[-1:]] * (each - len(own))]

    def time_s(self, group: int) -> float:
        """The middle of a group's first and last frame, from the start of the clip."""
        first, each = group * self.rules.temporal_patch, self.rules.temporal_patch
        times = self.video.times_s[first : first + each]
        return (times[0] + times[-1]) / 2

    def key(self, group: int) -> bytes:
        """Identifies the features of a group: content and everything that shapes its pixels."""
        options = (group, self.size, self.video.still, self.rules.mean, self.rules.std)
        return hashlib.blake2b(self.video.key + repr(options).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, eq=False)
class AuraPrompt:
    """positions int32 [3, len(tokens)] are T, H, W; a later row's are its index + delta, on all three.

    media: a span for each of the groups; before_text: of each message, how many of the tokens stay as they are whatever its
    text is; beginning: all but the last message.
    """

    tokens: list[int]
    visuals: tuple[Visual, ...]
    groups: tuple[Group, ...]
    media: tuple[MediaSpan, ...]
    positions: np.ndarray
    delta: int
    before_text: tuple[int, ...]
    beginning: Beginning

    @property
    def video_tokens(self) -> int:
        """Rows that are pixels, of videos and images."""
        return sum(group.length for group in self.groups)

    @property
    def text_tokens(self) -> int:
        return len(self.tokens) - self.video_tokens


class PromptWriter:
    """Turns messages into prompts. Thread-safe.

    max_model_len  tokens of prompt and answer together
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        profile: Profile,
        *,
        video_rules: PixelRules,
        image_rules: PixelRules,
        max_model_len: int,
    ) -> None:
        self.controls = Controls.of(tokenizer, profile)
        self._tokenizer, self._profile = tokenizer, profile
        self._video_rules, self._image_rules = video_rules, image_rules
        self._max_model_len = max_model_len
        self._memory = PromptMemory(ROWS_REMEMBERED)
        self._remembered = lru_cache(maxsize=TEXTS_KEPT)(lambda text: tuple(tokenizer.encode(text)))

    def write(self, messages: Sequence[Message], *, system_prompt: str | None = None) -> AuraPrompt:
        """Messages without Audio parts (transcripts are texts by now) to a prompt that ends where the answer starts.

        The system turn is `system_prompt`, followed by the text of a system message if the messages start with one;
        without either it is the profile's.
        Raises BadMedia for frames of an impossible shape, BadRequest for pictures that are not the user's, PromptTooLong.
        """
        path = (system_prompt, *map(_told_apart, messages))
        written = self._memory.longest(path)
        begun = 0 if written is None else written.messages
        self._tokenizer.refuse_endless(
            ["" if begun else system_prompt or "", *(text for message in messages[begun:] for text in _texts(message))],
            limit=self._max_model_len - 1,
            way_out="Send less text, or raise max_model_len.",
        )
        draft = _Draft(self._encode)
        if written is None:
            begun = self._opening(draft, messages, system_prompt)
        else:
            draft.go_on(
                written, [part for message in messages[:begun] for part in message.parts if isinstance(part, Video)]
            )
        last = max(begun, len(messages) - 1)
        for message in messages[begun:last]:
            self._message(draft, message)
        before_last = draft.mark(last)
        for message in messages[last:]:
            self._message(draft, message)
        self._answer_begins(draft)
        prompt = self._finished(draft, before_last, written)
        if last and (written is None or last > written.messages):
            self._memory.keep(path[: last + 1], before_last.of(prompt), instead=path[: begun + 1] if written else ())
        return prompt

    def _opening(self, draft: _Draft, messages: Sequence[Message], system_prompt: str | None) -> int:
        """The system turn; how many messages are in it."""
        self._open(draft, "system")
        opening = [] if system_prompt is None else [system_prompt]
        taken = 0
        if messages and messages[0].role == "system":
            draft.text_follows()
            opening += _texts(messages[0])
            self._refuse_pictures(messages[0])
            taken = 1
        elif not opening:
            opening = [self._profile.system_prompt]
        self._marked(draft, "\n".join(opening))
        self._close(draft)
        return taken

    def _message(self, draft: _Draft, message: Message) -> None:
        self._open(draft, message.role)
        text = "\n".join(_texts(message))
        if message.role == "user":
            for part in message.parts:
                if isinstance(part, Video):
                    self._picture(draft, part)
            draft.text_follows()
            draft.text(text)
        else:
            self._refuse_pictures(message)
            draft.text_follows()
            if message.role == "system":
                self._marked(draft, text)
            elif text == self._profile.silent_token and self.controls.silent is not None:
                draft.control(self.controls.silent)
            else:
                # Encoded apart from the header, as it was generated, so that the prefix cache knows it again.
                draft.flush()
                draft.text(text)
        self._close(draft)

    def _open(self, draft: _Draft, role: str) -> None:
        draft.control(self.controls.im_start)
        draft.text(role + self._profile.newline)

    def _close(self, draft: _Draft) -> None:
        draft.control(self.controls.im_end)
        draft.text(self._profile.newline)

    def _marked(self, draft: _Draft, text: str) -> None:
        """Instructions name the marker, and the model has learnt them with the token itself in that place."""
        if self.controls.silent is None or self._profile.silent_token is None:
            draft.text(text)
            return
        before, *rest = text.split(self._profile.silent_token)
        draft.text(before)
        for after in rest:
            draft.control(self.controls.silent)
            draft.text(after)

    def _picture(self, draft: _Draft, video: Video) -> None:
        rules = self._image_rules if video.still else self._video_rules
        count, height, width, _ = video.frames.shape
        try:
            size = rules.size(count, height, width, still=video.still)
        except ValueError as error:
            raise BadMedia(
                f"{'the image' if video.still else 'the video'} cannot be shown to the model: {error}", param="messages"
            ) from error
        visual = Visual(video, size, rules)
        pad = self.controls.image_pad if video.still else self.controls.video_pad
        for number in range(visual.groups):
            if not video.still:
                draft.text(f"<{visual.time_s(number):.1f} seconds>")
            draft.control(self.controls.vision_start)
            draft.pads(pad, visual, number)
            draft.control(self.controls.vision_end)

    def _answer_begins(self, draft: _Draft) -> None:
        self._open(draft, "assistant")
        for piece in self._profile.assistant_prefix:
            control = self._tokenizer.find(piece)
            if control is None:
                draft.text(piece)
            else:
                draft.control(control)

    def _refuse_pictures(self, message: Message) -> None:
        if any(isinstance(part, Video) for part in message.parts):
            raise BadRequest(
                f"a {message.role} message has a video or image; only user messages can have them", param="messages"
            )

    def _encode(self, text: str) -> Iterable[int]:
        return self._remembered(text) if len(text) <= SHORT_TEXT else self._tokenizer.encode(text)

    def _finished(self, draft: _Draft, before_last: _Mark, written: Written | None) -> AuraPrompt:
        draft.flush()
        first, position, done = (
            (0, 0, 0) if written is None else (len(written.ids), written.position, len(written.groups))
        )
        groups = draft.groups[done:]
        cells = [draft.visuals[group.visual].cells for group in groups]
        positions, delta = mrope_positions(range(first, len(draft.ids)), groups, cells, position=position)
        if written is None:
            beginning = Beginning(before_last.rows)
        else:
            positions = np.concatenate((written.positions, positions), axis=1)
            same = before_last.rows == len(written.ids)
            beginning = written.beginning if same else written.beginning.longer(before_last.rows)
        prompt = AuraPrompt(
            draft.ids,
            tuple(draft.visuals),
            tuple(draft.groups),
            tuple(draft.media),
            positions,
            delta,
            tuple(draft.before_text),
            beginning,
        )
        if len(prompt.tokens) >= self._max_model_len:
            image = sum(group.length for group in prompt.groups if prompt.visuals[group.visual].video.still)
            raise PromptTooLong(
                f"the prompt is {len(prompt.tokens):,} tokens ({prompt.video_tokens - image:,} of video, {image:,} of images, "
                f"{prompt.text_tokens:,} of text including what was heard); this model takes {self._max_model_len - 1:,} "
                "and one for the answer. Send fewer or smaller frames or less text, or raise max_model_len.",
                param="messages",
            )
        return prompt


@dataclass(frozen=True, slots=True)
class _Mark:
    """A place between two messages: how much of everything lies before it."""

    messages: int
    rows: int
    visuals: int
    groups: int

    def of(self, prompt: AuraPrompt) -> Written:
        return Written(
            messages=self.messages,
            ids=prompt.tokens[: self.rows],
            shapes=tuple((visual.size, visual.rules) for visual in prompt.visuals[: self.visuals]),
            groups=prompt.groups[: self.groups],
            media=prompt.media[: self.groups],
            positions=prompt.positions[:, : self.rows].copy(),
            position=int(prompt.positions[0, self.rows]),
            before_text=prompt.before_text[: self.messages],
            beginning=prompt.beginning,
        )


class _Draft:
    """Ids written so far. Text between two control tokens is encoded as one string, as the reference does."""

    def __init__(self, encode: Callable[[str], Iterable[int]]) -> None:
        self._encode = encode
        self._pending = ""
        self.ids: list[int] = []
        self.visuals: list[Visual] = []
        self.groups: list[Group] = []
        self.media: list[MediaSpan] = []
        self.before_text: list[int] = []

    def go_on(self, written: Written, pictures: Iterable[Video]) -> None:
        """Begin with what is written already; pictures: those in it."""
        self.ids += written.ids
        self.visuals += [Visual(video, *shape) for video, shape in zip(pictures, written.shapes, strict=True)]
        self.groups += written.groups
        self.media += written.media
        self.before_text += written.before_text

    def mark(self, messages: int) -> _Mark:
        """Here, between two of them: the next one begins with a control token, so what is pending is encoded for itself."""
        self.flush()
        return _Mark(messages, len(self.ids), len(self.visuals), len(self.groups))

    def text_follows(self) -> None:
        """Next is a message's text. What is pending will be encoded with it."""
        self.before_text.append(len(self.ids))

    def text(self, text: str) -> None:
        self._pending += text

    def flush(self) -> None:
        if self._pending:
            self.ids.extend(self._encode(self._pending))
            self._pending = ""

    def control(self, token: int) -> None:
        self.flush()
        self.ids.append(token)

    def pads(self, pad: int, visual: Visual, number: int) -> None:
        if number == 0:
            self.visuals.append(visual)
        rows = visual.cells[0] * visual.cells[1]
        self.groups.append(Group(len(self.ids), rows, len(self.visuals) - 1, number))
        self.media.append(MediaSpan(len(self.ids), rows, visual.key(number)))
        self.ids.extend([pad] * rows)


def mrope_positions(
    rows: range, groups: Sequence[Group], cells: Sequence[tuple[int, int]], *, position: int = 0
) -> tuple[np.ndarray, int]:
    """(positions int32 [3, len(rows)] of T, H, W; delta: what a later row adds to its index).

    Text advances all three by one. A group of h x w tokens keeps T, counts H by rows and W by columns from where it
    starts, and what follows continues max(h, w) later. rows: of the prompt; position: of the first of them; groups: those in
    them; cells: (h, w) of each.
    """
    positions = np.empty((3, len(rows)), dtype=np.int32)
    row = 0
    for group, (height, width) in zip(groups, cells, strict=True):
        start = group.start - rows.start
        positions[:, row:start] = np.arange(position, position + start - row)
        position += start - row
        row = start + group.length
        positions[0, start:row] = position
        positions[1, start:row] = np.repeat(np.arange(position, position + height), width)
        positions[2, start:row] = np.tile(np.arange(position, position + width), height)
        position += max(height, width)
    positions[:, row:] = np.arange(position, position + len(rows) - row)
    return positions, position - row - rows.start


def _told_apart(message: Message) -> Hashable:
    """Equal for messages that are written alike."""
    parts: list[Hashable] = [message.role]
    for part in message.parts:
        if isinstance(part, Text):
            parts.append(part.text)
        elif isinstance(part, Video):
            parts.append((part.key, part.still, part.frames.shape, part.times_s))
        else:
            raise TypeError(f"{type(part).__name__} in a prompt of AURA: what was said must have become text before")
    return tuple(parts)


def _texts(message: Message) -> list[str]:
    return [part.text for part in message.parts if isinstance(part, Text) and part.text]
