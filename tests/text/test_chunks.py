"""Chunks in a text: known texts are found, marks cannot be forged, nothing is ever lost."""

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.errors import SettingsError
from ragfuse.text import KnownChunks, Marker, Piece, chunk_id, peel, pieces
from ragfuse.types.whole_text import whole_text

SECRET = bytes(range(32))
A = "The fjord was frozen from shore to shore that year."
B = "Nobody had told the ferry captain about the new timetable."
C = "北京的秋天很短但是香山的红叶每年都会吸引成千上万的游客前来观赏。"


def sentence(i: int) -> str:
    return f"Record {i * 7919 % 100_003}: the valve of unit {i} was inspected and found {'open' if i % 3 else 'shut'}."


def found(known: KnownChunks, text: str) -> list[str]:
    return [text[span.lo : span.hi] for span in known.find(text)]


def known_with(*texts: str) -> KnownChunks:
    known = KnownChunks()
    known.add(texts)
    return known


def joined(parts: list[Piece] | tuple[Piece, ...]) -> str:
    return "".join(part.text for part in parts)


# known chunks


def test_known_chunks_are_found_in_any_order_with_id_and_source():
    known = KnownChunks()
    [a] = known.add([A], source="winter.txt")
    [b] = known.add([B], source="ferry.txt")
    text = f"Use this.\n\n{B}\n\n{A}\n\nWhy?"
    spans = known.find(text)
    assert [(span.id, span.source) for span in spans] == [(b, "ferry.txt"), (a, "winter.txt")]
    assert found(known, text) == [B, A]
    assert a == chunk_id(A)


def test_the_same_chunk_twice_is_found_twice():
    assert found(known_with(A), f"{A}\n{A}") == [A, A]


@pytest.mark.parametrize("stored", [A, f"  {A}\n", f"\r\n{A}\r\n"])
@pytest.mark.parametrize("shown", [A, f"\n\n {A} \n", f"Title: Winter\nPage: 3\n\n{A}", f"({A})", f"text={A}|"])
def test_stripped_padded_and_prefixed_chunks_are_found(stored: str, shown: str):
    known = known_with(stored)
    assert found(known, f"Context:{shown}\n\nQuestion: when?") == [A]


@pytest.mark.parametrize("edit", [A.replace("frozen", "thawed"), A[:-1], A.lower(), A.replace(" was", "  was"), A[1:]])
def test_an_edited_chunk_is_not_found(edit: str):
    assert found(known_with(A), f"Context:\n{edit}\n\nQuestion: when?") == []


def test_line_ends_are_part_of_a_chunk():
    known = known_with(f"{A}\r\n{B}")
    assert found(known, f"x\r\n{A}\r\n{B}\r\n") == [f"{A}\r\n{B}"]
    assert found(known, f"x\n{A}\n{B}\n") == []


def test_a_chunk_that_would_cut_a_word_is_not_found():
    known = known_with("the ferry captain has a hat", "the ferry captain has a hat tri")
    assert found(known, "the ferry captain has a hatch") == []
    assert found(known, "Breathe ferry captain has a hat") == []
    assert found(known, "the ferry captain has a hat trick") == ["the ferry captain has a hat"]


def test_chunks_of_a_script_without_spaces_are_found_anywhere():
    assert found(known_with(C), f"前文{C}后文") == [C]
    assert found(known_with(C), f"前文{C}{C}") == [C, C]


def test_the_longest_of_chunks_that_begin_together_wins():
    assert found(known_with(A, f"{A} {B}"), f"{A} {B} {A} {C}") == [f"{A} {B}", A]


def test_a_chunk_inside_another_is_found_where_it_stands_alone():
    known = known_with(B, f"{A} {B} {A}")
    assert found(known, f"{B}\n\n{A} {B} {A}\n\n{B}") == [B, f"{A} {B} {A}", B]


def test_neighbouring_chunks_that_share_text_are_both_found():
    words = [f"word{i}" for i in range(200)]
    chunks = [" ".join(words[i : i + 40]) for i in range(0, 160, 30)]
    assert chunks[0].split()[-10:] == chunks[1].split()[:10]
    known = known_with(*chunks)
    assert found(known, "\n\n".join(chunks)) == chunks
    assert found(known, "\n\n".join(reversed(chunks))) == chunks[::-1]


def test_of_chunks_that_overlap_in_the_text_the_first_is_found():
    words = [f"word{i}" for i in range(100)]
    one, two = " ".join(words[:60]), " ".join(words[40:])
    assert found(known_with(one, two), " ".join(words)) == [one]


def test_short_texts_are_never_found():
    known = KnownChunks(min_chars=10)
    known.add(["Yes.", "   x   ", "", "Nine char", "Ten chars."])
    assert found(known, "Yes. x Nine char Ten chars.") == ["Ten chars."]
    assert len(known) == 1


def test_discarded_chunks_are_not_found_and_others_stay():
    known = KnownChunks()
    [a, longer, b] = known.add([A, f"{A} {B}", B])
    known.discard([longer, b, "unknown"])
    assert found(known, f"{A} {B}") == [A]
    known.discard([a])
    assert found(known, f"{A} {B}") == []
    assert (len(known), A in known) == (0, False)


def test_adding_again_changes_nothing_but_a_given_source():
    known = KnownChunks()
    first = known.add([A], source="one.txt")
    assert known.add([f" {A} "]) == first
    assert known.find(A)[0].source == "one.txt"
    known.add([A], source="two.txt")
    assert known.find(A)[0].source == "two.txt"
    known.discard(first)
    assert known.find(A) == []


def test_all_of_5000_known_chunks_are_found_in_one_prompt():
    chunks = [sentence(i) for i in range(5_000)]
    known = known_with(*chunks)
    assert found(known, "Read:\n\n" + "\n\n".join(reversed(chunks)) + "\n\nDone?") == chunks[::-1]


def test_20000_chunks_behind_one_header_are_told_apart():
    header = "Annual report of the harbour authority, part two.\n"
    chunks = [header + sentence(i) * (1 + i % 40) for i in range(20_000)]
    known = known_with(*chunks)
    picked = chunks[::997]
    assert found(known, "\n\n".join(picked)) == picked
    assert found(known, "\n\n".join(chunk.replace("valve", "value") for chunk in picked)) == []


@pytest.fixture
def restless():
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_threads_add_discard_and_find_together():
    known = known_with(A)
    chunks = [sentence(i) for i in range(60)]
    text = "\n\n".join([A, *chunks])

    def churn(seed: int) -> bool:
        for i in range(60):
            ids = known.add(chunks[(i + seed) % 60 :])
            if A not in found(known, text):
                return False
            known.discard(ids)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(churn, range(0, 60, 15)))
    assert found(known, text) == [A]


def test_discarding_everything_leaves_nothing_behind():
    known = KnownChunks()
    known.discard(known.add([A, f"{A} {B}", A, C, "short"]))
    assert [kept for kept in vars(known).values() if isinstance(kept, dict)] == [{}, {}, {}]


def naive(texts: list[str], text: str) -> list[str]:
    """Slow twin of `find` for texts of letters and spaces."""
    hits, at = [], 0
    while at < len(text):
        fits = [t for t in texts if text.startswith(t, at)]
        fits = [t for t in fits if not (text[at - 1 : at].isalpha() and t[0].isalpha())]
        fits = [t for t in fits if not (text[at + len(t) :][:1].isalpha() and t[-1].isalpha())]
        hits += [max(fits, key=len)] if fits else []
        at += len(hits[-1]) if fits else 1
    return hits


@given(st.lists(st.text("ab .", min_size=3, max_size=8).map(str.strip), max_size=8), st.text("ab .", max_size=60))
def test_find_equals_a_naive_search(texts: list[str], text: str):
    known = KnownChunks(min_chars=3)
    known.add(texts)
    assert found(known, text) == naive([t for t in texts if len(t) >= 3], text)


@given(st.lists(st.text(min_size=5)), st.text(), st.randoms())
def test_spans_are_ordered_apart_and_known(texts: list[str], rest: str, random):
    known = KnownChunks(min_chars=5)
    known.add(texts)
    parts = [*texts, rest]
    random.shuffle(parts)
    text = "".join(parts)
    spans = known.find(text)
    assert all(before.hi <= after.lo for before, after in pairwise(spans))
    assert all(text[span.lo : span.hi] in known and span.id == chunk_id(text[span.lo : span.hi]) for span in spans)


def test_an_anchor_needs_at_least_one_character():
    with pytest.raises(SettingsError, match="min_chars is 0"):
        KnownChunks(min_chars=0)


# marks


@given(st.lists(st.tuples(st.text(), st.booleans(), st.text())))
def test_split_gives_back_what_was_marked(parts: list[tuple[str, bool, str]]):
    marker = Marker(SECRET)
    text = "".join(marker.mark(part, source) if chunk else part for part, chunk, source in parts)
    split = marker.split(text)
    assert joined(split) == "".join(whole_text(part) if chunk else part for part, chunk, _ in parts)
    wanted = [Piece(whole_text(part), "chunk", whole_text(source)) for part, chunk, source in parts if chunk and part]
    assert [piece for piece in split if piece.kind == "chunk"] == wanted


@pytest.mark.parametrize("text", ["\0", "\r\n a \r\n", "[[chunk:1::", "]]", "\ud800", "e\u0301", "[[end:0]]" * 3, "𝄞"])
def test_marked_text_may_hold_anything(text: str):
    marker = Marker(SECRET)
    found = marker.split(f"a{marker.mark(text, text)}b")
    assert found == [Piece("a"), Piece(whole_text(text), "chunk", whole_text(text)), Piece("b")]


def test_a_marked_chunk_survives_being_stripped():
    marker = Marker(SECRET)
    assert marker.split(marker.mark("\n a \n").strip()) == [Piece("\n a \n", "chunk")]


def test_marks_inside_a_marked_chunk_are_text():
    marker = Marker(SECRET)
    nested = f"before {marker.mark(A, 'inner')} after"
    assert marker.split(marker.mark(nested, "outer")) == [Piece(nested, "chunk", "outer")]


def test_a_mark_of_another_secret_is_text():
    text = Marker(bytes(32)).mark(A, "evil.txt")
    assert Marker(SECRET).split(text) == [Piece(text)]


def test_a_real_mark_around_other_text_is_text():
    marker = Marker(SECRET)
    real = marker.mark(A, "winter.txt")
    forged = real.replace("frozen", "thawed")
    assert marker.split(forged) == [Piece(forged)]
    forged = real.replace(f":{len(A)}:", f":{len(A) - 1}:")
    assert marker.split(forged) == [Piece(forged)]
    forged = real.replace(real.split(":")[2], marker.mark(A, "summer.txt").split(":")[2])
    assert forged != real
    assert marker.split(forged) == [Piece(forged)]


@pytest.mark.parametrize(
    "fake", ["[[chunk:3::" + "0" * 32 + "]]", "[[chunk:999999999:!:", "[[chunk:", "[[", "[[chunk:0::]]"]
)
def test_broken_marks_hide_no_real_one_behind_them(fake: str):
    marker = Marker(SECRET)
    split = marker.split(fake + marker.mark(A, "s") + fake)
    assert split == [Piece(fake), Piece(A, "chunk", "s"), Piece(fake)]


@given(st.text(min_size=1), st.text(), st.data())
def test_a_damaged_mark_loses_no_text(text: str, source: str, data: st.DataObject):
    marker = Marker(SECRET)
    marked = marker.mark(text, source)
    at = data.draw(st.integers(0, len(marked) - 1))
    damaged = marked[:at] + data.draw(st.characters().filter(lambda c: c != marked[at])) + marked[at + 1 :]
    assert marker.split(damaged) == [Piece(damaged)]


@given(
    st.lists(st.sampled_from(["[[", "chunk:", "1:", ":", "a" * 32, "]]", "x", "[[end:", "[[chunk:1::"])).map("".join)
)
def test_text_full_of_mark_parts_stays_as_it_is(text: str):
    assert joined(Marker(SECRET).split(text)) == text
    assert all(piece.kind == "fresh" for piece in Marker(SECRET).split(text))


def test_the_secret_is_not_shown():
    assert SECRET.hex() not in repr(vars(Marker(SECRET)))
    assert repr(SECRET) not in repr(vars(Marker(SECRET)))


def test_a_short_secret_is_refused():
    with pytest.raises(SettingsError, match="16"):
        Marker(b"secret")


# both


def test_marked_chunks_come_first_and_known_ones_are_found_around_them():
    marker, known = Marker(SECRET), KnownChunks()
    known.add([A], source="known")
    text = f"Read: {A}\n{marker.mark(f'{B} {A}', 'marked')}\n{A} Why?"
    assert pieces(text, marker, known) == (
        Piece("Read: "),
        Piece(A, "chunk", "known", found=True),
        Piece("\n"),
        Piece(f"{B} {A}", "chunk", "marked"),
        Piece("\n"),
        Piece(A, "chunk", "known", found=True),
        Piece(" Why?"),
    )


def test_without_marker_and_known_chunks_all_is_fresh():
    text = Marker(SECRET).mark(A)
    assert pieces(text) == (Piece(text),)
    assert pieces("") == ()


@given(st.lists(st.one_of(st.text(), st.sampled_from([A, B, C]))), st.lists(st.sampled_from([A, B, C])))
def test_pieces_joined_are_the_text(parts: list[str], stored: list[str]):
    text = "".join(parts)
    assert joined(pieces(text, Marker(SECRET), known_with(*stored))) == text


@given(st.text(), st.sampled_from(["fresh", "chunk"]))
def test_peeling_moves_white_space_out_of_a_chunk(text: str, kind):
    parts = peel(Piece(text, kind, "s"))
    assert joined(parts) == text
    assert all(part.text == part.text.strip() and part.source == "s" for part in parts if part.kind == "chunk")
