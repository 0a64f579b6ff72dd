"""Sessions as values: what is dropped, what is recognised, and that they come back as they were written."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ragfuse.sessions.session import (
    HistoryMessage,
    KVSpan,
    Session,
    Turn,
    agreed,
    is_again,
    is_same,
    matched,
    prefix_digests,
    truncated,
)
from ragfuse.types.answer import ToolCall
from ragfuse.types.keys import ChunkKey


def key(number: int) -> ChunkKey:
    return ChunkKey("a" * 32, f"{number:032x}")


def kv_spans(*sizes: int) -> tuple[KVSpan, ...]:
    """Stretches of so many tokens, counted through from 0."""
    found, at = [], 0
    for number, size in enumerate(sizes):
        found.append(KVSpan.whole(tuple(range(at, at + size)), key(number)))
        at += size
    return tuple(found)


def kept(given: tuple[KVSpan, ...]) -> list[int]:
    return [token for kv_span in given for lo, hi in kv_span.kept for token in kv_span.tokens[lo:hi]]


def session(*sizes: int) -> Session:
    turns = tuple(
        Turn(
            (HistoryMessage("user", (("why?", "fresh", ""), ("a text", "chunk", "book"))), HistoryMessage("assistant")),
            (1, 2),
            (s,),
        )
        for s in kv_spans(*sizes)
    )
    return Session("one", turns)


def test_the_earliest_half_of_the_window_is_dropped() -> None:
    assert kept(truncated(kv_spans(30, 50, 40), 100, 100, 0.5)) == list(range(50, 120))


def test_nothing_is_dropped_where_all_fits() -> None:
    given = kv_spans(30, 50)
    assert truncated(given, 80, 100, 0.5) == given


def test_as_many_halves_are_dropped_as_it_takes() -> None:
    assert kept(truncated(kv_spans(30, 50, 40), 15, 100, 0.5)) == []
    assert kept(truncated(kv_spans(30, 50, 40), 25, 100, 0.25)) == list(range(100, 120))


def test_sinks_stay() -> None:
    once = truncated(kv_spans(30, 50, 40), 100, 100, 0.5, sinks=4)
    assert kept(once) == [0, 1, 2, 3, *range(54, 120)]
    assert once[0].kept == ((0, 4),)
    assert kept(truncated(once, 50, 100, 0.5, sinks=4)) == [0, 1, 2, 3, *range(104, 120)]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 150), st.integers(1, 80), st.floats(0.01, 1), st.integers(0, 9)), max_size=4),
)
def test_rows_are_dropped_as_from_a_list(sizes: list[int], rounds: list[tuple[int, int, float, int]]) -> None:
    given, wanted = kv_spans(*sizes), list(range(sum(sizes)))
    for room, window, ratio, sinks in rounds:
        given, before = truncated(given, room, window, ratio, sinks), len(wanted)
        step = max(1, int(ratio * window))
        while len(wanted) > room and len(wanted) > sinks:
            wanted = wanted[:sinks] + wanted[sinks + step :]
        assert kept(given) == wanted
        assert len(wanted) <= max(room, min(before, sinks))
    assert [(each.key, each.tokens) for each in given] == [(each.key, each.tokens) for each in kv_spans(*sizes)]


def test_a_history_is_as_long_as_its_tokens_agree() -> None:
    given = kv_spans(3, 2, 4)
    assert matched(given, range(20)) == given
    assert matched(given, [0, 1, 2, 3, 9, 5, 6, 7, 8, 9]) == given[:1]
    assert matched(given, [7]) == ()


def test_something_is_always_left_to_compute() -> None:
    given = kv_spans(3, 2, 4)
    assert matched(given, range(9)) == given[:2]
    assert matched(given, range(10)) == given


def test_messages_are_told_apart_by_all_that_they_say() -> None:
    messages = [
        HistoryMessage("user", (("a", "fresh", ""),)),
        HistoryMessage("tool", (("a", "fresh", ""),)),
        HistoryMessage("user", (("a ", "fresh", ""),)),
        HistoryMessage("assistant", (), (ToolCall("look", {"at": 1}),)),
        HistoryMessage("assistant", (), (ToolCall("look", {"at": 2}),)),
    ]
    assert len({message.digest for message in messages}) == 5
    assert (
        HistoryMessage("user", (("a", "fresh", ""), (" b", "chunk", "x"))).digest
        == HistoryMessage("user", (("a b", "fresh", ""),)).digest
    )
    assert (
        HistoryMessage("assistant", (("a ", "fresh", ""),)).digest
        == HistoryMessage("assistant", (("a", "fresh", ""),)).digest
    )


def test_a_beginning_tells_of_all_messages_before_it() -> None:
    one, two = HistoryMessage("user", (("a", "fresh", ""),)), HistoryMessage("user", (("b", "fresh", ""),))
    assert prefix_digests([one, two])[:1] == prefix_digests([one])
    assert prefix_digests([one, two])[1] != prefix_digests([two, two])[1]
    assert prefix_digests([]) == []


def test_a_session_comes_back_as_it_was_written() -> None:
    given = session(3, 4)
    given = given.with_kv_spans(truncated(given.kv_spans, 2, 4, 0.5, sinks=1))
    assert Session.from_dict(json.loads(json.dumps(given.as_dict()))) == given
    assert given.dropped == 6


def test_what_is_no_session_is_none() -> None:
    written = session(3).as_dict()
    for broken in (
        {},
        {**written, "version": 0},
        {**written, "turns": [1]},
        {**written, "turns": [{**written["turns"][0], "kv_spans": [{"tokens": [1], "key": "no key", "kept": []}]}]},
    ):
        assert Session.from_dict(broken) is None


def test_stretches_are_given_back_to_their_turns() -> None:
    given = session(3, 4, 5)
    halves = [KVSpan.whole(each.tokens[:1], key(9)) for each in given.kv_spans[:1]]
    halves += [KVSpan.whole(given.kv_spans[0].tokens[1:], key(8)), given.kv_spans[1]]
    mended = given.with_kv_spans(halves)
    assert [len(turn.kv_spans) for turn in mended.turns] == [2, 1, 0]
    assert mended.messages == given.messages


FIRST, SECOND = ("A passage.", "chunk", "book"), ("Another passage.", "chunk", "book")
PARTED, WHY = ("\n\n", "fresh", ""), ("why?", "fresh", "")


def user(*parts: tuple[str, str, str]) -> HistoryMessage:
    return HistoryMessage("user", parts)


def test_a_message_comes_again_with_its_chunks_or_without_any() -> None:
    said = user(FIRST, PARTED, SECOND, PARTED, WHY)
    assert is_again(said, said)
    assert is_again(user(WHY), said)
    assert is_again(user(WHY), user(FIRST, ("\n\nwhy?\n", "fresh", "")))
    assert is_again(user(WHY), user(WHY, PARTED, FIRST))
    assert is_again(user(WHY), user(PARTED, PARTED, WHY))  # chunks that left
    assert is_again(user(("why", "fresh", ""), ("?", "fresh", "")), said)


def test_another_question_or_other_chunks_are_never_taken_for_what_was_said() -> None:
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
    assert not is_again(replace(user(WHY), role="assistant"), HistoryMessage("assistant", (FIRST, PARTED, WHY)))
    assert is_same(user(FIRST, PARTED, WHY), user(("A passage.\n\nwhy?", "fresh", "")))


def test_turns_agree_as_far_as_their_messages_do() -> None:
    given, reply = session(3, 4), HistoryMessage("assistant")
    asked = given.messages[0]
    assert agreed(given, [asked, reply, asked, reply, user(WHY)]) == given
    assert agreed(given, [asked, reply, asked]) == agreed(given, [asked, reply, user(WHY), reply]) == given.upto(1)
    assert agreed(given, [user(WHY), reply, asked, reply]) == given.upto(0)
    assert agreed(given, [user(WHY), reply, user(WHY), reply], is_again) == given
