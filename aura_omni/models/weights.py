"""How our parameter names map to the names in a published checkpoint, both ways.

A network keeps the published names below one or more renamed prefixes. The only structural difference is
`StackedLinear`: several published matrices kept as one, so that they cost one launch. Knows no files: `engine.loader`
reads them, `nano` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class StackedLinear(nn.Linear):
    """One matrix that a checkpoint stores as several, stacked along the output rows: {"q_proj": 2048, "k_proj": 1024, ...}."""

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)

    def split(self, out: Tensor) -> tuple[Tensor, ...]:
        return out.split(list(self.parts.values()), dim=-1)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Inside, networks are made of parameters without memory or values, on the "meta" device."""
    with torch.device("meta"), _NothingDrawn():
        yield


_DRAWS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class _NothingDrawn(TorchFunctionMode):
    """Where PyTorch has no numbers to draw it imports its compiler to find that out: 890 modules, in as long as PyTorch itself takes."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        given: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
    ) -> Any:
        named = named or {}
        return named["tensor"] if function in _DRAWS else function(*given, **named)


class Prepared(nn.Module):
    """A module that derives tables from its weights. The loader calls `prepare` once, when they are in place."""

    def prepare(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Layout:
    """renames: (our prefix, published prefix), first match wins; ignore: regular expressions (full match) of published
    tensors that are known and of no use to us (each with its reason where the layout is defined)."""

    renames: tuple[tuple[str, str], ...] = ()
    ignore: tuple[str, ...] = ()

    def published(self, name: str) -> str:
        for ours, theirs in self.renames:
            if name.startswith(ours):
                return theirs + name[len(ours) :]
        return name


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one published tensor goes: rows [start, stop) of our tensor `ours` (all of it when stop is None)."""

    ours: str
    published: str
    start: int = 0
    stop: int | None = None


def slots(module: nn.Module, layout: Layout) -> Iterator[Slot]:
    """Every published tensor that `module` needs, in our order."""
    stacked = {name: part for name, part in module.named_modules() if isinstance(part, StackedLinear)}
    for name in module.state_dict():
        owner, _, leaf = name.rpartition(".")
        if owner not in stacked:
            yield Slot(name, layout.published(name))
            continue
        parent, _, _ = owner.rpartition(".")
        start = 0
        for part, rows in stacked[owner].parts.items():
            whole = ".".join(piece for piece in (parent, part, leaf) if piece)
            yield Slot(name, layout.published(whole), start, start + rows)
            start += rows


def to_published(module: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The module's weights under published names, as a checkpoint file holds them (contiguous)."""
    state = module.state_dict()
    return {
        slot.published: state[slot.ours][slot.start : slot.stop].clone(memory_format=torch.contiguous_format)
        if slot.stop
        else state[slot.ours].clone(memory_format=torch.contiguous_format)
        for slot in slots(module, layout)
    }


def from_published(module: nn.Module, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors in memory into the module (tests). Files go through `engine.loader`, which checks them."""
    state = module.state_dict()
    with torch.no_grad():
        for slot in slots(module, layout):
            state[slot.ours][slot.start : slot.stop].copy_(tensors[slot.published]) if slot.stop else state[
                slot.ours
            ].copy_(tensors[slot.published])
    for part in module.modules():
        if isinstance(part, Prepared):
            part.prepare()
