"""One written unit (a word, a number with its unit, a date) as English words. American, as most of what is written is."""

from __future__ import annotations

import re
from collections.abc import Callable

from aura_omni.stages.speech_text.numbers import english as number
from aura_omni.stages.speech_text.numbers import english_digits as digits
from aura_omni.stages.speech_text.numbers import english_minutes as minutes
from aura_omni.stages.speech_text.numbers import english_ordinal as ordinal
from aura_omni.stages.speech_text.numbers import english_year as year

MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December"]  # fmt: skip
_MONTH_OF = {name: month for month in MONTHS for name in (month.lower(), month[:3].lower())} | {"sept": "September"}
_MONTH = rf"({'|'.join(name.capitalize() for name in sorted(_MONTH_OF, key=len, reverse=True))})\.?"

_ABBREVIATIONS = {
    "dr.": "Doctor", "mr.": "Mister", "mrs.": "Missus", "ms.": "Miss", "prof.": "Professor", "jr.": "Junior",
    "sr.": "Senior", "gen.": "General", "sen.": "Senator", "rep.": "Representative", "gov.": "Governor", "capt.": "Captain",
    "vs.": "versus", "e.g.": "for example", "i.e.": "that is", "etc.": "et cetera", "approx.": "approximately",
    "a.m.": "AM", "p.m.": "PM", "a.k.a.": "also known as", "ph.d.": "P H D", "inc.": "Incorporated",
    "ltd.": "Limited", "corp.": "Corporation", "dept.": "department", "est.": "established", "w/": "with", "w/o": "without",
    "&": "and", "+": "plus", "=": "equals", "×": "times", "÷": "divided by", "≈": "about", "≤": "at most", "≥": "at least",
    "≠": "is not",
}  # fmt: skip
_MAY_END = ("a.m.", "p.m.", "etc.")  # of others, a capital letter behind them says nothing: U.S. Senate

_UNITS = {
    "%": ("percent", "percent"), "°": ("degree", "degrees"), "°C": ("degree Celsius", "degrees Celsius"),
    "℃": ("degree Celsius", "degrees Celsius"), "°F": ("degree Fahrenheit", "degrees Fahrenheit"),
    "℉": ("degree Fahrenheit", "degrees Fahrenheit"), "mm": ("millimeter", ""), "cm": ("centimeter", ""),
    "m": ("meter", ""), "km": ("kilometer", ""), "m²": ("square meter", ""), "m2": ("square meter", ""),
    "m³": ("cubic meter", ""), "km²": ("square kilometer", ""), "ft": ("foot", "feet"), "mi": ("mile", ""),
    "yd": ("yard", ""), "mg": ("milligram", ""), "g": ("gram", ""), "kg": ("kilogram", ""), "lb": ("pound", ""),
    "lbs": ("pound", ""), "oz": ("ounce", ""), "ml": ("milliliter", ""), "mL": ("milliliter", ""), "l": ("liter", ""),
    "L": ("liter", ""), "ms": ("millisecond", ""), "s": ("second", ""), "sec": ("second", ""), "min": ("minute", ""),
    "h": ("hour", ""), "hr": ("hour", ""), "hrs": ("hour", ""), "km/h": ("kilometer per hour", "kilometers per hour"),
    "kph": ("kilometer per hour", "kilometers per hour"), "mph": ("mile per hour", "miles per hour"),
    "m/s": ("meter per second", "meters per second"), "Hz": ("hertz", "hertz"), "kHz": ("kilohertz", "kilohertz"),
    "MHz": ("megahertz", "megahertz"), "GHz": ("gigahertz", "gigahertz"), "kB": ("kilobyte", ""),
    "KB": ("kilobyte", ""), "MB": ("megabyte", ""), "GB": ("gigabyte", ""), "TB": ("terabyte", ""), "W": ("watt", ""),
    "kW": ("kilowatt", ""), "kWh": ("kilowatt hour", ""), "V": ("volt", ""), "mAh": ("milliamp hour", ""),
    "dB": ("decibel", ""), "kcal": ("kilocalorie", ""), "fps": ("frame per second", "frames per second"),
}  # fmt: skip
_MONEY = {
    "$": ("dollar", "dollars", "cent"), "US$": ("US dollar", "US dollars", "cent"), "USD": ("US dollar", "US dollars", "cent"),
    "€": ("euro", "euros", "cent"), "EUR": ("euro", "euros", "cent"), "£": ("pound", "pounds", "penny"),
    "GBP": ("pound", "pounds", "penny"), "¥": ("yuan", "yuan", ""), "CNY": ("yuan", "yuan", ""), "RMB": ("yuan", "yuan", ""),
    "JPY": ("yen", "yen", ""),
}  # fmt: skip
_SCALES = {"k": "thousand", "m": "million", "bn": "billion", "b": "billion", "t": "trillion"}
_FRACTIONS = {"1/2": "one half", "1/3": "one third", "2/3": "two thirds", "1/4": "one quarter", "3/4": "three quarters",
              "24/7": "twenty-four seven"}  # fmt: skip
_HALVES = {"½": "one half", "⅓": "one third", "⅔": "two thirds", "¼": "one quarter", "¾": "three quarters"}
_YEAR = re.compile(r"1[1-9]\d\d|20\d\d")
_BEFORE_YEARS = {"in", "since", "from", "until", "till", "by", "of", "year", "before", "after", "during", "circa"}.union(_MONTH_OF)  # fmt: skip
_BEFORE_DECADES = frozenset(("the", "early", "mid", "late"))

_N = r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_SIGNS = {"": "", "-": "minus ", "−": "minus ", "+": "plus ", "~": "about ", "≈": "about ", "±": "plus or minus ",
          "<": "under ", ">": "over "}  # fmt: skip
_SIGN = r"([-−+~≈±<>]?)"
_DASH = re.compile(r"[-–—~]")
_SPANNED = frozenset(":$€£¥%apm")  # signs of times, money and percentages
_SUM = re.compile(rf"{_N}(?:[-+−×÷*/=≈x]{_N})+")
_OPERATIONS = {"-": "minus", "−": "minus", "+": "plus", "×": "times", "*": "times", "x": "times", "÷": "divided by",
               "/": "divided by", "=": "equals", "≈": "is about"}  # fmt: skip


def may_end_a_sentence(written: str) -> bool:
    """Whether the dot of an abbreviation may be a full stop as well."""
    return written.lower().endswith(_MAY_END)


def starts_unit(written: str) -> bool:
    """Whether the next word may belong to this one, as a day to its month."""
    return re.fullmatch(rf"{_MONTH}|Nos?\.", written) is not None


def read(written: str, *, before: str, after: str = "") -> str | None:
    """None: it is spoken as it is written. before: the word before it, lower-case; after: unused here."""
    if (known := _ABBREVIATIONS.get(written.lower())) is not None:
        return known
    if re.fullmatch(r"(?:[A-Z]\.){2,}|[A-HJ-Z]\.", written):
        return " ".join(written.replace(".", ""))
    if written in _HALVES:
        return _HALVES[written]
    if written != "*" and not any(character.isdigit() for character in written):
        return None
    if _YEAR.fullmatch(written) and not _BEFORE_YEARS.isdisjoint(before.split()):
        return year(written)
    if before in _BEFORE_DECADES and (decade := re.fullmatch(r"(\d0)['’]?s", written)):
        return _decade(decade)
    if written == "*":
        return "times" if before[-1:].isdigit() else None
    for pattern, words in _READINGS:
        if (found := pattern.fullmatch(written)) and (said := words(found)) is not None:
            return said
    if ends := span(written):
        low, high = (read(end, before=before) for end in ends)
        return None if low is None or high is None else f"{low} to {high}"
    return None


def span(written: str) -> tuple[str, str] | None:
    """The two ends of a span of times, of money or of percentages."""
    ends = _DASH.split(written, maxsplit=2)
    return (ends[0], ends[1]) if len(ends) == 2 and ends[1] and not _SPANNED.isdisjoint(ends[0]) else None


def calculation(written: str) -> list[str] | None:
    """Its numbers, and the signs between them, in turn; None: it is none. "1-2", "1/2" and "4x3" alone are not."""
    if not _SUM.fullmatch(written) or not any(sign in written for sign in "+×÷=≈"):
        return None
    return re.split(r"([-+−×÷*/=≈x])", written)


def _plain(written: str) -> str:
    return written.replace(",", "")


def _signed(sign: str, written: str) -> str:
    return _SIGNS[sign] + number(_plain(written))


def _counted(written: str, one: str, many: str) -> str:
    return one if _plain(written) == "1" else (many or one + "s")


def _with_unit(found: re.Match[str]) -> str | None:
    sign, written, unit = found.groups()
    if unit not in _UNITS:
        return None
    return f"{_signed(sign, written)} {_counted(written, *_UNITS[unit])}"


def _span_with_unit(found: re.Match[str]) -> str | None:
    low, high, unit = found.groups()
    if unit and unit not in _UNITS:
        return None
    if not unit and _YEAR.fullmatch(low) and _YEAR.fullmatch(high):
        return f"{year(low)} to {year(high)}"
    words = f"{number(_plain(low))} to {number(_plain(high))}"
    return f"{words} {_counted(high, *_UNITS[unit])}" if unit else words


def _money(sign: str, written: str, currency: str, scale: str | None) -> str:
    one, many, small = _MONEY[currency]
    plain = _plain(written)
    if scale:
        return f"{_signed(sign, written)} {_SCALES.get(scale.lower(), scale.lower())} {many}"
    whole, _, decimals = plain.partition(".")
    if len(decimals) == 2 and small:
        parts = [] if int(whole or 0) == 0 else [f"{number(whole)} {_counted(whole, one, many)}"]
        if int(decimals):
            cents = str(int(decimals))
            parts.append(f"{number(cents)} {_counted(cents, small, 'pence' if small == 'penny' else small + 's')}")
        return _SIGNS[sign] + (" and ".join(parts) or f"zero {many}")
    return f"{_signed(sign, written)} {_counted(plain, one, many)}"


def _clock(found: re.Match[str]) -> str:
    hours, mins, secs, half = found.groups()
    words = number(str(int(hours)))
    if int(mins):
        words += f" {minutes(mins)}"
    elif not half:
        words += " o'clock" if 0 < int(hours) <= 12 else " hundred hours"
    if secs is not None:
        words += f" and {number(str(int(secs)))} seconds"
    return f"{words} {half.upper()}M" if half else words


def _date(month: int, day: str, of_year: str | None) -> str | None:
    if not (1 <= month <= 12 and 1 <= int(day) <= 31):
        return None
    words = f"{MONTHS[month - 1]} {ordinal(str(int(day)))}"
    if of_year is None:
        return words
    return f"{words}, {year(of_year if len(of_year) == 4 else '20' + of_year)}"


def _slashed_date(found: re.Match[str]) -> str | None:
    first, second, of_year = found.groups()
    if int(first) > 12:
        first, second = second, first
    return _date(int(first), second, of_year)


def _month_day(found: re.Match[str]) -> str | None:
    month, day = found[1].lower(), found[2]
    if _YEAR.fullmatch(day):
        return f"{_MONTH_OF[month]} {year(day)}"
    return f"{_MONTH_OF[month]} {ordinal(day)}" if len(day) < 3 and 1 <= int(day) <= 31 else None


def _day_month(found: re.Match[str]) -> str | None:
    return f"the {ordinal(found[1])} of {_MONTH_OF[found[2].lower()]}" if 1 <= int(found[1]) <= 31 else None


def _decade(found: re.Match[str]) -> str | None:
    decade = next(filter(None, found.groups()))
    words = year(decade) if len(decade) == 4 else number(decade)
    return f"{words[:-1]}ies" if words.endswith("ty") else f"{words}s"


def _calculation(written: str) -> str | None:
    parts = calculation(written)
    return None if parts is None else " ".join(_OPERATIONS.get(part) or number(_plain(part)) for part in parts)


def _power(found: re.Match[str]) -> str:
    sign, written, exponent = found.groups()
    return f"{_signed(sign, written)} times ten to the power of {_signed(exponent[0].strip('0123456789+'), exponent.lstrip('+-−'))}"


def _digit_groups(found: re.Match[str]) -> str:
    return ", ".join(digits(group) for group in re.findall(r"\d+", found[0]))


def _points(word: str) -> Callable[[re.Match[str]], str]:
    return lambda found: f" {word} ".join(number(part) for part in found[1].split("."))


_READINGS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str | None]], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"(?:[vV]|[vV]er\.?|[vV]ersion) ?(\d+(?:\.\d+)*)", lambda found: f"version {_points('point')(found)}"),
        (r"(\d+\.\d+\.\d+\.\d+)", _points("dot")),
        (r"(\d+(?:\.\d+){2,})", _points("point")),
        (r"([01]?\d|2[0-3]|24(?=:00)):([0-5]\d)(?::([0-5]\d))?(?: ?([aApP])\.?[mM]\.?)?", _clock),
        (r"(1[0-2]|0?[1-9]) ?([aApP])\.?[mM]\.?", lambda found: f"{number(str(int(found[1])))} {found[2].upper()}M"),
        (r"(\d{4})([-/])(\d{1,2})\2(\d{1,2})", lambda found: _date(int(found[3]), found[4], found[1])),
        (r"(\d{1,2})/(\d{1,2})/(\d{4}|\d{2})", _slashed_date),
        (rf"{_MONTH} (\d{{1,4}})(?:st|nd|rd|th)?", _month_day),
        (rf"(\d{{1,2}})(?:st|nd|rd|th)? {_MONTH}", _day_month),
        (rf"{_SIGN}(US\$|[$€£¥]){_N}(?: ?(k|K|m|M|bn|B|b|T|thousand|million|billion|trillion))?",
         lambda found: _money(found[1], found[3], found[2], found[4])),
        (rf"{_SIGN}{_N} ?([$€£¥]|USD|EUR|GBP|CNY|RMB|JPY)", lambda found: _money(found[1], found[2], found[3], None)),
        (r"([12]\d\d0)['’]?s|['’‘](\d0)['’]?s", _decade),
        (r"\d{3}-\d{4}", _digit_groups),
        (rf"{_SIGN}{_N}[- ]?([^\d\s.,]\S{{0,4}})", _with_unit),
        (rf"{_N} ?[-–—~] ?{_N} ?([^\d\s.,]\S{{0,4}})?", _span_with_unit),
        (r"(\d[\d,]*)(?:st|nd|rd|th)", lambda found: ordinal(_plain(found[1]))),
        (r"(?:\+\d{1,3}[- ]?)?(?:\(\d{2,4}\)[- ]?)?\d{2,4}(?:-\d{2,4})+", _digit_groups),
        (r"(?:#|Nos?\. )(\d[\d,]*)", lambda found: f"number {number(_plain(found[1]))}"),
        (r"(\d+)/(\d+)", lambda found: _FRACTIONS.get(found[0], f"{number(found[1])} over {number(found[2])}")),
        (r"(\d+):(0|[1-9]\d*)", lambda found: f"{number(found[1])} to {number(found[2])}"),  # "25:00" is neither that nor a time
        (rf"{_N} ?x ?{_N}", lambda found: f"{number(_plain(found[1]))} by {number(_plain(found[2]))}"),
        (rf"{_N}[x×]", lambda found: f"{number(_plain(found[1]))} times"),
        (r"(\d+)((?:-[A-Za-z]+)+)", lambda found: number(found[1]) + found[2]),
        (rf"{_N}k", lambda found: f"{number(_plain(found[1]))} thousand"),
        (rf"{_SIGN}{_N}", lambda found: _signed(found[1], found[2])),
        (rf"{_SIGN}{_N}[eE]([-+−]?\d{{1,3}})", _power),
        (r"(\d+)([½⅓⅔¼¾])", lambda found: f"{number(found[1])} and {_HALVES[found[2]].replace('one half', 'a half')}"),
        (r"\S+", lambda found: _calculation(found[0])),
    )
)  # fmt: skip
