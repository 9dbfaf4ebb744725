"""A recording of any length, read from its file a few seconds at a time and cut into segments where it is quiet.

    recording = Recording()
    for segment in recording.segments(file, max_s=14_400):
        segment.audio, segment.start_s, segment.end_s

Only the samples of a segment, of the next one, and of what the decoder holds are in memory. Nothing is known of words: a
segment's times are where its sound begins and ends, to 20 ms, and a pause is what is quiet beside the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from aura_omni.errors import BadMedia
from aura_omni.flow import Audio
from aura_omni.media.audio import audio_of, check_finite, mono_pieces
from aura_omni.media.level import SILENCE_RMS, SLOT_S, levels, quantiles, slot_samples

LEAST_S, LONGEST_S = 5.0, 30.0  # of a segment; the last one may be shorter
PAUSE_S = 0.4  # between two sentences; between two words it is less than half of that
_LULL_S = 0.1  # where there is no pause, a cut goes into the quietest stretch of this length
_KEPT_S = 0.3  # of silence at a trimmed end, for the first and last sounds of a word
_TRIMMED_S = 1.0  # silence shorter than this is left as it is
# A pause lies under the peaks by 30 dB, or, in a noisy room, is no more than 6 dB over its noise
_UNDER_PEAKS_DB, _OVER_NOISE_DB = 30.0, 6.0


@dataclass(frozen=True, slots=True)
class Segment:
    """start_s, end_s: where its sound begins and ends in the recording. audio has long silence at its ends cut off."""

    audio: Audio
    start_s: float
    end_s: float


@dataclass(slots=True)
class Recording:
    """duration_s: of what has been read so far."""

    duration_s: float = 0.0

    def segments(self, file: BinaryIO, *, max_s: float, param: str | None = None) -> Iterator[Segment]:
        """Segments in order, at least one; stretches without sound are in none, unless there is nothing else.

        Raises BadMedia as media.audio.decode_audio does, when it is met, and for a recording longer than max_s.
        """
        found = False
        for stretch in self._stretches(file, max_s, param):
            segment = _segment(stretch, param)
            if segment is not None:
                found = True
                yield segment
        if not found:
            yield Segment(audio_of(stretch.samples, stretch.rate, param=param), 0.0, self.duration_s)

    def _stretches(self, file: BinaryIO, max_s: float, param: str | None) -> Iterator[_Stretch]:
        """All samples in order, cut where it is quiet."""
        rest, begin = np.zeros(0, np.float32), 0  # what is not cut off yet, and where it begins
        loud = np.zeros(0)  # of the slots of the rest that have been measured
        pieces: list[np.ndarray] = []
        waiting = count = rate = 0
        for piece, rate in mono_pieces(file, param=param):
            check_finite(piece, param=param)
            pieces.append(piece)
            waiting += len(piece)
            count += len(piece)
            self.duration_s = count / rate
            if self.duration_s > max_s:
                raise BadMedia(
                    f"the recording lasts longer than {max_s:,g} s; cut it, or raise media.max_recording_s in the deploy file",
                    param=param,
                )
            if len(rest) + waiting < LONGEST_S * rate:
                continue
            rest, pieces, waiting = np.concatenate([rest, *pieces]), [], 0
            loud = _measured(loud, rest, rate)
            while len(rest) >= LONGEST_S * rate:
                slots = _cut(loud, len(rest), rate, whole=False)
                cut = slots * slot_samples(rate)
                yield _Stretch(rest[:cut], loud[:slots], begin, rate)
                rest, loud, begin = rest[cut:], loud[slots:], begin + cut
            rest = rest.copy()  # without what has been cut off
        rest = np.concatenate([rest, *pieces])
        loud = _measured(loud, rest, rate)
        while len(rest):
            slots = _cut(loud, len(rest), rate, whole=True)
            cut = slots * slot_samples(rate) if slots < len(loud) else len(rest)
            yield _Stretch(rest[:cut], loud[:slots], begin, rate)
            rest, loud, begin = rest[cut:], loud[slots:], begin + cut


@dataclass(frozen=True, slots=True)
class _Stretch:
    """samples float32 [n] from index `begin` of the recording on; loud: `levels` of them."""

    samples: np.ndarray
    loud: np.ndarray
    begin: int
    rate: int


def _measured(loud: np.ndarray, samples: np.ndarray, rate: int) -> np.ndarray:
    """`levels` of samples, of whose first slots they are known: every slot is measured once."""
    return np.concatenate([loud, levels(samples[len(loud) * slot_samples(rate) :], rate)])


def _segment(stretch: _Stretch, param: str | None) -> Segment | None:
    """The segment that a stretch is; None if there is no sound in it."""
    samples, loud, rate = stretch.samples, stretch.loud, stretch.rate
    begin_s, end_s = stretch.begin / rate, (stretch.begin + len(samples)) / rate
    if not len(loud):  # too short to tell
        return Segment(audio_of(samples, rate, param=param), begin_s, end_s)
    sounding = np.flatnonzero(loud > max(_quiet_level(loud), SILENCE_RMS))
    if not len(sounding):
        return None
    slot_s = slot_samples(rate) / rate
    first_s, last_s = sounding[0] * slot_s, (sounding[-1] + 1) * slot_s
    start = round((first_s - _KEPT_S) * rate) if first_s > _TRIMMED_S else 0
    stop = round((last_s + _KEPT_S) * rate) if len(samples) / rate - last_s > _TRIMMED_S else len(samples)
    return Segment(audio_of(samples[start:stop], rate, param=param), begin_s + first_s, begin_s + last_s)


def _cut(loud: np.ndarray, samples: int, rate: int, *, whole: bool) -> int:
    """How many slots the next segment of so many samples has; all of them: it goes to their end. whole: nothing follows.

    loud: levels of their slots.
    """
    slot, longest = slot_samples(rate), round(LONGEST_S * rate)
    ends_here = whole and samples <= longest
    loud = loud[: longest // slot]
    if not len(loud):
        return 0
    # So that nothing shorter than LEAST_S is left over
    limit = len(loud) - (round(LEAST_S / SLOT_S) if ends_here else 0)
    pause = _first_pause(loud < max(_quiet_level(loud), SILENCE_RMS), round(LEAST_S / SLOT_S), limit)
    if pause is not None:
        return pause
    if ends_here:
        return len(loud)
    half, lull = len(loud) // 2, round(_LULL_S / SLOT_S)
    sums = np.convolve(loud[half:], np.ones(lull), "valid")
    return half + int(sums.argmin()) + lull // 2


def _first_pause(quiet: np.ndarray, start: int, limit: int) -> int | None:
    """The slot at which to cut: in the first pause of quiet bool [slots] after `start`, late in it, not after `limit`."""
    least, kept = round(PAUSE_S / SLOT_S), round(_KEPT_S / 2 / SLOT_S)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], quiet, [False]]).astype(np.int8)))
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        cut = max(begin + least // 2, end - kept)
        if end - begin >= least and start <= cut <= limit:
            return int(cut)
    return None


def _quiet_level(loud: np.ndarray) -> float:
    """The level under which it is quiet, from the levels of a stretch. 0 when nothing stands out: then nothing is quiet."""
    noise, peaks = quantiles(loud, 0.01, 0.95)
    level = max(noise * 10 ** (_OVER_NOISE_DB / 20), peaks * 10 ** (-_UNDER_PEAKS_DB / 20))
    return float(level) if level < peaks * 10 ** (-_OVER_NOISE_DB / 20) else 0.0
