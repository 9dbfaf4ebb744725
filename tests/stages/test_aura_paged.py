"""AURA in the paged engine: the same answers, and chunks that are never encoded or computed twice."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
import torch

from aura_omni.engine.attention import PagedKV
from aura_omni.engine.runner import ArRunner
from aura_omni.engine.steps import PREFILL_SIZES
from aura_omni.flow import Message, Sampling, Text, Video
from aura_omni.stages.aura import AuraStage
from tests.aura_tiny import PlainKV, forward, greedy, image, sequence_of, stage, video
from tests.replayed import without_cuda

PAGE = 16


def user(*parts: Video | str) -> Message:
    return Message("user", tuple(Text(part) if isinstance(part, str) else part for part in parts))


SYSTEM = Message("system", (Text("S"),))
SILENT = Message("assistant", (Text("<|silent|>"),))
ROUND = user(video(2, 96, 160))
CHATS = [
    [SYSTEM, user(video(3, 96, 160), image(70, 40, seed=2), "look")],
    [SYSTEM, user(video(2, 64, 320, seed=3), "wide")],
    [SYSTEM, user("text only")],
]


@pytest.fixture(scope="module")
def aura() -> AuraStage:
    return stage()


@pytest.fixture
def encoded(aura: AuraStage, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many groups each call of the vision tower had."""
    calls: list[int] = []
    original = aura.network.visual.forward

    def counted(patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        calls.append(len(patches))
        return original(patches, grid)

    monkeypatch.setattr(aura.network.visual, "forward", counted)
    return calls


def runner_of(aura: AuraStage, *, rows: int = 512, pages: int = 64, graphs: bool = False) -> ArRunner:
    return ArRunner(
        aura,
        pages=pages,
        page_size=PAGE,
        max_num_seqs=4,
        max_num_batched_tokens=rows,
        max_model_len=aura.max_model_len,
        max_waiting=8,
        prefix_caching=True,
        graphs=graphs,
    )


def ask(aura: AuraStage, runner: ArRunner, chats: Seq[Seq[Message]], count: int) -> tuple[list[list[int]], list[int]]:
    """count greedy ids of each chat, all at once; and the rows that each found in the cache."""
    heard: list[list[int]] = [[] for _ in chats]
    sequences = []
    for chat, ids in zip(chats, heard, strict=True):
        sampling = Sampling(temperature=0.0, max_tokens=count, ignore_eos=True)
        sequence = aura.sequence(aura.prompt(chat), sampling, on_output=ids.append, on_end=lambda *_: None)
        runner.add(sequence)
        sequences.append(sequence)
    while runner.busy:
        runner.step()
        runner.check_integrity()
    assert [sequence.finished for sequence in sequences] == ["length"] * len(sequences)
    return heard, [sequence.cached for sequence in sequences]


def alone(aura: AuraStage, chat: Seq[Message], count: int) -> list[int]:
    kv, sequence = PlainKV(), sequence_of(aura, aura.prompt(chat))
    return greedy(aura, kv, sequence, forward(aura, kv, (sequence, 0, sequence.length)), count)


@pytest.mark.parametrize("rows", [512, 23])
def test_answers_equal_those_without_pages(aura: AuraStage, rows: int) -> None:
    heard, _ = ask(aura, runner_of(aura, rows=rows), CHATS, 12)
    assert heard == [alone(aura, chat, 12) for chat in CHATS]


@pytest.mark.parametrize("rows", [512, 23])
def test_answers_from_padded_steps_are_the_same(aura: AuraStage, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with frames and without, one after another and together: what one left in the padding is nothing to the next."""
    expected = [alone(aura, chat, 12) for chat in CHATS]
    recorded = without_cuda(monkeypatch)
    monkeypatch.setattr(aura, "_tower", aura.network.visual)  # put back afterwards
    runner = runner_of(aura, rows=rows, graphs=True)
    assert sorted(recorded).count(PREFILL_SIZES[-1]) == 1  # for prompts with deepstack features and without
    monkeypatch.delattr(PagedKV, "step")  # which steps that are no graphs begin with
    for chats in (*([chat] for chat in CHATS), CHATS):
        heard, _ = ask(aura, runner, chats, 12)
        assert heard == [expected[CHATS.index(chat)] for chat in chats]


def test_a_second_request_with_the_same_video_neither_encodes_nor_computes_it(
    aura: AuraStage, encoded: list[int]
) -> None:
    runner, chat = runner_of(aura), CHATS[0]
    first, _ = ask(aura, runner, [chat], 6)
    assert sum(encoded) == 3
    encoded.clear()
    second, cached = ask(aura, runner, [chat], 6)
    length = len(aura.prompt(chat).tokens)
    assert second == first
    assert cached == [(length - 1) // PAGE * PAGE]
    assert encoded == []


def test_a_round_more_encodes_only_the_new_chunk(aura: AuraStage, encoded: list[int]) -> None:
    runner = runner_of(aura)
    before = [SYSTEM, ROUND, SILENT, user(video(2, 96, 160, seed=7))]
    after = [*before, SILENT, user(video(2, 96, 160, seed=8), "what is it?")]
    ask(aura, runner, [before], 1)
    encoded.clear()
    heard, cached = ask(aura, runner, [after], 6)
    assert cached[0] >= aura.prompt(before).groups[-1].start
    # The last page of the earlier prompt was not full, so the end of its chunk may be needed again.
    assert sum(encoded) <= 2
    assert heard == [alone(aura, after, 6)]


def test_another_video_with_the_same_tokens_is_not_taken_for_it(aura: AuraStage) -> None:
    runner = runner_of(aura)
    one, other = ([SYSTEM, user(video(2, 96, 160, seed=seed), "look")] for seed in (1, 9))
    ask(aura, runner, [one], 1)
    heard, cached = ask(aura, runner, [other], 6)
    assert cached[0] <= aura.prompt(other).groups[0].start
    assert heard == [alone(aura, other, 6)]


def test_requests_that_push_each_other_out_of_the_pages_say_the_same(aura: AuraStage) -> None:
    chats = [[SYSTEM, user(video(2, 96, 160, seed=seed), "look")] for seed in (1, 2, 3)]
    runner = runner_of(aura, pages=14)
    heard, _ = ask(aura, runner, chats, 24)
    assert runner.counters.preemptions > 0
    assert heard == [alone(aura, chat, 24) for chat in chats]
