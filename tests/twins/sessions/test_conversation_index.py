"""Whose KV is whose, against looking through all of it every time, and what is told of a queue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragfuse.sessions.session_store import ConversationIndex
from ragfuse.types.keys import ChunkKey

KEYS = tuple(ChunkKey("m", name) for name in "pqrst")
NAMES = (("blue", "a"), ("blue", "b"), ("green", "a"))


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("note"),
            st.sampled_from(NAMES),
            st.lists(st.sampled_from(KEYS), max_size=4, unique=True),
        ),
        st.tuples(
            st.just("expect"),
            st.sampled_from(["blue", "green"]),
            st.dictionaries(st.sampled_from("ab"), st.floats(0, 9, allow_nan=False)),
        ),
    ),
    max_size=20,
)


@given(STEPS)
def test_a_key_is_its_first_waiting_conversation_s_else_its_last_one_s(steps):
    conversations, noted, told = ConversationIndex(), {}, {}
    for step, name, given_ in steps:
        if step == "note":
            conversations.note(name, given_)
            noted.pop(name, None)
            noted[name] = given_
        else:
            conversations.expect(name, given_)
            told[name] = given_
    places = {(whose, name): at for whose, names in told.items() for name, at in names.items()}
    assert conversations.places() == places
    for key in KEYS:
        owners = [name for name, keys in noted.items() if key in keys]
        waiting = sorted((name for name in owners if name in places), key=places.__getitem__)
        assert conversations.conversation_of(key) == next(iter([*waiting, *reversed(owners)]), None)
    for name in NAMES:
        assert conversations.keys(name) == tuple(noted.get(name, ()))
