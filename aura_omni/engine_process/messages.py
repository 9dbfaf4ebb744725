"""What the server's process and the engine's say to each other. Turns are numbered by the server's."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from aura_omni.config import Config
from aura_omni.counters import Counters
from aura_omni.errors import AuraError
from aura_omni.flow import Event, StageName, StagePhase, TurnRequest, Video, VoiceTask

# The server hears them and tells; a terminal, or whoever stops a service, sends them to both processes.
SERVERS_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# ---------------------------------------------------------------- to the engine's process


@dataclass(frozen=True, slots=True)
class Start:
    """The first message. log_level: of the root logger, as `logging` counts."""

    config: Config
    log_level: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Answered by Accepted or Refused."""

    turn: int
    request: TurnRequest


@dataclass(frozen=True, slots=True)
class Show:
    """The pictures of an accepted turn that are Coming. Answered by Shown."""

    turn: int
    videos: tuple[Video, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    turn: int


@dataclass(frozen=True, slots=True)
class Count:
    """Answered by Counted with the same number."""

    number: int


@dataclass(frozen=True, slots=True)
class Close:
    """End all turns, say so, and end the process."""


# ---------------------------------------------------------------- from the engine's process


@dataclass(frozen=True, slots=True)
class Reported:
    stage: StageName
    phase: StagePhase


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the pipeline is, once and for all."""

    served_names: tuple[str, ...]
    stages: tuple[StageName, ...]
    speakers: tuple[str, ...]
    voice_task: VoiceTask | None


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """Nothing follows."""

    error: AuraError


@dataclass(frozen=True, slots=True)
class Accepted:
    """Events of the turn may have come before."""

    turn: int


@dataclass(frozen=True, slots=True)
class Refused:
    """No event of the turn came or will come."""

    turn: int
    error: AuraError


@dataclass(frozen=True, slots=True)
class Shown:
    """error: why the pictures are refused; then the turn is cancelled, which its Ended tells, before or after."""

    turn: int
    error: AuraError | None = None


@dataclass(frozen=True, slots=True)
class Happened:
    """Events of turns, in their order."""

    events: tuple[tuple[int, Event], ...]


@dataclass(frozen=True, slots=True)
class Counted:
    number: int
    counters: Mapping[StageName, Counters]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The engine takes no more turns; all have ended."""

    reason: str
