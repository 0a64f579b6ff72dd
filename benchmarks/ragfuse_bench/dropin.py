"""`ragfuse bench dropin`: the same chain and the same query engine, with Hugging Face's model class
and then with ours.

The four programs are in `chains/`: real questions over real articles, retrieved by the embedded
embedder. What is timed is what a person waits for: from the question to the first text of the
answer's stream, retrieval included. The lines that a swap takes are counted in the programs' own
source. Nothing is indexed: what is reused was learnt in the round that warms up, and the rounds
behind it ask the very same prompts.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from difflib import SequenceMatcher
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from ragfuse_bench.chains.asks import MAKERS, Ask, Said
from ragfuse_bench.options import DROPIN_CHUNKS, DropinOptions
from ragfuse_bench.rounds import Times, speedup, thread_count
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.case import is_right, normalise
from ragfuse.calibration.runner import circumstances
from ragfuse.engine.engine import Engine
from ragfuse.errors import RagFuseError, SettingsError
from ragfuse.models import quietly
from ragfuse.settings import Settings
from ragfuse.telemetry.progress import progress

FRAMEWORKS = ("langchain", "llama_index")
NAMES = MappingProxyType({"langchain": "LangChain", "llama_index": "LlamaIndex"})
THEIRS = MappingProxyType({"langchain": "HuggingFacePipeline", "llama_index": "HuggingFaceLLM"})
OURS = MappingProxyType({"langchain": "ChatRagFuse", "llama_index": "RagFuseLLM"})
"""The classes that are swapped, by framework."""
ROOM = 6 << 30
"""Bytes of KV kept in memory."""


def run_dropin(options: DropinOptions, console: Console) -> dict[str, Any]:
    """The result as plain JSON types; `console` shows progress and the tables."""
    options.home.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"model": options.model}
    with thread_count(options.threads), _quiet(), quietly(options.home):
        result |= _swapped(options, console)
    given = {key: value for key, value in asdict(options).items() if key != "home"}
    result |= {
        "clock": "wall",
        "timed": "from the question to the first text of the answer's stream, retrieval included",
        "options": given,
        "chunks": DROPIN_CHUNKS,
        "rounds": options.rounds,
        **circumstances(torch.device("cpu"), options.threads),
    }
    _show(result, console)
    return result


def _swapped(options: DropinOptions, console: Console) -> dict[str, Any]:
    """Both frameworks' figures, by name, and the dtype."""
    with (
        tempfile.TemporaryDirectory(dir=options.home, prefix="dropin-") as folder,
        Engine(_swap_settings(options, Path(folder))) as engine,
    ):
        asked, splits = _material(options, engine)
        found: dict[str, Any] = {"dtype": engine.settings.dtype}
        for name in FRAMEWORKS:
            theirs, ours = (make(engine, splits) for make in MAKERS[name])
            found[name] = _measure(name, theirs, ours, asked, options, engine, console)
            del theirs, ours
            gc.collect()
    return found


def _swap_settings(options: DropinOptions, folder: Path) -> Settings:
    """All KV in memory and in a folder that goes away; no prefix caching: rounds ask the same
    prompts, of which nothing would be left to compute.
    """
    named: dict[str, Any] = {"model": options.model, "dtype": options.dtype, "home": options.home}
    return Settings(**named, store=folder, memory_bytes=ROOM, prefix_cache=False)


def _material(options: DropinOptions, engine: Engine) -> tuple[list[dict[str, Any]], list[str]]:
    """Questions on one article, and its text in chunks of up to so many tokens by LangChain's
    splitter.
    """
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    splitter = RecursiveCharacterTextSplitter.from_huggingface_tokenizer(
        engine.model.tokenizer, chunk_size=options.chunk_tokens, chunk_overlap=0
    )
    own = json.loads((files("ragfuse") / "demo" / "all_questions.json").read_text("utf-8"))
    mine = [each for each in own["questions"] if each["support"][0]["article"] == options.article]
    file = files("ragfuse") / "demo" / "corpus" / f"{options.article}.md"
    text = file.read_text("utf-8") if file.is_file() else ""
    splits = [split.strip() for split in splitter.split_text(text)][: options.splits]
    if not mine or len(splits) < DROPIN_CHUNKS:
        raise SettingsError(
            f"Wanted an article of the demo with questions and {DROPIN_CHUNKS} chunks, found"
            f" '{options.article}'."
        )
    return mine[: options.questions], splits


# measuring


def _measure(
    name: str,
    theirs: Ask,
    ours: Ask,
    asked: Sequence[Mapping[str, Any]],
    options: DropinOptions,
    engine: Engine,
    console: Console,
) -> dict[str, Any]:
    """A framework's figures: every question by both in turn, `rounds` times after one to
    warm up.
    """
    pairs: list[list[tuple[Said, Said]]] = []
    with progress(console) as bar:
        task = bar.add_task(NAMES[name], total=(options.rounds + 1) * len(asked))
        for _ in range(options.rounds + 1):
            pairs.append([])
            for item in asked:
                pairs[-1].append((theirs(item["question"]), ours(item["question"])))
                engine.flush()  # what is kept after an answer is no part of the next
                bar.advance(task)
    return summary(
        name,
        [
            question_row(item, [each[index] for each in pairs[1:]])
            for index, item in enumerate(asked)
        ],
    )


def summary(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A framework's figures over all questions; RagFuseError when the two models were given
    different chunks.
    """
    if not all(row["same_documents"] for row in rows):
        raise RagFuseError(
            f"Wanted the same chunks for both models of {NAMES[name]}, found others. This is a bug."
        )
    return {
        "ttft_ratio": median(row["ttft_ratio"] for row in rows),
        "ttft_ratio_cpu": median(row["ttft_ratio_cpu"] for row in rows),
        "same_documents": True,
        "agree": sum(row["agree"] for row in rows) / len(rows),
        "right_theirs": sum(row["right_theirs"] for row in rows),
        "right_ours": sum(row["right_ours"] for row in rows),
        "tokens_reused": sum(row["tokens_reused"] for row in rows),
        "tokens_in_all": sum(row["tokens"] for row in rows),
        "tokens": round(sum(row["tokens"] for row in rows) / len(rows)),
        "theirs_s": median(row["theirs"]["wall_s"]["median"] for row in rows),
        "ours_s": median(row["ours"]["wall_s"]["median"] for row in rows),
        "lines": lines(name),
        "questions": rows,
    }


def question_row(item: Mapping[str, Any], pairs: Sequence[tuple[Said, Said]]) -> dict[str, Any]:
    """One question's answers, and its times of all rounds."""
    theirs, ours = (Times(tuple(said[which].first for said in pairs), "wall") for which in (0, 1))
    first, ours_said = pairs[0]
    return {
        "question": item["question"],
        "gold": item["answers"][0],
        "theirs_says": first.text,
        "ours_says": ours_said.text,
        "agree": normalise(first.text) == normalise(ours_said.text),
        "right_theirs": is_right(first.text, item["answers"]),
        "right_ours": is_right(ours_said.text, item["answers"]),
        "same_documents": all(
            a.documents == b.documents and len(a.documents) == DROPIN_CHUNKS for a, b in pairs
        ),
        "tokens": ours_said.tokens,
        "tokens_reused": ours_said.reused,
        "ttft_ratio": speedup(theirs.of("wall"), ours.of("wall")),
        "ttft_ratio_cpu": speedup(theirs.of("cpu"), ours.of("cpu")),
        "theirs": theirs.as_dict(),
        "ours": ours.as_dict(),
    }


# lines


def lines(framework: str) -> dict[str, int]:
    """What a swap takes in a framework's two programs, see `counted`."""
    return counted(_source(f"{framework}_before"), _source(f"{framework}_after"))


def counted(before: Sequence[str], after: Sequence[str]) -> dict[str, int]:
    """Lines changed (or taken away), imports changed, lines added, and lines that there were,
    imports left out.
    """
    imports = sum(a != b for a, b in zip(_imports(before), _imports(after), strict=True))
    before, after = (
        [line for line in side if line not in _imports(side)] for side in (before, after)
    )
    changed = added = 0
    for tag, start, end, first, last in SequenceMatcher(
        None, before, after, autojunk=False
    ).get_opcodes():
        if tag != "equal":
            changed += end - start
            added += max(last - first - (end - start), 0)
    return {"changed": changed, "imports": imports, "added": added, "of": len(before)}


def _source(name: str) -> list[str]:
    """The statements of a program's `build`, without its head and its docstring."""
    module = import_module(f"ragfuse_bench.chains.{name}")
    body = inspect.getsource(module.build).rpartition('"""')[2]
    return [line.strip() for line in body.splitlines() if line.strip()]


def _imports(source: Sequence[str]) -> list[str]:
    return [line for line in source if line.startswith("from ")]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Hugging Face's classes say about themselves while they are used as they are
    meant to be.
    """
    before = {
        name: logging.getLogger(name).level
        for name in ("transformers", "llama_index", "langchain_huggingface")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for name in before:
                logging.getLogger(name).setLevel(logging.ERROR)
            yield
        finally:
            for name, level in before.items():
                logging.getLogger(name).setLevel(level)


# showing


def _show(result: Mapping[str, Any], console: Console) -> None:
    """Hugging Face's classes and ours, side by side."""
    table = Table(
        title=(
            f"The model swapped, {DROPIN_CHUNKS} chunks a prompt (median of {result['rounds']}"
            " rounds, wall time)"
        )
    )
    for column in (
        "framework",
        "model class",
        "first token",
        "faster",
        "tokens reused",
        "right",
        "same answer",
    ):
        table.add_column(
            column, justify="left" if column in ("framework", "model class") else "right"
        )
    for name in FRAMEWORKS:
        row = result[name]
        n = len(row["questions"])
        table.add_row(
            NAMES[name],
            THEIRS[name],
            f"{row['theirs_s']:.2f} s",
            "",
            "",
            f"{row['right_theirs']} of {n}",
        )
        cells = (
            f"{row['ours_s']:.2f} s",
            f"{row['ttft_ratio']:.1f}x",
            f"{row['tokens_reused'] / row['tokens_in_all']:.0%}",
        )
        table.add_row("", OURS[name], *cells, f"{row['right_ours']} of {n}", f"{row['agree']:.0%}")
    console.print(table)
    for name in FRAMEWORKS:
        row, cost = result[name], result[name]["lines"]
        console.print(
            f"{NAMES[name]}: the same {DROPIN_CHUNKS} chunks for both; {row['tokens']:,} prompt"
            f" tokens. Changed: {cost['changed']} line of {cost['of']} and its import; added:"
            f" {cost['added']}.",
            highlight=False,
        )
    console.print(f"Timed: {result['timed']}.", highlight=False)
