"""The whole server over the tiny family: a real socket, the official client, and what the engine got."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest

from aura_omni.config import Config
from aura_omni.flow import Event, TurnRequest
from aura_omni.pipeline import Pipeline
from aura_omni.server.around import Around
from aura_omni.server.turns import Turn
from aura_omni.stages.asr import AsrStage
from aura_omni.stages.aura import AuraStage
from aura_omni.stages.talker import TalkerStage
from tests.family import config, running
from tests.server.fake import serving


class Witness(Around):
    """A pipeline between the server and the real one, that remembers which requests reached the engine."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self.pipeline = pipeline
        self.requests: list[TurnRequest] = []

    def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> Turn:
        turn = super().submit(request, sink)  # raises for what it refuses, before the engine
        self.requests.append(request)
        return turn

    def close(self) -> None:
        """The server has ended; the pipeline is closed by who made it, after a look at what is left in it."""


@dataclass(frozen=True)
class Served:
    url: str
    witness: Witness
    client: openai.OpenAI


@contextmanager
def served_with(config: Config, **changes: Any) -> Iterator[Served]:
    """changes: fields of the Config. At the end nothing may be left over in the engine."""
    with running(replace(config, **changes)) as pipeline:
        witness = Witness(pipeline)
        with (
            serving(witness) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        ):
            yield Served(url, witness, client)


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with served_with(config()) as served:
        yield served


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The token ids that each stage was given, of all requests since the test began."""
    ids: dict[str, list[int]] = {"asr": [], "aura": [], "talker": []}
    hear, think, talk, feed = AsrStage.sequence, AuraStage.sequence, TalkerStage.prompt, TalkerStage.feed

    def of_asr(stage: AsrStage, prompt: Any, *rest: Any, **more: Any) -> Any:
        ids["asr"] += prompt.tokens
        return hear(stage, prompt, *rest, **more)

    def of_aura(stage: AuraStage, prompt: Any, *rest: Any, **more: Any) -> Any:
        ids["aura"] += prompt.tokens
        return think(stage, prompt, *rest, **more)

    def of_talker(stage: TalkerStage, speaking: Any, body: Any, *rest: Any) -> Any:
        ids["talker"] += body
        return talk(stage, speaking, body, *rest)

    def fed(stage: TalkerStage, sequence: Any, body: Any) -> None:
        ids["talker"] += body
        feed(stage, sequence, body)

    monkeypatch.setattr(AsrStage, "sequence", of_asr)
    monkeypatch.setattr(AuraStage, "sequence", of_aura)
    monkeypatch.setattr(TalkerStage, "prompt", of_talker)
    monkeypatch.setattr(TalkerStage, "feed", fed)
    return ids
