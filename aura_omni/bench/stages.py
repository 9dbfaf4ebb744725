"""What the stages of a server did during a load, by the counters of its /metrics; other servers have none, and no such figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from aura_omni.bench.client import Client

Counts = Mapping[str, Mapping[str, float]]  # stage -> counter -> value
_COUNTERS = {
    "aura_omni:engine_steps_total": "steps",
    "aura_omni:engine_step_rows_total": "rows",
    "aura_omni:engine_step_seconds_total": "step_s",
    "aura_omni:prompt_tokens_total": "prompt",
    "aura_omni:prefix_cache_hits_total": "cached",
}


def counts(client: Client) -> Counts:
    """Empty where there are none."""
    try:
        response = client.get("/metrics")
    except httpx.HTTPError:
        return {}
    return parsed(response.text) if response.status_code == httpx.codes.OK else {}


def parsed(metrics: str) -> Counts:
    """metrics: in Prometheus' text format."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(_COUNTERS.values(), 0.0))
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if sample.name in _COUNTERS and "stage" in sample.labels:
                    found[sample.labels["stage"]][_COUNTERS[sample.name]] = sample.value
    except ValueError:
        return {}  # whatever it is, it is not that
    return found


def during(before: Counts, after: Counts, wall_s: float) -> dict[str, dict[str, float]]:
    """Of each stage that made a step: steps_per_s; rows_a_step, those of prompts and frames included; under_way, the share of
    the load in which the host waited for one of its steps to end (not the time of kernels: stages share a device, and it may wait for the
    host); from_cache, the share of prompts that the prefix cache had.
    """
    found = {}
    for stage in after:
        steps, rows, step_s, prompt, cached = (
            after[stage][name] - before.get(stage, {}).get(name, 0.0) for name in _COUNTERS.values()
        )
        if steps:
            found[stage] = {
                "steps_per_s": round(steps / wall_s, 1),
                "rows_a_step": round(rows / steps, 2),
                "under_way": round(step_s / wall_s, 3),
                "from_cache": round(cached / prompt, 3) if prompt else 0.0,
            }
    return found
