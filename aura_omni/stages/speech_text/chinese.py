"""One written unit (a number with its unit, a date, a time) as Chinese words."""

from __future__ import annotations

import re
from collections.abc import Callable

from aura_omni.stages.speech_text.english import calculation, span
from aura_omni.stages.speech_text.numbers import chinese as number
from aura_omni.stages.speech_text.numbers import chinese_digits as digits

_UNITS = {
    "°": "度", "°C": "摄氏度", "℃": "摄氏度", "°F": "华氏度", "℉": "华氏度", "mm": "毫米", "cm": "厘米", "m": "米",
    "km": "公里", "m²": "平方米", "m2": "平方米", "m³": "立方米", "km²": "平方公里", "mg": "毫克", "g": "克", "kg": "公斤",
    "ml": "毫升", "mL": "毫升", "l": "升", "L": "升", "ms": "毫秒", "s": "秒", "min": "分钟", "h": "小时",
    "km/h": "公里每小时", "m/s": "米每秒", "Hz": "赫兹", "kHz": "千赫兹", "MHz": "兆赫兹", "GHz": "吉赫兹",
    "KB": "千字节", "kB": "千字节", "MB": "兆字节", "GB": "吉字节", "TB": "太字节", "W": "瓦", "kW": "千瓦", "kWh": "千瓦时",
    "V": "伏", "mAh": "毫安时", "dB": "分贝", "fps": "帧每秒",
}  # fmt: skip
_MONEY = {
    "$": "美元", "US$": "美元", "USD": "美元", "€": "欧元", "EUR": "欧元", "£": "英镑", "GBP": "英镑", "¥": "元",
    "CNY": "元", "RMB": "元", "JPY": "日元",
}  # fmt: skip
_SYMBOLS = {"&": "和", "+": "加", "=": "等于", "×": "乘", "÷": "除以", "≈": "约等于", "≤": "小于等于", "≥": "大于等于"}
_HALVES = {"½": "二分之一", "⅓": "三分之一", "⅔": "三分之二", "¼": "四分之一", "¾": "四分之三"}
_OPERATIONS = {
    "-": "减",
    "−": "减",
    "+": "加",
    "×": "乘",
    "*": "乘",
    "x": "乘",
    "÷": "除以",
    "/": "除以",
    "=": "等于",
    "≈": "约等于",
}
_COUNTED = frozenset(
    "个次只张本件条位名块倍种家岁周天年元双台辆杯瓶份句遍点度米克升秒人部座棵颗把套间封篇首片群队节道门项批分小公千百万亿"
)
_SIGNS = {"": "", "-": "负", "−": "负", "+": "加", "~": "约", "≈": "约", "±": "正负"}
_SIGN = r"([-−+~≈±]?)"
_N = r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)"


def read(written: str, *, before: str, after: str) -> str | None:
    """None: it is spoken as it is written. before, after: the characters around it, "" for none."""
    if (known := _SYMBOLS.get(written) or _HALVES.get(written)) is not None:
        return known
    if not any(character.isdigit() for character in written):
        return None
    if after == "年" and re.fullmatch(r"\d{2}|\d{4}", written):
        return digits(written)
    if written == "2" and after in _COUNTED and before != "第":
        return "两"
    if after in ("万", "亿") and written[0] in _MONEY:
        written = written[1:]  # its unit would have to come after the next character
    if re.fullmatch(r"0\d+|1[3-9]\d{9}", written):
        return digits(written)
    for pattern, words in _READINGS:
        if (found := pattern.fullmatch(written)) and (said := words(found)) is not None:
            return said
    if ends := span(written):
        low, high = (read(end, before=before, after="") for end in ends)
        return None if low is None or high is None else f"{low}到{high}"
    return None


def _signed(sign: str, written: str) -> str:
    return _SIGNS[sign] + number(written.replace(",", ""))


def _two(written: str) -> str:
    """A number that counts something: two of them is 两."""
    return "两" if written == "2" else number(written.replace(",", ""))


def _with_unit(found: re.Match[str]) -> str | None:
    sign, written, unit = found.groups()
    return None if unit not in _UNITS else f"{_SIGNS[sign]}{_two(written)}{_UNITS[unit]}"


def _span(found: re.Match[str]) -> str | None:
    low, high, unit = found.groups()
    if unit == "%":
        return f"百分之{_signed('', low)}到百分之{_signed('', high)}"
    if unit and unit not in _UNITS:
        return None
    return f"{_signed('', low)}到{_signed('', high)}{_UNITS.get(unit or '', '')}"


def _clock(found: re.Match[str]) -> str:
    hours, minutes, seconds = found.groups()
    words = f"{_two(str(int(hours)))}点"
    if int(minutes) or seconds:
        words += f"{'零' if minutes[0] == '0' and minutes != '00' else ''}{number(str(int(minutes)))}分"
    return words + (f"{number(str(int(seconds)))}秒" if seconds else "")


def _date(found: re.Match[str]) -> str | None:
    year, _, month, day = found.groups()
    if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
        return None
    return f"{digits(year)}年{number(str(int(month)))}月{number(str(int(day)))}日"


def _calculation(written: str) -> str | None:
    parts = calculation(written)
    return None if parts is None else "".join(_OPERATIONS.get(part) or _signed("", part) for part in parts)


def _power(found: re.Match[str]) -> str:
    sign, written, exponent = found.groups()
    below = "负" if exponent[0] in "-−" else ""
    return f"{_signed(sign, written)}乘以十的{below}{_signed('', exponent.lstrip('+-−'))}次方"


def _points(written: str) -> str:
    return "点".join(number(part) for part in written.split("."))


_READINGS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str | None]], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"[vV] ?(\d+(?:\.\d+)*)", lambda found: f"v{_points(found[1])}"),
        (r"(\d+(?:\.\d+){2,})", lambda found: _points(found[1])),
        (r"([01]?\d|2[0-3]|24(?=:00)):([0-5]\d)(?::([0-5]\d))?", _clock),
        (r"(\d{4})([-/.])(\d{1,2})\2(\d{1,2})", _date),
        (rf"{_SIGN}(US\$|[$€£¥]){_N}", lambda found: f"{_SIGNS[found[1]]}{_two(found[3])}{_MONEY[found[2]]}"),
        (rf"{_SIGN}{_N} ?([$€£]|USD|EUR|GBP|CNY|RMB|JPY)",
         lambda found: f"{_SIGNS[found[1]]}{_two(found[2])}{_MONEY[found[3]]}"),
        (rf"{_SIGN}{_N} ?%", lambda found: f"{_SIGNS[found[1]]}百分之{_signed('', found[2])}"),
        (rf"{_SIGN}{_N} ?([^\d\s.,]\S{{0,4}})", _with_unit),
        (rf"{_N} ?[-–—~] ?{_N} ?([^\d\s.,]\S{{0,4}})?", _span),
        (r"\d{2,4}(?:-\d{2,4}){1,3}", lambda found: "，".join(digits(group) for group in found[0].split("-"))),
        (r"(\d+)/(\d+)", lambda found: f"{number(found[2])}分之{number(found[1])}"),
        (r"(\d+):(0|[1-9]\d*)", lambda found: f"{number(found[1])}比{number(found[2])}"),
        (rf"{_N} ?[x×] ?{_N}", lambda found: f"{_signed('', found[1])}乘{_signed('', found[2])}"),
        (r"#(\d+)", lambda found: f"{number(found[1])}号"),
        (rf"{_SIGN}{_N}", lambda found: _signed(found[1], found[2])),
        (rf"{_SIGN}{_N}[eE]([-+−]?\d{{1,3}})", _power),
        (r"(\d+)([½⅓⅔¼¾])", lambda found: f"{number(found[1])}又{_HALVES[found[2]]}"),
        (r"\S+", lambda found: _calculation(found[0])),
    )
)  # fmt: skip
