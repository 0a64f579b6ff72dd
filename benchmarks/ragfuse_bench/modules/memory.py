"""Peak memory of a batch whose prompts share a module, with sharing and without, each in a process of its own.

A process that has only loaded its model is what the peak stands on: the peak of loading is forgotten, and freed pages
are given back, before the batch begins (Prompt Cache 3.4 and 5.4). So they are at each token of an answer, with sharing
and without: an engine that shares gives back by itself, and what is to be told is what it holds.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from ragfuse_bench.modules.asked import engine_over, model_of
from ragfuse_bench.modules.cases import long_schema, over_all
from ragfuse_bench.modules.lengths import notes
from ragfuse_bench.modules.options import Batch
from torch import Tensor

from ragfuse.calibration.runner import is_glibc, thread_count
from ragfuse.engine.engine import Ask, Engine
from ragfuse.errors import ModelError
from ragfuse.hf.shared_kv import give_back
from ragfuse.settings import Settings

CODE = "from ragfuse_bench.modules.memory import main; main()"
ALLOCATORS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"one arena": MappingProxyType({"MALLOC_ARENA_MAX": "1"}), "default": MappingProxyType({})}
)
"""What the environment says to glibc. By default each thread keeps what it frees, in an arena of its own: what one
answer of a batch no longer holds is not there for the next one. The first is what the ratio is told by."""
CARRIED = ("model", "dtype", "device", "home")
"""Settings that such a process goes by."""
QUESTIONS = (
    "Who is named first in these notes?",
    "Which place is named most often?",
    "What happened last?",
    "Which number stands in them?",
    "What was built, and by whom?",
    "Who disagreed with whom?",
    "What is still unknown?",
    "How would you call these notes?",
)


def batch_memory(settings: Settings, batch: Batch, threads: int) -> dict[str, Any]:
    """Bytes with sharing on and off, and the ratios of on over off: of all, and of what lies above the model.

    by_allocator: the same for each of `ALLOCATORS` that there is here; above it the first of them. by_tokens: by the
    first, for modules of `Batch.longer` tokens.
    """
    names = list(ALLOCATORS) if is_glibc() else ["default"]
    found = {name: _compared(settings, batch, threads, ALLOCATORS[name]) for name in names}
    longer = [
        {"tokens": tokens, **_compared(settings, replace(batch, tokens=tokens), threads, ALLOCATORS[names[0]])}
        for tokens in batch.longer
    ]
    said = {"prompts": batch.prompts, "tokens": batch.tokens, "answer_tokens": batch.answer_tokens}
    return {**found[names[0]], "allocator": names[0], "by_allocator": found, "by_tokens": longer, **said}


def _compared(settings: Settings, batch: Batch, threads: int, allocator: Mapping[str, str]) -> dict[str, Any]:
    on, off = (_in_a_process(settings, batch, threads, allocator, share) for share in (True, False))
    above = {name: told["peak"] - told["base"] for name, told in (("on", on), ("off", off))}
    return {
        "batch_memory_ratio": on["peak"] / off["peak"],
        "above_model_ratio": above["on"] / above["off"] if above["off"] > 0 else None,
        "peak_rss": {"on": on["peak"], "off": off["peak"]},
        "loaded_rss": {"on": on["base"], "off": off["base"]},
        "above_model": above,
        "module_nbytes": on["module_nbytes"],
        "prompt_tokens": on["tokens"],
        "same_answers": on["answers"] == off["answers"],
    }


def _in_a_process(
    settings: Settings, batch: Batch, threads: int, allocator: Mapping[str, str], share: bool
) -> dict[str, Any]:
    """What a fresh process says; ModelError with its last words where it fails."""
    given = {**{name: str(getattr(settings, name)) for name in CARRIED}, "share": share}
    told = {"settings": given, "batch": asdict(batch), "threads": threads}
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(told)],
        env={**_environment(threads), **allocator},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing was said"]
        raise ModelError(f"The batch could not be measured in a process of its own: {last[0]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment(threads: int) -> dict[str, str]:
    """This process's own, but for what it says to the allocator: some of that keeps what is freed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return {**kept, "OMP_NUM_THREADS": str(threads)}


def main() -> None:
    """Measure what the command line says and print it as JSON: in a process of its own."""
    told = json.loads(sys.argv[1])
    settings = Settings(**told["settings"])
    with thread_count(told["threads"]), engine_over(settings, model_of(settings)) as engine:
        print(json.dumps(measured(engine, Batch(**told["batch"]))))


def measured(engine: Engine, batch: Batch) -> dict[str, Any]:
    """Bytes before the batch and at its most, what the module's KV takes, and what was answered."""
    texts = [" ".join(notes(engine, batch.tokens))]
    schema = long_schema("shared", texts)
    engine.schemas.register(schema)
    engine.flush()
    asked = [QUESTIONS[at % len(QUESTIONS)] for at in range(batch.prompts)]
    prompts = [over_all(schema, 1, f"{question} ({at})") for at, question in enumerate(asked, 1)]
    length: Mapping[str, Any] = {"min_new_tokens": batch.answer_tokens, "logits_processor": [Trimming()]}
    ask = Ask(max_tokens=batch.answer_tokens, options=length)
    engine.answer(prompts[0], ask)  # what a first answer makes ready once
    engine.flush()
    base = settled_rss()
    answers = engine.batch(prompts, ask)
    peak = max(base, peak_rss())
    reused = [answer.trace.tokens_reused for answer in answers]
    if min(reused) < 0.9 * batch.tokens:
        raise ModelError(f"The batch did not reuse its module: {min(reused)} of about {batch.tokens} tokens.")
    nbytes = max(len(run.tokens) for run in engine.schemas.show("shared").runs) * engine.model.nbytes_per_token
    told = {"tokens": answers[0].trace.tokens, "module_nbytes": nbytes, "base": base, "peak": peak}
    return {**told, "answers": [answer.text for answer in answers]}


class Trimming:
    """A logits processor that changes nothing: at each token of an answer what was freed is given back."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """The scores as they are."""
        give_back()
        return scores


def settled_rss() -> int:
    """Bytes of this process now, what was freed given back; the peak begins here, where the system lets it."""
    gc.collect()
    give_back()
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
    return int(psutil.Process().memory_info().rss)


def peak_rss() -> int:
    """The most bytes since `settled_rss`; elsewhere than on Linux since the process began."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 1024
