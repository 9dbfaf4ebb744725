"""What the media of one request cost together."""

from __future__ import annotations

import numpy as np
import pytest

from aura_omni.errors import BadMedia
from aura_omni.media import budget as module
from aura_omni.media.audio import decode_audio
from aura_omni.media.budget import Budget
from aura_omni.media.encoder import encode
from aura_omni.media.video import decode_video
from tests.server.conftest import mp4_bytes


def test_sounds_are_counted_together(monkeypatch):
    monkeypatch.setitem(module._MOST, "audio_s", 5)
    file, budget = encode(np.zeros(16_000 * 2, np.float32), 16_000, "wav"), Budget()
    for _ in range(2):
        decode_audio(file, max_s=60, budget=budget)
    with pytest.raises(BadMedia, match=r"seconds of sound; at most 5 in one request") as refused:
        decode_audio(file, max_s=60, budget=budget, param="here")
    assert refused.value.param == "here"
    decode_audio(file, max_s=60, budget=Budget())


@pytest.mark.parametrize(("cost", "most"), [("pixels", 64 * 48 * 3), ("watched_pixels", 64 * 48 * 8)])
def test_clips_are_counted_together_by_kept_and_by_decoded_frames(monkeypatch, cost, most):
    monkeypatch.setitem(module._MOST, cost, most)
    clip, budget = mp4_bytes(frames=6, fps=4), Budget()  # 3 of 6 frames are kept
    assert len(decode_video(clip, max_frames=128, max_pixels=10**6, budget=budget).frames) == 3
    with pytest.raises(BadMedia, match=f"at most {most:,} in one request"):
        decode_video(clip, max_frames=128, max_pixels=10**6, budget=budget)
