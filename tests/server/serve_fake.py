"""A server process without models, for the tests of `run` and of the clients: `python -m tests.server.serve_fake KIND`."""

from __future__ import annotations

import sys
import time

from aura_omni.errors import AuraError, CheckpointError
from aura_omni.server.app import ServerConfig, run
from tests.server.fake import FakePipeline


def load() -> FakePipeline:
    if sys.argv[1] == "broken":
        raise CheckpointError("weights of the talker are missing")
    time.sleep(float(sys.argv[1]))
    return FakePipeline()


if __name__ == "__main__":
    try:
        run(ServerConfig(port=int(sys.argv[2])), load)
    except AuraError as error:
        sys.exit(f"error: {error.message}")
