"""Every stage at its published dimensions with random weights, on one GPU: does it load, does it run, how long does it take.

    python benchmarks/true_size.py --folder /scratch/true --out results.json

Writes the checkpoints (about 31 GB, bfloat16) unless they are there, loads the pipeline as `serve` does, and runs turns at the
pipeline: 5.0 s of sound and two frames of 640x360 in; ASR 24 tokens, AURA 48 tokens, Talker 124 frames (9.92 s) out, lengths
forced by sampling fields. Results are medians over turns after a warm-up; the JSON is rewritten after every part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lengths import AURA_TOKENS, FRAMES, forced, silence
from machine import machine

from aura_omni.config import Config, Options, load
from aura_omni.config.config import LoadFormat
from aura_omni.flow import Audio, AudioChunk, Ended, Event, Message, TextDelta, Transcript, TurnRequest, Video
from aura_omni.media.noise import swelling_noise
from aura_omni.nano.published import TRUE
from aura_omni.nano.random_family import write_family
from aura_omni.pipeline import Pipeline

QUANTIZED = {"asr": "0", "aura": "1"}  # stages whose weights, and whose keys and values, can have eight bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--turns", type=int, default=6, help="turns of each client")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    arguments = parser.parse_args()
    report = Report(arguments.out)
    report.add("machine", machine())

    start = time.monotonic()
    write(arguments.folder)
    report.add("write_s", time.monotonic() - start)
    start = time.monotonic()
    pipeline = load_pipeline(arguments.folder, eager=arguments.eager)
    report.add("load_s", time.monotonic() - start)
    report.add("pages", {name: runner.counters.pages for name, runner in pipeline.parts.ar_runners.items()})
    report.add("memory_after_load_gib", memory())

    try:
        bench = Bench(pipeline, arguments.folder)
        bench.turns(clients=1, each=1)
        report.add("memory_after_first_turn_gib", memory())
        for clients in arguments.clients:
            bench.turns(clients=clients, each=1)
            report.add(f"turn_{clients}", summary(bench.turns(clients=clients, each=arguments.turns)))
        bench.turns(clients=1, each=1, silent=True)
        report.add("silent_1", summary(bench.turns(clients=1, each=arguments.turns, silent=True)))
        pipeline.engine.check_integrity()
        report.add("memory_peak_gib", memory())
    finally:
        pipeline.close()
    print(json.dumps(report.content, indent=1))


def write(folder: Path, *, dummy: bool = False) -> None:
    """The checkpoints, unless they are there; of a dummy all but the weights, which nobody reads."""
    if dummy:
        write_family(folder, sizes=TRUE, kinds=("custom_voice",), weights=False)
    elif not (folder / "tts_custom_voice" / "speech_tokenizer" / "model.safetensors").is_file():
        device = torch.device("cuda")
        write_family(folder, sizes=TRUE, dtype=torch.bfloat16, device=device, kinds=("custom_voice",))


def load_pipeline(folder: Path, *, eager: bool) -> Pipeline:
    return Pipeline.load(true_config(folder, eager=eager))


def true_config(
    folder: Path, *, eager: bool, fp8: Iterable[str] = (), kv_fp8: Iterable[str] = (), dummy: bool = False
) -> Config:
    """fp8, kv_fp8: as `in_eight_bits`; dummy: weights are made up on the GPU."""
    options = Options(
        deploy_config="aura_omni.yaml",
        stage_overrides=json.dumps(in_eight_bits(true_stages(folder), fp8, kv_fp8)),
        enforce_eager=eager or None,
        load_format=load_format(dummy),
    )
    return load(options, environ={}, platform="cuda")


def load_format(dummy: bool) -> LoadFormat:
    return "dummy" if dummy else "auto"


def true_stages(folder: Path) -> dict[str, dict[str, Any]]:
    """What is laid over the stages of `aura_omni.yaml`: the checkpoints of the folder, AURA's context shortened to 32,768 and seats
    for the loads that are measured."""
    stages = stages_of(folder)
    stages["1"]["max_model_len"] = 32768
    for stage, seats in {"0": 128, "1": 32, "2": 64, "3": 64}.items():
        stages[stage]["max_num_seqs"] = seats
    return stages


def add_eight_bits(parser: argparse.ArgumentParser) -> None:
    """The flags of `in_eight_bits`."""
    parser.add_argument("--fp8", nargs="+", choices=QUANTIZED, default=(), help="stages with weights in eight bits")
    parser.add_argument(
        "--kv-fp8", nargs="+", choices=QUANTIZED, default=(), help="stages with keys and values in eight bits"
    )


def in_eight_bits(
    stages: dict[str, dict[str, Any]], fp8: Iterable[str], kv_fp8: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Overrides of the stages, of which `fp8` have their weights in eight bits, and `kv_fp8` their keys and values."""
    for key, names in (("quantization", fp8), ("kv_cache_dtype", kv_fp8)):
        for name in names:
            stages[QUANTIZED[name]][key] = "fp8"
    return stages


def stages_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The checkpoints of a family that `write_family` wrote, as overrides of the stages."""
    names = {"0": "asr", "1": "aura", "2": "tts_custom_voice", "3": "tts_custom_voice"}
    return {stage: {"model": str(folder / name)} for stage, name in names.items()}


class Report:
    def __init__(self, path: Path) -> None:
        self.path, self.content = path, dict[str, Any]()

    def add(self, name: str, value: Any) -> None:
        self.content[name] = value
        self.path.write_text(json.dumps(self.content, indent=1))
        print(name, json.dumps(value), flush=True)


class Bench:
    def __init__(self, pipeline: Pipeline, folder: Path) -> None:
        self._pipeline = pipeline
        self._random = np.random.default_rng(0)
        self._spoken = forced(folder)
        self._silent = {**self._spoken, "aura": silence(folder)}

    def turns(self, *, clients: int, each: int, silent: bool = False) -> list[dict[str, float]]:
        """Closed loop: every client starts its next turn when the last has ended."""
        results: list[dict[str, float]] = []
        lock = threading.Lock()

        def client() -> None:
            for _ in range(each):
                with lock:
                    request = self._request(silent)
                result = self._turn(request)
                with lock:
                    results.append(result)

        start = time.monotonic()
        threads = [threading.Thread(target=client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall = time.monotonic() - start
        for result in results:
            result["wall_s"] = wall
        return results

    def _request(self, silent: bool) -> TurnRequest:
        sound = swelling_noise(self._random, 5.0, 16_000)
        frames = self._random.integers(0, 256, (2, 360, 640, 3), dtype=np.uint8)
        parts = (
            Audio(sound, 16_000, self._random.bytes(16)),
            Video(frames, (0.0, 0.5), 2.0, self._random.bytes(16)),
        )
        return TurnRequest((Message("user", parts),), sampling=self._silent if silent else self._spoken)

    def _turn(self, request: TurnRequest) -> dict[str, float]:
        times: dict[str, float] = {}
        counts = {"audio_s": 0.0}
        done = threading.Event()
        ended: list[Ended] = []
        start = time.monotonic()

        def sink(event: Event) -> None:
            now = time.monotonic() - start
            if isinstance(event, Transcript):
                times.setdefault("transcript_s", now)
            elif isinstance(event, TextDelta):
                times.setdefault("first_text_s", now)
                times["last_text_s"] = now
            elif isinstance(event, AudioChunk):
                times.setdefault("first_audio_s", now)
                counts["audio_s"] += len(event.samples) / 24_000
            elif isinstance(event, Ended):
                times["ended_s"] = now
                ended.append(event)
                done.set()

        self._pipeline.submit(request, sink)
        times["submit_s"] = time.monotonic() - start
        if not done.wait(300):
            raise TimeoutError("a turn did not end within 300 s")
        if ended[0].error is not None:
            raise ended[0].error
        usage = ended[0].usage
        return {**times, **counts, "text_tokens": usage.text_tokens, "frames": usage.audio_frames}


def summary(turns: list[dict[str, float]]) -> dict[str, float]:
    """Medians of each time, throughput, and the time of one AURA token and one Talker frame."""
    found = {name: round(statistics.median(turn[name] for turn in turns if name in turn), 4) for name in turns[0]}
    found["turns"] = len(turns)
    found["first_audio_max_s"] = max((turn.get("first_audio_s", 0.0) for turn in turns), default=0.0)
    found["audio_s_per_s"] = round(sum(turn["audio_s"] for turn in turns) / turns[0]["wall_s"], 2)
    if "last_text_s" in found:
        found["aura_token_ms"] = round(1000 * (found["last_text_s"] - found["first_text_s"]) / (AURA_TOKENS - 1), 2)
        found["frame_ms"] = round(1000 * (found["ended_s"] - found["last_text_s"]) / FRAMES, 2)
    return found


def memory() -> dict[str, float]:
    gib = 2**30
    return {
        "allocated": round(torch.cuda.memory_allocated() / gib, 2),
        "peak": round(torch.cuda.max_memory_allocated() / gib, 2),
        "reserved": round(torch.cuda.memory_reserved() / gib, 2),
    }


if __name__ == "__main__":
    main()
