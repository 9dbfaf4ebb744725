"""Lines of text spoken by a voice that ASR's training does not hear, as one Opus file with its index.

python -m training.asr.say OUT VOICE --bundle DATA/bundle < lines        # VOICE: rms, ked or espeak; OUT/VOICE.opus, OUT/VOICE.json
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from training.asr.heldout import voices
from training.asr.opus_writer import write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("voice")
    parser.add_argument("--bundle", type=Path, required=True)
    options = parser.parse_args()
    say, rng = voices(options.bundle)[options.voice], random.Random(f"say {options.voice}")
    texts = [line.strip() for line in sys.stdin if line.strip()]
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out, options.voice, [(say(text, rng), text) for text in texts])


if __name__ == "__main__":
    main()
