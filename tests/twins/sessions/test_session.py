"""Sessions as values: what is dropped, what is recognised, and that they come back as they were
written.
"""

import json
from dataclasses import replace
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from ragfuse.sessions.session import (
    Session,
    Turn,
    is_again,
    is_same,
    truncated,
)
from ragfuse.store.radix import Rows
from ragfuse.text.chat_messages import ChatMessage, Piece
from ragfuse.types.answer import ToolCall
from ragfuse.types.keys import ChunkKey


def key(number):
    return ChunkKey("a" * 32, f"{number:032x}")


def message(role, parts=(), *calls):
    return ChatMessage(role, tuple(Piece(*part) for part in parts), calls)


def path(*sizes):
    """Entries of so many tokens, one behind the other."""
    ends = tuple(accumulate(sizes))
    return tuple(
        Rows(end - size, end, key(at))
        for at, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )


def session(*sizes):
    question = message("user", (("why?", "fresh", ""), ("a text", "chunk", "book")))
    turn = Turn((question, message("assistant")))
    return Session("one", (turn,) * len(sizes), tuple(range(sum(sizes))), path(*sizes))


def without(given, lo, hi):
    """The session without these tokens."""
    cut = (part for rows in given.rows for part in (rows.cut(0, lo), rows.cut(hi, rows.hi)))
    kept = tuple(part for part in cut if part.lo < part.hi)
    return replace(given, left_out=(lo, hi), rows=kept)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 150), st.integers(1, 80)), max_size=4),
    st.integers(0, 9),
)
def test_rows_are_dropped_as_from_a_list(sizes, rounds, sinks):
    given, wanted, stay = session(*sizes), list(range(sum(sizes))), sum(sizes)
    for room, step in rounds:
        left_out = truncated(given.left_out, given.n_tokens, room, step, sinks)
        given, before = without(given, *left_out), len(wanted)
        if len(wanted) > room:
            stay = min(stay, sinks)
        while len(wanted) > room and len(wanted) > stay:
            wanted = wanted[:stay] + wanted[stay + step :]
        assert [at for rows in given.rows for at in range(rows.lo, rows.hi)] == wanted
        assert given.n_tokens - given.dropped == len(wanted) <= max(room, min(before, sinks))
    held = {rows.key: rows for rows in path(*sizes)}
    assert all(rows.row == rows.lo - held[rows.key].lo for rows in given.rows)


def test_a_history_is_as_long_as_its_tokens_agree():
    given = session(3, 2, 4)
    assert given.known(range(20)) == given.rows
    assert given.known([0, 1, 2, 3, 9, 5, 6, 7, 8, 9]) == given.rows[:1]
    assert given.known([7]) == ()

    # something is always left to compute
    assert given.known(range(9)) == given.rows[:2]


def test_messages_are_told_apart_by_all_that_they_say():
    messages = [
        message("user", (("a", "fresh", ""),)),
        message("tool", (("a", "fresh", ""),)),
        message("user", (("a ", "fresh", ""),)),
        message("assistant", (), ToolCall("look", {"at": 1})),
        message("assistant", (), ToolCall("look", {"at": 2})),
    ]
    assert [[is_same(a, b) for b in messages] for a in messages] == [
        [a is b for b in messages] for a in messages
    ]
    assert is_same(
        message("user", (("a", "fresh", ""), (" b", "chunk", "x"))),
        message("user", (("a b", "fresh", ""),)),
    )
    assert is_same(
        message("assistant", (("a ", "fresh", ""),)), message("assistant", (("a", "fresh", ""),))
    )


def test_a_session_comes_back_as_it_was_written():
    given = without(session(3, 4), 1, 7)
    again = Session.from_dict(json.loads(json.dumps(given.as_dict())))
    assert again is not None
    assert (again.as_dict(), again.rows) == (given.as_dict(), given.rows)
    assert given.dropped == 6


def test_what_is_no_session_is_none():
    written = session(3).as_dict()
    for broken in (
        {},
        {**written, "version": 0},
        {**written, "turns": [1]},
        {**written, "rows": [{**written["rows"][0], "key": "no key"}]},
    ):
        assert Session.from_dict(broken) is None


FIRST, SECOND = ("A passage.", "chunk", "book"), ("Another passage.", "chunk", "book")
PARTED, WHY = ("\n\n", "fresh", ""), ("why?", "fresh", "")


def user(*parts):
    return message("user", parts)


def test_a_message_comes_again_with_its_chunks_or_without_any():
    said = user(FIRST, PARTED, SECOND, PARTED, WHY)
    assert is_again(said, said)
    assert is_again(user(WHY), said)
    assert is_again(user(WHY), user(FIRST, ("\n\nwhy?\n", "fresh", "")))
    assert is_again(user(WHY), user(WHY, PARTED, FIRST))
    assert is_again(user(WHY), user(PARTED, PARTED, WHY))  # chunks that left
    assert is_again(user(("why", "fresh", ""), ("?", "fresh", "")), said)


def test_another_question_or_other_chunks_are_never_taken_for_what_was_said():
    said = user(FIRST, PARTED, SECOND, PARTED, WHY)
    others = [
        user(("why", "fresh", "")),
        user(("whywhy?", "fresh", "")),
        user(FIRST, PARTED, WHY),
        user(SECOND, PARTED, FIRST, PARTED, WHY),
        user(FIRST, SECOND, WHY),
        user(("A passage.\n\nAnother passage.", "fresh", "")),
        replace(user(WHY), role="system"),
        replace(user(WHY), tool_calls=(ToolCall("look", {}),)),
        user(),
    ]
    assert [other for other in others if is_again(other, said)] == []
    assert not is_again(said, user(WHY))
    assert not is_again(user(), user(FIRST, PARTED))
    assert not is_again(user(WHY, WHY), user(WHY, FIRST, WHY))  # chunks amid what it says
    assert not is_again(
        replace(user(WHY), role="assistant"), message("assistant", (FIRST, PARTED, WHY))
    )
    assert is_same(user(FIRST, PARTED, WHY), user(("A passage.\n\nwhy?", "fresh", "")))
