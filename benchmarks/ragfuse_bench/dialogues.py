"""What is said in the benchmark of conversations: real dialogues from a folder of data sets, or one of our own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any

from ragfuse.errors import InputError

SETS = ("mtbench101.jsonl.gz", "mt_bench.jsonl", "sharegpt_zh_1k.jsonl.gz")
"""Files of multi-turn dialogues that are looked for in the folder or in its `multiturn`."""


@dataclass(frozen=True)
class Dialogue:
    """One message for each turn, the first one long; text: much of both sides, to measure perplexity on."""

    source: str
    questions: tuple[str, ...]
    text: str


def dialogue_of(folder: Path | None, turns: int, opening_tokens: int, count: Callable[[str], int]) -> Dialogue:
    """A conversation of so many turns, whose first message has about so many tokens, as `count` counts them."""
    said = _own() if folder is None else _read(folder)
    opening = [said.opening]
    for part in cycle(said.texts):
        if count("\n\n".join(opening)) >= opening_tokens:
            break
        opening.append(part)
    first = "\n\n".join([*opening, said.questions[0]])
    later = [question for question, _ in zip(cycle(said.questions[1:]), range(turns - 1), strict=False)]
    return Dialogue(said.source, (first, *later), "\n\n".join([*said.texts, *said.questions] * said.times))


@dataclass(frozen=True)
class _Said:
    source: str
    opening: str
    texts: tuple[str, ...]
    questions: tuple[str, ...]
    times: int = 1


def _own() -> _Said:
    """The notes that come along; they come again and again until there are enough."""
    found = json.loads((files("ragfuse_bench") / "sets" / "conversation.json").read_text(encoding="utf-8"))
    return _Said("sets/conversation.json", found["opening"], tuple(found["notes"]), tuple(found["questions"]), 8)


def _read(folder: Path) -> _Said:
    """Dialogues of a folder: their own turns as they follow each other, one dialogue after the other."""
    places = [place / name for name in SETS for place in (folder, folder / "multiturn") if (place / name).is_file()]
    if not places:
        raise InputError(f"Wanted one of {', '.join(SETS)} in '{folder}', found none. Name another folder: --data.")
    dialogues = [pairs for pairs in _dialogues(places[0]) if pairs]
    texts = tuple("\n".join(f"User: {user}\nAssistant: {bot}" for user, bot in pairs) for pairs in dialogues)
    asked = tuple(user for pairs in dialogues[::-1] for user, _ in pairs if 20 <= len(user) <= 400)
    return _Said(places[0].name, "These are conversations that I would like to talk about.", texts, asked)


def _dialogues(path: Path) -> Iterator[list[tuple[str, str]]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for line in lines:
            yield _pairs(json.loads(line))


def _pairs(row: dict[str, Any]) -> list[tuple[str, str]]:
    """What was said and answered, of the three forms that these files have."""
    if "history" in row:
        return [(each["user"], each["bot"]) for each in row["history"]]
    if "turns" in row:
        return [(said, "") for said in row["turns"]]
    said: Sequence[str] = [each["value"] for each in row.get("conversations", ())]
    return list(zip(said[::2], said[1::2], strict=False))
