"""Compiles kernels for an H100 or H200 as a GPU would be given them, on any machine that has Triton. Run by test_compiles.py.

Triton's interpreter forgives what its compiler does not, so a kernel that passes there may still not exist on a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled
from triton.runtime.driver import driver

from aura_omni.engine import (
    fused_numbers,
    fused_sampler,
    fused_seats,
    paged_attention,
    paged_eight,
    paged_head,
    paged_row,
)
from aura_omni.engine.seats import Tables
from aura_omni.models import codec_kernels, fused, fused_audio, fused_fp8, fused_linear, fused_mel, fused_tiles
from aura_omni.models.codec import CodecConfig, CodecDecoder
from aura_omni.models.codec_fused import FusedStep
from aura_omni.models.weights import Prepared
from aura_omni.rehearsal import Gpu
from tests.models.codec_reference import PUBLISHED

BYTES = torch.float8_e4m3fn
HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    BYTES: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}

MODULES = (
    fused,
    fused_audio,
    fused_fp8,
    fused_linear,
    fused_mel,
    fused_tiles,
    fused_numbers,
    fused_sampler,
    fused_seats,
    paged_attention,
    paged_eight,
    paged_head,
    paged_row,
    codec_kernels,
)


class Recorder:
    """Stands in for a kernel: compiles it for what it is launched with, and launches nothing."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._compile

    def _compile(self, *given: Any, **named: Any) -> None:
        names = self._kernel.arg_names
        options = {name: value for name, value in named.items() if name not in names}
        arguments = {**dict(zip(names, given, strict=False)), **named}
        constants = {parameter.name for parameter in self._kernel.params if parameter.is_constexpr}
        signature: dict[str, str] = {}
        for name in names:
            value = arguments[name]
            if name in constants:
                signature[name] = "constexpr"
            elif isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
        # As Triton is told of a launch: addresses, and numbers that a kernel does not take as they come, are multiples of 16.
        taken = {parameter.name for parameter in self._kernel.params if parameter.do_not_specialize}
        even = {
            name
            for name in names
            if signature[name].startswith("*")
            or (signature[name] == "i32" and name not in taken and not arguments[name] % 16)
        }
        aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in even}
        source = ASTSource(self._kernel, signature, {name: arguments[name] for name in constants}, aligned)
        done = compiled(source, target=HOPPER, options=options)
        print(self._kernel.__name__, done.metadata.shared, flush=True)


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def scale_of(weight: torch.Tensor) -> torch.Tensor | None:
    return made(len(weight), dtype=torch.float32) if weight.dtype == BYTES else None


def integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return made(*shape, dtype=dtype)


def tables(hidden: int, vocabulary: int) -> Tables:
    """Of eight seats."""
    marks = [made(9, vocabulary, dtype=dtype) for dtype in (torch.float32, torch.bool, torch.bool, torch.int32)]
    return Tables(made(9, hidden), made(9, 9, dtype=torch.float32), integers(9, 4), *marks)


def launches() -> Iterator[Callable[[], object]]:
    """Every kernel in the shapes of the published models."""
    for rows, heads in ((1, 16), (8, 16), (40, 16), (1, 32)):
        q, k = made(rows, heads, 128), made(rows, 8, 128)
        pages, table = made(1_600, 8, 128), integers(rows, 2_048 if heads == 32 else 100, dtype=torch.int32)
        turn = paged_attention.Turn(made(128), made(128), made(rows, 128), made(rows, 128), 1e-6)
        where = {"table": table, "lengths": integers(rows, dtype=torch.int32), "page_size": 16}
        where["arrived"] = integers(rows * 8, dtype=torch.int32)
        for norms in (None, turn):
            yield partial(paged_attention.decode, q, k, k, integers(rows), pages, pages, turn=norms, **where)
        eight, scales = made(1_600, 8, 128, dtype=BYTES), made(1_600, 8, 2, dtype=torch.float32)
        yield partial(paged_attention.decode, q, k, k, integers(rows), eight, eight, turn=turn, scales=scales, **where)
        yield partial(paged_eight.store, k, k, integers(rows), eight, eight, scales)
    for heads, rows, length in ((16, 40, 400), (32, 250, 32_768)):
        chunk = {name: integers(4, dtype=torch.int32) for name in ("begins", "counts", "starts")}
        q, table = made(rows, heads, 128), integers(4, length // 16, dtype=torch.int32)
        for kind, scales in ((torch.bfloat16, None), (BYTES, made(1_600, 8, 2, dtype=torch.float32))):
            pages = made(1_600, 8, 128, dtype=kind)
            yield partial(
                paged_attention.prefill,
                q,
                pages,
                pages,
                made(rows, heads, 128),
                table=table,
                most_rows=rows,
                page_size=16,
                scales=scales,
                **chunk,
            )
    for hidden, wide, inner in ((4_096, 6_144, 12_288), (2_048, 4_096, 6_144), (1_024, 4_096, 3_072)):
        for rows, dtype in (
            (1, torch.bfloat16),
            (8, torch.bfloat16),
            (16, torch.bfloat16),
            (1, BYTES),
            (8, BYTES),
            (16, BYTES),
        ):
            x, norm = made(rows, hidden), made(hidden)
            qkv, both, down = (
                made(*shape, dtype=dtype) for shape in ((wide, hidden), (2 * inner, hidden), (hidden, inner))
            )
            yield partial(fused_linear.normed_linear, x, norm, 1e-6, qkv, scale=scale_of(qkv))
            yield partial(fused_linear.normed_swiglu, x, norm, 1e-6, both, scale=scale_of(both))
            yield partial(fused_linear.linear_added, made(rows, inner), down, x, scale=scale_of(down))
    for batch, steps in ((1, 2), (8, 1)):
        held, turns = made(batch, 8, 16, 128), made(batch * steps, 128)
        yield partial(
            fused.dense_attend,
            made(batch * steps, 4_096),
            made(128),
            made(128),
            turns,
            turns,
            1e-6,
            keys=held,
            values=held,
            start=4,
        )
    for rows in (8, 250):
        turns = made(rows, 128)
        norms = made(128), made(128), turns, turns, 1e-6
        yield partial(fused.qk_norm_rope, made(rows, 6_144), *norms, heads=32, kv_heads=8)
        held = {"slots": integers(rows), "keys": made(1_600, 8, 128), "values": made(1_600, 8, 128)}
        yield partial(fused.qk_norm_rope_stored, made(rows, 6_144), *norms, **held)
        yield partial(fused.rms_norm, made(rows, 4_096), made(4_096), 1e-6)
        yield partial(fused.add_rms_norm, made(rows, 4_096), made(rows, 4_096), made(4_096), 1e-6)
        yield partial(fused.add_layer_norm, made(rows, 1_152), made(rows, 1_152), made(1_152), made(1_152), 1e-6)
        yield partial(fused.silu_mul, made(rows, 24_576))
        yield partial(fused_fp8.quantized, made(rows, 12_288))
        yield partial(fused_fp8.quantized, made(rows, 4_096, dtype=torch.float32))
        yield partial(fused_fp8.silu_mul, made(rows, 24_576))
        for more in (None, made(rows, 4_096)):
            yield partial(fused_fp8.normed_sum, made(rows, 4_096), more, made(4_096), 1e-6)
    wave, hann, filters = (made(*shape, dtype=torch.float32) for shape in ((1, 128_160), (400,), (128, 201)))
    yield partial(fused_mel.log_mels, wave, integers(1), hann, filters, 160)
    for windows in (1, 8):
        mask = made(windows, 1, 1, 104, dtype=torch.bool)
        yield partial(fused_audio.window_attention, made(windows, 104, 3 * 1_024), 16, mask)
        images = made(128, 8 * windows, 100, dtype=torch.float32).transpose(0, 1)
        yield partial(fused_audio.first_convolution, images, made(480, 16), made(480))
        for rows, high, wide in ((False, 32, 25), (True, 16, 13)):
            x = made(8 * windows, high, wide, 480).permute(0, 3, 1, 2)
            yield partial(fused_audio.bias_gelu, x, made(480), rows=rows)
    angles = made(920, 72, dtype=torch.float32)
    yield partial(fused.turn_patches, made(1, 920, 3 * 1_152), angles, angles, 16)
    draw = made(8, 3, dtype=torch.float32), integers(8, 3)
    yield partial(fused_sampler.pick_small, made(8, 2_048), *draw, top_k=True, stream=1, table=made(2_048, 1_024))
    held, how = tables(2_048, 3_072), {"constrained": True}
    yield partial(fused_seats.choose, made(8, 3_072), integers(8), integers(8), held, top_k=True, **how)
    values = integers(8), made(8, dtype=torch.bool), made(8, 2_048), integers(8, 16)
    yield partial(fused_seats.keep, integers(8), *values, held, no_id=-1, **how)
    yield partial(fused.summed_rows, integers(8, 16), integers(16), made(33_792, 2_048))
    for hidden, axes, adds in ((2_048, 1, 0), (4_096, 3, 3)):
        numbers, media = integers(96, 3 + axes, dtype=torch.int32), made(96, 1 + adds, hidden)
        rope, columns = (made(64, dtype=torch.float32), integers(64)), (0, 1, 2, 2 + axes)
        for looked_up, rows in ((True, 151_936), (False, 96)):
            base = made(rows, hidden)
            yield partial(fused_numbers.gathered, numbers, media, base, *rope, columns=columns, looked_up=looked_up)
    yield partial(fused_seats.fill, integers(2, 14 + 6 * 16, dtype=torch.int32), tables(2_048, 151_936))
    yield partial(fused_seats.constrain, made(8, 3_072), integers(8), integers(8), tables(2_048, 3_072))
    for hidden, batch, axes in ((2_048, 1, 1), (2_048, 8, 1), (4_096, 1, 3), (4_096, 8, 3)):
        numbers = integers(4 + axes + 512, batch, dtype=torch.int32).T
        rope = made(64, dtype=torch.float32), integers(64)
        yield partial(fused_numbers.begun, numbers, made(9, hidden), *rope, width=4 + axes, columns=(0, 3, 4))
        for constrained, random in ((False, False), (False, True), (True, True)):
            yield partial(
                fused_seats.ended,
                made(batch, 151_936),
                numbers[:, 0],
                numbers[:, 1],
                tables(hidden, 151_936),
                made(151_936, hidden),
                constrained=constrained,
                random=random,
                no_id=-1,
            )
    with torch.device("meta"):
        decoder = CodecDecoder(CodecConfig.from_json(PUBLISHED)).to(torch.bfloat16).requires_grad_(False)
        for part in decoder.modules():
            if isinstance(part, Prepared):
                part.prepare()
        for streams, frames in ((1, 1), (8, 1), (64, 1)):
            step = FusedStep(decoder, decoder.new_state(streams), integers(streams))
            yield partial(code2wav, step, integers(streams, frames, 16))


def code2wav(step: FusedStep, codes: torch.Tensor) -> None:
    step.samples(step.latents(codes))
    step.end(codes.shape[1])


def main() -> None:
    driver.set_active(Gpu(HOPPER, max_shared_mem=232_448))
    for module in MODULES:
        for name, kernel in vars(module).items():
            if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
                setattr(module, name, Recorder(kernel))
    work = list(launches())
    cores = len(os.sched_getaffinity(0))
    fork = multiprocessing.get_context("fork")  # which hands tensors on as they are
    processes = [fork.Process(target=_launched, args=(work[first::cores],)) for first in range(cores)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


def _launched(work: list[Callable[[], object]]) -> None:
    for launch in work:
        launch()


if __name__ == "__main__":
    main()
