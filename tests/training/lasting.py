"""What a training step reads of what was there before it, so that a CUDA graph of it can be trusted.

A captured graph holds addresses, not tensors. What a step reads must therefore be made in the step itself or outlive it, in
its place: a gradient left over from the step before, or a table that was made anew, is freed memory in every replay.

    reads = Reads.of(step)          # runs it
    assert not reads.gone           # what was read and did not live on
    assert reads.places == Reads.of(step).places
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}
        self.read: dict[int, tuple[StorageWeakRef, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs or {})):
            if isinstance(value, Tensor) and value.numel():
                storage = value.untyped_storage()
                place, made = storage._cdata, self.made.get(storage._cdata)
                if (made is None or made.expired()) and place not in self.read:
                    self.read[place] = (StorageWeakRef(storage), f"{func} {tuple(value.shape)}")
        given = {
            value.untyped_storage()._cdata for value in tree_leaves((args, kwargs or {})) if isinstance(value, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.read:
                    self.made[storage._cdata] = StorageWeakRef(storage)
        return out


@dataclass(frozen=True, slots=True)
class Reads:
    places: frozenset[int] = field(repr=False)  # addresses of what was read and lives on
    gone: tuple[str, ...]  # the operation that first read each of the others, and its shape

    @classmethod
    def of(cls, step: Callable[[], object]) -> Reads:
        with _Watch() as watch:
            step()
        gc.collect()
        gone = tuple(what for storage, what in watch.read.values() if storage.expired())
        return cls(frozenset(place for place, (storage, _) in watch.read.items() if not storage.expired()), gone)
