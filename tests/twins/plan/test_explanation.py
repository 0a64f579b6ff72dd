"""A plan as people read it: what is read from where, what is computed and why, and when the first
token comes.
"""

from ragfuse.plan.explanation import UNMEASURED, in_words
from tests.kits.plan import machine, plan, prompt_of


def told(tiers, policy="auto", ratio=None, deadline_s=None, **byte_s):
    prompt, entries = prompt_of(tiers)
    found = plan(prompt, entries, policy, ratio, deadline_s=deadline_s, costs=machine(**byte_s))
    return in_words(found).splitlines()


def test_every_chunk_has_a_line_with_tier_and_bytes():
    first, *lines = told(["disk", "memory", ""], "hkvd", 0.2)
    wanted = [
        (first, ("9.6 MB", "0.20", "hkvd")),
        (lines[0], ("book-0", "200", "disk", "4.8 MB", "exact")),
        (lines[1], ("book-1", "200", "memory", "4.8 MB")),
        (lines[2], ("book-2", "200", "miss")),
    ]
    assert [word for line, words in wanted for word in words if word not in line] == []


def test_what_is_there_and_not_read_says_why():
    lines = told(["disk", "disk", "disk", "far", "disk"], far=1e-7)
    (line,) = [line for line in lines if "book-3" in line]
    assert "slower to load" in line
    full = told(["far"] * 2, far=1e-6)
    assert "420 tokens" in full[0]
    assert all("full prefill is faster" in line for line in full[1:3])
    late = told(["far"] * 6, "hkvd", deadline_s=0.001, far=2e-8)
    assert "cannot be met" in late[-1]


def test_without_timings_the_plan_says_how_to_get_them():
    prompt, entries = prompt_of(["disk", ""])
    assert in_words(plan(prompt, entries)).splitlines()[-1] == UNMEASURED
