"""Documents that were retrieved and not encoded yet: tokenised once, found beside encoded chunks, bounded."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from string import ascii_letters

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.text import retrieved_documents as module
from ragfuse.text.known_spans import KnownSpan, KnownSpans, Match
from ragfuse.text.retrieved_documents import COVERED_SHARE, RetrievedDocuments
from ragfuse.text.span_runs import MIN_RUN_TOKENS


def ids_of(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def text_of(number: int, size: int = 60) -> str:
    return "".join(Random(number).choices(ascii_letters, k=size))


def test_a_document_is_tokenised_once_however_often_it_is_met() -> None:
    read: list[str] = []
    documents = RetrievedDocuments(8, lambda text: read.append(text) or ids_of(text))  # type: ignore[func-returns-value]
    for _ in range(3):
        assert documents.add(text_of(1), "a", KnownSpans())
        assert not documents.add("short", "a", KnownSpans())
    assert read == [text_of(1), "short"]
    documents.discard(ids_of(text_of(1)), text_of(1))
    documents.add(text_of(1), "a", KnownSpans())
    assert read == [text_of(1), "short", text_of(1)]


def test_the_documents_are_bounded_in_number_and_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RETRIEVED_TOKENS", 300)
    documents = RetrievedDocuments(8, ids_of)
    for number in range(20):
        documents.add(text_of(number), str(number), KnownSpans())
    prompt = [token for number in range(20) for token in (*ids_of(text_of(number)), 1, 2, 3)]
    assert {match.span.source for match in documents.find(prompt, [])} == {"15", "16", "17", "18", "19"}


def test_of_a_document_that_chunks_say_enough_of_the_chunks_are_taken() -> None:
    documents = RetrievedDocuments(8, ids_of)
    text = text_of(1, 100)
    documents.add(text, "new", KnownSpans())
    for share, wanted in ((0.9, "old"), (0.5, "new")):
        known = KnownSpans()
        known.add(ids_of(text[: int(100 * share)]), source="old")
        found = documents.find(ids_of(text), known.find(ids_of(text)))
        assert {match.span.source for match in found} == {wanted}


def spans(draw: st.DrawFn, name: str) -> list[Match]:
    """Matches that do not overlap, of few spans."""
    at, found = 0, []
    for gap, size, which in draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12), st.integers(0, 2)))):
        lo = at + gap
        at = lo + size
        found.append(Match(lo, at, KnownSpan((which,), source=f"{name}{which}"), 7 * lo))
    return found


@st.composite
def both(draw: st.DrawFn) -> tuple[list[Match], list[Match]]:
    return spans(draw, "old"), spans(draw, "new")


def slowly(retrieved: Sequence[Match], found: Sequence[Match]) -> set[tuple[int, str]]:
    """(place in the prompt, source) of every token that is found, by looking at each token."""
    old = {at: match for match in found for at in range(match.lo, match.hi)}
    own = set()
    for match in retrieved:
        tokens = [at for each in retrieved if each.span == match.span for at in range(each.lo, each.hi)]
        if sum(at in old for at in tokens) < COVERED_SHARE * len(tokens):
            own |= {(at, match.span.source) for at in range(match.lo, match.hi)}
    taken = {at for at, _ in own}
    for match in found:
        piece: list[int] = []
        is_cut = any(at in taken for at in range(match.lo, match.hi))
        for at in range(match.lo, match.hi + 1):
            if at < match.hi and at not in taken:
                piece.append(at)
            else:
                if len(piece) >= MIN_RUN_TOKENS or not is_cut:
                    own |= {(place, match.span.source) for place in piece}
                piece = []
    return own


@given(both())
def test_one_pass_over_both_gives_what_looking_at_each_token_gives(matches: tuple[list[Match], list[Match]]) -> None:
    found, retrieved = matches
    documents = RetrievedDocuments(8, ids_of)
    documents.add(text_of(1), "", KnownSpans())
    documents._spans.find = lambda ids: retrieved  # type: ignore[method-assign]
    given = documents.find([], found)
    assert [match.lo for match in given] == sorted(match.lo for match in given)
    assert {(at, match.span.source) for match in given for at in range(match.lo, match.hi)} == slowly(retrieved, found)
    for match in given:
        assert any(
            m.span == match.span and m.lo <= match.lo and m.row - m.lo == match.row - match.lo
            for m in (*found, *retrieved)
        )


def test_spans_that_share_a_run_with_ids_are_all_told() -> None:
    known = KnownSpans()
    text = text_of(3, 200)
    for number in range(40):  # more spans with one beginning than a search looks at
        known.add(ids_of(text[:80] + text_of(number, 20)), source="seen")
    known.add(ids_of(text[150:] + text_of(77, 80)), source="seen")
    known.add(ids_of(text[:90]), source="indexed")
    known.add(ids_of(text_of(99, 90)), source="seen")
    known.add(ids_of(text[20:43]), source="seen")
    assert len(known.sharing(ids_of(text), "seen")) == 41
    assert known.sharing([], "seen") == known.sharing(ids_of("no"), "seen") == []
