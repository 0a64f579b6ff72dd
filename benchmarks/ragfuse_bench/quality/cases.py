"""Data sets as cases: a question, its known answers, and the chunks of its prompt in order.

Read from files of several shapes, told apart by what is in them. Which chunks a prompt holds is
decided here, once and from a seed, so that every method answers the same prompts.
"""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ragfuse_bench.quality.made import CHUNK_TOKENS, RULES, made_cases
from ragfuse_bench.quality.rows import ROWS, ContextRow, parsed

from ragfuse.calibration.case import Case, Task
from ragfuse.errors import InputError

Count = Callable[[str], int]
"""Tokens of a text."""

SQUAD_PASSAGES = 6
OWN = ("held-out", "demo", *RULES)
"""Sets that come along: SQuAD questions on articles the reader never saw, our own on the demo
texts, and two that are made by rule.
"""


@dataclass(frozen=True)
class Packing:
    """How passages become chunks.

    chunk_tokens: neighbouring passages are put together, and long ones cut, up to so many; 0: each
    is a chunk as it is. context_tokens: most tokens of all chunks; longer passages are cut evenly.
    passages: of a SQuAD prompt.
    """

    count: Count
    chunk_tokens: int = 0
    context_tokens: int = 2600
    passages: int = SQUAD_PASSAGES


def read_cases(name: str | Path, packing: Packing) -> list[Case]:
    """All cases of a file, or of the set that comes along under `name`; InputError if it is of no
    known shape.
    """
    if str(name) in RULES:
        texts = [text for texts in _demo_documents().values() for text in texts]
        chunks = list(
            pack(texts, replace(packing, chunk_tokens=packing.chunk_tokens or CHUNK_TOKENS))
        )
        return made_cases(str(name), chunks, packing.count, packing.context_tokens)
    path, stem = _own(str(name)) if str(name) in OWN else Path(name), set_name(name)
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
        cases = list(_cases(stem, parsed(text), packing))
    except (OSError, EOFError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"'{path}' cannot be read as a data set: {error}. {_SHAPES}") from error
    if not cases:
        raise InputError(f"'{path}' holds no question that can be asked. {_SHAPES}")
    return cases


def set_name(name: str | Path) -> str:
    """What a data set is called in results: its own name, or its file's without folder and
    endings.
    """
    return str(name) if str(name) in OWN else Path(name).name.split(".")[0]


_SHAPES = (
    "Known shapes: SQuAD; JSONL of {question, answers: [text], ctxs: [{title, text}]}; LongBench's"
    " {input, context, answers}; and the sets that come along: " + ", ".join(OWN) + "."
)


def _own(name: str) -> Path:
    if name == "demo":
        return Path(str(files("ragfuse"))) / "demo" / "all_questions.json"
    return Path(str(files("ragfuse_bench"))) / "sets" / "squad_held_out.json"


def _cases(name: str, data: Any, packing: Packing) -> Iterator[Case]:
    if isinstance(data, dict) and {"data", "questions"} & set(data):
        if packing.chunk_tokens:
            raise InputError(
                f"The chunks of {name} are paragraphs as they are: leave --chunk-tokens out."
            )
        if "data" in data:
            yield from _squad(name, data["data"], packing)
        else:
            yield from _on_demo_texts(name, data["questions"], packing)
        return
    for index, row in enumerate(ROWS.validate_python(data if isinstance(data, list) else [data])):
        if isinstance(row, ContextRow):
            question, passages = row.input, _passages(row.context)
        else:
            question, passages = row.question, [str(each) for each in row.ctxs if str(each).strip()]
        chunks = tuple(pack(_fitting(passages, packing), packing))
        if not chunks:
            raise InputError(f"{name}, row {index + 1}: wanted a passage with text, found none.")
        case_id = str(index if row.id is None else row.id)
        task: Task = "answer" if question else "summary"
        yield Case(name, case_id, question, tuple(row.answers), chunks, task)


def _squad(name: str, articles: Sequence[Mapping[str, Any]], packing: Packing) -> Iterator[Case]:
    """Each answerable question over its own paragraph among others of the file, in an order drawn
    from its id.
    """
    documents = {a["title"]: tuple(p["context"].strip() for p in a["paragraphs"]) for a in articles}
    pool = [(title, text) for title, texts in documents.items() for text in texts]
    for article in articles:
        for paragraph in article["paragraphs"]:
            gold = (article["title"], paragraph["context"].strip())
            for qa in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
                if qa.get("is_impossible") or not answers:
                    continue
                drawn = random.Random(str(qa["id"]))
                rest = [each for each in pool if each != gold]
                others = drawn.sample(rest, min(packing.passages - 1, len(rest)))
                chosen = [gold, *others]
                drawn.shuffle(chosen)
                yield Case(
                    name,
                    str(qa["id"]),
                    qa["question"].strip(),
                    answers,
                    tuple(text for _, text in chosen),
                )


def _demo_documents() -> dict[str, tuple[str, ...]]:
    """The demo's articles by name, as paragraphs."""
    return {
        path.stem: tuple(
            line.strip() for line in path.read_text("utf-8").splitlines() if len(line.split()) > 20
        )
        for path in sorted((Path(str(files("ragfuse"))) / "demo" / "corpus").glob("*.md"))
    }


def _on_demo_texts(
    name: str, questions: Sequence[Mapping[str, Any]], packing: Packing
) -> Iterator[Case]:
    """Our own questions: the paragraphs that they need among others of the same articles and of one
    more.
    """
    documents = _demo_documents()
    for row in questions:
        drawn = random.Random(str(row["id"]))
        needed = [_quoted(documents, **support) for support in row["support"]]
        articles = list(dict.fromkeys(article for article, _ in needed))
        articles.append(drawn.choice([article for article in documents if article not in articles]))
        others = [(a, text) for a in articles for text in documents[a] if (a, text) not in needed]
        chosen = [*dict.fromkeys(needed)]
        chosen += drawn.sample(others, max(0, min(packing.passages - len(chosen), len(others))))
        drawn.shuffle(chosen)
        yield Case(
            name, row["id"], row["question"], tuple(row["answers"]), tuple(t for _, t in chosen)
        )


def _quoted(documents: Mapping[str, Sequence[str]], article: str, quote: str) -> tuple[str, str]:
    found = [text for text in documents[article] if quote in text]
    if len(found) != 1:
        raise ValueError(f"'{quote}' stands in {len(found)} paragraphs of {article}")
    return article, found[0]


def _passages(context: str) -> list[str]:
    """LongBench's "Passage N:" parts, else paragraphs."""
    parts = re.split(
        r"^Passage \d+:\s*$", context.replace("NEWLINE_CHAR", "\n"), flags=re.MULTILINE
    )
    parts = parts if len(parts) > 1 else context.split("\n\n")
    return [re.sub(r"\s*\n\s*", "\n", part).strip() for part in parts if part.strip()]


def _fitting(passages: Sequence[str], packing: Packing) -> list[str]:
    """The passages, cut evenly where they are too long together: each keeps its beginning."""
    counts = [packing.count(passage) for passage in passages]
    if sum(counts) <= packing.context_tokens:
        return list(passages)
    share = packing.context_tokens / sum(counts)
    return [_head(text, int(n * share), n) for text, n in zip(passages, counts, strict=True)]


def _head(text: str, tokens: int, of: int) -> str:
    words = text.split(" ")
    return " ".join(words[: max(1, len(words) * tokens // of)])


def pack(passages: Sequence[str], packing: Packing) -> Iterator[str]:
    """Chunks of up to `chunk_tokens`: neighbours put together, long ones cut between sentences; 0:
    as they are.
    """
    if not packing.chunk_tokens:
        yield from passages
        return
    held, size = list[str](), 0
    for part, tokens in _parts(passages, packing):
        if held and size + tokens > packing.chunk_tokens:
            yield "\n\n".join(held)
            held, size = [], 0
        held.append(part)
        size += tokens
    if held:
        yield "\n\n".join(held)


def _parts(passages: Sequence[str], packing: Packing) -> Iterator[tuple[str, int]]:
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    splitter = RecursiveCharacterTextSplitter(
        chunk_size=packing.chunk_tokens,
        chunk_overlap=0,
        length_function=packing.count,
        separators=["\n\n", "\n", ". ", " ", ""],
        keep_separator="end",
    )
    for passage in passages:
        for part in splitter.split_text(passage):
            yield part.strip(), packing.count(part)
