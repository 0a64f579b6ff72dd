"""What is reused where nothing was indexed: the same questions asked twice through every door, only the model ours.

A door is a program of `chains/doors.py`, or a server asked by OpenAI's own client, each with a store of its own that
begins empty. Questions are asked one after the other with the pause that a person makes; then the same again, beside
full prefill of the same prompts. A second store, where all passages were indexed first, says what indexing would add.

Counted are tokens of passages, as the trace tells of them: found, and of these the reused ones, which were not computed
again. A passage recurs where an earlier prompt of the same door held it.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

from ragfuse_bench.chains import doors as programs
from ragfuse_bench.chains.doors import TOP, Program, Wording
from ragfuse_bench.chains.places import ANSWER_S, Here, Place, Prompted, Recorder, Reply, There
from ragfuse_bench.options import QUESTIONS_PREPARED
from ragfuse_bench.throughput.served import require_server, serving
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.metrics import is_right, normalise
from ragfuse.calibration.prompts import NEW_TOKENS, PROMPT_TEXTS
from ragfuse.engine.engine import Engine
from ragfuse.errors import InputError, RagFuseError, SettingsError
from ragfuse.models import resolve_embedder
from ragfuse.settings import Settings
from ragfuse.telemetry.progress import progress

ARTICLE = "1973 oil crisis"
"""Of the held-out set: the reader was not trained on it."""
LINES = 1
"""Lines that a program changes: where its model, or its client, is made."""
TIMED = "from a prompt to its first token; of a server, from the request to the first text of the answer's stream"
EDGE = 2
"""Tokens at either end of a passage that may be others in a prompt, whose text is tokenised as a whole."""


@dataclass(frozen=True)
class Question:
    """A question and its known answers."""

    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Material:
    """What is asked, and the passages that it is asked about."""

    questions: tuple[Question, ...]
    passages: tuple[str, ...]


@dataclass(frozen=True)
class Embedders:
    """The embedder as each framework has it."""

    langchain: Any
    llama_index: Any

    @classmethod
    def embedded(cls, settings: Settings) -> Embedders:
        """The one that comes along, loaded once for each."""
        from langchain_huggingface import HuggingFaceEmbeddings
        from llama_index.embeddings.huggingface import HuggingFaceEmbedding

        path = str(resolve_embedder(settings.embedder, settings.home))
        return cls(HuggingFaceEmbeddings(model_name=path), HuggingFaceEmbedding(model_name=path, device="cpu"))


def held_out(n_questions: int = QUESTIONS_PREPARED, article: str = ARTICLE) -> Material:
    """The first passages of an article of the held-out set, and the first question on each."""
    own = json.loads((files("ragfuse_bench") / "sets" / "squad_held_out.json").read_text("utf-8"))
    paragraphs = [part for each in own["data"] if each["title"] == article for part in each["paragraphs"]]
    pairs: list[tuple[str, Question]] = []
    for paragraph in paragraphs:
        asked = next((qa for qa in paragraph["qas"] if qa["answers"] and not qa.get("is_impossible")), None)
        if asked is not None:
            answers = dict.fromkeys(answer["text"] for answer in asked["answers"])
            pairs.append((paragraph["context"].strip(), Question(asked["question"].strip(), tuple(answers))))
    if not 1 <= n_questions <= QUESTIONS_PREPARED or len(pairs) < QUESTIONS_PREPARED:
        raise SettingsError(
            f"Wanted 1 to {QUESTIONS_PREPARED} questions on an article of the held-out set, found {n_questions} on "
            f"'{article}'."
        )
    pairs = pairs[:QUESTIONS_PREPARED]
    return Material(tuple(question for _, question in pairs[:n_questions]), tuple(text for text, _ in pairs))


# what is asked, and what was reused for it


@dataclass(frozen=True)
class Share:
    """Tokens of passages; of these, those found in the store; of these, those that were not recomputed."""

    tokens: int = 0
    found: float = 0.0
    reused: float = 0.0

    def __add__(self, other: Share) -> Share:
        return Share(self.tokens + other.tokens, self.found + other.found, self.reused + other.reused)

    @property
    def found_share(self) -> float | None:
        """None where there is nothing to be found."""
        return self.found / self.tokens if self.tokens else None

    @property
    def reused_share(self) -> float | None:
        """None where there is nothing to be reused."""
        return self.reused / self.tokens if self.tokens else None


@dataclass
class Ledger:
    """Counts what prompts reuse of their passages. runs: the passages' ids; met: those that a prompt has held."""

    runs: Sequence[Sequence[int]]
    met: set[int] = field(default_factory=set)

    def count(self, prompts: Sequence[Prompted], n_passages: int = TOP) -> tuple[Share, Share]:
        """Of all passages of one question's prompts, and of those that recur.

        RagFuseError where these are not so many passages, whole: then figures would say nothing.
        """
        whole, again, seen = Share(), Share(), set[int]()
        for prompt in prompts:
            held = {n: span for n, run in enumerate(self.runs) if (span := span_of(prompt.ids, run)) is not None}
            for number, (lo, hi) in held.items():
                cut = [(max(lo, a), min(hi, b), share) for a, b, share in prompt.found]
                mine = [(b - a, share) for a, b, share in cut if a < b]
                share = Share(hi - lo, sum(n for n, _ in mine), sum(n * (1 - part) for n, part in mine))
                whole += share
                again += share if number in self.met else Share()
            self.met |= set(held)
            seen |= set(held)
        if len(seen) != n_passages:
            raise RagFuseError(f"Wanted {n_passages} whole passages in a question's prompts, found {len(seen)}.")
        return whole, again


def span_of(ids: Sequence[int], run: Sequence[int]) -> tuple[int, int] | None:
    """Rows lo:hi of a passage in a prompt; its ends may be tokenised with what stands beside them."""
    edge = EDGE if len(run) > 4 * EDGE else 0
    whole, part = array("q", ids), array("q", run[edge : len(run) - edge])
    text, sought, at = whole.tobytes(), part.tobytes(), -1
    while (at := text.find(sought, at + 1)) >= 0:
        if at % whole.itemsize == 0:
            lo = at // whole.itemsize - edge
            return max(0, lo), min(len(ids), lo + len(run))
    return None


# doors


@dataclass(frozen=True)
class Run:
    """What all doors share. settings: without a store, which each has for itself."""

    settings: Settings
    material: Material
    embedders: Embedders
    threads: int = 1
    wording: Wording = PROMPT_TEXTS["answer"]


Opened = AbstractContextManager[Place]


@dataclass(frozen=True)
class Door:
    """A way to ask. called: what people call it; open: the door over an empty store in a folder, or, indexed, over one
    that holds all passages.
    """

    name: str
    framework: str
    called: str
    open: Callable[[Run, Path, bool], Opened]


Models = Callable[[Engine, Sequence[str]], tuple[Any, Any, Callable[[], object]]]
"""A framework's model over an engine, the same without reuse, and what indexes these passages."""


def _langchain(engine: Engine, passages: Sequence[str]) -> tuple[Any, Any, Callable[[], object]]:
    from langchain_core.documents import Document
    from langchain_ragfuse import ChatRagFuse, RagFuseIndexer

    llm, plain = (ChatRagFuse(engine=engine, max_tokens=NEW_TOKENS["answer"], reuse=each) for each in (True, False))
    return llm, plain, lambda: RagFuseIndexer(llm).index([Document(text) for text in passages], progress=False)


def _llama_index(engine: Engine, passages: Sequence[str]) -> tuple[Any, Any, Callable[[], object]]:
    from llama_index.llms.ragfuse import KVPrecompute, RagFuseLLM

    llm, plain = (RagFuseLLM(engine=engine, max_tokens=NEW_TOKENS["answer"], reuse=each) for each in (True, False))
    return llm, plain, lambda: KVPrecompute(llm).ensure(programs.nodes_of(passages))


FRAMEWORKS: Mapping[str, tuple[Models, str]] = MappingProxyType(
    {"LangChain": (_langchain, "langchain"), "LlamaIndex": (_llama_index, "llama_index")}
)
"""Each framework's models, and which of `Embedders` its programs retrieve with."""


def _program(name: str, framework: str, called: str, program: Callable[..., Program]) -> Door:
    """The door that is a program of `chains/doors.py`."""
    models, embedder = FRAMEWORKS[framework]

    @contextmanager
    def opened(run: Run, folder: Path, indexed: bool) -> Iterator[Place]:
        passages = run.material.passages
        with Recorder(run.settings.model_copy(update={"store": folder})) as engine:
            llm, plain, index = models(engine, passages)
            if indexed:
                index()
            given = passages, getattr(run.embedders, embedder), run.wording
            yield Here(engine, program(llm, *given), program(plain, *given))

    return Door(name, framework, called, opened)


@contextmanager
def _server(run: Run, folder: Path, indexed: bool) -> Iterator[Place]:
    settings = run.settings.model_copy(update={"store": folder})
    if indexed:
        with Engine(settings) as engine:
            engine.ingest((text, "passages") for text in run.material.passages)
    retriever = programs.passages_by(run.material.passages, run.embedders.langchain)
    kept = {"store": folder, "disk_bytes": settings.disk_bytes}
    with (
        Engine(settings.model_copy(update={"store": None, "disk_bytes": 0})) as words,
        serving(settings, run.threads, ANSWER_S, **kept) as server,
    ):
        yield There(server, words, retriever, run.wording)


DOORS: Mapping[str, Door] = MappingProxyType(
    {
        door.name: door
        for door in (
            _program("chain", "LangChain", "create_retrieval_chain", programs.retrieval_chain),
            _program("lcel", "LangChain", "LCEL: retriever | prompt | llm", programs.lcel_chain),
            _program("agent", "LangChain", "agent with a retriever tool", programs.agent_step),
            _program("compact", "LlamaIndex", "query engine, compact", programs.compact),
            _program("refine", "LlamaIndex", "query engine, refine", programs.refine),
            _program("tree", "LlamaIndex", "query engine, tree_summarize", programs.tree_summarize),
            _program("chat", "LlamaIndex", "chat engine, context", programs.chat_engine),
            Door("server", "OpenAI client", "ragfuse serve, plain prompts", _server),
        )
    }
)
"""All ways that are measured, by name."""
NEEDED = MappingProxyType({"langchain_classic": "ragfuse-kv[demo]", "faiss": "ragfuse-kv[demo]"})
"""What they import beside the two frameworks and what ties them to ours, and what brings it."""


def require_doors(names: Sequence[str], settings: Settings) -> None:
    """InputError for a door whose packages are missing."""
    needed = dict(NEEDED) if names else {}
    if "server" in names:
        require_server(settings)
        needed["openai"] = "openai"
    missing = {package: extra for package, extra in needed.items() if find_spec(package) is None}
    if missing:
        raise InputError(
            f"Wanted packages for {', '.join(names)}, found no {', '.join(missing)}. "
            f"Install: pip install {' '.join(repr(extra) for extra in dict.fromkeys(missing.values()))}"
        )


# measuring


def run_unprepared(run: Run, names: Sequence[str], console: Console) -> dict[str, Any]:
    """The figures of these doors, one after the other, and their means; `console` shows progress."""
    rows = []
    with progress(console) as bar:
        task = bar.add_task("nothing indexed", total=5 * len(run.material.questions) * len(names))
        for name in names:
            bar.update(task, description=f"nothing indexed: {DOORS[name].called}")
            # In a context of its own: what was retrieved for one door is heard by no other.
            rows.append(Context().run(measure, DOORS[name], run, lambda: bar.advance(task)))
    return {**means(rows), "timed_doors": TIMED, "by_framework": rows}


def measure(door: Door, run: Run, tick: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """One door's figures: both passes over a store that begins empty, then one over a store that was filled."""
    asked = run.material.questions
    with tempfile.TemporaryDirectory(dir=run.settings.home, prefix="unprepared-") as folder:
        with Engine(run.settings.model_copy(update={"store": Path(folder) / "words"})) as words:
            runs = [words.tokens(text) for text in run.material.passages]
        with door.open(run, Path(folder) / "empty", False) as place:
            ledger = Ledger(runs)
            first = [_asked(place, question, ledger, True, tick) for question in asked]
            second = [_both(place, question, ledger, number, tick) for number, question in enumerate(asked)]
        with door.open(run, Path(folder) / "filled", True) as place:
            ledger = Ledger(runs)
            for question in asked:
                _asked(place, question, ledger, True, tick)
            indexed = [_asked(place, question, ledger, True, tick) for question in asked]  # the second time, as ours
    ours, full = [each[True] for each in second], [each[False] for each in second]
    texts = [[said.reply.text for said in side] for side in (ours, full, indexed)]
    right = [sum(map(_is_right, side, asked)) for side in (ours, full, indexed)]
    factors = [f.reply.first_s / o.reply.first_s for f, o in zip(full, ours, strict=True)]
    return {
        "name": door.framework,
        "door": door.called,
        "option": door.name,
        "lines_changed": LINES,
        "prompts": sum(len(said.reply.prompts) for said in first),
        "prompt_tokens": round(fmean(len(prompt.ids) for said in first for prompt in said.reply.prompts)),
        "first_pass": {
            **_shares(first),
            "recurring_share": sum((said.again for said in first), Share()).reused_share,
            "recurring_found_share": sum((said.again for said in first), Share()).found_share,
            "by_question": [_shares([said]) for said in first],
            "same_as_indexed": _same([said.reply.text for said in first], texts[2]),
            "same_as_full": _same([said.reply.text for said in first], texts[1]),
            "right": sum(map(_is_right, first, asked)),
        },
        "second_pass": {
            **_shares(ours),
            "ttft_x": median(factors),
            "ttft_ours_s": median(said.reply.first_s for said in ours),
            "ttft_full_s": median(said.reply.first_s for said in full),
            "same_as_indexed": _same(texts[0], texts[2]),
            "same_as_full": _same(texts[0], texts[1]),
            "right": right[0],
            "by_question": [_shares([said]) for said in ours],
        },
        "full": {"right": right[1]},
        "indexed": {**_shares(indexed), "right": right[2], "same_as_full": _same(texts[2], texts[1])},
        "questions": [
            {
                "question": question.text,
                "gold": question.answers[0],
                "first_says": one.reply.text,
                "second_says": two.reply.text,
                "full_says": three.reply.text,
                "indexed_says": four.reply.text,
                "ttft_first_pass_s": one.reply.first_s,
                "ttft_ours_s": two.reply.first_s,
                "ttft_full_s": three.reply.first_s,
            }
            for question, one, two, three, four in zip(asked, first, ours, full, indexed, strict=True)
        ],
    }


@dataclass(frozen=True)
class _Said:
    """A reply; what it reused of all its passages, and of those that recur."""

    reply: Reply
    whole: Share
    again: Share


def _asked(place: Place, question: Question, ledger: Ledger, reuse: bool, tick: Callable[[], object]) -> _Said:
    reply = place.ask(question.text, reuse)
    place.rest()
    tick()
    return _Said(reply, *ledger.count(reply.prompts))


def _both(
    place: Place, question: Question, ledger: Ledger, number: int, tick: Callable[[], object]
) -> dict[bool, _Said]:
    """Ours and full prefill side by side; which of them comes first changes from question to question."""
    order = (False, True) if number % 2 else (True, False)
    return {reuse: _asked(place, question, ledger, reuse, tick) for reuse in order}


def _shares(said: Sequence[_Said]) -> dict[str, float | None]:
    whole = sum((each.whole for each in said), Share())
    return {"reused_share": whole.reused_share, "found_share": whole.found_share}


def _is_right(said: _Said, question: Question) -> bool:
    return is_right(said.reply.text, question.answers)


def _same(some: Sequence[str], others: Sequence[str]) -> float:
    """The share of answers that are the same but for case, punctuation and articles."""
    return fmean(normalise(a) == normalise(b) for a, b in zip(some, others, strict=True))


FIRST = (
    "reused_share",
    "recurring_share",
    "found_share",
    "recurring_found_share",
    "same_as_indexed",
    "same_as_full",
)
SECOND = ("reused_share", "found_share", "ttft_x", "same_as_indexed", "same_as_full")


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over doors, of each figure where there is one."""
    first, second = [row["first_pass"] for row in rows], [row["second_pass"] for row in rows]
    names = ("reused_share", "found_share")
    by_question = zip(*(each["by_question"] for each in first), strict=True)
    return {
        "first_pass": {
            **{name: _mean(first, name) for name in FIRST},
            "by_question": [{name: _mean(each, name) for name in names} for each in by_question],
        },
        "second_pass": {name: _mean(second, name) for name in SECOND},
    }


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    found = [row[name] for row in rows if row[name] is not None]
    return fmean(found) if found else None


# showing


def show(result: Mapping[str, Any], console: Console) -> None:
    """The result as a table that needs no manual."""
    n = len(result["by_framework"][0]["questions"])
    table = Table(title=f"Nothing indexed, {LINES} line changed: {n} questions with {TOP} passages each, asked twice")
    table.add_column("asked through")
    columns = ("reused in pass one", "where passages recur", "in pass two", "first token", "same answer as indexed")
    for column in (*columns, "as full prefill", "right: ours, indexed, full"):
        table.add_column(column, justify="right")
    for row in result["by_framework"]:
        right = (row["second_pass"]["right"], row["indexed"]["right"], row["full"]["right"])
        table.add_row(f"{row['name']}: {row['door']}", *_cells(row), f"{', '.join(map(str, right))} of {n}")
    if len(result["by_framework"]) > 1:
        table.add_row("mean", *_cells(result), "", end_section=True)
    console.print(table)
    console.print(
        "Reused: tokens of the passages that were taken from the store and not recomputed; they recur where an "
        "earlier prompt held them. First token: of pass two, beside full prefill of the same prompt (median).",
        highlight=False,
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    first, second = row["first_pass"], row["second_pass"]
    shares = (first["reused_share"], first["recurring_share"], second["reused_share"])
    cells = ["none do" if share is None else f"{share:.0%}" for share in shares]
    same = (second["same_as_indexed"], second["same_as_full"])
    return [*cells, f"{second['ttft_x']:.1f}x as fast", *(f"{share:.0%}" for share in same)]


def draw_shares(axes: Any, result: Mapping[str, Any]) -> None:
    """What of its passages each question reused in pass one, a line for each door, on axes of a picture."""
    for number, row in enumerate(result["by_framework"]):
        shares = [each["reused_share"] for each in row["first_pass"]["by_question"]]
        label, places = f"{row['name']}: {row['door']}", range(1, len(shares) + 1)
        axes.plot(places, shares, "osD^vPX*"[number % 8] + "-", label=label, markersize=4)
    axes.set_xticks(range(1, len(result["first_pass"]["by_question"]) + 1))
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("question, asked one after the other; nothing was indexed")
    axes.set_ylabel("passage tokens reused")
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
