import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_omni.stages.speech_text import numbers

HAN_DIGITS = {character: value for value, character in enumerate("零一二三四五六七八九")}
HAN_POWERS = {"十": 10, "百": 100, "千": 1_000}


def value_of_chinese(words: str) -> int:
    """Reads a number back, by the rules of school: what it means, not how it was made."""
    if "亿" in words:
        high, _, low = words.partition("亿")
        return value_of_chinese(high) * 10**8 + value_of_chinese(low)
    if "万" in words:
        high, _, low = words.partition("万")
        return value_of_chinese(high) * 10**4 + value_of_chinese(low)
    total, digit = 0, 0
    for character in words:
        if character in HAN_POWERS:
            total += (digit or 1) * HAN_POWERS[character]
            digit = 0
        else:
            digit = HAN_DIGITS[character]
    return total + digit


def value_of_english(words: str) -> int:
    small = {word: value for value, word in enumerate(numbers._ONES)} | {
        word: 10 * value for value, word in enumerate(numbers._TENS)
    }
    scales = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
    total = group = 0
    for word in words.replace("-", " ").split():
        if word == "hundred":
            group *= 100
        elif word in scales:
            total, group = total + group * scales[word], 0
        else:
            group += small[word]
    return total + group


@given(st.integers(0, 10**12 - 1))
def test_chinese_numbers_mean_what_they_say(value):
    assert value_of_chinese(numbers.chinese(str(value))) == value


@given(st.integers(0, 10**15 - 1))
def test_english_numbers_mean_what_they_say(value):
    assert value_of_english(numbers.english(str(value))) == value


@pytest.mark.parametrize(
    ("digits", "words"),
    [("0", "零"), ("10", "十"), ("110", "一百一十"), ("101", "一百零一"), ("1001", "一千零一"), ("1010", "一千零一十"),
     ("10001", "一万零一"), ("100000", "十万"), ("100100", "十万零一百"), ("100000001", "一亿零一"), ("20000", "二万")],
)  # fmt: skip
def test_chinese_zeros_are_said_once_for_a_gap(digits, words):
    assert numbers.chinese(digits) == words


@pytest.mark.parametrize(
    ("digits", "words"),
    [("1", "first"), ("12", "twelfth"), ("20", "twentieth"), ("21", "twenty-first"), ("100", "one hundredth")],
)
def test_english_ordinals(digits, words):
    assert numbers.english_ordinal(digits) == words


@pytest.mark.parametrize(
    ("digits", "words"),
    [("1998", "nineteen ninety-eight"), ("2000", "two thousand"), ("2005", "two thousand five"), ("1900", "nineteen hundred"),
     ("1905", "nineteen oh five"), ("2026", "twenty twenty-six"), ("1066", "ten sixty-six")],
)  # fmt: skip
def test_english_years(digits, words):
    assert numbers.english_year(digits) == words
