"""What a framework's retrievers returned: which run, task and thread it belongs to, how long it is
kept.
"""

from __future__ import annotations

import asyncio
import json
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragfuse import RetrievalRuns
from ragfuse.text import retrieval_runs
from ragfuse.text.retrieval_runs import RetrievedText


def letter(name: str) -> RetrievedText:
    return f"The {name} letter.", f"{name}.txt", ""


NAMES = (
    "one",
    "two",
    "mine",
    "harbour",
    "mill",
    "last",
    "xx",
    *map(str, range(10)),
    *(f"{number:02}" for number in range(99)),
)
ALL = " ".join(letter(name)[0] for name in NAMES)


def told(runs: RetrievalRuns, *ids: str, prompt: str = ALL) -> list[str]:
    return [source for _, source in runs.retrieved(ids, lambda: prompt)]


@pytest.fixture
def runs():
    return RetrievalRuns("test")


def test_a_run_knows_what_was_retrieved_in_all_runs_below_the_outermost(
    runs,
):
    runs.begin("chain", None, [letter("mill")])
    runs.begin("retriever", "chain")
    runs.end("retriever", [letter("harbour")])
    runs.begin("other", None)
    assert told(runs, "chain") == ["harbour.txt", "mill.txt"]
    assert told(runs, "other") == []


def test_what_a_model_was_asked_about_is_dropped_with_its_run_and_the_rest_kept_for_the_thread(
    runs,
):
    runs.begin("asks", None, [letter("mill")])
    assert told(runs, "asks") == ["mill.txt"]
    runs.end("asks")
    runs.begin("retrieves", None)
    runs.end("retrieves", [letter("harbour")])
    assert told(runs) == ["harbour.txt"]
    assert len(runs) == 0


def test_a_run_that_outlasts_its_parent_keeps_its_texts_until_it_ends(runs):
    runs.begin("query", None, [letter("mill")])
    runs.begin("stream", "query")
    told(runs, "stream")
    runs.end("query")
    assert len(runs) == 1
    assert told(runs, "stream") == ["mill.txt"]
    runs.end("stream", unread=True)
    assert told(runs) == ["mill.txt"]  # the stream may still be read


def test_a_text_is_returned_as_the_prompt_has_it(runs):
    whole, bare = "file: a.txt\n\nIt's dug\nin 1847.", "It's dug\nin 1847."
    runs.record(None, [(whole, "a.txt", bare)])
    for prompt, form in (
        (f"Read: {whole}", whole),
        (f"Read: {bare}", bare),
        (f"Read: {[bare]}", "It's dug\\nin 1847."),
    ):
        assert runs.retrieved([], lambda prompt=prompt: prompt) == ((form, "a.txt"),)  # type: ignore[misc]
    assert runs.retrieved([], lambda: "Nothing of it.") == ()


STORY = " ".join(
    f"In {year} ship {year * 7919 % 1000} came in and left with {year % 83} bales."
    for year in range(60)
)


@pytest.mark.parametrize(
    "prompt",
    [
        json.dumps({"text": STORY}),
        "\n".join(textwrap.wrap(STORY, 40)),
        "> " + "\n> ".join(textwrap.wrap(STORY, 60)),
        STORY[600:1200],
        STORY.replace(" ", "  ").replace(".", " ."),
    ],
    ids=["escaped", "wrapped", "quoted", "cut", "spaced"],
)
def test_a_text_that_stands_in_a_prompt_altered_is_told_as_it_was_retrieved(runs, prompt):
    runs.record(None, [(STORY, "ships.txt", "")])
    assert runs.retrieved([], lambda: f"Answer by this:\n{prompt}\nWhen?") == (
        (STORY, "ships.txt"),
    )


def test_a_thread_that_serves_several_tenants_shows_none_the_texts_of_another(
    runs,
):
    runs.record(None, [letter("harbour")])
    assert told(runs, prompt="Somebody else asks: what does the mill letter say?") == []
    assert told(runs, prompt="What does it say? The harbour letter.") == ["harbour.txt"]


def test_the_newest_texts_are_kept_in_number_and_in_characters(runs, monkeypatch):
    for number in range(retrieval_runs.MAX_TEXTS + 3):
        runs.record(None, [letter(f"{number:02}")])
    assert told(runs) == [
        f"{number:02}.txt" for number in reversed(range(3, retrieval_runs.MAX_TEXTS + 3))
    ]
    monkeypatch.setattr(retrieval_runs, "MAX_RETRIEVED_CHARS", 3 * len(letter("00")[0]))
    runs.record(None, [letter("xx")])
    assert len(told(runs)) == 3
    assert told(runs)[0] == "xx.txt"


def test_runs_that_never_end_are_given_up(monkeypatch):
    monkeypatch.setattr(retrieval_runs, "MAX_RUNS", 6)
    runs = RetrievalRuns("test")
    for number in range(5):
        runs.begin(f"chain {number}", None, [letter(str(number))])
        runs.begin(f"retriever {number}", f"chain {number}")
    known = [bool(told(runs, f"chain {number}")) for number in range(5)]
    assert known == [False, False, True, True, True]
    assert len(runs) == 6


def test_threads_and_tasks_begin_with_what_their_context_knew_and_keep_their_own(
    runs,
):
    async def task(name: str) -> list[str]:
        runs.record(None, [letter(name)])
        await asyncio.sleep(0)
        return told(runs)

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(task("one"), task("two")))

    runs.record(None, [letter("mine")])
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(told, runs).result() == []
    assert asyncio.run(both()) == [["one.txt", "mine.txt"], ["two.txt", "mine.txt"]]
    assert told(runs) == ["mine.txt"]
