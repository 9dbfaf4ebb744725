"""Which page holds which rows of which sequence, and which pages a new request can take over from earlier ones.

Plain Python: knows token ids and page numbers, no tensors (`attention.PagedKV` holds those). A full page has a key, the
hash of (key of the page before it, its token ids, the media that overlap it); pages of equal keys hold equal rows, so a
page is stored once and its references are counted. Pages without references keep their rows until they are needed, the
least recently used first.

    cache.admit(sequence)            # takes over what is cached, takes pages for the rest
    cache.commit(sequence, start)    # rows [start, sequence.computed) are written: others may find full pages
    cache.extend(sequence)           # one more token: perhaps one more page
    cache.release(sequence)
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from aura_omni.engine.sequence import MediaSpan, Sequence


class KVCache:
    def __init__(self, pages: int, page_size: int = 16, *, prefix_caching: bool = True) -> None:
        """pages: how many there are in all; page_size: rows of one page."""
        if pages < 1 or page_size < 1:
            raise ValueError(f"{pages} pages of {page_size} rows: both must be at least 1")
        self.pages, self.page_size, self.prefix_caching = pages, page_size, prefix_caching
        self._references = [0] * pages
        self._key_of: list[bytes | None] = [None] * pages
        self._page_of: dict[bytes, int] = {}
        self._empty = list(range(pages - 1, -1, -1))  # neither referenced nor worth keeping
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept for later requests, least recently used first

    @property
    def free(self) -> int:
        """Pages that can be taken now, idle ones included."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that some sequence references."""
        return self.pages - self.free

    @property
    def kept(self) -> int:
        """Pages that a new request could find, used or idle."""
        return len(self._page_of)

    def admit(self, sequence: Sequence, *, headroom: int = 0) -> bool:
        """Give the sequence pages for all its tokens; `computed` becomes the number of rows found in the cache.

        The last row is never taken from the cache, because its hidden state is needed for the next token. False, and
        nothing changed, when that would leave fewer than `headroom` free pages.
        """
        assert not sequence.pages, f"sequence {sequence.id} has pages already"
        hits = self._find(sequence)
        fresh = self._pages_for(sequence.length) - len(hits)
        if fresh + sum(map(self._idle.__contains__, hits)) + headroom > self.free:
            return False
        self._refer(hits)
        sequence.pages = hits + [self._take() for _ in range(fresh)]
        sequence.computed = len(hits) * self.page_size
        return True

    def extend(self, sequence: Sequence, *, ahead: int = 0) -> bool:
        """Make room for all tokens of the sequence, and for so many more. False, and nothing changed, when there are too few
        free pages."""
        fresh = self._pages_for(sequence.length + ahead) - len(sequence.pages)
        if fresh <= 0:
            return True
        if fresh > self.free:
            return False
        sequence.pages.extend(self._take() for _ in range(fresh))
        return True

    def catch_up(self, sequence: Sequence) -> int:
        """Take over what is cached by now of an admitted sequence beyond `computed`, which becomes as many rows more as are
        returned: its prompt has grown, or others have read the same."""
        hits = self._find(sequence)
        found = len(hits) * self.page_size - sequence.computed
        if found <= 0:
            return 0
        self._refer(hits)
        own, sequence.pages = sequence.pages, hits + sequence.pages[len(hits) :]
        self._unreference(own[: len(hits)])
        sequence.computed += found
        return found

    def commit(self, sequence: Sequence, start: int) -> None:
        """Rows [start, sequence.computed) have just been written: publish the pages that they filled."""
        if not (self.prefix_caching and sequence.cacheable):
            return
        pages = range(start // self.page_size, sequence.computed // self.page_size)
        for index in pages:
            key, page = self._key(sequence, index), sequence.pages[index]
            # Two sequences may compute the same rows in one step; one of the two pages is enough.
            if key not in self._page_of:
                self._key_of[page] = key
                self._page_of[key] = page
        if pages and sequence.beginning is not None:
            sequence.beginning.learn(sequence.page_keys, self.page_size)

    def release(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Give back all pages. forget: their rows may be wrong, nobody shall find them any more."""
        if forget:
            for page in sequence.pages:
                self._unpublish(page)
        self._unreference(sequence.pages)
        sequence.pages = []
        sequence.computed = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError if pages are lost or counted wrongly. sequences: all that may hold pages."""
        held = Counter(page for sequence in sequences for page in sequence.pages)
        empty, idle = set(self._empty), set(self._idle)
        assert len(empty) == len(self._empty), "a page is twice among the empty ones"
        assert not empty & idle, f"pages {empty & idle} are both empty and idle"
        for page, references in enumerate(self._references):
            key = self._key_of[page]
            assert references == held[page], (
                f"page {page} counts {references} references, {held[page]} sequences hold it"
            )
            assert (references == 0) == (page in empty or page in idle), f"page {page} is lost or both used and free"
            assert key is None or self._page_of.get(key) == page, f"page {page} has a key that leads elsewhere"
            assert page not in empty or key is None, f"page {page} is empty and can still be found"
            assert page not in idle or key is not None, f"page {page} is kept but cannot be found"
        assert len(self._page_of) == sum(key is not None for key in self._key_of), "a key leads to a page without it"

    def _pages_for(self, rows: int) -> int:
        return -(-rows // self.page_size)

    def _take(self) -> int:
        if self._empty:
            page = self._empty.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._unpublish(page)
        self._references[page] = 1
        return page

    def _refer(self, hits: list[int]) -> None:
        references = self._references
        for page in hits:
            if not references[page]:
                del self._idle[page]
            references[page] += 1

    def _unreference(self, pages: list[int]) -> None:
        # The last page first, so that a chain loses its end before the pages that the end depends on.
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._key_of[page] is None:
                    self._empty.append(page)
                else:
                    self._idle[page] = None

    def _unpublish(self, page: int) -> None:
        key = self._key_of[page]
        if key is not None:
            del self._page_of[key]
            self._key_of[page] = None

    def _find(self, sequence: Sequence) -> list[int]:
        """The longest cached run of full pages from the start that leaves at least the last row out."""
        hits: list[int] = []
        if not (self.prefix_caching and sequence.cacheable):
            return hits
        if not sequence.page_keys and sequence.beginning is not None:
            sequence.page_keys += sequence.beginning.known(self.page_size)
        full = (sequence.length - 1) // self.page_size
        for key in sequence.page_keys[:full]:  # hundreds, after a long history
            page = self._page_of.get(key)
            if page is None:
                return hits
            hits.append(page)
        for index in range(len(hits), full):
            page = self._page_of.get(self._key(sequence, index))
            if page is None:
                break
            hits.append(page)
        return hits

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Key of the sequence's full page `index`. Kept with the sequence, as its tokens only ever grow."""
        keys = sequence.page_keys
        while len(keys) <= index:
            begin = len(keys) * self.page_size
            tokens = sequence.tokens[begin : begin + self.page_size]
            keys.append(_page_key(keys[-1] if keys else b"", tokens, begin, sequence.media))
        return keys[index]


def _page_key(parent: bytes, tokens: list[int], begin: int, media: tuple[MediaSpan, ...]) -> bytes:
    """A 128-bit hash: no two different pages will ever share one, so tokens need not be compared again.

    Every field has a fixed width or its length before it, so different pages never spell the same bytes.
    """
    state = blake2b(parent, digest_size=16)
    state.update(array("q", tokens).tobytes())
    first = bisect_right(media, begin, key=lambda span: span.start + span.length)
    for span in media[first:]:
        if span.start >= begin + len(tokens):
            break
        # The offset tells apart rows of the same medium: page 2 of a clip is not page 3 of it.
        state.update(struct.pack("<qqq", span.start - begin, span.length, len(span.key)))
        state.update(span.key)
    return state.digest()
