"""When a stage's decoding waits, for the sake of somebody who has got nothing yet.

Steps side by side on a GPU slow each other, and one that is under way is not interrupted. Those who decode have text or sound in
hand; who waits for a first result has not. Knows sequences and other runners, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from aura_omni.engine.scheduler import Scheduler
from aura_omni.engine.stage_model import Runner

# How long a step of decoding waits at most for what somebody else gets first. A GPU that computes both takes up to three times as long for
# a first frame, which is some 10 ms otherwise; those who decode have more text or sound in hand than that.
HOLD_S = 0.02

# What listeners must have in hand for steps of decoding to wait for prompts of others: sound in 16 frames, of some 5 ms each, follows in time.
IN_HAND_S = 1.0


class Holding:
    def __init__(self, before: Seq[Runner], clock: Callable[[], float]) -> None:
        """before: more urgent runners, whose first results are waited for."""
        self._before, self._clock = before, clock
        self._behind: Runner | None = None
        self._since_s: float | None = None

    def make_room_for(self, behind: Runner) -> None:
        """As `ArRunner.make_room_for`."""
        self._behind = behind

    def holds(self, scheduler: Scheduler) -> bool:
        """Whether the stage's next step waits. One that gives somebody a first result never does."""
        return not scheduler.newcomers and (self._for_a_first_result() or self._for_prompts(scheduler))

    def over(self) -> None:
        """The step goes on; the next one may wait as long again."""
        self._since_s = None

    def _for_a_first_result(self) -> bool:
        if not any(runner.awaited for runner in self._before):
            return False
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s < HOLD_S

    def _for_prompts(self, scheduler: Scheduler) -> bool:
        """While all who listen have enough in hand."""
        if self._behind is None or not self._behind.reads:
            return False
        enough_s = self._clock() + IN_HAND_S
        sequences = [*scheduler.running, *scheduler.waiting]
        if any(not sequence.blocked and sequence.lasts_until_s < enough_s for sequence in sequences):
            return False
        for sequence in sequences:
            sequence.paused = True
        return True
