"""From answers to figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from aura_omni.bench.client import Measured
from aura_omni.bench.playback import listen

UNDERRUN_S = 0.005  # a gap that a listener could notice


def figures(measured: Measured) -> dict[str, Any]:
    """Median, 95th percentile and maximum in seconds of each time; errors are counted, and in no other figure.

    heard_s_per_s, audio_s_per_s: seconds of sound that requests brought and that came back, in a second. rtf: seconds from
    request to end for each second of sound. underruns: share of answers whose sound, played from its first byte, had a gap of
    more than 5 ms. client_busy: share of a core that the busiest process of the client computed.
    """
    answers, wall_s = measured.answers, measured.wall_s
    good = [answer for answer in answers if answer.error is None]
    speaking = [(answer, played) for answer in good if (played := listen(answer.sound)) is not None]
    heard = [played for _, played in speaking]
    audio_s = sum(played.audio_s for played in heard)
    found: dict[str, Any] = {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "silent": sum(answer.silent for answer in good),
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(good) / wall_s, 3),
        "heard_s_per_s": round(sum(answer.heard_s for answer in good) / wall_s, 3),
        "audio_s_per_s": round(audio_s / wall_s, 3),
        "client_busy": round(measured.cpu_s / wall_s, 3),
        "first_text_s": spread([answer.first_text_s for answer in good if answer.first_text_s is not None]),
        "text_complete_s": spread([answer.last_text_s for answer in good if answer.last_text_s is not None]),
        "first_audio_s": spread([played.first_s for played in heard]),
        "gap_free_s": spread([played.gap_free_s for played in heard]),
        "worst_stall_s": spread([played.worst_s for played in heard]),
        "complete_s": spread([answer.ended_s for answer in good]),
    }
    if heard:
        found["audio_s"] = spread([played.audio_s for played in heard])
        found["rtf"] = spread([answer.ended_s / played.audio_s for answer, played in speaking])
        found["underruns"] = round(sum(played.worst_s > UNDERRUN_S for played in heard) / len(heard), 4)
    if first := next((answer.error for answer in answers if answer.error), None):
        found["first_error"] = first
    return found


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Nearest-rank percentiles; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)

    def rank(share: float) -> float:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 4)

    return {"median": rank(0.5), "p95": rank(0.95), "max": rank(1.0)}
