"""What a server asks itself before it is ready leaves nothing to be set up by the first user's request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aura_omni.bench.work import Speeches, Turns
from aura_omni.errors import EngineError
from aura_omni.flow import STAGES, Audio, Ended, StageName, Text, TurnPart, Video
from aura_omni.server.app import ServerConfig
from aura_omni.server.first import ask_first
from tests.server.fake import FakePipeline

ROOT = Path(__file__).parents[2]

# A process of its own: this one has imported what tests need.
SCRIPT = """
import asyncio, json, sys, threading
import httpx
from aura_omni.cli import config_of, _parser
from aura_omni.engine_process.client import PipelineProcess
from aura_omni.server.app import ServerConfig, create_app
from aura_omni.server.first import ask_first

def main():
    config = config_of(_parser().parse_args(["serve", "--deploy-config", "tiny.yaml"]), {})
    pipeline = PipelineProcess.load(config, lambda name, phase: None)
    try:
        ask_first(ServerConfig(), pipeline)
        before = set(sys.modules)
        # Made by others, as a client would: making them imports nothing here.
        bodies = json.load(open(sys.argv[1]))
        app = create_app(ServerConfig(), pipeline)
        async def ask():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=None) as client:
                for path, body in bodies:
                    answer = await client.post(path, json=body)
                    assert answer.status_code == 200, answer.text
                    assert "error" not in answer.text[:100], answer.text[:300]
        asyncio.run(ask())
        print(json.dumps(sorted(set(sys.modules) - before)))
    finally:
        pipeline.close()

main()
"""


def test_the_first_request_imports_nothing(tmp_path: Path) -> None:
    bodies = [
        (request.path, json.loads(request.body))
        for request in (
            Turns(model="aura-tiny", seed=0, more={"max_tokens": 4}).request(0),
            Speeches(model="aura-tiny", text="Hello.", more={"max_new_tokens": 4}).request(0),
        )
    ]
    for _, body in bodies:
        del body["model"]
    file, script = tmp_path / "bodies.json", tmp_path / "script.py"
    file.write_text(json.dumps(bodies))
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, file],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize(
    ("stages", "parts"),
    [(STAGES, ["turn", "speech", "transcript"]), (("talker", "code2wav"), ["speech"]), (("asr",), ["transcript"])],
)
def test_it_asks_for_whatever_the_stages_can_do(stages: tuple[StageName, ...], parts: list[TurnPart]) -> None:
    pipeline = FakePipeline()
    pipeline.stages = stages
    ask_first(ServerConfig(api_keys=("secret",)), pipeline)
    assert [request.part for request in pipeline.requests] == parts
    if "aura" in stages:
        assert [type(part) for part in pipeline.requests[0].messages[-1].parts] == [Audio, Video, Text]


def test_an_answer_that_fails_is_logged_and_the_next_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = FakePipeline(lambda request: [Ended("error", error=EngineError("no kernel"))])
    ask_first(ServerConfig(), pipeline)
    assert len(pipeline.requests) == 3
    assert sum("no kernel" in record.getMessage() for record in caplog.records if record.name.endswith("first")) == 3
