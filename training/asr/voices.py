"""The synthesizers that speak while the training runs, from one folder without any installation.

    mouth = Mouth(bundle)                       # one per process: the libraries behind it are not thread-safe
    samples = mouth.speak("espeak:en-us+f3", "What is this?", random.Random(0))     # float32 at 16 kHz

A voice is "engine:name". TRAINING and HELD_OUT share no voice: no flite speaker, no espeak variant, no espeak dialect.
"""

from __future__ import annotations

import ctypes
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import soxr

RATE = 16_000

FLITE = ("slt", "awb", "kal", "kal16")
PICO = ("en-US", "en-GB")
DIALECTS = ("en-us", "en-us", "en", "en-gb-x-rp", "en-029", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-us-nyc")
VARIANTS = (
    "f1", "f2", "f3", "f4", "m1", "m2", "m3", "m4", "m5", "m7", "m8", "klatt", "klatt2", "klatt3", "klatt4", "klatt5", "Alex", "Alicia",
    "Annie", "Denis", "Diogo", "Gene", "Gene2", "Hugo", "Jacky", "Lee", "Marco", "Mario", "Mike", "adam", "anika", "antonio", "aunty", "benjamin",
    "boris", "caleb", "david", "ed", "edward", "grandma", "grandpa", "iven", "iven2", "john", "marcelo", "max", "michel", "norbert", "paul",
    "quincy", "rob", "robert", "sandro", "shelby", "steph", "steph2", "travis", "victor", "zac",
)  # fmt: skip
HELD_OUT_ESPEAK = ("en-gb-scotland+f5", "en-gb-scotland+linda", "en-gb-scotland+Andy", "en-gb-scotland+Michael")

# How much each engine speaks. The robots are many, but each of the others sounds more like a person.
SHARES = {"flite": 0.45, "pico": 0.27, "espeak": 0.28}
# Of pitch: the diphone voice is low and can go up far, and then it is hardly the same speaker.
FLITE_PITCH = {"slt": (0.75, 1.3), "awb": (0.75, 1.4), "kal": (0.85, 2.1), "kal16": (0.85, 2.1)}


def training_voice(rng: random.Random) -> str:
    engine = rng.choices(list(SHARES), list(SHARES.values()))[0]
    if engine == "flite":
        return f"flite:{rng.choices(FLITE, (3, 3, 1, 2))[0]}"
    if engine == "pico":
        return f"pico:{rng.choice(PICO)}"
    return f"espeak:{rng.choice(DIALECTS)}+{rng.choice(VARIANTS)}"


class Mouth:
    def __init__(self, bundle: Path) -> None:
        self._bundle = bundle
        self._flite: subprocess.Popen[bytes] | None = None
        self._espeak: _Espeak | None = None
        self._pico: Any = None

    def speak(self, voice: str, text: str, rng: random.Random) -> np.ndarray:
        """float32 [n] at 16 kHz, silence at both ends cut off; pace and pitch drawn from rng."""
        engine, _, name = voice.partition(":")
        samples, rate = getattr(self, f"_speak_{engine}")(name, text, rng)
        if rate != RATE:
            samples = soxr.resample(samples, rate, RATE)
        return trimmed(samples)

    def close(self) -> None:
        if self._flite is not None:
            assert self._flite.stdin is not None
            self._flite.stdin.close()
            self._flite.wait()

    def _speak_flite(self, name: str, text: str, rng: random.Random) -> tuple[np.ndarray, int]:
        if self._flite is None:
            program = self._bundle / "flite_lines"
            self._flite = subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._flite.stdin is not None
        assert self._flite.stdout is not None
        low, high = FLITE_PITCH[name]
        pitch = low * (high / low) ** rng.random() if rng.random() < 0.7 else 1.0
        self._flite.stdin.write(f"{FLITE.index(name)}\t{rng.uniform(0.8, 1.3):.3f}\t{pitch:.3f}\t{text}\n".encode())
        self._flite.stdin.flush()
        rate, count = struct.unpack("ii", self._flite.stdout.read(8))
        return np.frombuffer(self._flite.stdout.read(2 * count), np.int16).astype(np.float32) / 32768, rate

    def _speak_pico(self, name: str, text: str, rng: random.Random) -> tuple[np.ndarray, int]:
        if self._pico is None:
            sys.path.insert(0, str(self._bundle))
            import py_nanotts  # from the bundle: a compiled module without dependencies

            self._pico = py_nanotts.NanoTTS()
        spoken = self._pico.speak(text, voice=name, speed=rng.uniform(0.8, 1.3), pitch=rng.uniform(0.75, 1.3))
        return np.frombuffer(spoken, np.int16).astype(np.float32) / 32768, 16_000

    def _speak_espeak(self, name: str, text: str, rng: random.Random) -> tuple[np.ndarray, int]:
        if self._espeak is None:
            self._espeak = _Espeak(self._bundle / "espeak")
        return self._espeak.speak(
            name, text, rate=rng.randint(120, 210), pitch=rng.randint(25, 75), spread=rng.randint(30, 70)
        )


class _Espeak:
    """libespeak-ng through its C interface (speak_lib.h)."""

    _SYNCHRONOUS, _CHARS_UTF8, _PHONEMES_OFF = 2, 1, 0
    _RATE, _PITCH, _RANGE = 1, 3, 4

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
        self._rate = self._library.espeak_Initialize(self._SYNCHRONOUS, 0, str(folder).encode(), 0)
        if self._rate <= 0:
            raise RuntimeError(f"espeak-ng finds no data in {folder}")
        self._parts: list[bytes] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)

        def heard(samples: ctypes._Pointer[ctypes.c_short], count: int, _events: int) -> int:
            if samples and count:
                self._parts.append(ctypes.string_at(samples, 2 * count))
            return 0

        self._callback = kind(heard)  # kept alive as long as the library may call it
        self._library.espeak_SetSynthCallback(self._callback)

    def speak(self, name: str, text: str, *, rate: int, pitch: int, spread: int) -> tuple[np.ndarray, int]:
        if self._library.espeak_SetVoiceByName(name.encode()):
            raise RuntimeError(f"espeak-ng has no voice {name}")
        for parameter, value in ((self._RATE, rate), (self._PITCH, pitch), (self._RANGE, spread)):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._parts.clear()
        spoken = text.encode()
        self._library.espeak_Synth(spoken, ctypes.c_size_t(len(spoken) + 1), 0, 0, 0, self._CHARS_UTF8, None, None)
        self._library.espeak_Synchronize()
        return np.frombuffer(b"".join(self._parts), np.int16).astype(np.float32) / 32768, self._rate


def trimmed(samples: np.ndarray, floor: float = 0.01, margin: int = 480) -> np.ndarray:
    """Without what is quieter than `floor` of the peak at either end, but for 30 ms."""
    loud = np.flatnonzero(np.abs(samples) > floor * max(1e-4, float(np.abs(samples).max(initial=0))))
    if not len(loud):
        return samples
    return samples[max(0, loud[0] - margin) : loud[-1] + margin]
