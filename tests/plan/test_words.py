"""A plan as people read it."""

from ragfuse.plan.controller import LoadingController, plan
from ragfuse.plan.words import UNMEASURED, in_words
from tests.plan.kit import machine, prompt_of


def told(tiers, policy="auto", ratio=None, deadline_s=None, **byte_s) -> list[str]:
    prompt, entries = prompt_of(tiers)
    controller = LoadingController(machine(**byte_s))
    return in_words(controller.plan(prompt, entries, policy, ratio, deadline_s=deadline_s)).splitlines()


def test_every_chunk_has_a_line_with_tier_bytes_and_times():
    first, one, two, three, *rest = told(["disk", "memory", ""], "hkvd", 0.2)
    assert first == "2 segments from the store (9.6 MB), 1 missing, ratio 0.20 by hkvd."
    assert one.startswith("- book-0, 200 tokens: hit in disk, 4.8 MB; 0.005 s to load, 0.000 s to recompute")
    assert two.startswith("- book-1, 200 tokens: hit in memory, 4.8 MB; 0.000 s to load, 0.")
    assert three.startswith("- book-2, 200 tokens: miss (not in the store); 0.")
    assert three.endswith(" s to compute")
    assert rest[0] == "Ratio 0.20 by hkvd: as asked for."
    assert rest[1].startswith("First token after ")
    assert "Full prefill: " in rest[1]


def test_what_the_ratio_stopped_at_is_said():
    assert "Ratio 0.15 by hkvd: the least that keeps answers close" in "\n".join(told(["memory"] * 4))
    assert "as much as is computed in the time of loading" in "\n".join(told(["far"] * 6, "hkvd", far=2e-8))
    late = "\n".join(told(["far"] * 6, "hkvd", deadline_s=0.001, far=2e-8))
    assert "as much as the deadline leaves time for" in late
    assert "The deadline of 0.001 s cannot be met." in late


def test_a_chunk_that_is_there_and_not_read_says_where_and_why():
    lines = told(["disk", "disk", "disk", "far", "disk"], far=1e-7)
    (line,) = [line for line in lines if "book-3" in line]
    assert "book-3, 200 tokens: miss (slower to load than to compute) in far, 4.8 MB; 0.480 s to load, 0." in line
    assert line.endswith(" s to compute")


def test_full_prefill_says_why_and_when():
    lines = told(["far"] * 2, far=1e-6)
    assert lines[0].startswith("full prefill of 420 tokens: full prefill 0.")
    assert all("miss (full prefill is sooner) in far, 4.8 MB" in line for line in lines[1:3])
    assert lines[-1].startswith("First token after 0.")


def test_without_timings_the_plan_says_how_to_get_them():
    prompt, entries = prompt_of(["disk", ""])
    lines = in_words(plan(prompt, entries)).splitlines()
    assert lines[1:] == [
        "- book-0, 200 tokens: hit in disk, 4.8 MB",
        "- book-1, 200 tokens: miss (not in the store)",
        UNMEASURED,
    ]
