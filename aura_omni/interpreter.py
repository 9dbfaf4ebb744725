"""Python's interpreter in a process of ours that serves: nobody keeps it from the others for long.

with shared_fairly():       # around such a process, and nowhere else
    pipeline = load()
    settled()               # what is there by now stays
    ...
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# The engine gives the interpreter up at each of its many short calls into PyTorch, and has to wait this long for a thread that works
# in Python, one that plans a request for example, before it gets it back. Beside three such threads 60 short calls in a row took
# 295 ms at Python's 5 ms (95th percentile; 0.3 ms alone), 68 ms at 0.5 ms and 0.4 ms at this, while the others got 10 % less done.
SWITCH_S = 50e-6


@contextmanager
def shared_fairly() -> Iterator[None]:
    """Threads take short turns; afterwards everything is as it was before."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
        gc.unfreeze()


def settled() -> None:
    """The garbage collector need not look again at what has been made so far.

    Every now and then it looks at all objects while every thread stands still: 100 to 360 ms with PyTorch and a pipeline, of
    which it can free nothing.
    """
    gc.collect()
    gc.freeze()
