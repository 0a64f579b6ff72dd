"""A plan as people read it."""

from dataclasses import replace

import pytest

from ragfuse.fuse.select import POLICIES
from ragfuse.plan.explanation import UNMEASURED, in_words
from ragfuse.types.prompt import Prompt
from tests.plan.kit import machine, plan, prompt_of


def told(tiers, policy="auto", ratio=None, deadline_s=None, **byte_s) -> list[str]:
    prompt, entries = prompt_of(tiers)
    found = plan(prompt, entries, policy, ratio, deadline_s=deadline_s, costs=machine(**byte_s))
    return in_words(found).splitlines()


def test_every_chunk_has_a_line_with_tier_bytes_and_times():
    first, one, two, three, *rest = told(["disk", "memory", ""], "hkvd", 0.2)
    assert first == "2 segments from the store (9.6 MB), 1 missing, ratio 0.20 by hkvd."
    assert one == (
        "- book-0, 200 tokens: hit in disk, 4.8 MB, encoded alone; 0.005 s to load, exact here, so nothing to recompute"
    )
    assert two.startswith("- book-1, 200 tokens: hit in memory, 4.8 MB, encoded alone; 0.000 s to load, 0.")
    assert two.endswith(" s to recompute")
    assert three.startswith("- book-2, 200 tokens: miss (not in the store); 0.")
    assert three.endswith(" s to compute")
    assert rest[0] == "Ratio 0.20 by hkvd: as asked for."
    assert rest[1].startswith("How hkvd goes: layer by layer: ")
    assert rest[2].startswith("First token after ")
    assert "Full prefill: " in rest[2]


def test_what_the_ratio_stopped_at_is_said():
    assert "Ratio 0.15 by hkvd: the least that keeps answers close; more would" in "\n".join(told(["memory"] * 4))
    assert "as much as is computed in the time of loading" in "\n".join(told(["far"] * 6, "hkvd", far=2e-8))
    in_time = "\n".join(told(["far"] * 6, "hkvd", deadline_s=0.6, far=2e-8))
    assert "as much as the deadline leaves time for" in in_time
    assert "cannot be met" not in in_time
    late = "\n".join(told(["far"] * 6, "hkvd", deadline_s=0.001, far=2e-8))
    assert "the least that keeps answers close, although the deadline asks for less" in late
    assert "The deadline, 0.001 s from now, cannot be met." in late
    assert "leaves time" not in late
    assert "Rows by lego-16: what this policy always" in "\n".join(told(["memory"] * 4, "lego-16", deadline_s=0.001))


@pytest.mark.parametrize("policy", [policy.name for policy in POLICIES])
def test_what_a_policy_needs_first_is_said(policy):
    needed = [line for line in told(["memory"] * 3, policy, 0.2) if line.startswith(f"How {policy} goes: ")]
    assert bool(needed) == (policy != "none")
    all_first = policy in ("query", "query-gradual")
    assert ["three quarters of the layers are read first" in line for line in needed] == [all_first] * len(needed)
    assert ["layer by layer" in line for line in needed] == [not all_first] * len(needed)


def test_where_nothing_is_to_choose_nothing_is_said_of_it():
    for lines in (told(["disk"]), told(["", ""]), told(["memory"] * 3, "hkvd", 0.0)):
        assert not [line for line in lines if line.startswith("How ")]


@pytest.mark.parametrize(("tiers", "policy", "ratio"), [(["disk"], "hkvd", 0.2), (["disk"] * 3, "hkvd", 0.0)])
def test_no_policy_is_named_where_none_chooses(tiers, policy, ratio):
    first, *rest = told(tiers, policy, ratio)
    assert first.endswith("0 missing, nothing recomputed.")
    assert policy not in "\n".join(rest)


def test_a_policy_that_never_recomputes_is_not_named():
    lines = told(["disk"] * 3, "none")
    assert lines[0].endswith("0 missing, nothing recomputed.")
    assert not [line for line in lines if line.startswith("Rows by")]


def test_where_nothing_is_read_no_size_and_no_policy_is_named():
    prompt, entries = prompt_of(["", ""])
    assert in_words(plan(prompt, entries)).splitlines()[0] == "nothing from the store, 2 missing."


def test_an_entry_that_several_segments_use_is_read_once():
    prompt, entries = prompt_of(["disk"])
    first, second = (replace(prompt.segments[0], kind="module", start=200 * at) for at in range(2))
    lines = in_words(plan(Prompt((first, second, replace(prompt.segments[1], start=400))), entries)).splitlines()
    assert "book-0, 200 tokens: hit in disk, 4.8 MB, encoded alone" in lines[1]
    assert "book-0, 200 tokens: hit, read above, encoded alone" in lines[2]
    assert "0 B" not in "".join(lines)


def test_loading_and_computing_at_the_same_time_is_said():
    assert "computing, partly at the same time. Full" in told(["far"] * 6, "hkvd", far=2e-8)[-1]
    assert " of computing. Full" in told(["memory"] * 6, "hkvd")[-1]


def test_a_chunk_that_is_there_and_not_read_says_where_and_why():
    lines = told(["disk", "disk", "disk", "far", "disk"], far=1e-7)
    (line,) = [line for line in lines if "book-3" in line]
    assert "book-3, 200 tokens: miss (slower to load than to compute) in far, 4.8 MB, encoded alone; 0.480 s" in line
    assert line.endswith(" s to compute")


def test_full_prefill_says_why_and_when():
    lines = told(["far"] * 2, far=1e-6)
    assert lines[0].startswith("full prefill of 420 tokens: full prefill 0.")
    assert all("miss (full prefill is faster) in far, 4.8 MB" in line for line in lines[1:3])
    assert lines[-1].startswith("First token after 0.")


def test_a_tier_of_another_speed_than_measured_is_said():
    prompt, entries = prompt_of(["disk", "far", "disk"])
    for times, said in (
        (4.0, "Reading far is assumed to take 4.0 times as long"),
        (0.25, "far is assumed to take 0.25 times as long"),
    ):
        corrected = machine(far=1e-9).corrected({"far": times})
        assert said in in_words(plan(prompt, entries, "hkvd", 0.2, costs=corrected))


def test_what_has_no_source_is_called_by_what_it_is():
    prompt, entries = prompt_of(["disk", "disk"])
    for kind, name in (("prefix", "the prompt's beginning"), ("module", "a module"), ("history", "earlier turns")):
        head = replace(prompt.segments[0], kind=kind, source="")
        found = plan(Prompt((head, *prompt.segments[1:])), entries, "hkvd", 0.2, costs=machine())
        assert f"- {name}, 200 tokens: hit in disk" in in_words(found)
        assert "to load, nothing to recompute" in in_words(found)


def test_without_timings_the_plan_says_how_to_get_them():
    prompt, entries = prompt_of(["disk", ""])
    lines = in_words(plan(prompt, entries)).splitlines()
    assert lines[1:] == [
        "- book-0, 200 tokens: hit in disk, 4.8 MB, encoded alone",
        "- book-1, 200 tokens: miss (not in the store)",
        UNMEASURED,
    ]
