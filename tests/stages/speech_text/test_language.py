import pytest

from aura_omni.stages.speech_text.language import LanguageGuess, guess


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The cat is on the table.", "english"),
        ("Guten Tag, das ist nicht mein Hund.", "german"),
        ("Je ne sais pas où est le chat.", "french"),
        ("El perro está en la casa y no come.", "spanish"),
        ("Non so che cosa è successo, ma sono qui.", "italian"),
        ("Eu não sei o que é isso, mas estou com você.", "portuguese"),
        ("今天天气很好。", "chinese"),
        ("我用 GPT 写代码。", "chinese"),
        ("今日は天気がいいですね。", "japanese"),
        ("오늘은 날씨가 좋아요.", "korean"),
        ("Сегодня хорошая погода.", "russian"),
        ("I like 北京 and it is the best city that we have.", "english"),
    ],
)
def test_a_sentence_tells_its_language(text, language):
    assert guess(text) == language


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12 345",
        "$5",
        "Berlin München",
        "!?",
        "a.com",
        "me@de.it",
        "https://the.of/and?is=to&you",
        "der_die.py",
        "das.is.v2",
        "C:\\the\\of",
    ],
)
def test_what_does_not_tell_is_not_guessed(text):
    assert guess(text) is None


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("OK", "english"),
        ("I paid $5.", "english"),
        ("Buy a car.", "english"),
        ("No, never.", "english"),  # which Spanish has as well
        ("5 kg", "english"),
        ("Es kostet 5 €.", "german"),
        ("Hallo Anna, 5 €.", "german"),
        ("Bonjour Anna, 5 €.", "french"),
        ("Hola Ana, 5 €.", "spanish"),
        ("Ciao Anna, 5 €.", "italian"),
        ("Obrigado Ana, 5 €.", "portuguese"),
        ("de la", None),  # French or Spanish
    ],
)
def test_latin_letters_that_speak_for_no_other_language_are_english(text, language):
    assert guess(text) == language


@pytest.mark.parametrize(
    ("prior", "text", "language"),
    [
        ("english", "", "english"),
        ("english", "Dr. Weiss", "english"),
        ("english", "Das ist", "german"),
        ("chinese", "It costs", "english"),
        ("chinese", "GPT", None),
        ("german", "GPT", "german"),
        ("english", "好的", "chinese"),
        ("japanese", "東京", "japanese"),
        ("japanese", "我今天要去北京，明天要去上海，后天要回到这里来。", "chinese"),
    ],
)
def test_what_came_before_counts_until_the_text_says_otherwise(prior, text, language):
    found = LanguageGuess(prior)
    found.add(text)
    assert found.language == language
