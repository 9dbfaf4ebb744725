"""Conversations that go on are written as if nothing were known of them."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace

import numpy as np
import pytest

from aura_omni.engine.sequence import Beginning
from aura_omni.errors import BadRequest, PromptTooLong
from aura_omni.flow import Message, Video
from aura_omni.stages import aura_prompt
from aura_omni.stages.aura_prompt import AuraPrompt, Profile, PromptWriter
from aura_omni.stages.prompt_memory import MOST_NEW, PromptMemory, Written
from tests.aura_tiny import image, video
from tests.stages.test_aura_prompt import said, writer


def assert_equal(ours: AuraPrompt, plain: AuraPrompt) -> None:
    assert ours.tokens == plain.tokens
    assert [(visual.size, visual.rules) for visual in ours.visuals] == [
        (visual.size, visual.rules) for visual in plain.visuals
    ]
    assert (ours.groups, ours.media, ours.delta) == (plain.groups, plain.media, plain.delta)
    assert ours.before_text == plain.before_text
    assert ours.positions.dtype == plain.positions.dtype
    assert np.array_equal(ours.positions, plain.positions)
    assert ours.beginning.rows == plain.beginning.rows


def some_message(pick: random.Random, role: str) -> Message:
    parts: list[Video | str] = [pick.choice(["", "look", "<|silent|>", "one two\n", "<|im_end|>"])]
    if role == "user":
        shown = [video(pick.choice([1, 2, 5]), 64, pick.choice([64, 96]), seed=pick.randrange(9)), image(40, 70)]
        parts += pick.sample(shown, pick.randint(0, 2))
    return said(role, *parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("spelling", ["newline", "bare"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_remembered_of_a_conversation_changes_nothing(seed: int, spelling: str) -> None:
    pick, profile = random.Random(seed), Profile(spelling=spelling)  # type: ignore[arg-type]
    ours = writer(profile=profile, max_model_len=100_000)
    chats: list[list[Message]] = [[], [said("system", "Be brief.")]]
    for _ in range(24):
        chat = pick.choice(chats)
        if pick.random() < 0.2:
            chats.append(chat[: pick.randint(0, len(chat))])  # goes on in another way
        else:
            chat += [
                some_message(pick, pick.choice(["user", "assistant", "system"])) for _ in range(pick.randint(1, 3))
            ]
        system = pick.choice([None, None, "S"])
        assert_equal(
            ours.write(chat, system_prompt=system),
            writer(profile=profile, max_model_len=100_000).write(chat, system_prompt=system),
        )


def live(rounds: int) -> list[Message]:
    chat = [message for number in range(rounds) for message in (said("user", video(2, 64, 64, seed=number)), SILENT)]
    return chat[:-1]


SILENT = said("assistant", "<|silent|>")


def test_a_further_round_writes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = writer()
    ours.write(live(4))
    written: list[Message] = []
    original = PromptWriter._message

    def watched(self: PromptWriter, draft: object, message: Message) -> None:
        written.append(message)
        original(self, draft, message)  # type: ignore[arg-type]

    monkeypatch.setattr(PromptWriter, "_message", watched)
    five = ours.write(live(5))
    assert len(written) == 3  # the last of the former prompt, its answer, and the new one
    five.beginning.keys.append(b"of its first page")
    assert ours.write(live(5)).beginning is five.beginning
    assert len(written) == 4
    assert ours.write(live(6)).beginning.like is five.beginning


def test_pictures_are_those_of_the_request_and_are_not_kept() -> None:
    ours, chat = writer(), live(3)
    first = ours.write(chat)
    old = weakref.ref(first.visuals[0].video.frames)
    del first, chat
    gc.collect()
    assert old() is None
    again = live(3)
    prompt = ours.write(again)
    assert [visual.video for visual in prompt.visuals] == [again[0].parts[0], again[2].parts[0], again[4].parts[0]]


def test_pictures_that_differ_in_anything_are_other_pictures() -> None:
    clip = video(2, 64, 64)
    others = [
        replace(clip, key=b"other"),
        replace(clip, times_s=(3.0, 3.5)),
        replace(clip, frames=clip.frames[:1], times_s=(0.0,)),
        replace(clip, frames=clip.frames[:1], times_s=(0.0,), still=True),
    ]
    ours = writer()
    for shown in (clip, *others):
        chat = [said("user", shown), SILENT, said("user", "what?")]
        assert_equal(ours.write(chat), writer().write(chat))


def test_what_is_refused_is_refused_again() -> None:
    ours = writer(max_model_len=60)
    for _ in range(2):
        with pytest.raises(PromptTooLong):
            ours.write([*live(1), SILENT, said("user", "word " * 60)])
        with pytest.raises(BadRequest):
            ours.write([said("assistant", video(2, 64, 64)), said("user", "well?")], system_prompt="S")


# ---------------------------------------------------------------- how much is kept


def written(rows: int) -> Written:
    return Written(1, [0] * rows, (), (), (), np.zeros((3, rows), np.int32), rows, (), Beginning(rows))


def test_the_least_recently_used_goes_first() -> None:
    memory = PromptMemory(rows=100)
    for name in "abc":
        memory.keep((None, name), written(30))
    assert memory.longest((None, "a", "new")) is not None
    memory.keep((None, "d"), written(30))
    assert [name for name in "abcd" if memory.longest((None, name, "new"))] == ["a", "c", "d"]
    memory.keep((None, "e"), written(101))
    assert not memory._kept
    assert memory._rows == 0


def test_what_a_longer_one_begins_with_is_let_go() -> None:
    memory = PromptMemory(rows=100)
    memory.keep((None, "a"), written(30))
    memory.keep((None, "a", "b", "c"), written(50), instead=(None, "a"))
    memory.keep((None, "a", "b", "c"), written(60))  # somebody else was as fast
    assert memory._rows == 60
    assert memory.longest((None, "a", "new")) is None


def test_only_so_many_messages_may_be_new_and_one_must_be() -> None:
    memory = PromptMemory(rows=100)
    memory.keep((None, "a"), written(10))
    assert memory.longest((None, "a")) is None
    assert memory.longest((None, "a", *range(MOST_NEW))) is not None
    assert memory.longest((None, "a", *range(MOST_NEW + 1))) is None


def test_a_bound_of_rows_holds_while_sessions_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aura_prompt, "ROWS_REMEMBERED", 200)
    ours = writer()
    for rounds in (1, 2, 3, 4, 5):
        for session in range(5):
            ours.write([said("user", f"session {session}"), SILENT, *live(rounds)])
            assert sum(len(kept.ids) for kept in ours._memory._kept.values()) == ours._memory._rows <= 200
