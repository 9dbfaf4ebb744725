"""A server process without models, for the tests of `run` and of the clients: `python -m tests.server.serve_fake KIND PORT GRACE_S`.

KIND: "broken", or the seconds that loading takes. A message "take S" is answered with a text at once and another after S
seconds; a message "quiet S" with one text after S seconds; "sound S" is one frame of sound, and another after S seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from aura_omni.errors import AuraError, CheckpointError
from aura_omni.flow import STAGES, AudioChunk, Ended, Event, Report, TextDelta, TurnRequest
from aura_omni.server.app import ServerConfig, run
from tests.server.fake import FakePipeline, Pause, said, tone


def answer(request: TurnRequest) -> Iterator[Event | Pause]:
    kind, _, seconds = said(request).partition(" ")
    if kind == "take":
        yield TextDelta("begun, ")
    if kind == "sound":
        yield AudioChunk(tone(440, 1))
    yield Pause(float(seconds))
    yield TextDelta("done")
    yield Ended("stop")


def load(report: Report) -> FakePipeline:
    if sys.argv[1] == "broken":
        raise CheckpointError("weights of the talker are missing")
    for name in STAGES:
        report(name, "waiting")
    report("asr", "ready")
    time.sleep(float(sys.argv[1]))
    return FakePipeline(answer)


if __name__ == "__main__":
    try:
        run(ServerConfig(port=int(sys.argv[2])), load, grace_s=float(sys.argv[3]))
    except AuraError as error:
        sys.exit(f"error: {error.message}")
