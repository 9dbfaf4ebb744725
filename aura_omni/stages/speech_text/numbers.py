"""Whole and decimal numbers as words, in English and Chinese. Input is digits as they are written, without separators."""

from __future__ import annotations

_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
         "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]  # fmt: skip
_TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]  # fmt: skip
_THOUSANDS = ("", " thousand", " million", " billion", " trillion")
_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
             "twelve": "twelfth"}  # fmt: skip
_LONGEST = 15  # digits; longer ones are codes and are read digit by digit

_HAN = "零一二三四五六七八九"


def english(digits: str) -> str:
    """ "1234" -> "one thousand two hundred thirty-four"; "3.14" -> "three point one four"; "007" -> "zero zero seven"."""
    whole, point, decimals = digits.partition(".")
    words = english_digits(whole) if _is_code(whole) else _cardinal(int(whole or 0))
    return f"{words} point {english_digits(decimals)}" if point and decimals else words


def english_digits(digits: str) -> str:
    return " ".join(_ONES[int(digit)] for digit in digits)


def english_ordinal(digits: str) -> str:
    words = english(digits)
    cut = max(words.rfind(" "), words.rfind("-")) + 1
    start, last = words[:cut], words[cut:]
    if last.endswith("y"):
        return f"{start}{last[:-1]}ieth"
    return start + _ORDINALS.get(last, f"{last}th")


def english_year(digits: str) -> str:
    """ "1998" -> "nineteen ninety-eight", "2005" -> "two thousand five", "1905" -> "nineteen oh five"."""
    century, rest = int(digits[:2]), int(digits[2:])
    if century % 10 == 0 and rest < 10:
        return _cardinal(int(digits))
    if rest == 0:
        return f"{_cardinal(century)} hundred"
    return f"{_cardinal(century)} {english_minutes(digits[2:])}"


def english_minutes(digits: str) -> str:
    """Two digits after another number: "05" -> "oh five"."""
    return f"oh {_ONES[int(digits)]}" if digits[0] == "0" else _cardinal(int(digits))


def _cardinal(number: int) -> str:
    if number < 20:
        return _ONES[number]
    if number < 100:
        return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")
    if number < 1_000:
        return f"{_ONES[number // 100]} hundred" + (f" {_cardinal(number % 100)}" if number % 100 else "")
    groups: list[str] = []
    for name in _THOUSANDS:
        number, group = divmod(number, 1_000)
        if group:
            groups.insert(0, _cardinal(group) + name)
    return " ".join(groups)


def _is_code(whole: str) -> bool:
    return len(whole) > _LONGEST or (len(whole) > 1 and whole[0] == "0")


def chinese(digits: str) -> str:
    """ "1234" -> 一千二百三十四; "3.14" -> 三点一四; "007" -> 零零七."""
    whole, point, decimals = digits.partition(".")
    words = chinese_digits(whole) if _is_code(whole) else _chinese_cardinal(int(whole or 0))
    return f"{words}点{chinese_digits(decimals)}" if point and decimals else words


def chinese_digits(digits: str) -> str:
    return "".join(_HAN[int(digit)] for digit in digits)


def _chinese_cardinal(number: int) -> str:
    if number == 0:
        return _HAN[0]
    groups: list[int] = []
    while number:
        number, group = divmod(number, 10_000)
        groups.append(group)
    words = ""
    for power in range(len(groups) - 1, -1, -1):
        group = groups[power]
        if not group:
            continue
        # A gap inside of the number is said once, as 零.
        if words and (group < 1_000 or groups[power + 1] == 0):
            words += "零"
        words += _chinese_group(group) + ("", "万", "亿", "万亿")[power]
    return words.removeprefix("一") if words.startswith("一十") else words


def _chinese_group(group: int) -> str:
    """1..9999."""
    words, gap = "", False
    for power, name in ((1_000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit, group = divmod(group, power)
        if digit:
            words += ("零" if gap and words else "") + _HAN[digit] + name
        gap = digit == 0
    return words
