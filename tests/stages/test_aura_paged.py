"""AURA in the paged engine: the same answers, and chunks that are never encoded or computed twice."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
import torch

from aura_omni.engine.attention import PagedKV
from aura_omni.engine.runner import LEAST_KNOWN_ROWS, ArRunner
from aura_omni.engine.sequence import Batch, Sequence
from aura_omni.engine.stage_model import Rows
from aura_omni.engine.steps import PREFILL_SIZES
from aura_omni.flow import Message, Sampling, Text, Video
from aura_omni.stages.aura import FIRST_WORD, AuraStage
from aura_omni.stages.picture_cache import PictureCache
from tests.aura_tiny import PlainKV, forward, greedy, image, sequence_of, stage, video
from tests.replayed import without_cuda
from tests.slow_lane import SlowLane

PAGE = 16
GREEDY = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)


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


def runner_of(
    aura: AuraStage, *, rows: int = 512, pages: int = 64, graphs: bool = False, lane: SlowLane | None = None
) -> ArRunner:
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
        lane=lane,
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
    monkeypatch.setattr(aura, "_graphs", None)  # put back afterwards
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


# ---------------------------------------------------------------- prompts whose end is not known yet

HEARD = [
    SYSTEM,
    user(ROUND.parts[0], "what is it?"),
    Message("assistant", (Text("A cat."),)),
    user(video(2, 64, 64), "now?"),
]
UNHEARD = [SYSTEM, user(ROUND.parts[0]), Message("assistant", (Text("A cat."),)), user(video(2, 64, 64))]


def open_sequence(aura: AuraStage, runner: ArRunner, chat: Seq[Message], ids: list[int]) -> Sequence:
    """Reads what precedes the text of the first message of the user, and all there is to do is done."""
    draft = aura.prompt(chat)
    sequence = aura.sequence(draft, GREEDY, on_output=ids.append, on_end=lambda *_: None, known=draft.before_text[1])
    runner.add(sequence)
    settle(runner)
    return sequence


def settle(runner: ArRunner) -> None:
    while runner.busy:
        runner.step()
        runner.check_integrity()


def close(aura: AuraStage, runner: ArRunner, sequence: Sequence, chat: Seq[Message]) -> None:
    aura.close(sequence, aura.prompt(chat), GREEDY)
    runner.close(sequence)
    settle(runner)


def test_what_is_not_known_of_a_prompt_is_not_taken_for_known(aura: AuraStage) -> None:
    """Rows behind those that are known may become others, and so may the pages that hold them."""
    draft = aura.prompt(UNHEARD)
    for known, sure in ((draft.beginning.rows - 1, False), (draft.beginning.rows, True)):
        sequence = aura.sequence(draft, GREEDY, on_output=print, on_end=print, known=known)
        assert (sequence.beginning is not None) == sure


@pytest.mark.parametrize("rows", [512, 23])
def test_a_prompt_read_in_advance_gives_the_same_answer_and_no_picture_is_encoded_twice(
    aura: AuraStage, encoded: list[int], rows: int
) -> None:
    runner, ids = runner_of(aura, rows=rows), list[int]()
    sequence = open_sequence(aura, runner, UNHEARD, ids)
    assert sum(encoded) == 2
    assert list(sequence.state.features) == [1], "what is read needs no features, what will be does"
    features = sequence.state.features[1]
    assert features.untyped_storage().nbytes() == features.nbytes, "it keeps more than itself"
    close(aura, runner, sequence, HEARD)
    assert sum(encoded) == 2
    assert not sequence.state.features
    assert sequence.cached == 0
    assert ids == alone(aura, HEARD, 6)
    assert runner.counters.pages_used == 0


def test_pictures_that_nobody_waits_for_yet_are_encoded_apart_from_their_rows(
    aura: AuraStage, encoded: list[int]
) -> None:
    runner, draft = runner_of(aura), aura.prompt([SYSTEM, user(video(2, 64, 64))])
    known = draft.before_text[0]
    open_ones = [aura.sequence(draft, GREEDY, on_output=print, on_end=lambda *_: None, known=known) for _ in range(2)]
    for sequence in open_ones:
        runner.add(sequence)
    for done in (1, 2):
        assert runner.step()
        assert [len(sequence.state.features) for sequence in open_ones] == [1, done - 1]
        assert [sequence.computed for sequence in open_ones] == [0, 0]
    settle(runner)
    assert encoded == [1, 1]
    assert [sequence.computed for sequence in open_ones] == [known] * 2
    for sequence in open_ones:
        runner.abort(sequence)


def test_what_was_encoded_for_nothing_is_freed(aura: AuraStage, encoded: list[int]) -> None:
    runner, ids = runner_of(aura), list[int]()
    ask(aura, runner, [HEARD], 6)
    sequence = open_sequence(aura, runner, UNHEARD, ids)
    assert sequence.state.features
    close(aura, runner, sequence, HEARD)  # the pages of the last picture are in the cache
    assert ids == alone(aura, HEARD, 6)
    assert not sequence.state.features
    cancelled = open_sequence(aura, runner, UNHEARD, [])
    assert cancelled.state.features
    runner.abort(cancelled)
    assert not cancelled.state.features
    assert runner.counters.pages_used == 0


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is known of a prompt here is too little to be read."""
    monkeypatch.setitem(LEAST_KNOWN_ROWS, "cpu", 10_000)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("rows", [512, 23])
@pytest.mark.parametrize("pictures_kept", [0, 1 << 20])
def test_pictures_of_a_few_known_rows_are_encoded_in_advance_and_once(
    aura: AuraStage, encoded: list[int], rows: int, pictures_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aura, "_pictures", PictureCache(pictures_kept))
    runner, ids = runner_of(aura, rows=rows), list[int]()
    sequence = open_sequence(aura, runner, UNHEARD, ids)
    assert encoded == [1, 1], "pictures of two sizes"
    assert sorted(sequence.state.features) == [0, 1]
    assert runner.counters.computed_rows == 0
    close(aura, runner, sequence, HEARD)
    assert encoded == [1, 1]
    assert not sequence.state.features
    assert ids == alone(aura, HEARD, 6)
    assert runner.counters.pages_used == 0


@pytest.mark.usefixtures("few")
def test_of_a_few_known_rows_pictures_that_are_in_the_cache_are_not_encoded(
    aura: AuraStage, encoded: list[int]
) -> None:
    runner, ids = runner_of(aura), list[int]()
    ask(aura, runner, [[*HEARD[:3], user("so?")]], 6)
    encoded.clear()
    draft = aura.prompt([*HEARD[:3], user(video(2, 64, 64))])
    known = draft.before_text[3]
    sequence = aura.sequence(draft, GREEDY, on_output=ids.append, on_end=lambda *_: None, known=known)
    runner.add(sequence)
    settle(runner)
    assert encoded == [1], "the picture of the last message"
    close(aura, runner, sequence, HEARD)
    assert encoded == [1]
    assert ids == alone(aura, HEARD, 6)


@pytest.mark.usefixtures("few")
def test_pictures_of_a_few_rows_of_several_are_encoded_one_after_the_other(aura: AuraStage, encoded: list[int]) -> None:
    lane = SlowLane()
    runner, draft = runner_of(aura, lane=lane), aura.prompt(UNHEARD)
    known = draft.before_text[1]
    open_ones = [aura.sequence(draft, GREEDY, on_output=print, on_end=lambda *_: None, known=known) for _ in range(2)]
    for sequence in open_ones:
        runner.add(sequence)
    for done in (1, 2):
        runner.step()
        assert len(encoded) == 2 * done
        assert not runner.step()
        lane.arrive()
    settle(runner)
    for sequence in open_ones:
        runner.abort(sequence)
        assert not sequence.state.features


@pytest.mark.usefixtures("few")
def test_what_was_encoded_for_a_preempted_prompt_stays_with_it(aura: AuraStage, encoded: list[int]) -> None:
    runner, ids = runner_of(aura, pages=14), list[int]()
    sequence = open_sequence(aura, runner, UNHEARD, ids)
    ask(aura, runner, [[SYSTEM, user(video(2, 96, 160, seed=seed), "look")] for seed in (5, 6, 7)], 24)
    assert sequence.preempted == 1
    encoded.clear()
    close(aura, runner, sequence, HEARD)
    assert not encoded
    assert ids == alone(aura, HEARD, 6)


@pytest.mark.usefixtures("few")
def test_a_step_that_failed_has_its_pictures_again(aura: AuraStage, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, heard = runner_of(aura), [list[int](), list[int]()]
    open_ones = [open_sequence(aura, runner, UNHEARD, ids) for ids in heard]
    rows, failures = aura.rows, [RuntimeError("once")]

    def failing(batch: Batch) -> Rows:
        made = rows(batch)
        if len(batch.sequences) > 1:
            raise failures.pop()
        return made

    monkeypatch.setattr(aura, "rows", failing)
    for sequence in open_ones:
        aura.close(sequence, aura.prompt(HEARD), GREEDY)
        runner.close(sequence)
    settle(runner)
    assert not failures
    assert heard == [alone(aura, HEARD, 6)] * 2


def test_only_pictures_of_the_last_message_are_encoded_in_advance_up_to_a_limit(
    aura: AuraStage, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = [*UNHEARD, SILENT, user(video(4, 64, 64, seed=4), image(64, 64))]
    runner = runner_of(aura)
    sequence = open_sequence(aura, runner, later, [])
    assert sorted(sequence.state.features) == [2, 3, 4]
    held = sum(features.nbytes for features in sequence.state.features.values())
    assert held <= AuraStage.ahead_bytes(aura.network.config, aura.dtype, known_rows=0)
    runner.abort(sequence)
    patches = 4 * aura.prompt(later).groups[2].length
    monkeypatch.setattr("aura_omni.stages.aura.AHEAD_PATCHES", 2 * patches)
    sequence = open_sequence(aura, runner, later, [])
    assert sorted(sequence.state.features) == [2, 3]
    runner.abort(sequence)


def test_a_preempted_prompt_that_was_read_in_advance_is_read_again(aura: AuraStage) -> None:
    runner, ids = runner_of(aura, pages=14), list[int]()
    sequence = open_sequence(aura, runner, UNHEARD, ids)
    ask(aura, runner, [[SYSTEM, user(video(2, 96, 160, seed=seed), "look")] for seed in (5, 6, 7)], 24)
    assert sequence.preempted == 1
    close(aura, runner, sequence, HEARD)
    assert ids == alone(aura, HEARD, 6)


def test_nothing_is_computed_for_an_answer_before_it_is_known_not_to_be_silence(aura: AuraStage) -> None:
    lane = SlowLane()
    runner = runner_of(aura, lane=lane)
    sequence = sequence_of(aura, aura.prompt([user("look")]), max_tokens=4, ignore_eos=True)
    runner.add(sequence)
    under_way = []
    while runner.busy:
        runner.step()
        under_way.append(len(lane.under_way))
        lane.arrive(1)
    assert under_way == [1, 2, 2, 1, 0]


CUT = [
    [
        SYSTEM,
        *[message for seed in range(first, 5) for message in (user(video(2, 96, 160, seed=seed)), SILENT)],
        user("so?"),
    ]
    for first in (0, 2)
]


def keeping(pictures: int, monkeypatch: pytest.MonkeyPatch, aura: AuraStage) -> PictureCache:
    """Room for so many of CUT's pairs of frames."""
    rows = aura.prompt(CUT[0]).groups[0].length
    pair = rows * (1 + aura.adds) * aura.decoder_config.hidden * aura.dtype.itemsize
    monkeypatch.setattr(aura, "_pictures", PictureCache(pictures * pair))
    return aura._pictures


@pytest.mark.parametrize("rows", [512, 23])
def test_of_a_history_that_was_cut_pictures_are_kept_and_not_encoded_again(
    aura: AuraStage, encoded: list[int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = [alone(aura, chat, 6) for chat in CUT]
    keeping(4, monkeypatch, aura)
    runner = runner_of(aura, rows=rows)
    encoded.clear()
    heard = [ask(aura, runner, [chat], 6)[0][0] for chat in CUT]
    assert heard == want
    assert sum(encoded) == 5, "three of the four that are kept are all that is left"


def test_pictures_take_no_more_than_they_may(aura: AuraStage, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = keeping(2, monkeypatch, aura)
    ask(aura, runner_of(aura), CUT[:1], 1)
    keys = [span.key for span in aura.prompt(CUT[0]).media]
    assert [cache.find(key) is not None for key in keys] == [False, False, False, True, True]
    assert cache.find(keys[3]) is not None
    more = torch.zeros(1, 2)
    assert cache.keep(b"more", more) is not more
    assert [cache.find(key) is not None for key in (b"more", *keys[3:])] == [True, True, False]
    none = PictureCache(0)
    assert none.keep(b"more", more) is more
    assert none.find(b"more") is None


def test_what_is_read_beforehand_encodes_its_pictures_once(aura: AuraStage, encoded: list[int]) -> None:
    want = alone(aura, CUT[1], 6)
    runner, ends = runner_of(aura, rows=23), []
    encoded.clear()
    runner.add(aura.reading(aura.prompt(CUT[1]), due_s=0.0, on_end=lambda reason, error: ends.append((reason, error))))
    while runner.busy:
        runner.step()
        runner.check_integrity()
    assert ends == [("stop", None)]
    ((heard,), (cached,)) = ask(aura, runner, [CUT[1]], 6)
    assert heard == want
    assert cached > aura.prompt(CUT[1]).beginning.rows - PAGE
    assert sum(encoded) == 3


def test_no_step_is_launched_ahead_of_an_answers_first_word_while_the_talker_waits_for_it(aura: AuraStage) -> None:
    waits = True

    def foreseen(count: int) -> list[bool]:
        prompt = aura.prompt([SYSTEM, user("say it")])
        sequence = aura.sequence(prompt, GREEDY, on_output=print, on_end=print, urgent=lambda: waits)
        found = []
        for _ in range(count):
            found.append(aura.foresees(sequence))
            sequence.tokens.append(5)
        return found

    assert foreseen(FIRST_WORD + 2) == [False] * FIRST_WORD + [True] * 2
    waits = False
    assert foreseen(3) == [False, True, True], "the first id may be silence"
