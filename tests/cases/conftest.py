"""The whole server: a real socket, the official client, and what the engine got.

Over the tiny family, whose random weights say more different things than trained ones, and over the checkpoints that ship,
whose speech has words and an end. `both` gives a test the one and then the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest

from aura_omni.config import Config, Options, load
from aura_omni.engine.loader import Checkpoint
from aura_omni.flow import Event, TurnRequest
from aura_omni.nano import folder_of
from aura_omni.pipeline import Pipeline
from aura_omni.server.app import ServerConfig
from aura_omni.server.around import Around
from aura_omni.server.turns import Turn
from aura_omni.stages.asr import AsrStage
from aura_omni.stages.aura import AuraStage
from aura_omni.stages.talker import TalkerStage
from aura_omni.stages.tokenizer import TextTokenizer
from tests.family import config, family, running
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

    @property
    def model(self) -> str:
        return self.witness.served_names[0]

    @property
    def trained(self) -> bool:
        return self.model == "aura-nano"


DRAWN = {"temperature": 0.5, "top_k": 10}


def shipped(tts: str = "nano:tts") -> Config:
    """nano.yaml, but its voice is drawn: so a seed that is lost shows, and so does one that two requests share."""
    talker = {"model": tts, "default_sampling_params": DRAWN, "subtalker_sampling_params": {"do_sample": True, **DRAWN}}
    overrides = json.dumps({"2": talker, "3": {"model": tts}})
    return load(Options(deploy_config="nano.yaml", stage_overrides=overrides), environ={}, platform="cpu")


@contextmanager
def served_with(config: Config, server: ServerConfig | None = None, **changes: Any) -> Iterator[Served]:
    """changes: fields of the Config. At the end nothing may be left over in the engine."""
    with running(replace(config, **changes)) as pipeline:
        witness = Witness(pipeline)
        with (
            serving(witness, server) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        ):
            yield Served(url, witness, client)


@pytest.fixture(scope="session")
def tiny() -> Iterator[Served]:
    with served_with(config()) as served:
        yield served


@pytest.fixture(scope="session")
def nano() -> Iterator[Served]:
    with served_with(shipped()) as served:
        yield served


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(getattr(request, "param", "tiny"))


both = pytest.mark.parametrize("served", ["tiny", "nano"], indirect=True)


def read_by(served: Served) -> TextTokenizer:
    """What the Talker reads with."""
    tts = folder_of("nano:tts") if served.trained else family() / "tts_custom_voice"
    return TextTokenizer.load(Checkpoint.find(str(tts)))


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
