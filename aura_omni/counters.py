"""What a stage has done and has in hand, as metrics show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """running to pages_kept: now; the rest since the start. Code2Wav has no pages, and its tokens are frames."""

    running: int
    waiting: int
    pages: int = 0
    pages_used: int = 0
    pages_kept: int = 0  # that a new request could find
    steps: int
    prompt_tokens: int  # of requests that were taken on
    generated_tokens: int
    computed_rows: int = 0
    cached_rows: int = 0  # rows of prompts that were found instead of computed
    preemptions: int = 0
