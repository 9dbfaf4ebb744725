"""How our parameter names map to the names in a published checkpoint, both ways.

A network keeps the published names below one or more renamed prefixes. The structural differences are `StackedLinear`, several
published matrices kept as one, so that they cost one launch, and matrices that are kept in eight bits (`in_eight_bits`). Knows no
files: `engine.loader` reads them, `nano` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aura_omni.models import fp8


class Linear(nn.Linear):
    """A matrix that may be kept in eight bits; then scale float32 [O] belongs to its rows (`fp8`), else it is None."""

    scale: Tensor | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.register_buffer("scale", None)

    def forward(self, x: Tensor | fp8.Rows) -> Tensor:
        if self.scale is not None:
            return fp8.linear(x, self.weight, self.scale)
        assert isinstance(x, Tensor)
        return super().forward(x)


class StackedLinear(Linear):
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


def in_eight_bits(network: nn.Module) -> None:
    """From here on every `Linear` of the network is kept in eight bits, also one that gets its weights only now."""
    for part in network.modules():
        if isinstance(part, Linear):
            assert part.bias is None
            weight = part.weight.detach()
            values, part.scale = fp8.meant(weight) if weight.is_meta else fp8.quantized(weight)
            part.weight = nn.Parameter(values, requires_grad=False)


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
    """Where one published tensor goes: rows [start, stop) of our tensor `ours` (all of it when stop is None).

    scale: the name of the tensor that its scales go to, if ours is in eight bits.
    """

    ours: str
    published: str
    start: int = 0
    stop: int | None = None
    scale: str | None = None

    def shape(self, ours: Tensor) -> tuple[int, ...]:
        """Of the published tensor, given ours."""
        return tuple(ours.shape) if self.stop is None else (self.stop - self.start, *ours.shape[1:])

    def put(self, published: Tensor, state: Mapping[str, Tensor]) -> None:
        """Copy the published tensor to its place among ours."""
        into = self._part(state[self.ours])
        if self.scale is None:
            into.copy_(published)
            return
        values, scale = fp8.quantized(published.to(into.device))
        into.copy_(values)
        self._part(state[self.scale]).copy_(scale)

    def _part(self, ours: Tensor) -> Tensor:
        return ours if self.stop is None else ours[self.start : self.stop]


def slots(module: nn.Module, layout: Layout) -> Iterator[Slot]:
    """Every published tensor that `module` needs, in our order."""
    linears = {name: part for name, part in module.named_modules() if isinstance(part, Linear)}
    for name in module.state_dict():
        owner, _, leaf = name.rpartition(".")
        linear = linears.get(owner)
        if linear is not None and leaf == "scale":
            continue  # made from the weight
        scale = None if linear is None or linear.scale is None else f"{owner}.scale"
        if not isinstance(linear, StackedLinear):
            yield Slot(name, layout.published(name), scale=scale)
            continue
        parent, _, _ = owner.rpartition(".")
        start = 0
        for part, rows in linear.parts.items():
            whole = ".".join(piece for piece in (parent, part, leaf) if piece)
            yield Slot(name, layout.published(whole), start, start + rows, scale)
            start += rows


class Filling:
    """The tensors of a network on a device, by our names; each is made when the first published part of it comes.

    What is in eight bits never is on the device in more than that, but for the part that has just come.
    """

    def __init__(self, network: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._meant, self._dtypes, self._device = network.state_dict(), dtypes(network, dtype), device

    def put(self, slot: Slot, published: Tensor) -> None:
        for name in (slot.ours, slot.scale):
            if name is not None and name not in self.tensors:
                shape = self._meant[name].shape
                self.tensors[name] = torch.empty(shape, dtype=self._dtypes[name], device=self._device)
        slot.put(published, self.tensors)


def dtypes(network: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Of the network's tensors, by our names, when it computes in dtype: that, but for integers and what belongs to eight bits."""
    kinds = {name: dtype if value.is_floating_point() else value.dtype for name, value in network.state_dict().items()}
    for name, part in network.named_modules():
        if isinstance(part, Linear) and part.scale is not None:
            kinds |= {f"{name}.weight": part.weight.dtype, f"{name}.scale": part.scale.dtype}
    return kinds


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
            slot.put(tensors[slot.published], state)
    for part in module.modules():
        if isinstance(part, Prepared):
            part.prepare()
