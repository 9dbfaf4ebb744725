"""How the memory of one device is shared out among the stages, decided once at start.

Plain arithmetic on bytes. A stage may take its fraction of the whole device for weights, activations and pages; the pages
get what the other two leave.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from aura_omni.errors import DoesNotFit

GIB = 2**30


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """fraction: of the whole device, as `gpu_memory_utilization` in vLLM; max_model_len: tokens of the longest sequence,
    which must fit; kv_bytes_per_token 0: the stage has no pages (Code2Wav)."""

    name: str
    fraction: float
    weight_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int = 0
    max_model_len: int = 0


def plan_pages(device_bytes: int, stages: Seq[StageNeeds], *, page_size: int) -> dict[str, int]:
    """Pages of page_size rows for every stage, by name. device_bytes: of the whole device, or the cap on a CPU.

    Raises DoesNotFit naming the stage, the numbers and the way out.
    """
    total = sum(stage.fraction for stage in stages)
    for stage in stages:
        if not 0 < stage.fraction <= 1:
            raise DoesNotFit(
                f"gpu_memory_utilization of stage {stage.name} is {stage.fraction:g}; it must be above 0 and at most 1"
            )
    if total > 1 + 1e-9:
        shares = ", ".join(f"{stage.name} {stage.fraction:g}" for stage in stages)
        raise DoesNotFit(
            f"gpu_memory_utilization of the stages sums to {total:g} ({shares}); one device has 1. Lower some of them, or "
            "put stages on different devices."
        )
    return {stage.name: _pages(device_bytes, stage, page_size) for stage in stages}


def _pages(device_bytes: int, stage: StageNeeds, page_size: int) -> int:
    share = int(device_bytes * stage.fraction)
    fixed = stage.weight_bytes + stage.activation_bytes
    page_bytes = page_size * stage.kv_bytes_per_token
    # One page more than can be used is allocated: the spare page of `PagedKV`.
    least = (-(-stage.max_model_len // page_size) + 1) * page_bytes
    pages = (share - fixed) // page_bytes - 1 if page_bytes else 0
    if share >= fixed + least:
        return pages
    enough = (fixed + least) / device_bytes
    if enough <= 1:
        way_out = f"Raise its gpu_memory_utilization from {stage.fraction:g} to {_up(enough):g}"
    else:
        way_out = "Use a device with more memory"
    tokens = pages * page_size
    if tokens > 1:
        way_out += f", or lower max_model_len to {tokens:,}"
    cache = f" and {_gib(least)} for one sequence of {stage.max_model_len:,} tokens" if page_bytes else ""
    raise DoesNotFit(
        f"stage {stage.name} may take {_gib(share)} ({stage.fraction:g} of {_gib(device_bytes)}) and needs "
        f"{_gib(stage.weight_bytes)} for weights, {_gib(stage.activation_bytes)} for activations{cache}. {way_out}."
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.2f} MiB"


def _up(fraction: float) -> float:
    """Rounded up to three decimals, so that following the advice works."""
    return -(-fraction * 1000 // 1) / 1000
