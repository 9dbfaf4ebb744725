"""What is spoken of a text: a table of what it becomes, and that its cuts into deltas never matter."""

import re
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aura_omni.stages.speech_text import SpeechText
from tests.stages.speech_text import whole

MARKED_UP = {
    "# Weather\nIt is **sunny**.": "Weather. It is sunny.",
    "Some **bold**, *it*, __both__, _one_ and ~~gone~~ words": "Some bold, it, both, one and gone words",
    "这是**重要**的，*很*重要": "这是重要的，很重要",
    "这是_重要_的": "这是重要的",
    "***both***, **a**b and a • b": "both, ab and a, b",
    "- **Speed**: fast": "Speed: fast",
    "## Über __uns__": "Über uns",
    "* one\n* two\n  - three\n+ four": "one. two. three. four",
    "Buy:\n- milk\n- eggs\n\nThen go.": "Buy: milk. eggs. Then go.",
    "1. Wash\n2. Cut": "one. Wash. two. Cut",
    "- [ ] open\n- [x] done": "open. done",
    "> quoted\n> words\nplain": "quoted. words. plain",
    "Title\n=====\nline one\nline two\n\n***\n\nend": "Title. line one line two. end",
    "| Name | Age |\n|:---|---:|\n| Ann | x |": "Name, Age. Ann, x",
    "See [the shop](https://shop.test/x?y=(1) \"Shop\") now": "See the shop now",
    "See [the shop][1], ![a cat](cat.png) and <https://shop.test/help>.": "See the shop, a cat and shop dot test slash help.",
    "Take [this] and [see it](not a link) too": "Take this and see it (not a link) too",
    "It is so [1], and so[^2].": "It is so, and so.",
    "See [12](#a), [7](./ch7.md), [X](b), ![5](c), [^1](d), [2024](e), [5][ref] and [6][].": "See 12, 7, X, 5, 1, 2024, 5 and 6.",
    "[1](a)[2](b) so [3][4][^5], [6][7](c), [8][9th], [1][2": "1 2 so, 7, 8, 2",
    "It is sunny[1]. a[i], a[x], [8] and [x] but so[^9]": "It is sunny. a[i], a[x], and but so",
    "- [x](a) b\n- [ ] c [3](not a link)": "x b. c 3 (not a link)",
    "Run `snake_case(2*3)` or ``a`b``.": "Run snake_case(2*3) or a`b.",
    "Like this:\n```python\nprint('x')\n# no\n```\nDone.": "Like this: Done.",
    "Like ```this``` here": "Like this here",
    "~~~\ncode\n~~~\nwords": "words",
    "```\nnever closed": "",
    "a_b_c, 2*3*4, 2**3, a*b, C#, F#, a[i], #tag, <3, x < y": None,
    "<b>bold</b> and <a href=\"https://x.test\">link</a><br/>next<!-- note -->": "bold and link. next",
    "if a <b and c> d": None,
    "see <script>alert(1)</script>this, <STYLE media='x'>p { y: z }</style> and that": "see. this, and that",
    "Use the <script> tag for it.": "Use the tag for it.",
    "say <!-- once <!-- twice --> more": "say <!-- once more",
    '[a](b "c) [d](e \'f\') [g](h ) [i](j(k(l(m))))': 'a (b "c) d g i',
    "|Ann|x|\n|Bob|y|": "Ann, x. Bob, y",
    "Tom &amp; Jerry&nbsp;run, AT&T &c.": "Tom & Jerry run, AT&T &c.",
    r"\*not bold\* and C:\dir": r"*not bold* and C:\dir",
    "Hi 😀! 👨‍👩‍👧‍👦 👍🏽 🇩🇪 1️⃣ ✔ ☎️ bye": "Hi! 1 bye",
    "20 °C": "20 °C",
    "a → b | c": "a, b, c",
    "zero\u200bwidth \u202dmark\r\nline": "zerowidth mark line",
    "Was it * 5 stars*?": "Was it * 5 stars?",
}  # fmt: skip

READ = {
    "english": {
        "0, 12, 1,234 and 1000000": "zero, twelve, one thousand two hundred thirty-four and one million",
        "3.14 or .5 or -5": "three point one four or zero point five or minus five",
        "007 is 1.": "zero zero seven is one.",
        "the 1st, 22nd and 30th": "the first, twenty-second and thirtieth",
        "$7.20, $5, $1, $0.99, €3.5 million and 20 EUR": "seven dollars and twenty cents, five dollars, one dollar, "
        "ninety-nine cents, three point five million euros and twenty euros",
        "8:45 p.m., 8:05, 8:00, 5pm": "eight forty-five PM, eight oh five, eight o'clock, five PM",
        "July 4, 2026": "July fourth, twenty twenty-six",
        "on 4 July 2026 or Dec. 5": "on the fourth of July twenty twenty-six or December fifth",
        "2026-11-30 and 11/30/2026": "November thirtieth, twenty twenty-six and November thirtieth, twenty twenty-six",
        "in 1998, the 1990s, the 80s": "in nineteen ninety-eight, the nineteen nineties, the eighties",
        "'90s, the ’60s, ‘70s' and '8'": "nineties, the sixties, seventies' and 'eight'",
        "25:00, 7:99, 24:00, 21:9": "25:00, seven to ninety-nine, twenty-four hundred hours, twenty-one to nine",
        "5+5=10, 3×4, 3 × 4, 10-5=5, 6÷2, 1/2+1/2=1": "five plus five equals ten, three times four, three times four, ten minus five "
        "equals five, six divided by two, one divided by two plus one divided by two equals one",
        "1,234.5e10, -2E-3": "one thousand two hundred thirty-four point five times ten to the power of ten, minus two times ten to "
        "the power of minus three",
        "½ and 2½ or 1¾": "one half and two and a half or one and three quarters",
        "see https://shop.test/" + "a/" * 50 + "b. Next": "see shop dot test. Next",
        "2000 people in 2005": "two thousand people in two thousand five",
        "2.5 kg, 1 km, 3km, 15%, -5 °C": "two point five kilograms, one kilometer, three kilometers, fifteen percent, "
        "minus five degrees Celsius",
        "10-15 km/h, 5–6, 1999-2003": "ten to fifteen kilometers per hour, five to six, nineteen ninety-nine to two thousand three",
        "1/2 and 3/8, 3:1, 4x3, 2x": "one half and three over eight, three to one, four by three, two times",
        "v3.1, version 2, 1.2.3, 10.0.0.1": "version three point one, version two, one point two point three, "
        "ten dot zero dot zero dot one",
        "Dr. Weiss, Mr. Fox vs. Prof. Lee": "Doctor Weiss, Mister Fox versus Professor Lee",
        "to A. B. Cole, e.g. nuts, i.e. food": "to A B Cole, for example nuts, that is food",
        "at 5 p.m. Then sleep, etc. Next. In the U.S.": "at five PM. Then sleep, et cetera. Next. In the U S.",
        "the U.S. Senate, No. That is May. May I?": "the U S Senate, No. That is May. May I?",
        "9am-5pm, 8:00–9:30, $5-$10, 5%-10%": "nine AM to five PM, eight o'clock to nine thirty, five dollars to ten dollars, "
        "five percent to ten percent",
        "iPhone 15 Pro, Windows 11.": "iPhone fifteen Pro, Windows eleven.",
        "72°F, $1.5B, $2M": "seventy-two degrees Fahrenheit, one point five billion dollars, two million dollars",
        "call 555-1234": "call five five five, one two three four",
        "#5 and No. 7 of a 10-year-old": "number five and number seven of a ten-year-old",
        "see www.shop.test/a, bob@shop.test.": "see www dot shop dot test slash a, bob at shop dot test.",
        "https://www.shop.test/a/b/c?d=1": "shop dot test",
        "H200, MP3, 4K, COVID-19 and B2B": None,
        "(7 kg) “8”, [9]": "(seven kilograms) “eight”,",
    },
    "chinese": {
        "1234, 10, 100005, 10010": "一千二百三十四, 十, 十万零五, 一万零一十",
        "3.14 和 -5": "三点一四 和 负五",
        "2026年11月30日 2026-11-30": "二零二六年十一月三十日 二零二六年十一月三十日",
        "15%，2%-3%": "百分之十五，百分之二到百分之三",
        "2次 第2次 2个 12个 2月": "两次 第二次 两个 十二个 二月",
        "8:45和20:05和2:00": "八点四十五分和二十点零五分和两点",
        "2.5 kg，5km/h，-5°C": "二点五公斤，五公里每小时，负五摄氏度",
        "$7.20，¥20，100 USD": "七点二零美元，二十元，一百美元",
        "10-15公斤，1/2，3:1": "十到十五公斤，二分之一，三比一",
        "13812345678": "一三八一二三四五六七八",
        "见shop.test，v3.1": "见shop点test，v三点一",
        "５％，￥２０，¥3万，3.5亿，2万": "百分之五，二十元，三万，三点五亿，两万",
        "下午3:30，400-800-1234": "下午三点三十分，四零零，八零零，一二三四",
        "1、先洗米。2、下锅": "一、先洗米。二、下锅",
        "25℃，10㎏": "二十五摄氏度，十公斤",
        "25:00，5+5=10，3×4，½，1.5e3": "25:00，五加五等于十，三乘四，二分之一，一点五乘以十的三次方",
    },
    "german": {
        "Am 3. Mai kosten 2,5 kg **5 €**.": "Am 3. Mai kosten 2,5 kg 5 €.",
        "Siehe shop.test.": "Siehe shop Punkt test.",
    },
    "japanese": {"## 天気\n3個で5円です。😀": "天気。3個で5円です。"},
}


@pytest.mark.parametrize("written", MARKED_UP)
def test_markup_is_not_spoken_and_its_words_are(written):
    language = "english" if written.startswith("1.") or "http" in written else "korean"  # in which numbers stay
    expected = MARKED_UP[written]
    assert whole(written, language) == (written if expected is None else expected)


@pytest.mark.parametrize(
    ("language", "written", "spoken"),
    [(language, written, spoken) for language, table in READ.items() for written, spoken in table.items()],
)
def test_numbers_and_abbreviations_are_read_in_words(language, written, spoken):
    assert whole(written, language) == (written if spoken is None else spoken)


PIECES = st.sampled_from([
    " ", "\n", "\n\n", ",", ". ", "，", "。", "*", "**", "_", "`", "```", "```\n", "~~", "# ", "- ", "\n- ", "1. ", "> ", "|", "[",
    "](", "]", "[5]", "[^1]", "(", ")", "<", "</b>", "<b>", "<br", "<!--", "-->", "&amp;", "&", "!", "\\", "\n|a|b|\n|-|-|\n", "A", "a b", "Dr.",
    "p.m.", "2", ".5", "$7.20", "kg", "%", ":45", "July", "2026", "https://shop.test/a", "好", "的。", "“走。”", "2次", "です", "😀",
    "👨\u200d👩", "🇩🇪", "ä", "é", "v3.1", "etc.", "U.S.", "the ", "der ", "\t", "\r\n", "-5", "x",
])  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=25).map("".join)


@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 200), max_size=8),
    language=st.sampled_from([None, "english", "chinese", "german"]),
)
@example(text="**bold**", cuts=[1, 4], language=None)
def test_cuts_into_deltas_do_not_change_what_is_spoken(text, cuts, language):
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    cut = SpeechText(language)
    parts = "".join(cut.feed(text[start:stop]) for start, stop in pairwise(bounds)) + cut.finish()
    single = SpeechText(language)
    assert parts == "".join(map(single.feed, text)) + single.finish()


@given(text=TEXTS)
def test_nothing_unspeakable_comes_out(text):
    for character in whole(text):
        assert character == " " or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        assert not 0x1F000 <= ord(character) <= 0x1FBFF


@given(
    words=st.lists(
        st.sampled_from(["a", "bb", "5", "kg", "2.5", "July", "4,", "Dr.", "e.g.", "x,", "end."]),
        min_size=1,
        max_size=30,
    )
)
def test_no_more_than_a_word_or_a_number_and_its_unit_is_held_back(words):
    speech = SpeechText("german")
    written = spoken = ""
    for word in words:
        written += word + " "
        spoken += speech.feed(word + " ")
        assert len(spoken.split()) == len(written.split())  # all complete words are out
    english = SpeechText("english")
    english.feed("It is ")
    assert english.feed("2.5") == ""
    assert english.feed(" ") == ""
    assert english.feed("tons") == ""
    assert english.feed(" ") == " two point five tons"


def pieces_of(text: str, language: str | None = None) -> list[str]:
    speech = SpeechText(language)
    return [piece for piece in [*map(speech.feed, text), speech.finish()] if piece]


SAMPLE = (
    "Dr. Weiss sold 2.5 kg for $7.20 at 8:45 p.m. to A. B. Cole, see shop.test v3.1. Done! 好的。他说：“走。”然后离开。"
)


def test_no_piece_ends_inside_a_number_an_abbreviation_or_a_name():
    pieces = pieces_of(SAMPLE, "english")
    assert "".join(pieces) == (
        "Doctor Weiss sold two point five kilograms for seven dollars and twenty cents at eight forty-five PM to A B Cole, "
        "see shop dot test version three point one. Done! 好的。他说：“走。”然后离开。"
    )
    for unit in ("Doctor", "two point five kilograms", "seven dollars and twenty cents", "eight forty-five PM",
                 "shop dot test", "version three point one."):  # fmt: skip
        assert any(unit in piece for piece in pieces), f"{unit} came in parts: {pieces}"


def test_of_a_text_without_a_language_numbers_are_read_in_the_one_that_it_is_probably_in():
    assert pieces_of(SAMPLE) == pieces_of(SAMPLE, "english")
    assert whole("I paid $5.") == "I paid five dollars."
    for unknown in ("Es kostet $5.", "München, 5 kg", "$5"):
        assert "".join(pieces_of(unknown)) == unknown
    other = SpeechText(context="这个东西多少钱？你能告诉我吗？")
    assert other.feed("It costs $7.20 ") + other.finish() == "It costs seven dollars and twenty cents"


def test_a_number_that_comes_before_the_language_shows_stays_unless_the_question_shows_it():
    written = "$5 kostet es."
    assert "".join(pieces_of(written)) == whole(written) == written
    in_german = SpeechText(context="Was kostet das?")
    assert "".join(map(in_german.feed, written)) + in_german.finish() == written


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("user@example.com", "user at example dot com"),
        ("Visit example.com", "Visit example dot com"),
        ("see www.google.com/maps", "see www dot google dot com slash maps"),
    ],
)
def test_an_address_without_a_language_around_it_is_read_in_english(written, spoken):
    assert whole(written) == spoken


def test_a_number_beside_chinese_is_chinese_in_any_company():
    assert whole("The word 2次 is Chinese, and 2 is not.") == "The word 两次 is Chinese, and two is not."
    assert whole("我用 GPT 写了 3 个。") == "我用 GPT 写了 三 个。"


@pytest.mark.parametrize("written", ["", " \n", "😀 👍🏽", "```py\nx = 1\n```", "---", "**", "<!-- x -->", "[1]"])
def test_what_has_no_words_is_nothing(written):
    assert whole(written).strip() == ""


def test_spoken_text_spoken_again_is_the_same():
    for language in ("english", "chinese"):
        for written in READ[language]:
            once = whole(written, language)
            if not re.search(r"[\d*]", once):
                assert whole(once, language) == once


def test_of_what_tells_the_language_only_the_start_is_looked_at():
    text = "the weather is fine " * 1_000
    assert SpeechText(context=text + "und das ist nicht mein Hund " * 10_000).feed("2 kg is, ") == "two kilograms is,"


@given(st.text(alphabet="aB1 \n.,'()|→*#好。\u0301é-@", max_size=40))
@example("5 apples 3 m e.g. This isn 't it " + 30 * "long" + " word")
@example("a " + 30 * "long" + "er b")
@example("好 a好 5 个")
def test_a_word_is_only_said_to_be_whole_when_no_letter_joins_it(text):
    speech, apart = SpeechText("english"), False
    for delta in [*text, None]:
        said = speech.finish() if delta is None else speech.feed(delta)
        if said:
            assert not apart or not (said[0].isalpha() or unicodedata.category(said[0]).startswith("M"))
        apart = speech.apart
