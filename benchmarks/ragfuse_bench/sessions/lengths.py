"""How long conversations are, and how long people pause: counted from real ones, kept as figures, drawn from again.

What comes along holds counts and quantiles alone, no text. `read_lengths` counts them anew from a folder of data.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragfuse.errors import InputError

TALKS = Path("multiturn") / "sharegpt_zh_1k.jsonl.gz"
REQUESTS = Path("traces") / "mooncake_conversation_trace.jsonl.gz"
QUANTILES = 101
MOST_TURNS = 40
"""Longer conversations are left out, as in the paper's figure 2."""
PAPER_SINGLE, PAPER_TURNS = 0.27, 5.75
"""Of ShareGPT: the share of conversations with one turn (section 2.3), turns on average (section 4.2)."""
WIDE, NARROW = 1.5, 0.25
"""Tokens of a character that is not ASCII, mostly Chinese, and of one that is: about what LLaMA's tokenizer makes."""


@dataclass(frozen=True)
class Lengths:
    """Counts and quantiles of real conversations, and where they are from.

    turns: (turns, how many conversations). questions, answers: quantiles of tokens; pauses: of seconds between requests
    of one conversation; from the least to the most, evenly spaced. alike: of questions and of answers, the share of the
    variance of log tokens that lies between conversations.
    """

    source: str
    turns: tuple[tuple[int, int], ...]
    questions: tuple[float, ...]
    answers: tuple[float, ...]
    alike: tuple[float, float]
    pauses: tuple[float, ...]

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Lengths:
        """From plain JSON types; what else is there is for people."""
        lists = {name: tuple(found[name]) for name in ("questions", "answers", "alike", "pauses")}
        return cls(source=found["source"], turns=tuple((n, many) for n, many in found["turns"]), **lists)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def turn_shares(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(turns, how likely), weighed so that the paper's share has one turn and the mean is the paper's.

        Conversations of several turns are tilted by exp(t * turns): of all ways to have this mean, the closest to what
        was counted.
        """
        several = np.array([n for n, _ in self.turns if n > 1])
        counted = np.array([many for n, many in self.turns if n > 1], dtype=float)
        wanted = (PAPER_TURNS - PAPER_SINGLE) / (1 - PAPER_SINGLE)
        low, high = -1.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            weights = counted * np.exp(middle * several)
            low, high = (middle, high) if (weights * several).sum() < wanted * weights.sum() else (low, middle)
        weights = counted * np.exp(low * several)
        shares = np.concatenate([[PAPER_SINGLE], (1 - PAPER_SINGLE) * weights / weights.sum()])
        return np.concatenate([[1], several]), shares


def packaged() -> Lengths:
    """What comes along."""
    path = Path(str(files("ragfuse_bench"))) / "sets" / "conversation_lengths.json"
    return Lengths.from_dict(json.loads(path.read_text("utf-8")))


def read_lengths(folder: Path) -> Lengths:
    """Counted anew from a folder that has `TALKS` and `REQUESTS`; InputError where it has not."""
    talks = list(_talks(lines_of(folder, TALKS)))
    several = [talk for talk in talks if len(talk) > 1]
    asked, answered = ([[turn[part] for turn in talk] for talk in talks] for part in (0, 1))
    pauses = list(pauses_of(lines_of(folder, REQUESTS)))
    return Lengths(
        source=f"{TALKS.name} ({len(talks)} conversations), {REQUESTS.name} ({len(pauses)} pauses)",
        turns=tuple(sorted(Counter(map(len, talks)).items())),
        questions=_quantiles([n for talk in asked for n in talk]),
        answers=_quantiles([n for talk in answered for n in talk]),
        alike=(_alike([[t[0] for t in talk] for talk in several]), _alike([[t[1] for t in talk] for talk in several])),
        pauses=_quantiles(pauses),
    )


def lines_of(folder: Path, path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a packed file in a folder of data; InputError if it is not there."""
    if not (folder / path).is_file():
        raise InputError(f"Wanted {path} in '{folder}', found none. Give the folder of data sets that has it.")
    with gzip.open(folder / path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def tokens_of(text: str) -> int:
    """About how many tokens LLaMA's tokenizer makes of a text; at least one."""
    narrow = sum(character.isascii() for character in text)
    return max(1, round(NARROW * narrow + WIDE * (len(text) - narrow)))


def _talks(rows: Iterator[dict[str, Any]]) -> Iterator[list[tuple[int, int]]]:
    """Conversations as (tokens of the question, of its answer); without those of no answer, or of very many turns."""
    for row in rows:
        said: dict[str, list[int]] = {"human": [], "gpt": []}
        for message in row["conversations"]:
            said[message["from"]].append(tokens_of(message["value"]))
        turns = list(zip(said["human"], said["gpt"], strict=False))
        if 0 < len(turns) <= MOST_TURNS:
            yield turns


def pauses_of(rows: Iterator[dict[str, Any]]) -> Iterator[float]:
    """Seconds from each request of a conversation to its next one, by `talks_of`."""
    last: dict[int, float] = {}
    for row, talk, _ in talks_of(rows):
        at_s = row["timestamp"] / 1000
        if talk in last:
            yield at_s - last[talk]
        last[talk] = at_s


def talks_of(rows: Iterator[dict[str, Any]], block: int = 512) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Requests of a Mooncake trace, each with a number for its conversation and the tokens that this has in common.

    A request goes on with the one whose whole blocks it begins with, the longest of these. The first block is one
    system prompt, the same in all, so it makes no conversation.
    """
    ends: dict[int, int] = {}
    for number, row in enumerate(rows):
        blocks, whole = row["hash_ids"], row["input_length"] // block
        deepest = (k for k in range(min(whole, len(blocks)), 1, -1) if blocks[k - 1] in ends)
        shared = next(deepest, 0)
        talk = ends[blocks[shared - 1]] if shared else number
        if whole > 1:
            ends[blocks[whole - 1]] = talk
        yield row, talk, shared * block


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(float(value), 1) for value in np.quantile(values, np.linspace(0, 1, QUANTILES)))


def _alike(talks: Sequence[Sequence[int]]) -> float:
    """Share of the variance of log tokens that lies between conversations."""
    logs = [np.log(talk) for talk in talks]
    within = sum(((each - each.mean()) ** 2).sum() for each in logs) / sum(len(each) - 1 for each in logs)
    return round(float(max(0.0, 1 - within / np.concatenate(logs).var())), 3)
