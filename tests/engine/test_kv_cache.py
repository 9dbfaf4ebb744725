from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_omni.engine import kv_cache
from aura_omni.engine.kv_cache import KVCache
from aura_omni.engine.sequence import Beginning, MediaSpan, Sequence
from aura_omni.flow import Sampling


def sequence(tokens: list[int], *media: MediaSpan, cacheable: bool = True) -> Sequence:
    return Sequence(list(tokens), Sampling(), print, print, media=media, cacheable=cacheable)


def fill(cache: KVCache, *sequences: Sequence) -> None:
    """Admit each and compute all its rows."""
    for one in sequences:
        assert cache.admit(one)
        start, one.computed = one.computed, one.length
        cache.commit(one, start)


def hits(cache: KVCache, one: Sequence) -> int:
    """Rows that the sequence would find."""
    assert cache.admit(one)
    found = one.computed
    cache.release(one)
    return found


def test_equal_prompts_share_full_pages_but_never_the_last_row() -> None:
    cache = KVCache(20, 4)
    fill(cache, sequence(list(range(8))))
    assert hits(cache, sequence(list(range(8)))) == 4  # the second page holds the last row
    assert hits(cache, sequence(list(range(9)))) == 8
    assert hits(cache, sequence(list(range(7)))) == 4
    assert hits(cache, sequence(list(range(4)))) == 0


def test_a_shared_page_is_one_page_with_two_references() -> None:
    cache = KVCache(20, 4)
    first, second = sequence(list(range(9))), sequence([*range(8), 50])
    fill(cache, first, second)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert cache.used == 4
    cache.check_integrity([first, second])
    cache.release(first)
    cache.check_integrity([second])
    assert cache.used == 3


def test_equal_tokens_after_different_ones_are_not_shared() -> None:
    cache = KVCache(20, 4)
    fill(cache, sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert hits(cache, sequence([0, 2, 3, 4, 5, 6, 7, 8, 9])) == 0
    assert hits(cache, sequence([1, 2, 3, 4, 0, 6, 7, 8, 9])) == 4


def test_media_with_equal_tokens_and_different_keys_never_share_a_page() -> None:
    cache = KVCache(40, 4)
    tokens = [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 5, 6, 7]
    fill(cache, sequence(tokens, MediaSpan(4, 6, b"a cat")))
    assert hits(cache, sequence(tokens, MediaSpan(4, 6, b"a cat"))) == 12
    assert hits(cache, sequence(tokens, MediaSpan(4, 6, b"a dog"))) == 4
    assert hits(cache, sequence(tokens)) == 4


def test_rows_of_one_medium_at_another_offset_are_not_shared() -> None:
    cache = KVCache(40, 4)
    fill(cache, sequence([9] * 13, MediaSpan(0, 8, b"clip")))
    assert hits(cache, sequence([9] * 13, MediaSpan(1, 8, b"clip"))) == 0
    assert hits(cache, sequence([9] * 13, MediaSpan(0, 9, b"clip"))) == 0
    # Two spans must not spell the same bytes as one with a longer key.
    assert hits(cache, sequence([9] * 13, MediaSpan(0, 4, b"cl"), MediaSpan(4, 4, b"ip"))) == 0


def test_generated_pages_are_found_by_the_next_round() -> None:
    cache = KVCache(20, 4)
    one = sequence([1, 2, 3])
    assert cache.admit(one)
    for token in range(10, 20):
        start, one.computed = one.computed, one.length
        cache.commit(one, start)
        one.tokens.append(token)
        assert cache.extend(one)
    cache.release(one)
    assert hits(cache, sequence([1, 2, 3, *range(10, 20), 77])) == 12


def test_pages_of_a_known_beginning_are_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    original = kv_cache._page_key

    def counted(parent: bytes, tokens: list[int], begin: int, media: tuple[MediaSpan, ...]) -> bytes:
        hashed.append(begin)
        return original(parent, tokens, begin, media)

    def rounds(count: int, beginning: Beginning, *answer: int) -> Sequence:
        one = sequence([*range(7 * count), *answer], MediaSpan(5, 4, b"seen"))
        one.beginning = beginning
        return one

    monkeypatch.setattr(kv_cache, "_page_key", counted)
    cache, known = KVCache(40, 4), Beginning(7)
    # What one prompt has behind its beginning is not what another one has there.
    answered, other = rounds(1, known, 50, 51, 52, 53, 54), rounds(1, known, 60, 61, 62, 63, 64)
    fill(cache, answered, other)
    assert hashed == [0, 4, 8, 4, 8]
    further = known.longer(14)
    nobody_asked = further.longer(21)
    longest = nobody_asked.longer(28)
    assert longest.like is known, "what is out of use is held"
    hashed.clear()
    for times in range(2):
        fill(cache, rounds(4, longest, 70))
        assert hashed == [4, 8, 12, 16, 20, 24], times
    assert longest.like is None
    plain = sequence([*range(28), 70], MediaSpan(5, 4, b"seen"))
    assert hits(cache, plain) == 28
    assert plain.page_keys == longest.known(4)
    assert longest.known(8) == [], "keys of pages of another size"


def test_uncacheable_sequences_neither_find_nor_leave_pages() -> None:
    cache = KVCache(20, 4)
    fill(cache, sequence(list(range(9)), cacheable=False))
    assert cache.kept == 0
    fill(cache, sequence(list(range(9))))
    assert hits(cache, sequence(list(range(9)), cacheable=False)) == 0


def test_prefix_caching_can_be_off() -> None:
    cache = KVCache(20, 4, prefix_caching=False)
    fill(cache, sequence(list(range(9))))
    assert hits(cache, sequence(list(range(9)))) == 0


def test_the_least_recently_used_page_goes_first_and_a_chain_loses_its_end_first() -> None:
    cache = KVCache(6, 4)
    old, new = sequence([*range(8), 90]), sequence([*range(20, 28), 91])
    fill(cache, old)
    fill(cache, new)
    cache.release(old)
    cache.release(new)
    assert cache.free == 6
    big = sequence(list(range(50, 62)), cacheable=False)  # three pages: the two empty ones and one idle one
    fill(cache, big)
    cache.release(big)
    assert hits(cache, sequence([*range(20, 28), 91])) == 8
    assert hits(cache, sequence([*range(8), 90])) == 4


def test_admission_that_does_not_fit_changes_nothing() -> None:
    cache = KVCache(4, 4)
    one = sequence(list(range(9)))
    fill(cache, one)
    two = sequence([*range(8), 99, 98, 97, 96, 95])  # two shared pages and two of its own
    assert not cache.admit(two)
    assert two.pages == []
    assert two.computed == 0
    cache.check_integrity([one])
    assert cache.admit(sequence([7]))


def test_idle_pages_that_are_found_do_not_count_as_free_for_the_rest() -> None:
    cache = KVCache(4, 4)
    one = sequence(list(range(13)))
    fill(cache, one)
    cache.release(one)
    assert cache.free == 4
    longer = sequence(list(range(17)))  # finds three idle pages, needs two more, one is left
    assert not cache.admit(longer)
    cache.check_integrity([])


def test_forgotten_rows_are_not_found_again() -> None:
    cache = KVCache(20, 4)
    one = sequence(list(range(13)))
    fill(cache, one)
    cache.release(one, forget=True)
    assert cache.kept == 0
    assert hits(cache, sequence(list(range(13)))) == 0
    cache.check_integrity([])


def test_integrity_check_sees_a_lost_page() -> None:
    cache = KVCache(20, 4)
    one = sequence(list(range(9)))
    fill(cache, one)
    cache.check_integrity([one])
    with pytest.raises(AssertionError, match="references"):
        cache.check_integrity([])
    one.pages.append(one.pages[0])
    with pytest.raises(AssertionError, match="references"):
        cache.check_integrity([one])


@pytest.mark.parametrize(("pages", "size"), [(0, 4), (4, 0)])
def test_a_cache_without_rows_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KVCache(pages, size)


Row = tuple[tuple[int, ...], tuple[tuple[int, bytes], ...]]


def row_content(one: Sequence, row: int) -> Row:
    """What a row's keys and values depend on: every token up to it, and which row of which medium each of them is."""
    media = tuple(
        (at - span.start, span.key)
        for at in range(row + 1)
        for span in one.media
        if span.start <= at < span.start + span.length
    )
    return tuple(one.tokens[: row + 1]), media


prompts = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=14),
    st.none() | st.tuples(st.integers(0, 12), st.integers(1, 8), st.sampled_from([b"a", b"b"])),
    st.booleans(),
)
operations = st.one_of(
    st.tuples(st.just("admit"), prompts),
    st.tuples(st.just("append"), st.tuples(st.integers(0, 10), st.integers(0, 1))),
    st.tuples(st.just("compute"), st.tuples(st.integers(0, 10), st.integers(1, 9))),
    st.tuples(st.just("release"), st.tuples(st.integers(0, 10), st.booleans())),
)


@settings(max_examples=300, deadline=None)
@given(pages=st.integers(1, 12), size=st.integers(1, 4), script=st.lists(operations, max_size=60))
def test_random_use_loses_no_page_and_every_row_found_is_the_right_one(
    pages: int, size: int, script: list[tuple[str, tuple]]
) -> None:
    cache = KVCache(pages, size)
    alive: list[Sequence] = []
    content: dict[tuple[int, int], Row] = {}  # (page, row in page) -> what was last written there

    for name, arguments in script:
        if name == "admit":
            tokens, span, cacheable = arguments
            media = ()
            if span is not None and span[0] < len(tokens):
                media = (MediaSpan(span[0], min(span[1], len(tokens) - span[0]), span[2]),)
            one = sequence(tokens, *media, cacheable=cacheable)
            if cache.admit(one):
                alive.append(one)
                assert one.computed < one.length
            else:
                assert one.pages == []
        elif alive:
            one = alive[arguments[0] % len(alive)]
            if name == "append":
                one.tokens.append(arguments[1])
                if not cache.extend(one):
                    one.tokens.pop()
            elif name == "compute":
                start = one.computed
                one.computed = min(one.length, start + arguments[1])
                for row in range(start, one.computed):
                    page = one.pages[row // size]
                    assert sum(page in other.pages for other in alive) == 1, "a shared page is written"
                    content[page, row % size] = row_content(one, row)
                cache.commit(one, start)
            else:
                alive.remove(one)
                cache.release(one, forget=arguments[1])
                assert one.pages == []
        cache.check_integrity(alive)
        assert cache.used + cache.free == pages
        for one in alive:
            assert len(one.pages) * size >= one.length
            for row in range(one.computed):
                assert content[one.pages[row // size], row % size] == row_content(one, row)
    for one in alive:
        cache.release(one)
    cache.check_integrity([])
    assert cache.free == pages
