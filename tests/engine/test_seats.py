"""Bias, bans and penalties as tables on the device, against what they mean in plain Python."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from aura_omni.engine import seats as seats_module
from aura_omni.engine.sampler import Draw, Filters
from aura_omni.engine.seats import Seats, Taker, constrained
from aura_omni.flow import Sampling
from tests.replayed import without_cuda

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0)


def seats_of(vocabulary: int, *, seats: int = 3) -> Seats:
    return Seats(seats, hidden=4, vocabulary=vocabulary, dtype=torch.float32, device=CPU)


class Row:
    """One sequence: how it samples, what its prompt was and what it has said."""

    def __init__(
        self, sampling: Sampling, prompt: Seq[int] = (), outputs: Seq[int] = (), stop_ids: Seq[int] = ()
    ) -> None:
        self.sampling, self.prompt, self.outputs, self.stop_ids = sampling, prompt, list(outputs), stop_ids

    def sit(self, seats: Seats, seat: int) -> None:
        seats.fill([self.taking(seat)])

    def taking(self, seat: int) -> Taker:
        more = {"prompt": self.prompt, "outputs": self.outputs, "stop_ids": self.stop_ids}
        return Taker(seat, self.sampling, inner=GREEDY, seed=0, **more)

    def plainly(self, logits: Seq[float]) -> list[float]:
        """The meaning, one id after another."""
        sampling, out = self.sampling, []
        for token, value in enumerate(logits):
            value += sampling.logit_bias.get(token, 0.0)
            if token in self.stop_ids and len(self.outputs) < sampling.min_tokens:
                value = -float("inf")
            if token in self.prompt or token in self.outputs:
                value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
            count = self.outputs.count(token)
            value -= sampling.presence_penalty * (count > 0) + sampling.frequency_penalty * count
            out.append(value)
        return out


def constrain(logits: torch.Tensor, rows: Seq[Row]) -> torch.Tensor:
    seats = seats_of(logits.shape[-1], seats=len(rows))
    for seat, row in enumerate(rows):
        row.sit(seats, seat)
    return seats.constrain(logits, torch.arange(len(rows)), torch.tensor([len(row.outputs) for row in rows]))


IDS = st.integers(0, 11)
SAMPLINGS = st.builds(
    Sampling,
    logit_bias=st.dictionaries(IDS, st.floats(-5, 5, width=16), max_size=4),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.05, 2.0]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.25]),
    min_tokens=st.integers(0, 5),
)
ROWS = st.builds(
    Row, SAMPLINGS, st.lists(IDS, max_size=5), st.lists(IDS, max_size=7), st.lists(st.integers(0, 200), max_size=3)
)


@pytest.fixture(params=[16, 2], ids=["few_marks", "many_marks"])
def marks(request: pytest.FixtureRequest) -> Iterator[None]:
    """With as many ids as go along with a taker, and with more."""
    with patch.object(seats_module, "MARKS", request.param):
        yield


@pytest.mark.usefixtures("marks")
@settings(max_examples=300, deadline=None)
@given(st.lists(ROWS, min_size=3, max_size=3), st.lists(st.tuples(st.integers(0, 2), ROWS, IDS), max_size=6))
def test_the_tables_mean_what_plain_python_means_whoever_came_and_said_what(
    sitting: list[Row], events: list[tuple[int, Row, int]]
) -> None:
    """At each event someone else takes a seat, then everybody says an id; the padding of a step says some, too."""
    seats = seats_of(12)
    seats.fill([row.taking(seat) for seat, row in enumerate(sitting)])
    for seat, newcomer, token in [*events, (0, sitting[0], 0)]:
        sitting[seat] = Row(newcomer.sampling, newcomer.prompt, newcomer.outputs, newcomer.stop_ids)
        sitting[seat].sit(seats, seat)
        said = [(token + other) % 12 for other in range(3)]
        seats.count(torch.tensor([2, 0, 1, 3, 3]), torch.tensor([said[2], said[0], said[1], 5, 5]))
        for row, own in zip(sitting, said, strict=True):
            row.outputs.append(own)
        logits = torch.linspace(-3, 3, 36).view(3, 12).roll(token, 1)
        order = torch.tensor([1, 2, 0])
        steps = torch.tensor([len(sitting[seat].outputs) for seat in order.tolist()])
        found = seats.constrain(logits[order], order, steps)
        expected = [sitting[seat].plainly(logits[seat].tolist()) for seat in order.tolist()]
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_penalties_equal_values_worked_out_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 4.0, -1.0, 0.5]])
    sampling = Sampling(
        logit_bias={0: 1.0, 5: -3.0},
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        min_tokens=4,
    )
    row = Row(sampling, prompt=[0, 1], outputs=[3, 3, 4], stop_ids=(2,))
    # 0: (2 + 1) / 2   1: -2 * 2   2: banned   3: 4 / 2 - 0.5 - 2 * 0.25   4: -1 * 2 - 0.5 - 0.25   5: 0.5 - 3
    expected = torch.tensor([[1.5, -4.0, -torch.inf, 1.0, -2.75, -2.5]])
    torch.testing.assert_close(constrain(logits, [row]), expected)


def test_the_input_is_not_changed_and_rows_without_constraints_stay_to_the_last_bit() -> None:
    logits = torch.randn(3, 10)
    logits[0, 3] = -torch.inf
    before = logits.clone()
    out = constrain(logits, [Row(Sampling()), Row(Sampling(presence_penalty=1.0), [], [4]), Row(Sampling())])
    assert torch.equal(logits, before)
    assert torch.equal(out[[0, 2]], before[[0, 2]])
    assert torch.equal((out != before).nonzero(), torch.tensor([[1, 4]]))


def test_each_row_has_its_own_constraints() -> None:
    rows = [
        Row(Sampling(logit_bias={1: 2.0})),
        Row(Sampling(frequency_penalty=0.5), [], [1, 1, 2]),
        Row(Sampling(repetition_penalty=4.0), [0], [3]),
    ]
    expected = torch.tensor([[1, 3, 1, 1, 1], [1, 0, 0.5, 1, 1], [0.25, 1, 1, 0.25, 1]])
    torch.testing.assert_close(constrain(torch.ones(3, 5), rows), expected)


def test_stop_ids_are_banned_until_min_tokens_are_out() -> None:
    for outputs, expected in (([], [1, 3]), ([0], [1, 3]), ([0, 0], [])):
        out = constrain(torch.zeros(1, 5), [Row(Sampling(min_tokens=2), [], outputs, stop_ids=(1, 3))])
        assert out[0].isinf().nonzero().flatten().tolist() == expected


def test_ids_that_the_head_does_not_have_are_no_matter() -> None:
    sampling = Sampling(repetition_penalty=2.0, min_tokens=1)
    row = Row(sampling, [2, 151_655, -1], stop_ids=(3, 99))
    assert constrain(torch.ones(1, 4), [row]).tolist() == [[1.0, 1.0, 0.5, -torch.inf]]


def test_what_is_banned_already_stays_banned() -> None:
    sampling = Sampling(logit_bias={0: 100.0}, repetition_penalty=0.5, frequency_penalty=-2.0)
    assert constrain(torch.tensor([[-torch.inf, 0.0]]), [Row(sampling, [0], [0])])[0, 0] == -torch.inf


def test_a_draw_from_the_seats_is_the_draw_of_their_samplings() -> None:
    seats = seats_of(50)
    samplings = [
        Sampling(temperature=0.5, top_k=-1),
        Sampling(temperature=0.0, top_p=0.25, min_p=0.5),
        Sampling(top_k=7),
    ]
    inner = [replace(sampling, temperature=sampling.temperature + 1) for sampling in samplings]
    seeds = [7, 2**40 + 1, -3]
    for seat, (own, other, seed) in enumerate(zip(samplings, inner, seeds, strict=True)):
        seats.fill([Taker(seat, own, inner=other, seed=seed)])
    seat, step = torch.tensor([2, 0, 1]), torch.tensor([4, 5, 6])
    for wanted, make in ((samplings, seats.draw), (inner, seats.inner_draw)):
        order = [wanted[index] for index in seat.tolist()]
        expected = Draw.of(order, [seeds[index] for index in seat.tolist()], step.tolist(), CPU)
        found = make(seat, step, Filters.of(order))
        assert torch.equal(found.floats, expected.floats)
        assert torch.equal(found.integers, expected.integers)


def test_the_memory_of_the_tables_is_what_is_planned_for() -> None:
    seats = seats_of(1000, seats=5)
    tables = [value for value in vars(seats).values() if isinstance(value, torch.Tensor)]
    planned = Seats.bytes(5, hidden=4, vocabulary=1000, dtype=torch.float32)
    assert sum(table.numel() * table.element_size() for table in tables) == planned


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_k": 3, "seed": 1, "stop_token_ids": (5,)}, False),
        ({"logit_bias": {1: 1.0}}, True),
        ({"min_tokens": 1}, True),
        ({"repetition_penalty": 1.05}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_only_requests_that_ask_for_constraints_pay_for_them(changes: dict[str, Any], needed: bool) -> None:
    assert constrained(Sampling(**changes)) is needed


@pytest.mark.reference
@pytest.mark.parametrize("penalty", [0.7, 1.05, 2.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 50)
    tokens = [3, 3, 7, 49, 0]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits.clone())
    sampling = Sampling(repetition_penalty=penalty)
    for split in (0, 2, 5):
        ours = constrain(logits, [Row(sampling, tokens[:split], tokens[split:])])
        torch.testing.assert_close(ours, expected, atol=0, rtol=1e-6)


@pytest.mark.reference
def test_bias_and_bans_equal_transformers() -> None:
    from transformers import MinNewTokensLengthLogitsProcessor, SequenceBiasLogitsProcessor

    logits = torch.randn(1, 50)
    ids = torch.tensor([[5, 6, 7, 8]])  # two of the prompt, two said
    expected = SequenceBiasLogitsProcessor([[[4], 2.5], [[9], -1.5]])(ids, logits.clone())
    expected = MinNewTokensLengthLogitsProcessor(2, 3, [11, 12], device="cpu")(ids, expected)
    row = Row(Sampling(logit_bias={4: 2.5, 9: -1.5}, min_tokens=3), [5, 6], [7, 8], stop_ids=(11, 12))
    torch.testing.assert_close(constrain(logits, [row]), expected)


@torch.inference_mode()
def test_seats_filled_by_a_graph_are_as_those_filled_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where fewer take one than the graph is for, or more than there is one for."""
    without_cuda(monkeypatch)
    sampling = Sampling(logit_bias={3: 1.0}, min_tokens=2, repetition_penalty=1.1, top_k=2**31, seed=1)
    takers = [Row(replace(sampling, temperature=seat), [seat], [5] * seat, [1]).taking(seat) for seat in range(9)]
    for some in (takers[:1], takers[2:5], takers):
        plain, recorded = seats_of(12, seats=9), seats_of(12, seats=9)
        recorded.capture()
        for seats in (plain, recorded):
            seats.fill(takers[4:7])
            seats.fill(some)
        for name, table in vars(plain).items():
            if isinstance(table, torch.Tensor):
                assert torch.equal(table[:9], vars(recorded)[name][:9]), name


class _Counted(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_eight_are_seated_by_as_many_operations_as_one() -> None:
    sampling = Sampling(logit_bias={3: 1.0}, min_tokens=2, repetition_penalty=1.1)
    rows = [Row(sampling, prompt=[seat], outputs=[5, 5], stop_ids=[1, 2]) for seat in range(8)]
    counts = []
    for some in (1, 8):
        with _Counted() as counted:
            seats_of(12, seats=8).fill([row.taking(seat) for seat, row in enumerate(rows[:some])])
        counts.append(counted.count)
    assert counts[1] <= counts[0] + 3  # what is one row is contiguous as it is
