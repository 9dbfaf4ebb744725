"""Reading published checkpoints: safetensors and JSON, nothing else. No remote code, no pickle, `auto_map` is ignored.

    checkpoint = Checkpoint.find("Qwen/Qwen3-ASR-1.7B")       # a folder, or a hub id
    config = checkpoint.json("config.json")
    checkpoint.load(network, layout, device=device, dtype=torch.bfloat16)

A missing, unused or misshaped tensor is an error that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from aura_omni.errors import CheckpointError, shown
from aura_omni.models.random_weights import RandomWeights
from aura_omni.models.weights import Filling, Layout, Prepared, Slot, dtypes, slots

T = TypeVar("T")
_INDEX = "model.safetensors.index.json"
_NEEDED = ["*.json", "*.safetensors", "*.txt", "*/*.json", "*/*.safetensors"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One folder in the published layout. `name` is what errors and logs call it.

    shelf: a folder above it, in which its indexes may name the files of checkpoints beside it, so that two kinds share their
    weights; without one an index names files of its own folder.
    dummy: weights are not read but made up on the device (`load_format: dummy`); the folder needs all other files.
    """

    folder: Path
    name: str
    shelf: Path | None = None
    dummy: bool = False

    @classmethod
    def find(cls, source: str, *, revision: str | None = None, dummy: bool = False) -> Checkpoint:
        """source: a local folder, or a hub id ("owner/name"), which is downloaded into the hub's cache; of a dummy all but weights."""
        if Path(source).expanduser().is_dir():
            return cls(Path(source).expanduser(), source, dummy=dummy)
        if source.count("/") != 1 or source.startswith((".", "/", "~")):
            raise CheckpointError(f"checkpoint {source!r} is neither a folder nor a hub id of the form owner/name")
        from huggingface_hub import snapshot_download  # only here: a local start needs no hub client
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        needed = [pattern for pattern in _NEEDED if not (dummy and pattern.endswith(".safetensors"))]
        try:
            return cls(Path(snapshot_download(source, revision=revision, allow_patterns=needed)), source, dummy=dummy)
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise CheckpointError(
                f"checkpoint {source!r} could not be fetched from the hub ({type(error).__name__}). "
                "Give a local folder, or log in if the repository is gated."
            ) from error

    def sub(self, name: str) -> Checkpoint:
        return replace(self, folder=self.folder / name, name=f"{self.name}/{name}")

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def json(self, name: str, *, default: dict[str, Any] | None = None) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            if default is not None:
                return default
            raise CheckpointError(f"checkpoint {self.name} has no {name}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
            raise CheckpointError(f"{name} of checkpoint {self.name} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{name} of checkpoint {self.name} holds {type(content).__name__}, not an object")
        return content

    def parse(self, parser: Callable[[dict[str, Any]], T], name: str = "config.json") -> T:
        """The file through a network's `from_json`, which may rely on the published shape.

        What it lacks (KeyError), refuses (ValueError) or stumbles over, because null, a text or a list stands where
        something else belongs, is a CheckpointError that names the file.
        """
        try:
            return parser(self.json(name))
        except KeyError as error:
            raise CheckpointError(f"{name} of checkpoint {self.name} lacks {error}") from error
        except ValueError as error:
            raise CheckpointError(f"{name} of checkpoint {self.name}: {error}") from error
        except (TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(f"{name} of checkpoint {self.name} is not of the published shape: {error}") from error

    def tensors(self) -> dict[str, Path]:
        """Published tensor name -> the file that holds it, over all *.safetensors of the folder (or of its index)."""
        indexed = self.parse(self._indexed, _INDEX) if self.has(_INDEX) else {}
        files = sorted(set(indexed.values()) or self.folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"checkpoint {self.name} has no *.safetensors file")
        holds: dict[Path, set[str]] = {}
        for file in files:
            with self._opened(file) as tensors:
                holds[file] = set(tensors.keys())
        found = {tensor: file for file, names in holds.items() for tensor in names}
        astray = sorted(tensor for tensor, file in indexed.items() if tensor not in holds[file])
        if astray:
            raise CheckpointError(
                f"checkpoint {self.name}: the files that its index names do not hold "
                f"{_few(f'{shown(tensor)} ({self._whereabouts(indexed[tensor], found.get(tensor))})' for tensor in astray)}"
            )
        return found | indexed

    def _indexed(self, index: dict[str, Any]) -> dict[str, Path]:
        """Tensor name -> its file, which is there."""
        where = index.get("weight_map", {})
        files: dict[str, Path] = {}
        for name in set(where.values()):
            if not (isinstance(name, str) and (self.shelf or Path(name).name == name)):
                raise ValueError("weight_map must give a file of this folder for each tensor")
            files[name] = self.folder / name
            try:
                if self.shelf and not files[name].resolve().is_relative_to(self.shelf.resolve()):
                    raise ValueError(f"weight_map must give a file below {self.shelf.name} for each tensor")
                there = files[name].is_file()
            except OSError:  # no file can be called so
                there = False
            if not there:
                raise ValueError(f"weight_map names the file {shown(name)}, which is not there")
        return {tensor: files[name] for tensor, name in where.items()}

    def _whereabouts(self, named: Path, holder: Path | None) -> str:
        return f"said to be in {self._shown(named)}, it is in {'none' if holder is None else self._shown(holder)}"

    def _shown(self, file: Path) -> str:
        """As the index has it."""
        return str(file.relative_to(self.folder) if file.is_relative_to(self.folder) else file)

    @contextmanager
    def _opened(self, file: Path) -> Iterator[Any]:
        """The tensors of a file. What is wrong with it, also with what is read from it inside, is a CheckpointError."""
        try:
            with safe_open(file, framework="pt") as tensors:
                yield tensors
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self._shown(file)} of checkpoint {self.name} cannot be read ({error}); it may be incomplete: fetch it again"
            ) from error

    def load(
        self,
        network: nn.Module,
        layout: Layout,
        *,
        device: torch.device,
        dtype: torch.dtype,
        own: str = "",
    ) -> None:
        """Fill `network` (built on the meta device or not) and move it to device and dtype, then `prepare` its tables.

        own: a prefix; published tensors that do not start with it belong to another network of the same file and are not
        counted as unused. Integer tensors keep their dtype, and what the network has in eight bits is made so tensor by tensor.
        Raises CheckpointError naming the missing, unused or misshaped tensors (the first few of each). On "meta", and of a dummy,
        nothing is read.
        """
        wanted = list(slots(network, layout))
        state = network.state_dict()
        filling = Filling(network, device=device, dtype=dtype)
        if device.type == "meta":
            for slot in wanted:
                kind = dtype if slot.scale is not None else state[slot.ours].dtype
                filling.put(slot, torch.empty(slot.shape(state[slot.ours]), dtype=kind, device=device))
            return settle(network, filling.tensors)
        if self.dummy:
            random = RandomWeights(dtype=dtype, device=device)
            for slot in wanted:
                published = torch.Size(slot.shape(state[slot.ours]))
                filling.put(slot, random.value(slot.published, published, state[slot.ours].dtype))
            return settle(network, filling.tensors)
        where = self.tensors()
        self._check_names(where, wanted, layout, own)
        wrong: list[str] = []
        for file in sorted(set(where.values())):
            with self._opened(file) as tensors:
                for slot in wanted:
                    if where[slot.published] != file:
                        continue
                    shape = tuple(tensors.get_slice(slot.published).get_shape())
                    expected = slot.shape(state[slot.ours])
                    if shape != expected:
                        wrong.append(f"{slot.published} is {list(shape)}, the configuration asks for {list(expected)}")
                        continue
                    filling.put(slot, tensors.get_tensor(slot.published))
        if wrong:
            raise CheckpointError(f"checkpoint {self.name}: {_few(wrong)}")
        settle(network, filling.tensors)

    def _check_names(self, where: dict[str, Path], wanted: list[Slot], layout: Layout, own: str) -> None:
        names = {slot.published for slot in wanted}
        missing = sorted(names - set(where))
        ignored = [re.compile(pattern) for pattern in layout.ignore]
        unused = sorted(
            name
            for name in set(where) - names
            if name.startswith(own) and not any(pattern.fullmatch(name) for pattern in ignored)
        )
        if missing or unused:
            parts = [f"missing {_few(missing)}"] if missing else []
            parts += [f"unused {_few(unused)}"] if unused else []
            raise CheckpointError(f"checkpoint {self.name} does not fit its configuration: {'; '.join(parts)}")


def settle(network: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Give a network all its weights, by its own names, and make the tables that follow from them. For inference."""
    network.load_state_dict(weights, strict=True, assign=True)
    network.requires_grad_(False).eval()
    for part in network.modules():
        if isinstance(part, Prepared):
            part.prepare()


def _few(items: Iterable[str], limit: int = 5) -> str:
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def weight_bytes(network: nn.Module, dtype: torch.dtype) -> int:
    """What the network's weights will take on the device, from its shapes alone (it may be on the meta device)."""
    kinds = dtypes(network, dtype)
    return sum(value.numel() * kinds[name].itemsize for name, value in network.state_dict().items())
