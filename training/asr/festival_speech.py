"""Speech of festival's own voices, a diphone one and a statistical one, as Opus files that travel.

    apt-get install festival festvox-kallpc16k festvox-us-slt-hts
    python -m training.asr.festival_speech OUT --english sentences.txt --clips 900

Of the diphone voices the evaluation keeps ked for itself.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import tempfile
from pathlib import Path

from training.asr.clips import HELD_OUT_LINES, lines, said
from training.asr.heldout import read
from training.asr.opus_writer import write
from training.asr.voices import trimmed

VOICES = ("kal_diphone", "cmu_us_slt_arctic_hts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--clips", type=int, default=900, help="of each voice")
    parser.add_argument("--file-clips", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    english = lines(options.english)[HELD_OUT_LINES:]
    for voice in VOICES:
        for number in range(options.clips // options.file_clips):
            rng = random.Random(f"{options.seed}/{voice}/{number}")
            texts = [said(rng, english) for _ in range(options.file_clips)]
            with tempfile.TemporaryDirectory() as folder:
                script = [f"(voice_{voice})"]
                for place, text in enumerate(texts):
                    stretch = f"(Parameter.set 'Duration_Stretch {rng.uniform(0.8, 1.25):.2f})"
                    spoken = f'(utt.synth (Utterance Text "{text}"))'
                    script += [stretch, f'(utt.save.wave {spoken} "{folder}/{place}.wav")']
                (Path(folder) / "all.scm").write_text("\n".join(script), encoding="utf-8")
                subprocess.run(["festival", "-b", f"{folder}/all.scm"], check=True)
                clips = [(trimmed(read(Path(folder) / f"{place}.wav")), text) for place, text in enumerate(texts)]
            write(options.out, f"{voice}{number}", clips)


if __name__ == "__main__":
    main()
