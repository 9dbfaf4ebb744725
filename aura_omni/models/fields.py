"""Numbers of a published config.json section, checked where they are read.

Each raises KeyError when the field is missing, and ValueError, with its name and value, when it is not such a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def whole(section: Mapping[str, Any], name: str, *, least: int = 1) -> int:
    value = section[name]
    if type(value) is not int or value < least:  # true is no number here
        raise ValueError(f"{name} is {value!r}; it must be a whole number from {least}")
    return value


def wholes(section: Mapping[str, Any], name: str, *, least: int = 1) -> tuple[int, ...]:
    values = section[name]
    if not isinstance(values, list | tuple) or not all(type(value) is int and value >= least for value in values):
        raise ValueError(f"{name} is {values!r}; it must be a list of whole numbers from {least}")
    return tuple(values)


def positive(section: Mapping[str, Any], name: str) -> float:
    value = section[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a number above 0")
    return value


def numbers(section: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = section[name]
    if not isinstance(values, list | tuple) or not all(type(value) in (int, float) for value in values):
        raise ValueError(f"{name} is {values!r}; it must be a list of numbers")
    return tuple(values)


def rope_theta(section: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    """Newer files keep it in `rope_parameters`, older ones beside the dimensions."""
    return positive(section if section.get("rope_theta") is not None else rope, "rope_theta")
