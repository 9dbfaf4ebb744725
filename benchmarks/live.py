"""Live sessions at the pipeline: a pair of frames every second, now and then a spoken question, in real time.

    python benchmarks/live.py --folder /scratch/true --out live.json                       # 32 sessions for 40 s, on one GPU
    python benchmarks/live.py --folder /scratch/true --out live.json --sessions 8 16 24 32 --seconds 20
    python benchmarks/live.py --tiny --sessions 2 --seconds 10 --out live.json             # two CPU cores

A session is a round a second, at a phase of its own: two frames of 640x360 come, and AURA decides to be silent. Every tenth round also
brings 5 s of speech, which is answered aloud. Who is late does not slow the camera down: times count from when the frames, and
the end of the speech, came. A session's next round begins when the text of the one before is written; speech goes on meanwhile.

History is AURA's: all rounds with their frames, answers and silences; one round more than `--prune-at` and the oldest go at
once, so that `--rounds` are left, and of those that go questions and answers stay as text, ten at most. What a session has seen is in
the prefix cache, but after such a cut everything behind the system prompt is computed again. What a cut will leave is known
before: from `--read-ahead` rounds before it on AURA is told to read it when nobody waits for it (`Pipeline.prepare`).

Loads go on where the one before ended: its sessions stay, others come with a history of their own.

No HTTP and no decoding of media: frames and sound are arrays. Lengths are forced (`lengths.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from lengths import AURA_TOKENS, WORD, forced, silence
from machine import machine
from true_size import Report, add_eight_bits, in_eight_bits, load_format, memory, stages_of, true_stages, write

from aura_omni.assembly import PAGE_SIZE
from aura_omni.bench.playback import listen
from aura_omni.bench.report import UNDERRUN_S, spread
from aura_omni.bench.stages import Counts, during
from aura_omni.compiling import compiled_ahead
from aura_omni.config import Config, Options, load_here
from aura_omni.flow import (
    SILENT_TEXT,
    SPEECH_RATE,
    VOICE_RATE,
    Audio,
    AudioChunk,
    Ended,
    Event,
    Message,
    Text,
    TextDelta,
    Transcript,
    TurnRequest,
    Video,
)
from aura_omni.media.noise import swelling_noise
from aura_omni.nano.random_family import write_family
from aura_omni.pipeline import Pipeline
from aura_omni.reading import Reading

LATE_S = 1.0  # the next frames are there
GIVE_UP_S = 10.0  # behind the camera: a session that cannot keep up ends
KEPT_ANSWERS = 10
PREPARED_AT_ONCE = 4  # histories
GOLDEN = (5**0.5 - 1) / 2  # its multiples are spread evenly, however many
PICTURES_GIB = 0.22  # of a session: 31 pairs of frames, as a cut leaves 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="checkpoints of true size; written unless they are there")
    parser.add_argument("--dummy", action="store_true", help="weights are made up on the GPU, not written and read")
    add_eight_bits(parser)
    parser.add_argument("--tiny", action="store_true", help="the tiny family")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--sessions", type=int, nargs="+", default=[32], metavar="N", help="at once; one load after another, growing"
    )
    parser.add_argument("--seconds", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=30, help="that a cut leaves (default: %(default)s)")
    parser.add_argument("--prune-at", type=int, default=45, help="the most rounds (default: %(default)s)")
    parser.add_argument(
        "--question-every", type=int, default=10, metavar="ROUNDS", help="0: never (default: %(default)s)"
    )
    parser.add_argument(
        "--read-ahead",
        type=int,
        default=5,
        metavar="ROUNDS",
        help="before a cut, from which on AURA reads what it will leave; 0: never (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.sessions != sorted(arguments.sessions):
        parser.error("--sessions must grow: sessions stay from one load to the next")
    if arguments.tiny == (arguments.folder is not None):
        parser.error("give --folder FOLDER or --tiny")
    if arguments.tiny:
        with TemporaryDirectory() as temporary:
            write_family(Path(temporary), kinds=("custom_voice",))
            measure(arguments, Path(temporary), tiny_config(Path(temporary)))
    else:
        write(arguments.folder, dummy=arguments.dummy)
        measure(arguments, arguments.folder, live_config(arguments))


def live_config(arguments: argparse.Namespace) -> Config:
    """32 sessions of 46 rounds of 240 rows are 353,000 rows of AURA's cache, more than its usual share of an H200 holds, and
    the Talker needs far less than its. Frames are kept encoded until a cut has had them read again."""
    stages = in_eight_bits(true_stages(arguments.folder), arguments.fp8, arguments.kv_fp8)
    sessions = max(arguments.sessions)
    kept_gib = round(sessions * PICTURES_GIB, 1)
    stages["1"] |= {"max_num_seqs": sessions, "gpu_memory_utilization": 0.65, "picture_cache_gib": kept_gib}
    stages["2"] |= {"gpu_memory_utilization": 0.10}
    stages["3"] |= {"gpu_memory_utilization": 0.10}
    options = Options(
        deploy_config="aura_omni.yaml",
        stage_overrides=json.dumps(stages),
        load_format=load_format(arguments.dummy),
    )
    return load_here(options)


def tiny_config(folder: Path) -> Config:
    stages = stages_of(folder)
    stages["1"] |= {"max_model_len": 16384, "gpu_memory_utilization": 0.60}
    return load_here(Options(deploy_config="tiny.yaml", stage_overrides=json.dumps(stages)))


def measure(arguments: argparse.Namespace, folder: Path, config: Config) -> None:
    report = Report(arguments.out)
    report.add("machine", machine())
    report.add("load", {name: value for name, value in vars(arguments).items() if name not in ("folder", "out")})
    begin = time.monotonic()
    with compiled_ahead(config, environ=os.environ):
        pipeline = Pipeline.load(config)
    try:
        report.add("load_s", round(time.monotonic() - begin, 1))
        sessions: list[Session] = []
        for number in arguments.sessions:
            begin = time.monotonic()
            sessions += [Session(pipeline, folder, arguments, place) for place in range(len(sessions), number)]
            remember(sessions)
            prepared = {"prepare_s": round(time.monotonic() - begin, 1), "cache_rows": cache(pipeline)}
            report.add(f"sessions_{number}", prepared | together(pipeline, sessions, arguments.seconds))
        pipeline.engine.check_integrity()
        report.add("memory_gib", memory())
    finally:
        pipeline.close()


def remember(sessions: list[Session]) -> None:
    """The past of all of them into the cache; then each asks something, so that nothing is done for the first time later."""
    with ThreadPoolExecutor(PREPARED_AT_ONCE) as pool:
        list(pool.map(Session.remember, sessions))
    with ThreadPoolExecutor(len(sessions)) as pool:
        list(pool.map(Session.begin, sessions))


def together(pipeline: Pipeline, sessions: list[Session], seconds: int) -> dict[str, Any]:
    """All of them for so long, to their last word."""
    coming = [session.videos(seconds) for session in sessions]
    before, begin = counts(pipeline), time.monotonic() + 0.5

    def live(place: int) -> list[Found]:
        return sessions[place].live(begin + place / len(sessions), coming[place])

    with ThreadPoolExecutor(len(sessions)) as pool:
        rounds = [found for founds in pool.map(live, range(len(sessions))) for found in founds]
    wall_s, after = time.monotonic() - begin, counts(pipeline)
    return {
        "wall_s": round(wall_s, 1),
        **summary(rounds),
        "given_up": len(sessions) * seconds - len(rounds),
        "aura_rows_a_round": of_each(
            {name: after["aura"][name] - before["aura"][name] for name in after["aura"]}, len(rounds)
        ),
        "stages": during(before, after, wall_s),
    }


def of_each(gained: Mapping[str, float], rounds: int) -> dict[str, int]:
    """Rows that AURA computed for each round: in all, for the turn's own prompt, and beforehand; and those that its cache had."""
    own = gained["prompt"] - gained["cached"]
    beforehand = gained["rows"] - own - gained["generated"]
    rows = {"rows": gained["rows"], "own": own, "beforehand": beforehand, "cached": gained["cached"]}
    return {name: round(count / rounds) for name, count in rows.items()}


def counts(pipeline: Pipeline) -> Counts:
    return {
        stage: {
            "steps": found.steps,
            "rows": found.computed_rows,
            "step_s": found.step_s,
            "prompt": found.prompt_tokens,
            "cached": found.cached_rows,
            "generated": found.generated_tokens,
        }
        for stage, found in pipeline.counters.items()
    }


def cache(pipeline: Pipeline) -> dict[str, int]:
    """Rows of AURA's, and how many of them hold what was said before."""
    found = pipeline.counters["aura"]
    return {"of": found.pages * PAGE_SIZE, "kept": found.pages_kept * PAGE_SIZE}


# ---------------------------------------------------------------- a session


@dataclass(slots=True)
class Round:
    """answer: what AURA said to it."""

    video: Video
    question: str = ""
    answer: str = SILENT_TEXT


@dataclass(slots=True)
class History:
    """What AURA is told of a session. answered: questions with their answers from before the oldest round."""

    rounds: int
    prune_at: int
    answered: list[tuple[str, str]] = field(default_factory=list)
    window: list[Round] = field(default_factory=list)

    def add(self, video: Video) -> bool:
        """A new round; whether there was a cut."""
        self.window.append(Round(video))
        if len(self.window) <= self.prune_at:
            return False
        self.answered, self.window = self._left()
        return True

    def messages(self, *asked: Audio) -> tuple[Message, ...]:
        """asked: what is said in the newest round, which is not answered."""
        *past, newest = self.window
        return (*_messages(self.answered, past), Message("user", (newest.video, *asked)))

    @property
    def rounds_to_cut(self) -> int:
        return self.prune_at + 1 - len(self.window)

    def after_cut(self) -> tuple[Message, ...]:
        """What the next cut will leave of what there is now."""
        return tuple(_messages(*self._left()))

    def _left(self) -> tuple[list[tuple[str, str]], list[Round]]:
        many = self.prune_at + 1 - self.rounds
        going, left = self.window[:many], self.window[many:]
        answered = [(past.question, past.answer) for past in going if past.answer != SILENT_TEXT]
        return [*self.answered, *answered][-KEPT_ANSWERS:], left


def _messages(answered: list[tuple[str, str]], rounds: list[Round]) -> Iterator[Message]:
    for question, answer in answered:
        yield Message("user", (Text(question),))
        yield Message("assistant", (Text(answer),))
    for past in rounds:
        yield Message("user", (past.video, *([Text(past.question)] if past.question else [])))
        yield Message("assistant", (Text(past.answer),))


@dataclass(slots=True)
class Found:
    """Of one round; times in seconds since its frames came. pruned: it began with a cut."""

    pruned: bool = False
    asked: bool = False
    started_s: float = 0.0  # when it was submitted: the answer before it was written by then
    transcript_s: float | None = None
    text_s: float | None = None  # first text, or that there will be none
    sound: list[tuple[float, float]] = field(default_factory=list)
    error: str | None = None

    @property
    def audio_s(self) -> float | None:
        """When the first sound came."""
        return self.sound[0][0] if self.sound else None


class Session:
    def __init__(self, pipeline: Pipeline, folder: Path, arguments: argparse.Namespace, number: int) -> None:
        self._pipeline, self._random = pipeline, np.random.default_rng(number)
        self._every, self._read_ahead = arguments.question_every, arguments.read_ahead
        # Sessions are of different ages, so that their questions and their cuts come one after the other.
        self._age = number % (arguments.question_every or 1)
        more = int(number * GOLDEN % 1 * (arguments.prune_at - arguments.rounds + 1))
        self._history = History(arguments.rounds, arguments.prune_at)
        self._history.window = [Round(video) for video in self.videos(arguments.rounds + more)]
        self._reading: Reading | None = None
        spoken = forced(folder)
        self._sampling = {True: spoken, False: {**spoken, "aura": silence(folder)}}  # by whether somebody asks
        self._open: list[threading.Event] = []  # turns that may still speak

    def remember(self) -> None:
        """What was said and seen so far into the cache, if it is not there."""
        self._pipeline.prepare(self._history.messages()[:-1]).wait()
        if self._history.rounds_to_cut <= self._read_ahead:
            self._pipeline.prepare(self._history.after_cut()).wait()

    def begin(self) -> None:
        """Ask something about the newest frames."""
        self._ask(Found(asked=bool(self._every)), time.monotonic(), self._history.window[-1])
        self._wait()

    def live(self, begin: float, coming: list[Video]) -> list[Found]:
        """A round for each of what comes every second, or those before it gave up."""
        rounds: list[Found] = []
        for second, video in enumerate(coming):
            due = begin + second
            time.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() - due > GIVE_UP_S:
                break
            self._age += 1
            found = Found(asked=bool(self._every) and self._age % self._every == 0)
            found.pruned = self._history.add(video)
            found.started_s = time.monotonic() - due
            rounds.append(found)
            self._ask(found, due, self._history.window[-1])
            if self._history.rounds_to_cut <= self._read_ahead and (self._reading is None or self._reading.over):
                self._reading = self._pipeline.prepare(
                    self._history.after_cut(), due_s=due + self._history.rounds_to_cut
                )
        self._wait()
        return rounds

    def _wait(self) -> None:
        """Until nobody speaks any more."""
        for ended in self._open:
            ended.wait()
        self._open.clear()

    def _ask(self, found: Found, due: float, newest: Round) -> None:
        """One turn; returns when its text is written. What is spoken goes on."""
        written, ended = threading.Event(), threading.Event()
        self._open.append(ended)
        texts: list[str] = []

        def sink(event: Event) -> None:
            now = time.monotonic() - due
            match event:
                case Transcript():
                    found.transcript_s, newest.question = now, event.text
                case TextDelta():
                    found.text_s = now if found.text_s is None else found.text_s
                    texts.append(event.text)
                    newest.answer = "".join(texts)
                    if newest.answer.count(WORD.strip()) == AURA_TOKENS:
                        written.set()
                case AudioChunk():
                    found.sound.append((now, len(event.samples) / VOICE_RATE))
                case Ended():
                    found.text_s = now if found.text_s is None else found.text_s
                    found.error = str(event.error) if event.error is not None else None
                    written.set()
                    ended.set()

        speech = (self._speech(),) if found.asked else ()
        request = TurnRequest(self._history.messages(*speech), sampling=self._sampling[found.asked])
        self._pipeline.submit(request, sink)
        written.wait()

    def videos(self, count: int) -> list[Video]:
        """So many pairs of frames."""
        frames = self._random.integers(0, 256, (count, 2, 360, 640, 3), dtype=np.uint8)
        return [Video(pair, (0.0, 0.5), 2.0, self._random.bytes(16)) for pair in frames]

    def _speech(self) -> Audio:
        return Audio(swelling_noise(self._random, 5.0, SPEECH_RATE), SPEECH_RATE, self._random.bytes(16))


def summary(rounds: list[Found]) -> dict[str, Any]:
    """Seconds since the frames came. late: share of rounds whose decision came when the next frames were there."""
    good = [found for found in rounds if found.error is None]
    chunks = [found for found in good if not found.asked]
    questions = [found for found in good if found.asked]
    heard = [played for found in questions if (played := listen(found.sound)) is not None]

    def times(of: list[Found], name: str) -> dict[str, float] | None:
        return spread([value for found in of if (value := getattr(found, name)) is not None])

    return {
        "rounds": len(rounds),
        "errors": len(rounds) - len(good),
        "first_error": next((found.error for found in rounds if found.error), None),
        "decision_s": times(chunks, "text_s"),
        "decision_after_a_cut_s": times([found for found in chunks if found.pruned], "text_s"),
        "decision_without_a_cut_s": times([found for found in chunks if not found.pruned], "text_s"),
        "cuts": sum(found.pruned for found in rounds),
        "late": round(sum((found.text_s or 0.0) > LATE_S for found in good) / max(1, len(good)), 4),
        "waited_for_the_round_before_s": times(good, "started_s"),
        "questions": len(questions),
        "transcript_s": times(questions, "transcript_s"),
        "first_text_s": times(questions, "text_s"),
        "first_audio_s": spread([played.first_s for played in heard]),
        "first_audio_without_a_cut_s": times([found for found in questions if not found.pruned], "audio_s"),
        "gap_free_s": spread([played.gap_free_s for played in heard]),
        "worst_stall_s": spread([played.worst_s for played in heard]),
        "underruns": round(sum(played.worst_s > UNDERRUN_S for played in heard) / max(1, len(heard)), 4),
        "audio_s": spread([played.audio_s for played in heard]),
    }


if __name__ == "__main__":
    main()
