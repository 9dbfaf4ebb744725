"""Which stage gets which sampling fields of a chat request.

Only what the request sets; the pipeline lays it over the deploy file. OpenAI's fields speak of the text that the user
reads, so they go to the stage that writes it (the Talker where none does) and beat that stage's entry in sampling_params_list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from aura_omni.errors import BadRequest, UnsupportedOption, shown
from aura_omni.flow import Sampling, StageName, checked_sampling
from aura_omni.server.schemas import ChatRequest, asks_nothing, hint, why_not_served

_SAMPLING = tuple(field.name for field in fields(Sampling))
_DIRECT = tuple(name for name in _SAMPLING if name in ChatRequest.model_fields)
# Fields of vLLM's SamplingParams that are not ours
_NOT_SERVED = frozenset({
    "n", "best_of", "length_penalty", "early_stopping", "use_beam_search", "logprobs", "prompt_logprobs",
    "flat_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "truncate_prompt_tokens", "output_kind", "logits_processors", "bad_words", "allowed_token_ids", "extra_args",
    "guided_decoding", "structured_outputs", "skip_clone",
})  # fmt: skip


def answering_stage(stages: Sequence[StageName]) -> StageName:
    """The stage that OpenAI's fields speak of: the one that writes the answer, or speaks what was written to it."""
    return next(stage for stage in ("aura", "asr", "talker") if stage in stages)


@cache
def _by_stage(stages: Sequence[StageName]) -> Mapping[str, str]:
    return {
        f"{stage}.{name}": f"sampling_params_list[{index}].{name}"
        for index, stage in enumerate(stages)
        for name in _SAMPLING
    }


def sampling_fields(body: ChatRequest, stages: Sequence[StageName]) -> Mapping[str, str]:
    """What this body calls the sampling fields of stages, by the pipeline's names of them: "aura.stop"."""
    answering = answering_stage(stages)
    entries: Sequence[Mapping[str, Any]] = body.sampling_params_list or ()
    index = stages.index(answering)
    of_entry = entries[index] if index < len(entries) else {}
    direct = {
        f"{answering}.{name}": name for name in _DIRECT if getattr(body, name) is not None or of_entry.get(name) is None
    }
    if body.max_tokens is None and body.max_completion_tokens is not None:
        direct[f"{answering}.max_tokens"] = "max_completion_tokens"
    return {**_by_stage(tuple(stages)), **direct}


def stage_sampling(body: ChatRequest, stages: Sequence[StageName]) -> dict[StageName, Mapping[str, Any]]:
    """Checked fields for each stage that the request mentions. Raises BadRequest naming entry, field and limit."""
    by_stage: dict[StageName, dict[str, Any]] = {}
    for index, entry in enumerate(_entries(body.sampling_params_list, stages)):
        by_stage[stages[index]] = _checked_entry(entry, f"sampling_params_list[{index}]")
    direct = checked_sampling({name: getattr(body, name) for name in _DIRECT})
    longest = _checked_longest(body.max_completion_tokens)
    if longest is not None and direct.setdefault("max_tokens", longest) != longest:
        raise BadRequest(
            f"max_tokens is {direct['max_tokens']} and max_completion_tokens is {longest}; give one of them",
            param="max_completion_tokens",
        )
    if direct:
        by_stage.setdefault(answering_stage(stages), {}).update(direct)
    if "seed" in direct and "talker" in stages:
        by_stage.setdefault("talker", {}).setdefault("seed", direct["seed"])
    return {stage: entry for stage, entry in by_stage.items() if entry}


def _checked_longest(max_completion_tokens: Any) -> int | None:
    """OpenAI's newer name of max_tokens."""
    try:
        return checked_sampling({"max_tokens": max_completion_tokens}).get("max_tokens")
    except BadRequest as error:
        error.name_fields({"max_tokens": "max_completion_tokens"})
        raise


def _entries(given: Any, stages: Sequence[StageName]) -> list[Mapping[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(entry, dict) for entry in given):
        raise BadRequest(
            f"Invalid sampling params: sampling_params_list must be a list of objects, one for each stage; it is {shown(given)}",
            param="sampling_params_list",
        )
    if len(given) > len(stages):
        raise BadRequest(
            f"Invalid sampling params: {len(given)} entries for {len(stages)} stages ({', '.join(stages)})",
            param="sampling_params_list",
        )
    return given


def _checked_entry(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for name, value in entry.items():
        if name in _SAMPLING:
            ours[name] = value
        elif name == "detokenize":
            if value is not None and not isinstance(value, bool):
                raise BadRequest(
                    f"{where}.detokenize is {shown(value)}; it must be true or false", param=f"{where}.detokenize"
                )
        elif name in _NOT_SERVED:
            if not asks_nothing(name, value):
                raise UnsupportedOption(why_not_served(f"{where}.{name}", name, value), param=f"{where}.{name}")
        else:
            meant = hint(name, _SAMPLING)
            raise BadRequest(f"{where}: unknown field {name[:60]!r}{meant}", param=f"{where}.{name[:60]}")
    try:
        return checked_sampling(ours)
    except BadRequest as error:
        error.name_fields({name: f"{where}.{name}" for name in _SAMPLING})
        raise BadRequest(f"Invalid sampling params: {error.message}", param=error.param) from None
