"""Seconds to the first token and tokens a second over HTTP: vLLM with prefix caching, ragfuse, and ragfuse with vLLM.

All have the same weights, dtype and token ids, answer as many tokens, and take turns round by round. One vLLM serves
both alone and behind ragfuse: what ragfuse hands over never enters its prefix cache. Where there are two cores, vLLM
has one and ragfuse's servers the other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from json import loads
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from ragfuse_bench.engines.asked import Shape, shapes_of
from ragfuse_bench.engines.options import EnginesOptions
from ragfuse_bench.engines.vllm_server import require_vllm, routed, vllm_serving
from ragfuse_bench.throughput.load import Heard, one_by_one
from ragfuse_bench.throughput.served import serving
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.runner import circumstances
from ragfuse.errors import RagFuseError
from ragfuse.models import resolve_llm
from ragfuse.settings import Settings
from ragfuse.telemetry.progress import progress

PATIENCE_S = 3600.0
TEXT_PATH = "/v1/completions"
VLLM, ALONE, BOTH = "vllm", "ragfuse", "ragfuse+vllm"
Place = tuple[str, int]


def run_engines(settings: Settings, options: EnginesOptions, console: Console | None = None) -> dict[str, Any]:
    """Return the result as plain JSON types; `console` shows progress and the table (standard error when None)."""
    console, python = console or Console(stderr=True), require_vllm(options.vllm)
    name, most = Path(settings.model).name, max(options.together)
    n_prompts = options.rounds * options.each * sum(options.together) + 1
    shapes = shapes_of(settings, options.shapes, n_prompts, options.answer_tokens, options.seed)
    with ExitStack() as stack, progress(console) as bar:
        task = bar.add_task("starting the servers", total=None)
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragfuse-engines-")))
        folder, place = Path(resolve_llm(settings.model, settings.home)), home / "place"
        sizes = most, options.threads, options.memory_gib
        vllm, pid = stack.enter_context(vllm_serving(python, folder, name, settings.dtype, place, *sizes))
        told: dict[str, Any] = {"serve_together": most, "max_tokens": options.answer_tokens}
        alone = stack.enter_context(serving(settings, options.threads, PATIENCE_S, **told))
        told |= {"transfer_url": str(place)}
        both = stack.enter_context(serving(settings, options.threads, PATIENCE_S, **told))
        router = stack.enter_context(routed(python, both.place, vllm, home / "router.log"))
        pinned = _pin(pid, (alone.pid, both.pid))
        ways: dict[str, Place] = {VLLM: vllm, ALONE: alone.place, BOTH: router}
        prefills: dict[str, Place] = {ALONE: alone.place, BOTH: both.place}
        bar.update(task, description="asking", total=len(shapes) * len(options.together) * options.rounds)
        measured = []
        for shape in shapes:
            bench = _Shape(shape, ways, prefills, name, options)
            bench.warm()
            for together in options.together:
                found = {way: list[Mapping[str, Any]]() for way in ways}
                for number in range(options.rounds):
                    for way, load in bench.round(together, number):
                        found[way].append(load)
                    bar.advance(task)
                measured.append({"shape": shape.name, "together": together, **compared(found)})
        loaded = _loaded(vllm)
    given = {name: str(value) for name, value in vars(options).items() if name != "vllm"}
    result = {"measured": measured, "loaded": loaded, "one_core_each": pinned, "options": given}
    result |= {"settings": {"model": settings.model, "dtype": settings.dtype}}
    show_engines(result, console)
    return {**result, **circumstances(torch.device("cpu"), options.threads)}


class _Shape:
    """One shape's prompts, each asked of every server once."""

    def __init__(
        self,
        shape: Shape,
        ways: Mapping[str, Place],
        prefills: Mapping[str, Place],
        model: str,
        options: EnginesOptions,
    ) -> None:
        self._shape, self._ways, self._prefills = shape, ways, prefills
        self._model, self._options = model, options
        self._left = list(shape.prompts)

    def warm(self) -> None:
        """Have ragfuse encode the chunks, and every server answer one prompt."""
        first = [self._body(self._left.pop())]
        for way, place in self._ways.items():
            if way in self._prefills:
                pool, n = self._shape.pool, self._shape.n_chunks
                said = {"model": self._model, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1}
                bodies = [{**said, "documents": list(pool[at : at + n])} for at in range(0, len(pool), n)]
                sure(way, one_by_one(self._prefills[way], bodies, PATIENCE_S))
                _settle(self._prefills[way])
            sure(way, one_by_one(place, first, PATIENCE_S, path=TEXT_PATH))

    def round(self, together: int, number: int) -> list[tuple[str, dict[str, Any]]]:
        """Ask every server the same new prompts, so many at the same time; return each one's load in numbers."""
        bodies = [self._body(self._left.pop()) for _ in range(together * self._options.each)]
        names = list(self._ways)
        names = names[number % len(names) :] + names[: number % len(names)]
        found = []
        for way in names:
            began_s = time.monotonic()
            heard = sure(way, one_by_one(self._ways[way], bodies, PATIENCE_S, together, TEXT_PATH))
            found.append((way, summed(heard, time.monotonic() - began_s)))
        return found

    def _body(self, ids: Sequence[int]) -> dict[str, Any]:
        n = self._options.answer_tokens
        return {"model": self._model, "prompt": list(ids), "max_tokens": n, "min_tokens": n, "temperature": 0}


def sure(way: str, found: list[Heard]) -> list[Heard]:
    """Return what was heard; RagFuseError where an answer went wrong."""
    wrong = next((one.wrong for one in found if one.wrong), "")
    if wrong:
        raise RagFuseError(f"{way} did not answer: {wrong}")
    return found


def summed(found: Sequence[Heard], seconds: float) -> dict[str, float]:
    """Return a load in numbers.

    ttft_s: median time to the first token. tokens_per_s: of all answers, over the whole load. decode_tokens_per_s:
    the median answer's tokens a second behind its first one.
    """
    rates = [
        (one.tokens - 1) / (one.whole_s - one.first_s)
        for one in found
        if one.first_s is not None and one.whole_s is not None and one.tokens > 1 and one.whole_s > one.first_s
    ]
    return {
        "ttft_s": median(one.first_s or 0.0 for one in found),
        "tokens_per_s": sum(one.tokens for one in found) / seconds,
        "decode_tokens_per_s": median(rates) if rates else 0.0,
    }


def compared(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Return each way's medians over the rounds, and what ragfuse with vLLM is of vLLM alone."""
    ways = {
        way: {name: median(load[name] for load in loads) for name in loads[0]} for way, loads in found.items() if loads
    }
    one, other = ways[VLLM], ways[BOTH]
    return {
        "ways": ways,
        "ttft_x": one["ttft_s"] / other["ttft_s"],
        "decode_x": other["decode_tokens_per_s"] / one["decode_tokens_per_s"] if one["decode_tokens_per_s"] else None,
        "rounds": {way: list(loads) for way, loads in found.items()},
    }


def show_engines(result: Mapping[str, Any], console: Console) -> None:
    """Show the result as a table."""
    table = Table("prompts", "at once", "server", title="Whole servers, over HTTP", box=None)
    for heading in ("first token s", "tokens/s", "of one answer/s", "first token x"):
        table.add_column(heading, justify="right")
    for row in result["measured"]:
        for way, told in row["ways"].items():
            times = f"{row['ttft_x']:.2f}" if way == BOTH else ""
            figures = f"{told['ttft_s']:.3f}", f"{told['tokens_per_s']:.1f}", f"{told['decode_tokens_per_s']:.1f}"
            table.add_row(row["shape"], str(row["together"]), way, *figures, times)
    console.print(table)


def _settle(place: Place) -> None:
    """Wait until a server has encoded all that it met."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s and loads(_got(place, "/v1/ragfuse/store"))["waiting_to_be_encoded"]:
        time.sleep(0.2)


def _loaded(place: Place) -> float:
    """Return how many prompts vLLM went on with from KV that was handed over."""
    lines = _got(place, "/metrics").decode().splitlines()
    mark = "vllm:ragfuse_prompts_loaded_total"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(mark))


def _got(place: Place, path: str) -> bytes:
    line = HTTPConnection(*place, timeout=60)
    try:
        line.request("GET", path)
        return line.getresponse().read()
    finally:
        line.close()


def _pin(vllm: int, ragfuse: Sequence[int]) -> bool:
    """Give vLLM one core and ragfuse's servers another; return whether that was possible."""
    try:
        cores = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else None
    except psutil.Error:
        cores = None
    if not cores or len(cores) < 2:
        return False
    for pid, core in ((vllm, cores[0]), *((pid, cores[1]) for pid in ragfuse)):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            for thread in process.threads():
                with suppress(psutil.Error):
                    psutil.Process(thread.id).cpu_affinity([core])
    return True
