"""Questions with deadlines over a line that changes: text, 8 bits, one level, and levels as the
deadline allows.

A real Redis behind a real socket whose bandwidth follows a trace; the store, the streams and the
prefill are those of any engine. Wall time: waiting is what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from statistics import mean, median
from typing import Any

from ragfuse_bench.codec.answers import Judge
from ragfuse_bench.codec.coded import Codecs, codecs_of
from ragfuse_bench.codec.contexts import Reading
from ragfuse_bench.line import constant, line_to
from ragfuse_bench.options import StreamOptions
from ragfuse_bench.presets import fusable_model
from ragfuse_bench.rounds import thread_count
from ragfuse_bench.stream.lines import Course, PacedTier, Scale, drawn_by_piece, published
from ragfuse_bench.stream.material import Cut, Worth, context_kv, long_readings
from ragfuse_bench.stream.report import show
from ragfuse_bench.stream.server import redis_server, require_redis
from rich.console import Console

from ragfuse.calibration.runner import circumstances
from ragfuse.codec import RAW, Codec
from ragfuse.engine.engine import Ask, Engine, PreparedPrompt
from ragfuse.errors import ModelError
from ragfuse.hf.model import HFModel
from ragfuse.load.timings import measure
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.telemetry.progress import progress
from ragfuse.types.answer import PieceTrace

METHODS = ("text", "int8", "fixed", "adaptive")
AT_GBPS = 3.0
SILENCE_S = 30.0
"""A line may stand still for so long before Redis is given up."""


@dataclass(frozen=True)
class Text:
    """One context: its reading, its pieces, who judges KV of it, and bytes by level."""

    reading: Reading
    cut: Cut
    judge: Judge
    sizes: Mapping[str, int]

    @property
    def question(self) -> tuple[int, ...]:
        """The first, which is asked."""
        return self.reading.questions[0].token_ids


@dataclass(frozen=True)
class Run:
    """One question by one method: seconds to its first logits, what came, and what that is
    worth.
    """

    seconds: float
    worth: Worth | None
    pieces: tuple[dict[str, Any], ...] = ()


class Rig:
    """Engines of all methods over one store behind one line, with what was measured of this
    machine.
    """

    def __init__(
        self, options: StreamOptions, model: HFModel, console: Console, held: ExitStack
    ) -> None:
        self.options, self.model, self.console = options, model, console
        self.codecs = codecs_of(model)
        self.fixed = options.fixed or self.codecs.default
        port = held.enter_context(redis_server(options.home))
        self.line = held.enter_context(line_to(port))
        url = f"redis://127.0.0.1:{self.line.port}/0"
        self.tier = PacedTier(url, timeout_s=SILENCE_S, name="redis")
        codecs = _by_name(self.codecs)
        self.store = self._store(codecs)
        held.callback(self.store.close)
        # A store that can decode one level reads everything at that level.
        alone = {
            name: self._store({level: codecs[level]})
            for name, level in (("int8", "int8"), ("fixed", self.fixed))
        }
        self.engines = {name: self._engine(alone.get(name, self.store)) for name in METHODS}
        machine = self._measured(codecs)
        for engine in self.engines.values():
            engine.timings.learn(machine)
        self.texts = self._texts()
        self.scale = Scale(mean(text.sizes["int8"] for text in self.texts), self._text_s())
        self._worth: dict[object, Worth] = {}

    def run(self, method: str, text: Text, course: Course, deadline_s: float) -> Run:
        """One question over the line, which knows nothing of what it carried before."""
        engine, prompt = self.engines[method], text.cut.prompt(text.question)
        engine.runtime.links.clear()
        self.tier.go(self.line, course, text.cut.keys)
        began = time.perf_counter()
        due_s = deadline_s if method == "adaptive" else None
        ready = engine.prepare(prompt, Ask(reuse=method != "text", ratio=0.0, deadline_s=due_s))
        seconds = time.perf_counter() - began
        self.line.start(None)
        return Run(
            seconds, self._worth_of(text, ready), tuple(asdict(piece) for piece in _came(ready))
        )

    def _worth_of(self, text: Text, ready: PreparedPrompt) -> Worth:
        """Judged once for all streams that brought the same."""
        steps = ((piece.segments, piece.level) for piece in _came(ready) if not piece.why)
        lossy = tuple(step for step in steps if step[1] not in ("text", RAW.name))
        if not lossy:
            return Worth.of(text.judge.raw)
        name = (text.cut.keys[0], frozenset(lossy))
        if name not in self._worth:
            rows = text.judge.rows(context_kv(ready.prefill, text.cut.bounds[-1]))
            self._worth[name] = Worth.of(rows)
        return self._worth[name]

    def _store(self, codecs: Mapping[str, Codec]) -> KVStore:
        store = KVStore([self.tier], {"redis": self.options.levels})
        store.levels.codec = lambda level, model, tables="": codecs.get(level)  # type: ignore[method-assign]
        return store

    def _engine(self, store: KVStore) -> Engine:
        settings = Settings(
            home=self.options.home,
            model=self.options.model,
            store=self.options.home / "bench-stream",
        )
        return Engine(settings, self.model, store)

    def _measured(self, codecs: Mapping[str, Codec]) -> Any:
        """Without the line's speed: what it carries is to be found out."""
        with progress(self.console) as bar:
            task = bar.add_task("timing this machine", total=100)

            def tell(what: str, done: float) -> None:
                bar.update(task, description=what, completed=round(100 * done))

            longest = self.options.tokens + 512
            return replace(measure(self.model, [], tell, longest, 2, None, codecs.get), tiers={})

    def _texts(self) -> list[Text]:
        options, made = self.options, []
        readings = long_readings(self.model, options.tokens, options.contexts, options.questions)
        with progress(self.console) as bar:
            for reading in bar.track(readings, description="prefilling and encoding contexts"):
                cut = Cut.of(self.engines["text"].digest, reading.token_ids, options.piece_tokens)
                kv = self.model.encode(reading.token_ids)
                for key, piece in cut.pieces(kv, self.model):
                    self.store.put(key, piece, wait=True)
                found = self.store.lookup(cut.keys)
                if len(found) < len(cut.keys):
                    raise ModelError(
                        "Redis did not keep every piece: give it more memory, or take fewer tokens."
                    )
                sizes = {
                    level: sum(entry.sizes[level] for entry in found.values())
                    for level in options.levels
                }
                made.append(Text(reading, cut, Judge(self.model, reading, kv), sizes))
        return made

    def _text_s(self) -> float:
        """Prefilling a context and a question, three times after once to warm up."""
        seconds = []
        for turn in range(4):
            text = self.texts[turn % len(self.texts)]
            began = time.perf_counter()
            self.engines["text"].prepare(text.cut.prompt(text.question), Ask(reuse=False))
            seconds.append(time.perf_counter() - began)
        return median(seconds[1:])


def run_stream(options: StreamOptions, console: Console) -> dict[str, Any]:
    """The result as plain JSON types; `console` shows progress and the table."""
    require_redis()
    with thread_count(options.threads), ExitStack() as held:
        model = fusable_model(options.model, options.dtype, options.device, options.home)
        rig = Rig(options, model, console, held)
        result = _result(rig, console)
    show(result, console)
    return result


def courses(options: StreamOptions, scale: Scale, n_pieces: int) -> list[Course]:
    """Half of them drawn as the paper draws them, half measured ones; measured ones that lack are
    drawn, too.
    """
    measured = list(islice(published(scale, AT_GBPS), options.traces // 2))
    return [
        drawn_by_piece(seed, n_pieces, scale) for seed in range(options.traces - len(measured))
    ] + measured


def _result(rig: Rig, console: Console) -> dict[str, Any]:
    options, scale = rig.options, rig.scale
    n_pieces = len(rig.texts[0].cut.keys)
    lines, runs = courses(options, scale, n_pieces), list[dict[str, Any]]()
    curve = _curve(rig, console)
    with progress(console) as bar:
        task = bar.add_task("streams", total=len(lines) * (2 + len(options.deadlines)))
        for number, course in enumerate(lines):
            text = rig.texts[number % len(rig.texts)]
            for method in METHODS:
                for deadline in options.deadlines if method == "adaptive" else (0.0,):
                    run = (
                        rig.run(method, text, course, deadline * scale.seconds)
                        if method != "text"
                        else None
                    )
                    runs.append(_row(course, number, method, deadline, run, scale, text))
                    bar.advance(task, method != "text")
    at = next((row for row in curve if row["gbps"] == AT_GBPS), None)
    return {
        **{
            f"ttft_x_vs_{other}": at[f"{other}_s"] / at["fixed_s"] if at else None
            for other in ("text", "int8")
        },
        "deadlines": [_by_deadline(runs, deadline, scale) for deadline in options.deadlines],
        "traces": len(lines),
        "scale": scale.as_dict(),
        "curve": curve,
        "levels": {
            level: mean(text.sizes[level] for text in rig.texts) for level in options.levels
        },
        "fixed": rig.fixed,
        "runs": runs,
        "model": options.model,
        "tokens": [text.cut.bounds[-1] for text in rig.texts],
        "pieces": n_pieces,
        "questions": [len(text.reading.questions) for text in rig.texts],
        "clock": "wall",
        **circumstances(rig.model.device, options.threads),
    }


def _row(
    course: Course,
    number: int,
    method: str,
    deadline: float,
    run: Run | None,
    scale: Scale,
    text: Text,
) -> dict[str, Any]:
    """One stream as plain types; text is prefilled the same whatever the line does."""
    worth = run.worth if run is not None else Worth.of(text.judge.raw)
    told = asdict(worth) if worth is not None else {}
    seconds = run.seconds if run is not None else scale.text_s
    common = {"trace": course.name, "kind": course.kind, "number": number, "method": method}
    return {
        **common,
        "deadline_s": deadline * scale.seconds if deadline else None,
        "ttft_s": seconds,
        **told,
        "pieces": run.pieces if run is not None else (),
    }


def _by_deadline(
    runs: Sequence[Mapping[str, Any]], deadline: float, scale: Scale
) -> dict[str, Any]:
    """Shares of streams that were late, and what came on average, by method."""
    seconds = deadline * scale.seconds
    mine = {
        method: [
            run for run in runs if run["method"] == method and run["deadline_s"] in (None, seconds)
        ]
        for method in METHODS
    }

    def late(found: Sequence[Mapping[str, Any]]) -> float | None:
        return mean(float(run["ttft_s"] > seconds) for run in found) if found else None

    return {
        "deadline_s": seconds,
        "paper_s": deadline,
        "violations": {method: late(found) for method, found in mine.items()},
        **{
            name: {method: mean(run[name] for run in found) for method, found in mine.items()}
            for name in ("f1", "kl", "top1")
        },
        "ttft_s": {
            method: median(run["ttft_s"] for run in found) for method, found in mine.items()
        },
    }


def _curve(rig: Rig, console: Console) -> list[dict[str, Any]]:
    """Seconds to the first token at bandwidths that do not change; the adaptive one in a hurry,
    whatever it costs.
    """
    text, rows = rig.texts[0], []
    with progress(console) as bar:
        for gbps in bar.track(rig.options.curve, description="bandwidths"):
            course = Course(
                f"{gbps:g} Gbit/s", "constant", constant(gbps * rig.scale.bytes_per_gbps)
            )
            deadline_s = rig.options.deadlines[0] * rig.scale.seconds
            seconds = {
                name: rig.run(name, text, course, deadline_s).seconds for name in METHODS[1:]
            }
            rows.append(
                {
                    "gbps": gbps,
                    "text_s": rig.scale.text_s,
                    **{f"{name}_s": s for name, s in seconds.items()},
                }
            )
    return rows


def _came(ready: PreparedPrompt) -> Sequence[PieceTrace]:
    """What was read for a prompt; without a stream one piece of all its segments."""
    if ready.stream is not None or not ready.plan.fetches:
        return ready.stream.pieces if ready.stream is not None else ()
    fetches, tokens = ready.plan.fetches, len(ready.plan.prompt)
    segments, nbytes = (
        tuple(fetch.segment for fetch in fetches),
        sum(fetch.nbytes for fetch in fetches),
    )
    return [PieceTrace(segments, tokens, fetches[0].level, nbytes=nbytes, seconds=ready.load_s)]


def _by_name(codecs: Codecs) -> dict[str, Codec]:
    return dict(chain([(RAW.name, RAW)], codecs.levels.items()))
