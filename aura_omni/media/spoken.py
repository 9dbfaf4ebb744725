"""Whether a text can be what is said in a recording, by their lengths."""

from __future__ import annotations

from aura_omni.errors import BadVoice, field_name

# Speech has 3 to 8 syllables a second; these refuse only what is no transcript, pauses and slips of counting included.
_LEAST_SYLLABLES_PER_S, _MOST_SYLLABLES_PER_S = 0.5, 15
_SPARE_S, _SPARE_SYLLABLES = 4, 4


def check_transcript(text: str, duration_s: float, *, recording: str = field_name("ref_audio"), way_out: str) -> None:
    """A Talker that is to continue a recording with a transcript of something else says anything but its text.

    recording: what a request calls it. Raises BadVoice, with both numbers or for a text without a word.
    """
    if not any(map(str.isalnum, text)):
        raise BadVoice(
            f"{field_name('ref_text')} has no letter or digit in it; send the exact transcript of {recording}, or {way_out}",
            param="ref_text",
        )
    syllables = _syllables(text)
    most = _SPARE_SYLLABLES + int(duration_s * _MOST_SYLLABLES_PER_S)
    longest_s = _SPARE_S + syllables / _LEAST_SYLLABLES_PER_S
    if syllables > most or duration_s > longest_s:
        shown_s = (
            max(duration_s, longest_s + 0.1) if duration_s > longest_s else duration_s
        )  # never as long as what fits
        limit = f"at most {most} fit into it" if syllables > most else f"at most {longest_s:.0f} s of sound fit to them"
        raise BadVoice(
            f"{field_name('ref_text')} is not what is said in {recording}: it has about {syllables} syllables, the recording {shown_s:.1f} s; "
            f"{limit}. Send its exact transcript, or {way_out}",
            param="ref_text",
        )


def _syllables(text: str) -> int:
    """About how many: a character of a syllabic script is one, three letters of an alphabet are, and so is a digit."""
    thirds = 0
    for character in text:
        if character.isdigit() or (character.isalpha() and character >= "\u2e80"):
            thirds += 3
        elif character.isalpha():
            thirds += 1
    return -(-thirds // 3)
