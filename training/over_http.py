"""The whole server from outside, on what no training saw: drawn scenes as pictures and clips, questions in writing or aloud.

    aura-omni serve --port 8091 &
    python -m training.over_http http://localhost:8091 --photos DATA/photos.npz --looks 300 --sessions 100
    python -m training.over_http http://localhost:8091 --photos DATA/photos.npz --bundle DATA/bundle --voice rms
    python -m training.over_http http://localhost:8091 --photos DATA/photos.npz --sounds 200

A session is run round by round, and its history holds what the model itself said and heard. --voice speaks every text with
a voice that ASR's training did not hear (rms, ked, espeak: `training.asr.heldout`); "um" and its like are sent as text, since
synthesizers cannot say them. --sounds: chunks with a clip in which nobody speaks.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import soundfile
import torch
from PIL import Image

from aura_omni.flow import Message, Text, Video
from aura_omni.media.video import CHUNK_FPS, video_of
from training.asr.wer import wer, words
from training.aura.data import Maker, Plan
from training.aura.draw import Painter, Spec
from training.aura.evaluate import Tally
from training.aura.looks import Album
from training.aura.photos import read
from training.aura.serve import LOOKS, run
from training.aura.small_talk import is_noise

CHECKPOINT = Path(__file__).parents[1] / "aura_omni/nano/checkpoints/aura"
RATE = 16_000


class Asked:
    """A server, asked one thing at a time.

    heard  (said, heard) of everything that was spoken to it
    first_text_s  of every answer that was not silent, in seconds from the request
    """

    def __init__(self, url: str, *, say: Callable[[str], np.ndarray] | None = None) -> None:
        """say: speaks a text, float32 [n] at 16 kHz; None: texts are sent as they are."""
        self._client = httpx.Client(base_url=url, timeout=60)
        self._say = say
        self._names: dict[str, str] = {}  # what was heard when a text was said
        self.heard: list[tuple[str, str]] = []
        self.first_text_s: list[float] = []

    def answer(self, messages: Sequence[Message], system: str | None) -> str | None:
        """None: silence. The last message is spoken, those before it are sent as they were heard."""
        sent = [] if system is None else [{"role": "system", "content": system}]
        sent += [{"role": each.role, "content": self._content(each)} for each in messages[:-1]]
        said = next((part.text for part in messages[-1].parts if isinstance(part, Text)), "")
        if self._say is None or is_noise(said):
            return self._posted([*sent, {"role": "user", "content": self._content(messages[-1])}])[0]
        seen = [_part(part) for part in messages[-1].parts if isinstance(part, Video)]
        words_said = (said.lower() if said.isupper() else said).replace("color", "colour")
        text, heard = self._posted([*sent, {"role": "user", "content": [*seen, spoken(self._say(words_said))]}])
        self.heard.append((words_said, heard))
        self._names[said] = heard
        return text

    def overhears(self, chunk: Video, samples: np.ndarray) -> str | None:
        """What is said to a chunk and a clip, float32 [n] at 16 kHz."""
        return self._posted([{"role": "user", "content": [_part(chunk), spoken(samples)]}])[0]

    def _content(self, message: Message) -> Any:
        if message.role == "assistant":
            return "".join(part.text for part in message.parts if isinstance(part, Text))
        parts = [
            replace(part, text=self._names.get(part.text, part.text)) if isinstance(part, Text) else part
            for part in message.parts
        ]
        return [_part(part) for part in parts if not isinstance(part, Text) or part.text or len(parts) == 1]

    def _posted(self, messages: list[dict[str, Any]]) -> tuple[str | None, str]:
        """(answer, transcript)"""
        started, first = time.monotonic(), None
        text, heard, silent = "", "", False
        body = {"model": "aura-nano", "modalities": ["text"], "stream": True, "messages": messages}
        with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"the server refused: {answer.read().decode()}")
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                heard += " ".join(chunk.get("aura", {}).get("transcripts", ()))
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    silent = silent or choice.get("silent", False)
                if text and first is None:
                    first = time.monotonic() - started
        if not silent and first is not None:
            self.first_text_s.append(first)
        return (None if silent else text), heard


# ---------------------------------------------------------------- as parts of a message


def spoken(samples: np.ndarray) -> dict[str, Any]:
    """float32 [n] at 16 kHz as a WAV."""
    return _url("audio", "audio/wav", wav(samples))


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.pad(samples, (RATE // 5, RATE // 5)), RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    assert isinstance(part, Video)
    if part.still:
        return _url("image", "image/png", png(part.frames[0]))
    return _url("video", "video/mp4", mp4(part.frames))


def _url(kind: str, media_type: str, data: bytes) -> dict[str, Any]:
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def png(frame: np.ndarray) -> bytes:
    """uint8 [h, w, 3]"""
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return file.getvalue()


def mp4(frames: np.ndarray) -> bytes:
    """uint8 [n, h, w, 3], as a camera sends them: two a second, H.264, half the resolution for colour."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(CHUNK_FPS), options={"crf": "20", "preset": "veryfast"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


# ---------------------------------------------------------------- a run


def conversations(asked: Asked, maker: Maker, painter: Painter, *, looks: int, sessions: int, chunks: int) -> Tally:
    """Looks (pictures and clips of all sizes, some rounds each), then live sessions of `chunks` chunks."""
    tally = Tally()
    plans = [LOOKS[n % len(LOOKS)] for n in range(looks)] + [Plan(256, 144, chunks=chunks)] * sessions
    for number, plan in enumerate(plans):
        made, look = maker.conversation(plan)
        run(asked, painter, plan, made, look, tally, seed=1000 * number)
    return tally


def nobody_speaks(asked: Asked, maker: Maker, painter: Painter, count: int) -> Tally:
    """Chunks of a scene, each with a clip of near silence, noise or sounds."""
    from training.asr.evaluate import quiet_sets

    tally = Tally()
    for name, clips in quiet_sets(-(-count // 3)).items():
        for number, samples in enumerate(clips):
            made, look = maker.conversation(Plan(256, 144, chunks=1))
            assert look is not None
            assert made.scene is not None
            shown = made.rounds[0].shown
            assert shown is not None
            slots, ground = look.arrays(shown.frames, first=0, height=144, width=256, card=None, unit=made.scene.unit)
            frames = painter.frames(Spec(144, 256, slots, ground), seed=number).cpu().numpy()
            chunk = video_of(frames, (0.0, 0.5), fps=CHUNK_FPS)
            tally.add(f"silent at {name}", asked.overhears(chunk, samples) is None)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--photos", type=Path, help="backgrounds (default: drawn ones alone)")
    parser.add_argument("--looks", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument("--sounds", type=int, default=0)
    parser.add_argument("--bundle", type=Path, help="synthesizers, as training.asr.bundle makes them")
    parser.add_argument("--voice", choices=("rms", "ked", "espeak"))
    parser.add_argument("--seed", type=int, default=4711)
    options = parser.parse_args()
    say = None
    if options.voice:
        from training.asr.heldout import voices

        mouth, rng = voices(options.bundle)[options.voice], random.Random(options.seed)

        def say(text: str) -> np.ndarray:
            return mouth(text, rng)

    photos, album = np.zeros((1, 144, 256, 3), np.uint8), Album((), ())
    if options.photos:
        photos, album = read(options.photos, "unseen")
    asked = Asked(options.url, say=say)
    painter = Painter(photos, torch.device("cpu"))
    maker = Maker(CHECKPOINT, album, seed=options.seed, unseen=None, slips=0.0)
    counts = {"looks": options.looks, "sessions": options.sessions, "chunks": options.chunks}
    shares = conversations(asked, maker, painter, **counts).shares()
    shares |= nobody_speaks(asked, maker, painter, options.sounds).shares()
    if asked.heard:
        right = sum(words(said) == words(heard) for said, heard in asked.heard)
        shares["word error rate"] = f"{100 * wer(asked.heard):.1f}% of {len(asked.heard)} texts"
        shares["heard word for word"] = f"{100 * right / len(asked.heard):.1f}%"
    if asked.first_text_s:
        middle, slow = (1000 * np.quantile(asked.first_text_s, share) for share in (0.5, 0.95))
        shares["first text"] = f"{middle:.0f} ms (median), {slow:.0f} ms (95 of 100)"
    print(json.dumps(shares, indent=1))


if __name__ == "__main__":
    main()
