"""One autoregressive stage at work: schedule, launch, and hand on what comes back.

Knows sequences, tensors and the stage model. Does not know text or HTTP. Everything runs on the engine's thread.

    runner = ArRunner(model, pages=1000, page_size=16, ...)
    runner.add(sequence)
    while runner.busy:
        runner.step()          # calls on_output and on_end of the sequences

A step never waits for the device: it launches, and a later call finds the result. What it computes is `steps`. Where all that
could be done is to go on decoding, the next step is launched behind the one under way, be that one of decoding or the end of
prompts, as if none of its ids ended a sequence; what it draws for one that did is dropped.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from aura_omni.counters import Counters, UnderWay
from aura_omni.engine.holding import Holding
from aura_omni.engine.kv_cache import KVCache
from aura_omni.engine.lane import Arrival, Lane
from aura_omni.engine.scheduler import Scheduler
from aura_omni.engine.sequence import Batch, FinishReason, Sequence
from aura_omni.engine.stage_model import Runner, StageModel
from aura_omni.engine.steps import JOINED_SIZES, NO_ID, PREFILL_SIZES, Steps
from aura_omni.errors import AuraError, BadRequest, EngineError, field_name
from aura_omni.flow import Sampling

logger = logging.getLogger(__name__)

# Rows of prompts in a step that others wait for: on a GPU what is one graph together with rows of decoding, as half of it is, too. 8B
# parameters take some 12 ms for them, while launching more would take the host twice as long; on a core of a CPU some 30 to 50 ms of a small
# model. A frame of speech is heard for 80.
SHARED_ROWS = {"cuda": 2 * JOINED_SIZES[-2], "cpu": 128}

# Rows of any step: who comes while a long prompt is read alone waits for the end of one. On a CPU steps are short where somebody waits already.
LONGEST_ROWS = {"cuda": 4 * PREFILL_SIZES[-1], "cpu": 1 << 20}

# Rows of an open sequence that must be left for them to be read before all of its prompt is known. On a GPU the rest of the prompt, however
# short, takes a pass over the weights of its own then, 4 ms for 8B parameters, and each step beside ASR's takes from those what a
# transcript is waited for: with a pair of frames, 229 rows, first text came 2 to 7 ms later than without (H200). What fewer rows are made of
# (`StageModel.prepare`) has weights of its own, so its part is done in advance nevertheless.
LEAST_KNOWN_ROWS = {"cuda": 512, "cpu": 1}

# The same where nobody will wait for the rest: fewer take as long as so many.
LEAST_ONLY_READ = {"cuda": 128, "cpu": 1}


@dataclass(frozen=True, slots=True)
class _Flight:
    """Rows that are being computed. drawn: those of their sequences that get a next id; arrival: its values [drawn, K].

    decode: all are rows of decoding.
    """

    batch: Batch
    drawn: tuple[Sequence, ...]
    arrival: Arrival
    decode: bool

    @property
    def piece(self) -> bool:
        """Whether it is of what rows are made of: see `StageModel.prepare`."""
        return not self.batch.sequences

    @property
    def draws_all(self) -> bool:
        """Whether all of its sequences can go on with a row of decoding."""
        return len(self.drawn) == len(self.batch.sequences) > 0

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for it who has got nothing yet."""
        return any(not (sequence.open or sequence.generated) for sequence in self.batch.sequences)


class ArRunner(Runner):
    """Of an autoregressive stage."""

    def __init__(
        self,
        model: StageModel,
        *,
        pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_waiting: int,
        prefix_caching: bool,
        graphs: bool = False,
        usual: tuple[Sampling, Sampling] = (Sampling(), Sampling(temperature=0.0)),
        lane: Lane | None = None,
        before: Seq[Runner] = (),
        prompts_first: Seq[ArRunner] = (),
        alone: bool = False,
        kv_eight_bits: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """pages of page_size rows are taken on the model's device at once, kv_eight_bits: of keys and values in eight bits; the limits
        are `Scheduler`'s.

        graphs: steps of decoding and short prefills are CUDA graphs; without, they run as they are written. Those that the
        usual sampling needs, a sequence's own and its inner one, are captured here, others when they are first needed.
        lane: where steps are computed; None: a new one.
        before: more urgent runners. On a CPU they wait for a step of this one, so while one of them has work, steps are short; on a
        GPU their steps take longer beside one of this, so none of decoding begins while somebody waits for a first result.
        prompts_first: runners whose prompts, where somebody waits for them, are read before anything is prepared here for nobody yet.
        alone: nobody listens while it decodes and nothing else computes on the device, so what counts is how much it gets done: steps
        that decode, too, read as many rows of prompts as any, and decoding is launched behind prompts that are under way.
        """
        self._model, self._lane, self._before = model, lane or Lane(model.device), tuple(before)
        self._prompts_first = tuple(prompts_first)
        self._unprepared: dict[Sequence, Batch] = {}  # known rows that are too few to be read
        self._flights: deque[_Flight] = deque()  # in the order of their launch
        self._news = False  # something has landed or come since the last launch
        self._at_once = model.device.type == "cpu"  # a launch computes
        self._alone = alone
        kind = "cpu" if self._at_once else "cuda"
        self._least_known, self._least_read = LEAST_KNOWN_ROWS[kind], LEAST_ONLY_READ[kind]
        self._holding, self._holds = Holding(self._before, clock), False
        self._cache = KVCache(pages, page_size, prefix_caching=prefix_caching)
        longest = min(max_num_batched_tokens, max(max_num_seqs, LONGEST_ROWS[kind]))
        self._scheduler = Scheduler(
            self._cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=longest,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
            shared_rows=longest if alone else SHARED_ROWS[kind],
        )
        self._steps = self._computed_rows = 0
        self._under_way = UnderWay()
        with self._lane.active():
            self._compute = Steps(
                model,
                pages=pages,
                page_size=page_size,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                graphs=graphs,
                usual=usual,
                alone=alone,
                kv_eight_bits=kv_eight_bits,
            )
        self._prompt_tokens = self._generated_tokens = 0

    @property
    def busy(self) -> bool:
        """Whether a step is under way or would find something to do."""
        return self.flying or self._scheduler.busy or bool(self._unprepared)

    @property
    def flying(self) -> bool:
        return bool(self._flights)

    @property
    def awaited(self) -> bool:
        return any(flight.awaited for flight in self._flights)

    @property
    def begins(self) -> bool:
        """Whether somebody who has got nothing of this stage yet waits for it, be that under way or not."""
        return self.awaited or self._scheduler.newcomers

    @property
    def reads(self) -> bool:
        return any(not flight.decode for flight in self._flights) or self._scheduler.reading

    @property
    def holds(self) -> bool:
        return self._holds

    def make_room_for(self, behind: Runner) -> None:
        """Let a less urgent runner read prompts by itself while all who listen here have enough in hand."""
        self._holding.make_room_for(behind)

    @property
    def counters(self) -> Counters:
        """From any thread; the numbers may be of two neighbouring steps."""
        return Counters(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages=self._cache.pages,
            pages_used=self._cache.used,
            pages_kept=self._cache.kept,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            step_s=self._under_way.total_s,
            computed_rows=self._computed_rows,
            cached_rows=self._scheduler.cached_rows,
            preemptions=self._scheduler.preemptions,
        )

    def check(self, prompt_length: int, sampling: Sampling) -> None:
        """Raises PromptTooLong or BadRequest for what no server of this kind would ever take. From any thread."""
        self._scheduler.check_length(prompt_length)
        for name, tokens in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            unknown = [token for token in tokens if not 0 <= token < self._compute.vocabulary]
            if unknown:
                raise BadRequest(
                    f"{field_name(name)} has the token id {unknown[0]}; this model's ids are from 0 to {self._compute.vocabulary - 1}",
                    param=name,
                )
        stops = self._model.stop_ids.union(sampling.stop_token_ids)
        if sampling.min_tokens > 0 and len(stops) >= len(self._compute.drawable) and stops >= self._compute.drawable:
            raise BadRequest(
                f"{field_name('min_tokens')} is {sampling.min_tokens} and {field_name('stop_token_ids')} are {len(sampling.stop_token_ids):,} ids, "
                f"all that this model can say: until then nothing could be chosen. Leave some of its {len(self._compute.drawable):,} "
                f"ids, or set {field_name('min_tokens')} 0.",
                param="stop_token_ids",
            )

    def add(self, sequence: Sequence) -> None:
        """Start a sequence. Raises Overloaded or as `check`; then neither of its listeners is ever called."""
        sampling = sequence.sampling
        self.check(sequence.prompt_length, sampling)
        self._scheduler.add(sequence)
        self._news = True
        if not sequence.open:
            self._prompt_tokens += sequence.prompt_length
        sequence.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed

    @property
    def spare(self) -> bool:
        """Whether an open sequence would get a seat that nobody waits for."""
        return self._scheduler.spare

    def close(self, sequence: Sequence) -> None:
        """An open sequence has been given all of its prompt, which begins with what was known of it: it goes on like any other.

        Raises as `check`.
        """
        self.check(sequence.prompt_length, sequence.sampling)
        self._prompt_tokens += sequence.prompt_length
        self._unprepared.pop(sequence, None)
        self._scheduler.close(sequence)
        self._news = True

    def abort(self, sequence: Sequence) -> None:
        """End the sequence with reason "cancelled", at any point. Nothing happens if it has ended or was refused by `add`."""
        if sequence.id >= 0:
            self._finish(sequence, "cancelled")

    def abort_all(self, error: Exception) -> None:
        self._flights.clear()
        self._under_way.end()
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            self._finish(sequence, "error", error)
        self._lane.wait()

    def land(self) -> bool:
        landed = False
        while self._flights and self._flights[0].arrival.there:
            flight = self._flights.popleft()
            if not self._flights:
                self._under_way.end()
            self._settle(flight)
            landed = True
        self._news |= landed
        return landed

    def launch(self) -> bool:
        due = self._news if self._flights else self._scheduler.busy or self._prepares
        self._holds = due and self._holding.holds(self._scheduler)
        if self._holds or not due:
            return False
        self._holding.over()
        self._news = False
        with self._lane.active(), torch.inference_mode():
            launched = not self._flights and self._scheduler.busy and self._launch()
            if launched:
                self.land()  # a CPU has computed it already
            if self._prepares:
                launched |= self._launch_piece()
            if len(self._flights) == 1:
                flight = self._flights[0]
                launched |= (flight.draws_all and self._launch_ahead(flight.batch)) or (
                    not flight.awaited and (self._launch_newcomers(flight.batch) or self._launch_reading(flight.batch))
                )
            if len(self._flights) == 1 and (self._flights[0].piece or (self._alone and not self._flights[0].decode)):
                launched |= self._launch_decoding(self._flights[0].batch)
        return launched

    def check_integrity(self) -> None:
        """Raise AssertionError if a sequence, a page or a piece is lost, doubled or left over."""
        self._scheduler.check_integrity()
        assert sum(flight.piece for flight in self._flights) <= 1, "a piece is under way behind another"
        # One that is left over would keep the runner busy with pictures that nobody will ask about.
        for sequence in self._unprepared:
            assert sequence.finished is None, f"sequence {sequence.id} has ended and is still prepared"
            assert sequence.open, f"sequence {sequence.id} has all of its prompt and is still prepared ahead"
            assert sequence.blocked, f"sequence {sequence.id} is read and prepared ahead as well"

    # ------------------------------------------------------------ launch

    def _launch(self) -> bool:
        """Start the next step. Changes nothing that the host knows of its sequences: that follows when it has arrived."""
        batch = self._scheduler.schedule(shared=self._at_once and any(runner.busy for runner in self._before))
        if batch is None:
            return False
        self._under_way.begin()
        self._launch_batch(batch)
        if not self._flights:
            self._under_way.end()  # it has failed, or was put off
        return True

    def _launch_batch(self, batch: Batch) -> None:
        decoding: list[int] = []
        prompts: list[int] = []
        known: list[int] = []  # of prompts whose end is not
        for index, sequence in enumerate(batch.sequences):
            (known if sequence.open else decoding if _decodes(batch, index) else prompts).append(index)
        single, whole, ahead = (batch.part(indices) for indices in (decoding, prompts, known))
        ahead = self._worth_reading(ahead)
        if ahead.sequences and ahead.sequences[0].only_read:
            whole, ahead = Batch.of(whole, ahead), batch.part(())
        if self._compute.joins(single, whole) and not any(sequence.finished for sequence in batch.sequences):
            self._launch_joined(single, whole)
            single = whole = batch.part(())
        parts = [(single, True), (whole, False)]
        if whole.sampled():
            parts.reverse()  # who waits for a first id goes before those who have one
        for part, decode in parts:
            self._launch_rows(part, decode=decode)
        if ahead.sequences and not self._prepare(ahead):
            self._launch_rows(ahead, decode=False)
        self._steps += 1

    def _launch_rows(self, batch: Batch, *, decode: bool) -> None:
        self._computed_rows += batch.rows
        self._launch_safely(batch, decode=decode)

    def _launch_joined(self, single: Batch, prompts: Batch) -> None:
        """Launch rows of decoding with those of prompts; if that fails, one after the other."""
        try:
            values = self._compute.joined(single, prompts)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            logger.warning("rows of decoding and of prompts failed together; they go on apart", exc_info=error)
            self._launch_rows(single, decode=True)
            self._launch_rows(prompts, decode=False)
            return
        batch = Batch.of(single, prompts)
        drawn = Batch.of(single, prompts.part(prompts.sampled())).sequences
        self._computed_rows += batch.rows
        self._flights.append(_Flight(batch, drawn, self._lane.home(values[: len(drawn)]), decode=False))

    @property
    def _prepares(self) -> bool:
        """Whether what too few rows need may be launched: a piece at a time, behind one step of decoding at most, so that whoever comes
        finds nothing more in front; and not while somebody waits for a first result that it would be in the way of, or for what
        follows from the step."""
        return (
            bool(self._unprepared)
            and len(self._flights) < 2
            and all(
                flight.decode and all(map(self._model.foresees, flight.batch.sequences)) for flight in self._flights
            )
            and not any(runner.begins for runner in (self, *self._prompts_first))
        )

    def _launch_piece(self) -> bool:
        while self._unprepared:
            sequence, rows = next(iter(self._unprepared.items()))
            self._under_way.begin()
            if self._prepare(rows):
                return True
            del self._unprepared[sequence]  # nothing is missing, or `rows` will meet what is wrong again
            if not self._flights:
                self._under_way.end()
        return False

    def _prepare(self, batch: Batch) -> bool:
        """Launch a piece of what the rows need. Until it has arrived, whoever is waited for finds nothing of theirs behind it."""
        try:
            launched = self._model.prepare(batch)
        except torch.AcceleratorError:
            raise
        except Exception:
            # `rows` will meet it again, and whose it is will be found out there.
            logger.warning("what rows of prompts need could not be prepared beforehand", exc_info=True)
            return False
        if launched:
            nothing = torch.empty(0, 1, dtype=torch.int64, device=self._model.device)
            self._flights.append(_Flight(batch.part(()), (), self._lane.home(nothing), decode=False))
        return launched

    def _worth_reading(self, batch: Batch) -> Batch:
        """Of known rows those of whose sequences enough is left; the others are read when all of their prompts is known."""
        worth = []
        for index, (sequence, start) in enumerate(zip(batch.sequences, batch.starts, strict=True)):
            if sequence.length - start >= (self._least_read if sequence.only_read else self._least_known):
                worth.append(index)
            else:
                sequence.blocked = True  # until `close`
                if not sequence.only_read:
                    self._prepare_later(sequence, start)
                self._end_read(sequence)
        return batch.part(worth)

    def _prepare_later(self, sequence: Sequence, start: int) -> None:
        self._unprepared[sequence] = Batch((sequence,), (start,), (sequence.length - start,))

    def _end_read(self, sequence: Sequence) -> None:
        """What was only read has come to its end, when there is nothing left of it to be read."""
        if sequence.only_read and sequence.blocked:
            self._finish(sequence, "stop")

    def _launch_ahead(self, under_way: Batch) -> bool:
        """Start the step after one that is under way and draws for all, for those that go on if it ends nobody."""
        if self._scheduler.others(under_way):
            return False
        left = [
            sequence
            for sequence in under_way.sequences
            if not sequence.finished and sequence.length + 1 < self._limit(sequence)
        ]
        foreseen = [sequence for sequence in left if self._model.foresees(sequence)]
        if self._model.in_step and len(foreseen) < len(left):
            return False
        going = self._scheduler.schedule_ahead(foreseen)
        if going is None:
            return False
        self._steps += 1
        self._computed_rows += going.rows
        self._launch_safely(going, decode=True, ahead=True)
        return True

    def _launch_newcomers(self, under_way: Batch) -> bool:
        """Start prompts behind a step of others that is under way, so that none of them waits for its launch as well."""
        batch = self._scheduler.schedule_newcomers(under_way)
        if batch is None:
            return False
        self._launch_batch(batch)
        return True

    def _launch_reading(self, under_way: Batch) -> bool:
        """Start the step after one that nobody waits for, so that the device does not wait for the host."""
        batch = self._scheduler.schedule_reading(under_way)
        if batch is None:
            return False
        self._steps += 1
        self._launch_rows(batch, decode=False)
        return True

    def _launch_decoding(self, under_way: Batch) -> bool:
        """Start a step of decoding behind prompts that are under way, for all others: the device does not wait for its launch."""
        batch = self._scheduler.schedule_decoding(under_way)
        if batch is None:
            return False
        self._launch_batch(batch)
        return True

    def _launch_safely(self, batch: Batch, *, decode: bool, ahead: bool = False) -> None:
        """Launch rows. If that fails, launch their sequences one by one, so that only those at fault end."""
        # A listener to the end of one may have ended another.
        if any(sequence.finished for sequence in batch.sequences):
            batch = batch.part(index for index, sequence in enumerate(batch.sequences) if not sequence.finished)
        if not batch.sequences:
            return
        try:
            if decode:
                drawn, values = batch.sequences, self._compute.decode(batch, ahead=ahead)
            else:
                drawn = tuple(batch.sequences[index] for index in batch.sampled())
                values = self._compute.prefill(batch)
            self._flights.append(_Flight(batch, drawn, self._lane.home(values[: len(drawn)]), decode))
        except torch.AcceleratorError:
            raise  # the device itself has failed: no later step can succeed
        except Exception as error:
            # Whatever it is, it is one request's until shown otherwise.
            if len(batch.sequences) == 1:
                self._fail(batch.sequences[0], error)
                return
            logger.warning("a step of %d sequences failed; they go on one by one", len(batch.sequences), exc_info=error)
            for alone in batch.split():
                self._launch_safely(alone, decode=decode, ahead=ahead)

    # ------------------------------------------------------------ what has been computed

    def _settle(self, flight: _Flight) -> None:
        """Write the ids down, end who has stopped, and hand on what the others said.

        Anyone may have ended since the launch, and any listener may end any sequence, so each is looked at before something is
        done for it.
        """
        self._scheduler.commit(flight.batch)
        for sequence in flight.batch.sequences:
            self._end_read(sequence)
        for sequence, values in zip(flight.drawn, flight.arrival.numpy(), strict=True):
            if sequence.finished:
                continue
            token = int(values[0])
            if token == NO_ID:
                self._fail(sequence, EngineError("the logits of a step are not finite"))
                continue
            sequence.tokens.append(token)
            self._generated_tokens += 1
            if self._stops(sequence, token):
                self._finish(sequence, "stop")
                continue
            sequence.carried = True
            try:
                sequence.on_output(self._model.heard(sequence, values))
            except torch.AcceleratorError:
                raise
            except Exception as error:
                # A listener's mistake ends its own request.
                self._fail(sequence, error)
                continue
            if sequence.length >= self._limit(sequence):
                self._finish(sequence, "length")

    def _limit(self, sequence: Sequence) -> int:
        """The length that ends a sequence."""
        return min(self._scheduler.max_length, sequence.prompt_length + sequence.sampling.max_tokens)

    def _stops(self, sequence: Sequence, token: int) -> bool:
        if token in sequence.sampling.stop_token_ids:
            return True
        return not sequence.sampling.ignore_eos and (token in sequence.stop_ids or token in self._model.stop_ids)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if sequence.finished:
            return
        if not isinstance(error, AuraError):
            logger.error("a request failed", exc_info=error)
            cause = error
            error = EngineError(f"a stage failed while it computed this request: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        self._finish(sequence, "error", error)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: Exception | None = None) -> None:
        if sequence.finished:
            return
        self._scheduler.remove(sequence, forget=reason == "error")
        self._unprepared.pop(sequence, None)
        sequence.finished = reason
        try:
            sequence.on_end(reason, error)
        except Exception:
            # It has ended and nobody else may suffer: all that can be done is to say so.
            logger.exception("the listener to the end of a sequence failed")


def _decodes(batch: Batch, index: int) -> bool:
    """Whether the sequence's part of the batch is one row that yields an id and can be taken from a seat."""
    sequence, start = batch.sequences[index], batch.starts[index]
    if sequence.open or batch.counts[index] != 1 or start + 1 != sequence.length:
        return False
    # A row of a medium may come with adds, for which a seat has no room.
    return sequence.carried or not any(span.start <= start < span.start + span.length for span in sequence.media)
