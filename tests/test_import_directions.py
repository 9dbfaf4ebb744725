"""Who may import whom, read from the source.

server -> realtime, pipeline -> stages -> engine -> models -> torch; flow, errors, config, media, spacing, counters and interpreter are leaves.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "aura_omni"

LEAVES = {"errors", "flow", "config", "media", "spacing", "counters", "interpreter"}
BELOW = {
    "errors": set(),
    "flow": {"errors"},
    "spacing": set(),
    "counters": set(),
    "interpreter": set(),
    "config": {"errors", "flow"},
    "media": {"errors", "flow"},
    "models": set(),
    "engine": {"models", "errors", "flow", "counters"},
    "stages": {"engine", "models"} | LEAVES,
    "nano": {"stages", "engine", "models"} | LEAVES,
    "heard": {"errors", "flow", "media"},
    "transcription": {"errors", "flow", "heard", "spacing"},
    "transcript_file": {"flow", "transcription"},
    "asking": {"heard", "transcription"} | LEAVES,
    "assembly": {"nano", "stages", "engine", "models"} | LEAVES,  # loads what pipeline.py serves
    "rehearsal": {"assembly"} | LEAVES,
    "compiling": {"errors", "config"},
    "plan": {"stages"} | LEAVES,
    "coming": {"engine"} | LEAVES,
    "work": {"coming", "stages", "engine"} | LEAVES,
    "speaking": {"plan", "work", "assembly", "stages", "engine"} | LEAVES,
    "reading": {"stages", "engine"} | LEAVES,
    "turn": {"plan", "coming", "work", "speaking", "assembly", "stages", "engine"} | LEAVES,
    "warm_up": {"errors", "flow", "media"},
    "pipeline": {"asking", "plan", "coming", "work", "reading", "turn", "warm_up", "assembly", "stages", "engine"}
    | LEAVES,
    "engine_process": {
        "pipeline",
        "errors",
        "flow",
        "config",
        "counters",
        "interpreter",
    },  # stands between the server and the pipeline
    "realtime": {"pipeline"} | LEAVES,
    "server": {"pipeline", "realtime", "heard", "transcription", "transcript_file"} | LEAVES,
    "offline_flags": {"errors", "flow", "config"},
    "offline": {"offline_flags", "pipeline", "assembly", "stages", "heard", "transcription", "transcript_file"}
    | LEAVES,
    "doctor": LEAVES,
    "bench": {"errors", "flow", "media"},  # a client: it must not know the server
}
TOP = {"cli", "__main__", "__init__"}  # may import everything of ours

WITHOUT_TORCH = {
    "errors",
    "flow",
    "config",
    "realtime",
    "spacing",
    "counters",
    "interpreter",
    "offline_flags",
    "compiling",
    "engine_process",
    "cli",
    "__main__",
}
ONLY_IN_SERVER = {"fastapi", "starlette", "uvicorn", "h11"}
NOWHERE = {"transformers", "qwen_tts", "qwen_asr", "vllm", "vllm_omni"}

# What a command or a rare path needs and every start would pay for.
LAZY = {
    ("bench/gpu.py", "pynvml"),
    ("bench/picture.py", "matplotlib.figure"),
    ("cli.py", "aura_omni.bench.command"),
    ("cli.py", "aura_omni.engine_process.client"),
    ("engine_process/worker.py", "aura_omni.pipeline"),
    ("__init__.py", "aura_omni.pipeline"),
    ("cli.py", "aura_omni.offline"),
    ("cli.py", "aura_omni.server.app"),
    ("cli.py", "aura_omni.server.first"),
    ("cli.py", "aura_omni.doctor"),
    ("cli.py", "aura_omni.media.fetch"),
    ("cli.py", "aura_omni.nano.random_family"),
    ("cli.py", "aura_omni.pipeline"),
    ("config/choose.py", "huggingface_hub"),
    ("config/choose.py", "huggingface_hub.errors"),
    ("engine/attention.py", "aura_omni.engine"),
    ("engine/loader.py", "huggingface_hub"),
    ("engine/loader.py", "huggingface_hub.errors"),
    ("engine/sampler.py", "aura_omni.engine"),
    ("engine/seats.py", "aura_omni.engine"),
    ("engine/numbers.py", "aura_omni.engine"),
    ("models/codec.py", "aura_omni.models"),
    ("models/fp8.py", "aura_omni.models"),
    ("models/layers.py", "aura_omni.models"),
    ("nano/__init__.py", "aura_omni.nano.random_family"),
}
# Fields of the public API that carry the name of a model
API_FIELDS = {"initial_codec_chunk_frames", "qwen3_tts_model"}


@dataclass(frozen=True)
class Import:
    file: str  # below the package
    line: int
    module: str
    inside_function: bool

    @property
    def room(self) -> str:
        return Path(self.file).parts[0].removesuffix(".py")

    @property
    def our_room(self) -> str | None:
        """The part of the package that is imported; None: something else, or the package's own __init__."""
        first, _, rest = self.module.partition(".")
        return rest.split(".")[0] or None if first == "aura_omni" else None

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path, package: Path) -> Iterator[Import]:
    file = path.relative_to(package).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    folder = ["aura_omni", *path.relative_to(package).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            # "from aura_omni import config" and "from . import x" import the named parts
            modules = [f"{module}.{alias.name}" for alias in node.names] if module == "aura_omni" else [module]
        else:
            continue
        for module in modules:
            yield Import(file, node.lineno, module, id(node) in inside)


def all_imports() -> list[Import]:
    return [found for path in files() for found in imports_of(path, PACKAGE)]


def broken(found: Import) -> str | None:
    """What is wrong with one import, if anything."""
    outside = found.module.split(".")[0]
    if outside in NOWHERE:
        return "a reference package is not for the server"
    if outside in ONLY_IN_SERVER and found.room != "server":
        return "HTTP lives in server/"
    if outside == "torch" and found.room in WITHOUT_TORCH:
        return "this part knows no torch"
    if found.inside_function and (found.file, found.module) not in LAZY:
        return "imports stand at the top of the file"
    target = found.our_room
    if target is None or target == found.room or found.room in TOP or target == "__version__":
        return None
    if target not in BELOW.get(found.room, set()):
        return f"{found.room} may import {sorted(BELOW.get(found.room, set()))}"
    return None


def test_imports_go_downwards():
    assert [f"{found}: {why}" for found in all_imports() if (why := broken(found))] == []


def test_every_part_of_the_package_has_its_place():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in files()}
    assert rooms - set(BELOW) - TOP == set()


def test_lazy_imports_that_are_allowed_exist():
    lazy = {(found.file, found.module) for found in all_imports() if found.inside_function}
    assert lazy == LAZY


@pytest.mark.parametrize(
    ("file", "source", "why"),
    [
        ("engine/x.py", "from aura_omni.server import app", "engine may import"),
        ("models/x.py", "from aura_omni.errors import BadRequest", "models may import"),
        ("models/x.py", "from ..engine import loader", "models may import"),
        ("media/x.py", "import aura_omni.config", "media may import"),
        ("flow.py", "from aura_omni import stages", "flow may import"),
        ("stages/x.py", "from fastapi import FastAPI", "HTTP lives"),
        ("config/x.py", "import torch.nn", "no torch"),
        ("engine/x.py", "from transformers import AutoModel", "reference package"),
        ("engine/x.py", "def f():\n    import math", "top of the file"),
        ("new_part.py", "from aura_omni.flow import Text", "new_part may import"),
        ("stages/x.py", "from aura_omni.engine.loader import Checkpoint", None),
        ("models/x.py", "from . import layers", None),
        ("server/x.py", "from aura_omni import __version__", None),
    ],
)
def test_the_rules_catch_what_they_are_for(tmp_path, file, source, why):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    reasons = [broken(found) for found in imports_of(path, tmp_path)]
    assert (
        all(reason is None for reason in reasons) if why is None else any(why in (reason or "") for reason in reasons)
    )


def test_no_function_rebinds_a_global():
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Global)
    ]
    assert found == []


def test_server_names_no_model():
    found = []
    for path in sorted((PACKAGE / "server").rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for field in API_FIELDS:
                line = line.replace(field, "")
            if re.search(r"qwen|codec", line, re.IGNORECASE):
                found.append(f"{path.name}:{number}: {line.strip()}")
    assert found == []
