"""What is read and what computed: the best key first, a reason for every miss, and when a chunk is
exact.
"""

from dataclasses import replace

import pytest

from ragfuse.plan.controller import MEASURED, settle
from ragfuse.types.keys import ChunkKey, filler_context, token_digest
from ragfuse.types.kv import Entry
from ragfuse.types.plan import AUTO, Fetch, is_exact
from ragfuse.types.prompt import Prompt, Segment
from tests.kits.plan import plan

PREFIX, ONE, TWO, QUESTION = (1, 2, 3), (4, 5), (6, 7, 8), (9,)


def key(tokens, context=()):
    return ChunkKey("model", token_digest(tokens), token_digest(context) if context else "")


def entry(key, n_tokens, tier="memory"):
    return Entry(key, tier, n_tokens, 2, {"raw": 10 * n_tokens}, 0.0)


def chunk(tokens, start):
    return Segment(tokens, start, "chunk", (key(tokens, PREFIX), key(tokens)))


PROMPT = Prompt(
    (
        Segment(PREFIX, 0, "prefix", (key(PREFIX),)),
        chunk(ONE, 3),
        chunk(TWO, 5),
        Segment(QUESTION, 8),
    )
)
BEHIND = {
    k: entry(k, n) for k, n in ((key(PREFIX), 3), (key(ONE, PREFIX), 2), (key(TWO, PREFIX), 3))
}
ALONE = {k: entry(k, n, "disk") for k, n in ((key(ONE), 2), (key(TWO), 3))}


ABSENT = "not in the store"
EMPTY = replace(entry(key(ONE), 2), sizes={})


@pytest.mark.parametrize(
    ("entries", "lost", "read", "missed"),
    [
        ({**ALONE, **BEHIND}, (), {0: key(PREFIX), 1: key(ONE, PREFIX), 2: key(TWO, PREFIX)}, {}),
        (ALONE, (), {1: key(ONE), 2: key(TWO)}, {0: ABSENT}),
        ({}, (), {}, dict.fromkeys(range(3), ABSENT)),
        (
            BEHIND,
            (1,),
            {0: key(PREFIX), 2: key(TWO, PREFIX)},
            {1: "the stored entry could not be read"},
        ),
        (
            {key(ONE): entry(key(ONE), 99)},
            (),
            {},
            {0: ABSENT, 1: "the stored entry has a different length: 99 tokens", 2: ABSENT},
        ),
        ({key(ONE): EMPTY}, (), {}, {0: ABSENT, 1: "the stored entry is empty", 2: ABSENT}),
    ],
)
def test_the_entry_behind_the_prefix_is_read_else_the_one_alone_else_the_miss_has_a_reason(
    entries, lost, read, missed
):
    found = plan(PROMPT, entries, "hkvd", 0.2, frozenset(lost))
    assert found.fetches == tuple(
        Fetch(at, k, entries[k].tier, "raw", entries[k].nbytes, entries[k].n_tokens)
        for at, k in read.items()
    )
    assert dict(found.misses) == missed
    assert (found.policy, found.ratio, found.prompt) == ("hkvd", 0.2, PROMPT)


def fetch(index, key):
    return Fetch(index, key, "memory", "raw", 1)


def test_exact_is_what_attended_to_just_what_stands_before_it():
    assert is_exact(PROMPT, fetch(0, key(PREFIX)))
    assert is_exact(PROMPT, fetch(1, key(ONE, PREFIX)))
    assert not is_exact(PROMPT, fetch(1, key(ONE)))
    assert not is_exact(PROMPT, fetch(2, key(TWO, PREFIX)))
    assert is_exact(PROMPT, fetch(2, key(TWO, PREFIX + ONE)))
    whole = Prompt((replace(PROMPT.segments[0], kind="module"), *PROMPT.segments[1:]))
    assert is_exact(whole, fetch(0, key(PREFIX)))
    assert not is_exact(whole, fetch(0, key(PREFIX, ONE)))


def test_what_comes_from_the_prefix_cache_is_exact_also_where_it_is_part_of_an_entry():
    behind = Segment(ONE, 3, "prefix", (key((0, *ONE, 0), PREFIX),), rows=(1, 3))
    prompt = Prompt((PROMPT.segments[0], behind, chunk(TWO, 5), Segment(QUESTION, 8)))
    assert is_exact(prompt, fetch(1, behind.keys[0]))
    assert not is_exact(
        Prompt((prompt.segments[0], replace(behind, kind="chunk"), *prompt.segments[2:])),
        fetch(1, behind.keys[0]),
    )


@pytest.mark.parametrize(("begin", "start", "exact"), [(0, 4, False), (7, 10, True)])
def test_behind_a_gap_nothing_is_exact_and_a_prompt_that_starts_late_is_no_gap(begin, start, exact):
    prefix = Segment(PREFIX, begin, "prefix", (key(PREFIX),))
    prompt = Prompt((prefix, chunk(ONE, start), Segment(QUESTION, start + 2)))
    assert is_exact(prompt, fetch(1, key(ONE, PREFIX))) is exact


def amidst(tokens):
    return ChunkKey("model", token_digest(tokens), filler_context(token_digest(PREFIX)))


THREE = (10, 11, 12, 13)
LONGER = Prompt(
    (
        Segment(PREFIX, 0, "prefix", (key(PREFIX),)),
        chunk(ONE, 3),
        Segment(TWO, 5, "chunk", (amidst(TWO), key(TWO, PREFIX), key(TWO))),
        Segment(THREE, 8, "chunk", (amidst(THREE), key(THREE, PREFIX), key(THREE))),
        Segment(QUESTION, 12),
    )
)
AMIDST = {**BEHIND, amidst(TWO): entry(amidst(TWO), 3), amidst(THREE): entry(amidst(THREE), 4)}


CHOICE = ("lego", 0.06)


def test_auto_takes_the_model_s_own_choice_where_all_blended_chunks_were_encoded_amid_text():
    found = plan(LONGER, AMIDST, choice=CHOICE)
    assert [fetch.key.encoded for fetch in found.fetches] == ["alone", "prefix", "filler", "filler"]
    assert (found.policy, found.ratio) == CHOICE
    uncalibrated = plan(LONGER, AMIDST)
    assert (uncalibrated.policy, uncalibrated.ratio) == MEASURED


@pytest.mark.parametrize(
    ("gone", "n_read"),
    [
        ({amidst(TWO)}, 4),
        ({key(ONE, PREFIX)}, 4),
        (set(AMIDST) - {key(PREFIX), key(ONE, PREFIX)}, 4),
        (set(AMIDST), 3),
    ],
)
def test_auto_measures_deviations_where_a_chunk_was_not_encoded_amid_text(gone, n_read):
    others = {key(tokens): entry(key(tokens), len(tokens)) for tokens in (ONE, TWO, THREE)}
    found = plan(
        LONGER, {k: e for k, e in {**others, **AMIDST}.items() if k not in gone}, choice=CHOICE
    )
    assert len(found.fetches) == n_read
    assert (found.policy, found.ratio) == MEASURED


def test_what_was_asked_for_is_done_whatever_the_store_holds():
    assert settle("query", 0.3, CHOICE) == ("query", 0.3)
    assert settle("query", None, CHOICE) == ("query", MEASURED[1])
    assert settle(AUTO, 0.3, CHOICE) == (CHOICE[0], 0.3)
    assert settle(AUTO, 0.0) == (MEASURED[0], 0.0)
    assert settle("hkvd", None) == ("hkvd", MEASURED[1])
