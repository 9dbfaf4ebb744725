"""Pictures to a film, for where what it shows does not matter: to ask oneself, and to measure."""

from __future__ import annotations

import io
from collections.abc import Sequence

import av
import numpy as np


def film(pictures: Sequence[np.ndarray], *, fps: int = 2) -> bytes:
    """An MP4 file (H.264) of RGB pictures uint8 [h, w, 3], one or more, of one even size. Raises av's error where FFmpeg has no encoder."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.pix_fmt = "yuv420p"
        stream.height, stream.width = pictures[0].shape[:2]
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()
