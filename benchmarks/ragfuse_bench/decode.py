"""`ragfuse bench decode`: milliseconds a token of an answer, beside transformers' own and vLLM's,
on the same weights.

CPU time of one request, from the second token on, so that no prefill is in it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ragfuse_bench.options import DecodeOptions
from ragfuse_bench.presets import bench_model, preset
from ragfuse_bench.rounds import Runner, thread_count
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.runner import circumstances
from ragfuse.errors import InputError, SettingsError
from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel
from ragfuse.models import resolve_llm

FIRST = 4
"""Tokens of the shorter of two answers, whose difference is measured."""
WORKER = Path(__file__).with_name("vllm_decode.py")


def run_decode(options: DecodeOptions, console: Console) -> dict[str, Any]:
    """Return the result as plain JSON types; `console` shows progress and the table."""
    with thread_count(options.threads):
        model = bench_model(options.model, options.dtype, "cpu", options.home)
        runner = Runner(options.rounds, model.device, console)
        rows = {
            context: _row(model, context, options.steps, runner) for context in options.contexts
        }
    theirs = _vllm(options, console) if options.vllm is not None else {}
    measured = [
        {
            "context": context,
            **{name: 1e3 * median(seconds) for name, seconds in found.items()},
            "vllm": 1e3 * median(theirs[context]) if context in theirs else None,
            "rounds_s": {**found, "vllm": theirs.get(context)},
        }
        for context, found in rows.items()
    ]
    given = {"steps": options.steps, "rounds": options.rounds}
    result = {
        "ms_a_token": measured,
        "model": options.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        **given,
    }
    result |= circumstances(model.device, options.threads)
    _show(result, console)
    return result


def _row(model: HFModel, context: int, steps: int, runner: Runner) -> dict[str, list[float]]:
    """Return the seconds a token of each round, by who decodes."""
    vocabulary = model.model.config.get_text_config().vocab_size
    ids = [(100 + (7 * at) % 9973) % vocabulary for at in range(context)]
    prefill = model.full_prefill(ids)
    # of a model that is refused, which `bench_model` would have said
    assert prefill.cache is not None

    def ours(count: int) -> None:
        """Decode behind the prompt, whose cache then ends where it ended."""
        generate(
            model, prefill, {"max_new_tokens": count, "eos_token_id": None, "do_sample": False}
        )
        prefill.cache.length = context  # type: ignore[union-attr]

    inputs = torch.tensor([ids])
    with torch.no_grad():
        cache: Any = model.model(inputs, use_cache=True, logits_to_keep=1).past_key_values

    def theirs(count: int) -> None:
        """Decode by transformers' own `generate`, from its own cache of all tokens but the last."""
        if cache.get_seq_length() >= context:
            cache.crop(context - 1 - cache.get_seq_length())
        options = {
            "max_new_tokens": count,
            "eos_token_id": None,
            "do_sample": False,
            "pad_token_id": 0,
        }
        model.model.generate(
            inputs, attention_mask=torch.ones_like(inputs), past_key_values=cache, **options
        )

    cases = {
        f"{name} {count}": lambda run=run, count=count: run(count)
        for name, run in (("ragfuse", ours), ("transformers", theirs))
        for count in (FIRST, FIRST + steps)
    }
    times = runner.measure(cases, f"{context} tokens")
    return {
        name: [
            (long - short) / steps
            for short, long in zip(
                times[f"{name} {FIRST}"].seconds,
                times[f"{name} {FIRST + steps}"].seconds,
                strict=True,
            )
        ]
        for name in ("ragfuse", "transformers")
    }


def _vllm(options: DecodeOptions, console: Console) -> dict[int, list[float]]:
    """Return vLLM's seconds a token of each round, by the tokens of the context."""
    if preset(options.model) is not None:
        raise SettingsError(
            f"--vllm decodes with real weights; found --model {options.model}, a shape without any."
        )
    folder, python = resolve_llm(options.model, options.home), options.vllm
    assert python is not None
    threads = {name: str(options.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = {
        **os.environ,
        **threads,
        **one_process,
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "HF_HUB_OFFLINE": "1",
    }
    openmp = python.absolute().parents[1] / "lib" / "libiomp5.so"  # which vLLM asks for
    if openmp.is_file():
        environment["LD_PRELOAD"] = str(openmp)
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    sizes = ",".join(map(str, options.contexts)), str(options.steps), str(options.rounds)
    with console.status("vLLM decodes"):
        # -P: its folder is no path of modules
        line = [str(python), "-P", str(WORKER), str(folder), dtype, *sizes]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        told = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise InputError(f"vLLM failed in '{python}': {told[-1]}")
    return {
        int(context): seconds
        for context, seconds in json.loads(done.stdout.splitlines()[-1]).items()
    }


def _show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(title="Milliseconds a token, CPU time of one request")
    for name in ("context", "ragfuse", "transformers", "vLLM"):
        table.add_column(name, justify="right")
    for row in result["ms_a_token"]:
        vllm = "-" if row["vllm"] is None else f"{row['vllm']:.1f}"
        table.add_row(
            f"{row['context']:,}", f"{row['ragfuse']:.1f}", f"{row['transformers']:.1f}", vllm
        )
    console.print(table)
    console.print(
        f"{result['model']}, {result['dtype']}; median of {result['rounds']} rounds of"
        f" {result['steps']} tokens.",
        highlight=False,
    )
