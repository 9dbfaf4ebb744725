"""What eight bits change: a stage with `quantization: fp8`, or `kv_cache_dtype: fp8`, beside the same stage without, on the same inputs.

    python benchmarks/agreement.py --out agreement.json                       # nano, the trained checkpoints of the package
    python benchmarks/agreement.py --out it.json --what kv                    # of keys and values
    python benchmarks/agreement.py --out it.json --aura FOLDER --stages aura  # any checkpoint of the published layout
    python benchmarks/agreement.py --out it.json --random /tmp/described      # published dimensions, weights made up

AURA is asked about pictures, ASR hears recordings: those that nano is tested with. Both read the right answer, whatever they would
say themselves, so at each place of it both say what they expect next, after the same words. `same`: share of places where both hold the same
id for the most likely; `kl`: mean divergence of what they expect, in nats; `worst`: the largest difference of a logit, in standard deviations of the
logits of its place. On a GPU, `--rows 8` takes the kernels of decoding; left out, all rows of a prompt are one step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import Tensor
from true_size import Report

from aura_omni import nano
from aura_omni.engine.attention import PagedKV
from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.sequence import Batch
from aura_omni.engine.sequence import Sequence as Generation
from aura_omni.flow import Audio, Message, Text
from aura_omni.media.audio import decode_audio, resample
from aura_omni.models.qwen3_asr import SAMPLE_RATE
from aura_omni.nano.published import TRUE
from aura_omni.nano.random_family import write_family
from aura_omni.stages.asr import SAMPLING, AsrStage
from aura_omni.stages.aura import AuraStage

sys.path.insert(1, str(Path(__file__).parents[1]))  # the tests are not installed

from tests.nano.shown import CASES, seen

STAGES = ("asr", "aura")
WHAT = ("weights", "kv")
PAGE_SIZE = 16
ALL = 1 << 20  # rows, in one step
RECORDINGS = Path(__file__).parents[1] / "tests" / "nano" / "spoken"
VOICES, CLIPS = ("rms", "espeak"), 30  # of each voice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=["weights"], help="in eight bits (default: weights)")
    parser.add_argument("--asr", default="nano:asr", help="checkpoint (default: %(default)s)")
    parser.add_argument("--aura", default="nano:aura", help="checkpoint (default: %(default)s)")
    parser.add_argument("--random", type=Path, metavar="FOLDER", help="published dimensions, described there")
    parser.add_argument("--rows", type=int, default=ALL, help="most of one step (default: no limit)")
    arguments = parser.parse_args()
    sources = {"asr": arguments.asr, "aura": arguments.aura}
    if arguments.random is not None:
        write_family(arguments.random, sizes=TRUE, kinds=(), weights=False)
        sources = {name: str(arguments.random / name) for name in STAGES}
    report = Report(arguments.out)
    report.add("machine", machine())
    how: dict[str, Any] = {"rows": arguments.rows, "dummy": arguments.random is not None}
    for name in arguments.stages:
        report.add(name, asdict(measured(name, sources[name], arguments.what, **how)))


# ---------------------------------------------------------------- what is compared


@dataclass(frozen=True, slots=True)
class Agreement:
    places: int
    same: float
    kl: float
    worst: float


def agreement(plain: Sequence[Tensor], other: Sequence[Tensor]) -> Agreement:
    """Of logits float32 [places, V], one tensor for each case."""
    one, two = torch.cat(list(plain)), torch.cat(list(other))
    expected, found = one.log_softmax(1), two.log_softmax(1)
    return Agreement(
        places=len(one),
        same=(one.argmax(1) == two.argmax(1)).float().mean().item(),
        kl=(expected.exp() * (expected - found)).sum(1).mean().item(),
        worst=((one - two).abs().amax(1) / one.std(1)).max().item(),
    )


def measured(name: str, source: str, what: Sequence[str], *, rows: int, dummy: bool = False) -> Agreement:
    plain = list(logits(name, source, rows=rows, dummy=dummy))
    return agreement(plain, list(logits(name, source, what, rows=rows, dummy=dummy)))


def logits(
    name: str, source: str, what: Sequence[str] = (), *, rows: int = ALL, dummy: bool = False
) -> Iterator[Tensor]:
    """Of every place of every right answer, float32 [places, V] on the CPU. At most `rows` rows are computed at once.

    what: of WHAT, in eight bits; dummy: with random weights, the same each time.
    """
    fp8, kv = "weights" in what, "kv" in what
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    how: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}
    folder = str(nano.folder_of(source)) if nano.is_packaged(source) else source
    checkpoint = Checkpoint.find(folder, dummy=dummy)
    with torch.inference_mode():
        if name == "asr":
            hearing = AsrStage.load(checkpoint, fp8=fp8, **how)
            for sequence in heard(hearing):
                yield forced(hearing, sequence, rows=rows, kv_eight_bits=kv)
        else:
            seeing = AuraStage.load(checkpoint, fp8=fp8, **how)
            for sequence in asked(seeing):
                yield forced(seeing, sequence, rows=rows, kv_eight_bits=kv)


def forced(stage: AsrStage | AuraStage, sequence: Generation, *, rows: int, kv_eight_bits: bool) -> Tensor:
    """Logits where the ids behind the prompt are drawn, the last of which is not read."""
    config, length = stage.decoder_config, sequence.length - 1
    sequence.pages = list(range(-(-length // PAGE_SIZE)))
    kv = PagedKV(
        layers=config.layers, pages=len(sequence.pages), page_size=PAGE_SIZE, kv_heads=config.kv_heads, head_dim=config.head_dim,
        most_rows=1, dtype=stage.dtype, device=stage.device, eight_bits=kv_eight_bits,
    )  # fmt: skip
    hidden = []
    for start in range(0, length, rows):
        batch = Batch((sequence,), (start,), (min(rows, length - start),))
        hidden.append(stage.forward(batch, kv.step(batch)))
    return stage.logits(torch.cat(hidden)[sequence.prompt_length - 1 :]).float().cpu()


# ---------------------------------------------------------------- what is asked


def heard(stage: AsrStage) -> Iterator[Generation]:
    """Recordings, and behind each what is said in it."""
    for voice in VOICES:
        file = RECORDINGS / f"{voice}.opus"
        recording = decode_audio(file.read_bytes(), max_s=600)
        samples = resample(recording.samples, recording.rate, SAMPLE_RATE)
        for start, count, text in json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))[:CLIPS]:
            sound = Audio(samples[start : start + count], SAMPLE_RATE, f"{voice} {start}".encode())
            sequence = stage.sequence(stage.prompt(sound, language="en"), SAMPLING, on_output=_ignore, on_end=_ignore)
            sequence.tokens += [*stage.tokenizer.encode(text), stage.tokenizer.id("<|im_end|>")]
            yield sequence


def asked(stage: AuraStage) -> Iterator[Generation]:
    """Questions about pictures, and behind each the right answer."""
    for number, (scene, questions) in enumerate(CASES.items()):
        for question, answer in questions:
            prompt = stage.prompt((Message("user", (seen(scene, 100 + number), Text(question))),))
            sequence = stage.sequence(prompt, SAMPLING, on_output=_ignore, on_end=_ignore)
            sequence.tokens += [*stage.tokenizer.encode(answer), stage.controls.im_end]
            yield sequence


def _ignore(*_: object) -> None:
    pass


if __name__ == "__main__":
    main()
