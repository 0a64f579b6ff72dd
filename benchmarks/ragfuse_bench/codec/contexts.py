"""Real text for codecs: long contexts with what follows them, and passages with questions on them.

Data sets lie in a folder under the names in `FILES`; without one, the texts that come along are taken.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ragfuse_bench.quality.cases import Packing, read_cases

from ragfuse.calibration.prompts import PROMPT_TEXTS
from ragfuse.errors import InputError
from ragfuse.hf.model import HFModel

FOLLOW = 64
"""Tokens behind a context whose prediction is compared."""
FILES: Mapping[str, str] = MappingProxyType(
    {"musique": "musique_200.jsonl", "squad": "squad2_dev.json.gz", "longchat": "cachegen_longchat.jsonl.gz"}
)
"""The file of each data set, anywhere below the folder."""
OWN = ("held-out", "demo")
"""Sets that come along: SQuAD articles that the reader never saw, and the demo's texts."""
PASSAGES = 6
"""Neighbouring paragraphs that one reading holds."""


@dataclass(frozen=True)
class Context:
    """A text whose KV is coded: ids of a data set's text, and the ids that follow it."""

    dataset: str
    id: str
    token_ids: tuple[int, ...]
    follow: tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """One question on a reading: the ids that ask it behind the context, and its known answers."""

    id: str
    token_ids: tuple[int, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """Passages with all questions on them: the context's KV is computed and coded once for all of these."""

    token_ids: tuple[int, ...]
    questions: tuple[Question, ...]


def read_contexts(model: HFModel, folder: Path | None, per_set: int, tokens: int) -> list[Context]:
    """At most `per_set` contexts of `tokens` tokens of each set in the folder; None: of the sets that come along."""
    readers: Mapping[str, Callable[[HFModel, Path, int], Iterator[Context]]] = {
        "musique": _musique,
        "squad": _squad,
        "longchat": _longchat,
    }
    found: list[Context] = []
    if folder is None:
        found += _first(per_set, _windows(model, "held-out", _articles(held_out()), tokens))
        found += _first(per_set, _windows(model, "demo", _demo(), tokens))
        return found
    for name, file in FILES.items():
        path = next(iter(sorted(folder.rglob(file))), None)
        if path is not None:
            found += _first(per_set, readers[name](model, path, tokens))
    if not found:
        raise InputError(f"Below {folder} none of these was found: {', '.join(FILES.values())}. Leave --data out.")
    return found


def absent(folder: Path | None) -> list[str]:
    """The data sets that are not at hand."""
    return [name for name, file in FILES.items() if folder is None or not any(folder.rglob(file))]


def read_questions(model: HFModel, limit: int = 0) -> list[Reading]:
    """The questions that come along, by reading, worded as for every benchmark; 0: all of them."""
    before, after = PROMPT_TEXTS["answer"]
    readings, asked = list[Reading](), 0
    for article in _json(held_out())["data"]:
        paragraphs = article["paragraphs"]
        for at in range(0, len(paragraphs), PASSAGES):
            group = paragraphs[at : at + PASSAGES]
            passages = "\n\n".join(paragraph["context"].strip() for paragraph in group)
            head, tail = _in_template(model, f"{before}{passages}", after)
            questions = tuple(_asked(model, tail, group))[: limit - asked if limit else None]
            asked += len(questions)
            readings.append(Reading((*model.tokens(head, special=True),), questions))
            if limit and asked >= limit:
                return readings
    return readings


def reading_of(model: HFModel, paragraphs: Sequence[Mapping[str, Any]]) -> Reading:
    """These paragraphs of a SQuAD article with all questions on them, worded as for every benchmark."""
    before, after = PROMPT_TEXTS["answer"]
    passages = "\n\n".join(paragraph["context"].strip() for paragraph in paragraphs)
    head, tail = _in_template(model, f"{before}{passages}", after)
    return Reading((*model.tokens(head, special=True),), tuple(_asked(model, tail, paragraphs)))


def paragraphs_of(path: Path) -> Iterator[Mapping[str, Any]]:
    """All paragraphs of a SQuAD file, article by article."""
    for article in _json(path)["data"]:
        yield from article["paragraphs"]


def held_out() -> Path:
    """The SQuAD articles that the reader never saw."""
    return Path(str(files("ragfuse_bench"))) / "sets" / "squad_held_out.json"


def _in_template(model: HFModel, text: str, after: str) -> tuple[str, str]:
    """The model's chat template around a user's message, parted where the question begins."""
    said = [{"role": "user", "content": text + after}]
    if not getattr(model.tokenizer, "chat_template", None):
        return text, after
    whole = str(model.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))
    head, found, tail = whole.partition(after)
    return (head, found + tail) if found else (text, after)


def _asked(model: HFModel, tail: str, paragraphs: Sequence[Mapping[str, Any]]) -> Iterator[Question]:
    for paragraph in paragraphs:
        for qa in paragraph["qas"]:
            answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
            if answers and not qa.get("is_impossible"):
                ids = model.tokens(tail.replace("{question}", qa["question"].strip()), special=True)
                yield Question(str(qa["id"]), tuple(ids), answers)


def _first(most: int, contexts: Iterable[Context]) -> list[Context]:
    return [context for _, context in zip(range(most), contexts, strict=False)]


def _windows(model: HFModel, name: str, texts: Iterable[str], tokens: int) -> Iterator[Context]:
    """Contexts from one stream of texts, one behind the other; what is left over at the end is too short."""
    held: list[int] = []
    count = 0
    for text in texts:
        for paragraph in text.split("\n\n"):
            held += model.tokens(f"{paragraph}\n\n")
        while len(held) >= tokens + FOLLOW:
            ids = [*model.bos, *held][: tokens + FOLLOW]
            yield Context(name, str(count), tuple(ids[:tokens]), tuple(ids[tokens:]))
            held, count = held[tokens + FOLLOW :], count + 1


def _musique(model: HFModel, path: Path, tokens: int) -> Iterator[Context]:
    """Passages of several questions until there are enough; what follows is the first one with its answer."""
    held: list[int] = []
    asked = ""
    for case in read_cases(path, Packing(lambda text: len(model.tokens(text)), context_tokens=10**9)):
        if not held:
            held, first = [*model.bos], case.id
            asked = f"\n\nQuestion: {case.question}\nAnswer: {case.answers[0]}"
        held += model.tokens("\n\n".join((*case.chunks, "")))
        if len(held) >= tokens:
            yield Context("musique", first, tuple(held[:tokens]), tuple(model.tokens(asked)[:FOLLOW]))
            held = []


def _squad(model: HFModel, path: Path, tokens: int) -> Iterator[Context]:
    return _windows(model, "squad", _articles(path), tokens)


def _longchat(model: HFModel, path: Path, tokens: int) -> Iterator[Context]:
    """The beginning of each conversation."""
    for line in gzip.decompress(path.read_bytes()).decode("utf-8").splitlines():
        row = json.loads(line)
        lines = (model.tokens(part) for part in row["prompt"].splitlines(keepends=True))
        ids = [*model.bos, *chain.from_iterable(lines)][: tokens + FOLLOW]
        if len(ids) == tokens + FOLLOW:
            yield Context("longchat", str(row["test_id"]), tuple(ids[:tokens]), tuple(ids[tokens:]))


def _articles(path: Path) -> Iterator[str]:
    for article in _json(path)["data"]:
        yield "\n\n".join(paragraph["context"].strip() for paragraph in article["paragraphs"])


def _demo() -> Iterator[str]:
    folder = Path(str(files("ragfuse"))) / "demo" / "corpus"
    yield from (path.read_text("utf-8").strip() for path in sorted(folder.glob("*.md")))


def _json(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
