"""What of known passages is recovered from prompts that hold them altered, and what finding them
takes.

Passages are paragraphs of the demo's articles, every second one wrapped at 72 columns, tokenised
alone. Prompts hold them as frameworks write them: numbered, indented, escaped, shortened, split
again; each is tokenised as a whole. Recovered is the share of its tokens of passage text that stand
in a match. Speed is taken among more and more known spans, which are sentences of the same articles
in other orders.
"""

from __future__ import annotations

import json
import random
import re
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import psutil
import torch
from ragfuse_bench.options import PASSAGES_OF_A_LONG_PROMPT, MatchingOptions
from ragfuse_bench.presets import bench_model
from ragfuse_bench.rounds import thread_count
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.runner import circumstances
from ragfuse.errors import InputError
from ragfuse.hf.model import HFModel
from ragfuse.telemetry.progress import progress
from ragfuse.text.known_spans import KnownSpans
from ragfuse.types.prompt import Segment

Parts = list[tuple[str, bool]]
"""Pieces of a prompt, and whether each is text of a passage."""
Form = Callable[[Sequence[str], random.Random], Parts]
"""Writes passages into a prompt."""

OTHERS = 2
"""Articles that nothing is known of: what else stands in prompts."""
IN_A_PROMPT = 6
"""Passages of a prompt."""


def run_matching(options: MatchingOptions, console: Console) -> dict[str, Any]:
    """The result as plain JSON types; `console` shows progress and the tables."""
    options.home.mkdir(parents=True, exist_ok=True)
    with thread_count(options.threads):
        words = _Words(bench_model(options.model, "float32", "cpu", options.home))
        *articles, others = _articles()
        passages = _passages(articles, words, options)
        forms, wrong = _recovered(passages, words, options, console)
        speeds, more_wrong = _speeds(passages, articles, others, words, options, console)
    result = {
        "forms": forms,
        "ms_per_8k": speeds,
        "false_reuse": wrong + more_wrong,
        "model": options.model,
        "passages": len(passages),
        "passage_tokens": [options.least, options.longest],
        "prompts": options.prompts,
        "prompt_tokens": options.prompt_tokens,
        "rounds": options.rounds,
        "clock": "cpu",
        **circumstances(torch.device("cpu"), options.threads),
    }
    _show(result, console)
    return result


# texts


@dataclass(frozen=True)
class _Words:
    """A model's tokenizer."""

    model: HFModel

    def ids(self, text: str) -> list[int]:
        return self.model.tokens(text)

    def of_parts(self, parts: Parts) -> tuple[list[int], list[bool]]:
        """Ids of the whole, and which of them are text of a passage: those whose last
        character is.
        """
        text = "".join(part for part, _ in parts)
        owned = [mine for part, mine in parts for _ in part]
        encoded = self.model.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids: list[int] = encoded["input_ids"]
        return ids, [hi > lo and owned[hi - 1] for lo, hi in encoded["offset_mapping"]]


def _articles() -> Iterator[list[str]]:
    """Paragraphs by article, and last those of articles that nothing is known of."""
    folder = Path(str(files("ragfuse"))) / "demo" / "corpus"
    every = [
        [line.strip() for line in path.read_text("utf-8").splitlines() if len(line.split()) > 20]
        for path in sorted(folder.glob("*.md"))
    ]
    yield from every[:-OTHERS]
    yield [paragraph for article in every[-OTHERS:] for paragraph in article]


def _passages(
    articles: Sequence[Sequence[str]], words: _Words, options: MatchingOptions
) -> list[str]:
    """Paragraphs in the order of their articles, every second one wrapped."""
    found: list[str] = []
    for paragraph in (paragraph for article in articles for paragraph in article):
        text = textwrap.fill(paragraph, 72) if len(found) % 2 else paragraph
        if (
            len(found) < options.passages
            and options.least <= len(words.ids(text)) <= options.longest
        ):
            found.append(text)
    if len(found) < PASSAGES_OF_A_LONG_PROMPT:
        raise InputError(
            f"Of the articles {len(found)} paragraphs have {options.least} to {options.longest}"
            f" tokens; wanted {PASSAGES_OF_A_LONG_PROMPT} at least. Give wider bounds."
        )
    return found


# forms


def _between(
    texts: Sequence[str], joint: str, before: Callable[[int], str] = lambda index: ""
) -> Parts:
    return [
        part
        for index, text in enumerate(texts)
        for part in ((joint if index else "", False), (before(index), False), (text, True))
    ]


def _by_line(texts: Sequence[str], before: str) -> Parts:
    lines = [_between(text.split("\n"), "\n", lambda _: before) for text in texts]
    return [part for each in lines for part in [*each, ("\n\n", False)]]


def _escaped(texts: Sequence[str], ascii_only: bool) -> Parts:
    """A list in JSON. What stands for a character there is no text of the passage."""
    parts: Parts = [('[{"content": "', False)]
    for index, text in enumerate(texts):
        each = re.split(r"(\\u[0-9a-f]{4}|\\.)", json.dumps(text, ensure_ascii=ascii_only)[1:-1])
        parts += [
            ('"}, {"content": "' if index else "", False),
            *((part, at % 2 == 0) for at, part in enumerate(each)),
        ]
    return [*parts, ('"}]', False)]


def _normal(text: str) -> str:
    return " ".join(text.split())


def _middle(text: str, drawn: random.Random) -> str:
    lo = drawn.randrange(len(text) // 2)
    return text[lo : lo + len(text) // 2]


def _edited(text: str, drawn: random.Random) -> str:
    each = re.split(r"(\s+)", text)
    for index in range(0, len(each), 2):
        if drawn.random() < 1 / 30:
            each[index] = drawn.choice(("perhaps", "elsewhere", "nine", "Smith", "reported"))
    return "".join(each)


def _split_again(texts: Sequence[str], drawn: random.Random) -> Parts:
    """Pieces of all the passages, with other borders; a fifth of each is the next one's
    beginning.
    """
    whole = "\n\n".join(texts)
    size = len(whole) // len(texts)
    borders = range(drawn.randrange(size // 4, size // 2), len(whole) - size // 2, size * 4 // 5)
    return _between([whole[lo : lo + size].strip() for lo in borders], "\n\n---\n\n")


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "whole": lambda texts, drawn: _between(texts, "\n\n"),
        "joined by a space": lambda texts, drawn: _between(texts, " "),
        "numbered 1.": lambda texts, drawn: _between(texts, "\n", lambda index: f"{index + 1}. "),
        "numbered [1]": lambda texts, drawn: _between(
            texts, "\n\n", lambda index: f"[{index + 1}] "
        ),
        "indented": lambda texts, drawn: _by_line(texts, "    "),
        "quoted": lambda texts, drawn: _by_line(texts, "> "),
        "escaped": lambda texts, drawn: _escaped(texts, False),
        "escaped to ASCII": lambda texts, drawn: _escaped(texts, True),
        "white space normalised": lambda texts, drawn: _between([*map(_normal, texts)], "\n\n"),
        "truncated": lambda texts, drawn: _between(
            [text[: len(text) * 3 // 5] for text in texts], "...\n\n"
        ),
        "cut": lambda texts, drawn: _between([_middle(text, drawn) for text in texts], "\n\n"),
        "edited": lambda texts, drawn: _between([_edited(text, drawn) for text in texts], "\n\n"),
        "split again": _split_again,
    }
)
"""How passages come into prompts."""
WRAPPED = "white space normalised, wrapped lines"


def _recovered(
    passages: Sequence[str], words: _Words, options: MatchingOptions, console: Console
) -> tuple[list[dict[str, Any]], int]:
    """Of each form the share that is recovered, and how many matched ids differ."""
    known = KnownSpans()
    for passage in passages:
        known.add(words.ids(passage), passage)
    cases = [(name, form, passages) for name, form in FORMS.items()]
    cases.append(
        (WRAPPED, FORMS["white space normalised"], [text for text in passages if "\n" in text])
    )
    rows, wrong = [], 0
    with progress(console) as bar:
        for name, form, among in bar.track(cases, description="forms"):
            drawn, hit, total = random.Random(name), 0, 0
            for _ in range(options.prompts):
                first = drawn.randrange(len(among) - IN_A_PROMPT + 1)
                texts = (
                    among[first : first + IN_A_PROMPT]
                    if form is _split_again
                    else drawn.sample(among, IN_A_PROMPT)
                )
                opening: Parts = [("Answer from these texts.\n\n", False)]
                ids, mine = words.of_parts(
                    [*opening, *form(texts, drawn), ("\n\nWhat do they say?", False)]
                )
                found = known.find(ids)
                wrong += _differing(ids, found)
                hit += sum(sum(mine[match.start : match.stop]) for match in found)
                total += sum(mine)
            rows.append({"form": name, "recovered": hit / total})
    return rows, wrong


def _differing(ids: Sequence[int], found: Sequence[Segment]) -> int:
    """Matched ids that are not the span's, counted one by one."""
    return sum(
        ids[match.start + index] != match.run[match.row + index]
        for match in found
        for index in range(len(match.tokens))
    )


# speed


def _speeds(
    passages: Sequence[str],
    articles: Sequence[Sequence[str]],
    others: Sequence[str],
    words: _Words,
    options: MatchingOptions,
    console: Console,
) -> tuple[list[dict[str, Any]], int]:
    """Milliseconds to look through a long prompt among so many known spans, and how many matched
    ids differ.
    """
    drawn, known, rows, wrong = random.Random(0), KnownSpans(max_spans=max(options.known)), [], 0
    sentences = [
        words.ids(f" {sentence}")
        for article in articles
        for paragraph in article
        for sentence in re.split(r"(?<=[.!?]) ", paragraph)
    ]
    prompts = [_long_prompt(passages, others, words, options, drawn) for _ in range(4)]
    alone = [words.ids(passage) for passage in passages]
    size = sum(map(len, alone)) // len(alone)
    for passage, ids in zip(passages, alone, strict=True):
        known.add(ids, passage)
    process = psutil.Process()
    before = process.memory_info().rss
    with progress(console) as bar:
        for count in bar.track(sorted(options.known), description="among known spans"):
            began = time.perf_counter()
            while len(known) < count:
                known.add(_shuffled(sentences, size, drawn))
            known.find(prompts[0])
            filled, seconds, walls = time.perf_counter() - began, list[float](), list[float]()
            for index in range(options.rounds):
                prompt = prompts[index % len(prompts)]
                wall, began = time.perf_counter(), time.thread_time()
                found = known.find(prompt)
                seconds.append(time.thread_time() - began)
                walls.append(time.perf_counter() - wall)
                wrong += _differing(prompt, found)
            ms = {"ms": 1e3 * median(seconds), "wall_ms": 1e3 * median(walls)}
            rows.append(
                {
                    "known": count,
                    **ms,
                    "mb": (process.memory_info().rss - before) / 1e6,
                    "filled_s": filled,
                }
            )
    return rows, wrong


def _long_prompt(
    passages: Sequence[str],
    others: Sequence[str],
    words: _Words,
    options: MatchingOptions,
    drawn: random.Random,
) -> list[int]:
    """Passages in several forms, among other text."""
    texts, parts, forms = (
        drawn.sample(list(passages), PASSAGES_OF_A_LONG_PROMPT),
        Parts(),
        list(FORMS.values()),
    )
    for text in texts:
        parts += [
            (drawn.choice(others), False),
            ("\n\n", False),
            *drawn.choice(forms[:-1])([text], drawn),
            ("\n\n", False),
        ]
    ids, _ = words.of_parts(parts)
    rest = [
        token
        for text in drawn.sample(list(others), len(others))
        for token in words.ids(f"{text}\n\n")
    ]
    return (ids + rest)[: options.prompt_tokens]


def _shuffled(sentences: Sequence[list[int]], size: int, drawn: random.Random) -> list[int]:
    """A passage that nobody wrote."""
    found: list[int] = []
    while len(found) < size:
        found += drawn.choice(sentences)
    return found


def _show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(title="Tokens of known passages that are recovered")
    table.add_column("as they stand in the prompt")
    table.add_column("recovered", justify="right")
    for row in result["forms"]:
        table.add_row(row["form"], f"{100 * row['recovered']:.1f}%")
    console.print(table)
    for row in result["ms_per_8k"]:
        line = (
            f"Among {row['known']:,} known spans a prompt of {result['prompt_tokens']:,} tokens is"
            f" looked through in {row['ms']:.1f} ms; they take {row['mb']:.0f} MB."
        )
        console.print(line, highlight=False)
    console.print(f"Matched ids that differ: {result['false_reuse']}.", highlight=False)
