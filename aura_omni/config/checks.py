"""Checks of single values: (value, where it stands) -> the clean value, or ConfigError naming the value and the limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aura_omni.config.deploy_file import mapping
from aura_omni.errors import BadRequest, ConfigError, meant, shown
from aura_omni.flow import checked_sampling

Check = Callable[[Any, str], Any]


def whole(low: int, high: int = 2**31 - 1) -> Check:
    def check(value: Any, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{where} is {shown(value)}; it must be a whole number from {low} to {high}")
        return value

    return check


def number(low: float, high: float) -> Check:
    def check(value: Any, where: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{where} is {shown(value)}; it must be a number from {low:g} to {high:g}")
        return float(value)

    return check


def boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} is {shown(value)}; it must be true or false")
    return value


def text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} is {shown(value)}; it must be a non-empty text")
    return value


def texts(value: Any, where: str) -> tuple[str, ...]:
    """One text, or a list of them."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise ConfigError(f"{where} is {shown(value)}; it must be a text or a list of them")
    return tuple(text(item, where) for item in items)


def choice(*names: str) -> Check:
    def check(value: Any, where: str) -> str:
        if value not in names:
            raise ConfigError(f"{where} is {shown(value)}; {meant(value, names)}")
        return value

    return check


def fraction(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{where} is {shown(value)}; it must be a fraction of the device: above 0, at most 1")
    return float(value)


def dtype(value: Any, where: str) -> str:
    names = {name: name for name in ("auto", "bfloat16", "float16", "float32")} | {
        "half": "float16",
        "float": "float32",
    }
    return names[choice(*names)(value, where)]


def device(value: Any, where: str) -> int:
    """ "0" -> 0. One stage runs on one device."""
    digits = str(value).strip()
    if isinstance(value, bool) or not digits.isascii() or not digits.isdigit():
        raise ConfigError(
            f'{where} is {shown(value)}; it must be the number of one device, such as "0": '
            "this server runs each stage on one device"
        )
    return int(digits)


def sampling(value: Any, where: str) -> dict[str, Any]:
    """vLLM's SamplingParams by name. `detokenize` and its kin say how upstream's stages hand text on; here types do."""
    given = {key: item for key, item in mapping(value, where).items() if key not in _DETOKENIZE}
    for key in _DETOKENIZE & set(value):
        boolean(value[key], f"{where}.{key}")
    return _checked(given, where)


def subtalker(value: Any, where: str) -> dict[str, Any]:
    """How the Talker's code predictor samples: do_sample, temperature, top_k, top_p."""
    names = ("do_sample", "temperature", "top_k", "top_p")
    for key in mapping(value, where):
        if key not in names:
            raise ConfigError(f"{where}.{key} is not known; {meant(key, names)}")
    clean = _checked({key: item for key, item in value.items() if key != "do_sample"}, where)
    if value.get("do_sample") is not None:
        clean["do_sample"] = boolean(value["do_sample"], f"{where}.do_sample")
    return clean


def _checked(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        return checked_sampling(value)
    except BadRequest as error:
        raise ConfigError(f"{where}: {error.message}") from error


def limits(value: Any, where: str) -> dict[str, int]:
    """limit_mm_per_prompt: how many items of a kind one request may hold; also spelled {count: n}."""
    clean: dict[str, int] = {}
    for kind, most in mapping(value, where).items():
        choice("audio", "image", "video")(kind, f"{where}: kind")
        if isinstance(most, dict):
            known_keys(most, f"{where}.{kind}", used=("count",), unused={})
            most = most.get("count")
        clean[kind] = whole(0)(most, f"{where}.{kind}")
    return clean


_DETOKENIZE = {"detokenize", "skip_special_tokens", "spaces_between_special_tokens"}


def known_keys(
    given: Mapping[str, Any], where: str, *, used: Mapping[str, Any] | tuple[str, ...], unused: Mapping[str, str]
) -> None:
    """Refuse the first key that is neither used nor known to be without use."""
    for key in given:
        if key not in used and key not in unused:
            raise ConfigError(f"{where}: {shown(key)} is not known; {meant(key, (*used, *unused))}")
