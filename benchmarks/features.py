"""What `steps.py --without NAME` leaves out, to see what it is worth, or whether it is at fault.

Each name puts something plainer, which computes the same, in the place of one way to be fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from aura_omni.engine.attention import PagedKV
from aura_omni.engine.numbers import RowNumbers, StepNumbers
from aura_omni.engine.stage_model import StageModel
from aura_omni.models.layers import KeyValues, Rope

SHORT_PREFILLS = (16, 32, 64, 96, 128)


def _no(*_: object) -> bool:
    return False


def _as_chunks(kv: PagedKV, slot: Tensor, length: Tensor, table: Tensor) -> KeyValues:
    """A step of decoding as one of chunks of one row."""
    begins = torch.arange(len(slot), dtype=torch.int32, device=slot.device)
    numbers = torch.stack((begins, torch.ones_like(begins), length.int() - 1), dim=1)
    return kv.chunk_step(slot, torch.cat((numbers, table), dim=1), most_rows=1)


def _begun(numbers: StepNumbers, packed: Tensor, rows: Tensor, rope: Rope) -> tuple[RowNumbers, Tensor, Tensor, Tensor]:
    """`StepNumbers.begun` operation by operation."""
    row = numbers.unpack(packed.contiguous())
    return row, rows[row.seat], *rope.tables(row.positions, rows.dtype)


# Where it is looked up, and what is put there.
FEATURES: Mapping[str, Mapping[str, object]] = {
    # One kernel for a draw of the best few: PyTorch's operations instead.
    "fused-draw": {"aura_omni.engine.fused_sampler.MOST_VOCABULARY": 0},
    # What is before a step's first layer in one launch.
    "fused-begin": {"aura_omni.engine.numbers.StepNumbers.begun": _begun},
    # What is behind the head in two, where nothing follows from an id but its embedding.
    "fused-end": {"aura_omni.engine.seats.Seats.ends": _no},
    # The kernel of decode attention, with its splits and the store in it: that of chunks.
    "decode-attention": {"aura_omni.engine.attention.PagedKV.decode_step": _as_chunks},
    # Chunks after long histories cut into parts.
    "split-chunks": {"aura_omni.engine.paged_attention.LONG_CONTEXT": 1 << 40},
    # Graphs of more than 128 rows.
    "long-prefills": {"aura_omni.engine.steps.PREFILL_SIZES": SHORT_PREFILLS},
    # Rows of decoding in the same launch as those of prompts.
    "joined-steps": {"aura_omni.engine.steps.Steps.joins": _no},
    # Graphs of the vision tower and the audio encoder.
    "encoder-graphs": {
        "aura_omni.stages.asr.AsrStage.prepare_graphs": StageModel.prepare_graphs,
        "aura_omni.stages.aura.AuraStage.prepare_graphs": StageModel.prepare_graphs,
    },
    # Pictures of prompts of which too little is known to be read, encoded while ASR decodes.
    "pictures-ahead": {"aura_omni.engine.runner.ArRunner._prepare_later": _no},
    # A layer of a few rows as five launches: up to 16, up to 8 of wide ones.
    "fused-layers": {"aura_omni.models.qwen3.few": _no},
    # The same of more than one row, on tensor cores.
    "tiled-layers": {
        "aura_omni.models.fused_linear.MOST_ROWS": 1,
        "aura_omni.models.fused_linear.MOST_ROWS_OF_WIDE": 1,
    },
    # Norms and turns of heads inside the attention of rows of decoding, the code predictor's and that of pages.
    "raw-attention": {
        "aura_omni.models.layers.DenseKV.takes_raw": _no,
        "aura_omni.engine.paged_attention.DecodeStep.takes_raw": _no,
    },
    # Kernels that begin before the one in front of them has ended.
    "early-starts": {
        f"aura_omni.{module}.starts_early": _no
        for module in (
            "models.fused",
            "models.fused_linear",
            "models.fused_tiles",
            "engine.fused_sampler",
            "engine.fused_seats",
            "engine.paged_attention",
        )
    },
    # Code2Wav's convolutions with their memory and activations in one launch, and its attention in another.
    "fused-codec": {"aura_omni.models.codec.fusible": _no},
    # Turning the vision tower's queries and keys in one launch, and norming its sums in that which adds them up.
    "turned-patches": {"aura_omni.models.qwen3_vl.fusible": _no},
}


@contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    """Inside it, stages are assembled and run without these of FEATURES."""
    with ExitStack() as stack:
        for name in names:
            for target, value in FEATURES[name].items():
                stack.enter_context(patch(target, value))
        yield
