"""Figures and tables of the Prompt Cache paper, measured here: `ragfuse bench paper pc-fig3`, 4, 5, pc-table1, 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from types import MappingProxyType
from typing import Any

import torch
from ragfuse_bench.figure import Figure, Rows, Wanted
from ragfuse_bench.modules.asked import Place, engine_over, model_of, registered, said, score, timed
from ragfuse_bench.modules.cases import ModuleCase, documents
from ragfuse_bench.modules.lengths import slope
from ragfuse_bench.modules.options import LENGTHS
from ragfuse_bench.modules.report import draw_slope
from ragfuse_bench.modules.shapes import MIB, sizes
from ragfuse_bench.quality.cases import Packing
from rich.console import Console

from ragfuse.calibration.runner import Runner
from ragfuse.calibration.stats import difference_interval
from ragfuse.engine.engine import Ask, Engine
from ragfuse.hf.model import HFModel
from ragfuse.telemetry.progress import progress

DOCUMENT_TOKENS = 2600
"""Most tokens of a prompt's documents."""
TIMED = 8
"""Questions of a set that are timed, at most."""
WAYS: Mapping[str, Ask] = MappingProxyType({"full": Ask(reuse=False), "cached": Ask(), "blended": Ask(blend=True)})
PAPER_SCORES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"2wikimqa": (16.63, 13.95), "musique": (7.31, 8.57), "multi_news": (24.33, 24.22)}
)
"""Baseline and cached of Llama2 7B in table 1, by how the names of our files of these sets begin."""


def _device(wanted: Wanted) -> torch.device:
    return torch.device(wanted.settings.device)


def _cases(wanted: Wanted, model: HFModel, limit: int) -> list[ModuleCase]:
    most = min(wanted.context_tokens, DOCUMENT_TOKENS)
    packing = Packing(lambda text: len(model.tokens(text)), wanted.chunk_tokens, most)
    return list(documents(wanted.sets, limit, packing))


def _rounds(wanted: Wanted) -> int:
    return 1 if wanted.quick else 3


# figures 3 and 4: data sets


def _by_set(wanted: Wanted) -> Rows:
    """Seconds to the first token of each data set, modules in host memory and, on a GPU, in its own."""
    model = model_of(wanted.settings)
    cases = _cases(wanted, model, min(wanted.limit or TIMED, TIMED))
    places: tuple[Place, ...] = ("host", "gpu") if model.device.type == "cuda" else ("host",)
    return [row for place in places for row in _timed(wanted, model, cases, place)]


def _timed(wanted: Wanted, model: HFModel, cases: Sequence[ModuleCase], place: Place) -> Iterator[dict[str, Any]]:
    runner, rows = Runner(_rounds(wanted), model.device, Console(quiet=True)), list[dict[str, Any]]()
    with engine_over(wanted.settings, model, place) as engine, progress(wanted.console) as bar:
        for case in bar.track(cases, description=f"first tokens, modules in {place} memory"):
            with registered(engine, case.schema):
                rows.append({"dataset": case.dataset, **timed(engine, case.request, runner, case.name)})
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        mine = [row for row in rows if row["dataset"] == dataset]
        yield {"dataset": dataset, "device": _place_named(place, model), "n": len(mine), **_means(mine)}


def _place_named(place: Place, model: HFModel) -> str:
    return f"{model.device.type}, from {place}"


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found = {key: mean(row[key] for row in rows) for key in ("tokens", "cached_share", "full_s", "cached_s")}
    return {**found, "ttft_x": found["full_s"] / found["cached_s"]}


def _draw_by_set(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    labels = [f"{row['dataset']}\n{row['device']}" for row in rows]
    at = torch.arange(len(rows)).numpy()
    for shift, key, label in ((-0.2, "full_s", "all computed"), (0.2, "cached_s", "modules cached")):
        axes.bar(at + shift, [row[key] for row in rows], 0.4, label=label)
    axes.set_xticks(at, labels, fontsize=7)
    axes.set_ylabel("seconds to the first token")
    axes.legend(fontsize=8)


def _no_gpu(wanted: Wanted) -> list[str]:
    """What of the paper's machines and sets is not here."""
    absent = [
        "Not at hand: Llama2 7B and the paper's CPUs and GPUs; NarrativeQA, GovReport, QMSum, TriviaQA and passage "
        "retrieval of LongBench."
    ]
    if _device(wanted).type != "cuda":
        absent.append("No GPU is used: --device cuda takes one, and measures modules in its memory and in the host's.")
    return absent


def _by_documents(wanted: Wanted) -> str:
    most = min(wanted.limit or TIMED, TIMED)
    return f"n = {most} a set, documents of up to {min(wanted.context_tokens, DOCUMENT_TOKENS):,} tokens as modules"


# figure 5: lengths


def _lengths(wanted: Wanted) -> Rows:
    """Seconds to the first token by the prompt's length, nearly all of it cached."""
    model = model_of(wanted.settings)
    lengths = LENGTHS[:2] if wanted.quick else LENGTHS
    with engine_over(wanted.settings, model) as engine:
        return slope(engine, Runner(_rounds(wanted), model.device, wanted.console), lengths)


def _no_large_models(wanted: Wanted) -> list[str]:
    absent = ["Not at hand: Llama2 7B and 13B, the Intel i9-13900K, and the RTX 4090 and A40."]
    return absent if _device(wanted).type == "cuda" else [*absent, "No GPU is used: --device cuda takes one."]


# table 1: accuracy


def _accuracy(wanted: Wanted) -> Rows:
    """Scores on each data set: computed, over modules as they are, and over modules of which rows are computed anew."""
    model, scores = model_of(wanted.settings), dict[str, list[dict[str, Any]]]()
    with engine_over(wanted.settings, model) as engine, progress(wanted.console) as bar:
        for case in bar.track(_cases(wanted, model, wanted.limit), description="questions"):
            scores.setdefault(case.dataset, []).append(_answers(engine, case))
    return [_scored(dataset, rows) for dataset, rows in scores.items()]


def _answers(engine: Engine, case: ModuleCase) -> dict[str, Any]:
    with registered(engine, case.schema):
        texts = {way: said(engine, case, ask) for way, ask in WAYS.items()}
    same = float(texts["cached"] == texts["full"])
    return {"task": case.task, "same": same, **{way: score(case, text) for way, text in texts.items()}}


def _scored(dataset: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A set's means, out of a hundred as in the paper, beside the paper's own where it has the set."""
    full, cached = ([100 * row[way] for row in rows] for way in ("full", "cached"))
    paper = next((both for name, both in PAPER_SCORES.items() if dataset.startswith(name)), (None, None))
    return {
        "dataset": dataset,
        "method": "ROUGE-L" if rows[0]["task"] == "summary" else "F1",
        "n": len(rows),
        "full": mean(full),
        "cached": mean(cached),
        "to_full": mean(cached) - mean(full),
        "to_full_ci": list(difference_interval(cached, full)),
        "blended": mean(100 * row["blended"] for row in rows),
        "same": mean(row["same"] for row in rows),
        "paper_full": paper[0],
        "paper_cached": paper[1],
    }


def _draw_accuracy(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    at = torch.arange(len(rows)).numpy()
    for shift, way in ((-0.27, "full"), (0.0, "cached"), (0.27, "blended")):
        axes.bar(at + shift, [row[way] for row in rows], 0.27, label=way)
    axes.set_xticks(at, [f"{row['dataset']}\n{row['method']}, n = {row['n']}" for row in rows], fontsize=7)
    axes.set_ylabel("score")
    axes.legend(fontsize=8)


def _by_questions(wanted: Wanted) -> str:
    return f"n = {wanted.limit or 'all'} a set, documents as modules, greedy; paper_: Llama2 7B"


def _no_paper_models(wanted: Wanted) -> list[str]:
    return [
        "Not at hand: Llama2 7B and 13B, MPT 7B and Falcon 7B; NarrativeQA, GovReport, QMSum, TriviaQA and passage "
        "retrieval. Of MuSiQue and 2WikiMultihopQA other samples are used than LongBench's."
    ]


# table 2: memory


def _memory(wanted: Wanted) -> Rows:
    """The paper's models by their shapes, and the model that is named, measured."""
    model = model_of(wanted.settings)
    mine = model.nbytes_per_token / MIB
    name = f"{wanted.settings.model} ({wanted.settings.dtype})"
    return [*sizes(), {"what": name, "mb_per_token": mine, "mb_of_1k": 1000 * mine}]


def _draw_memory(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    names, at = [row["what"] for row in rows], torch.arange(len(rows)).numpy()
    for shift, key, label in (
        (-0.27, "paper_mb", "the paper"),
        (0.0, "all_heads_mb", "by all heads"),
        (0.27, "mb_per_token", "by the heads that have keys"),
    ):
        axes.bar(at + shift, [row.get(key) or 0.0 for row in rows], 0.27, label=label)
    axes.set_xticks(at, names, rotation=30, ha="right", fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("MB a token (2^20 bytes)")
    axes.legend(fontsize=8)


_TIMES = ("dataset", "device", "n", "tokens", "cached_share", "full_s", "cached_s", "ttft_x")
_FIG4 = Figure(
    "time to first token by data set, on a CPU",
    "up to 70x faster on the Intel and 20x on the AMD CPU (Llama2 7B, eight sets of LongBench, 5K tokens on average); "
    "less where more of the prompt is new text, as in TriviaQA.",
    _by_set,
    _TIMES,
    _draw_by_set,
    _by_documents,
    _no_gpu,
)

PROMPTCACHE: Mapping[str, Figure] = MappingProxyType(
    {
        "pc-fig3": replace(
            _FIG4,
            title="time to first token by data set, modules in the host's memory and in a GPU's",
            paper="1.5-3x faster with modules in host memory and 5-10x in the GPU's (Llama2 7B, eight sets of "
            "LongBench, 5K tokens on average; RTX 4090, A40, A100).",
        ),
        "pc-fig4": _FIG4,
        "pc-fig5": Figure(
            "computing grows faster than the prompt, the cache does not",
            "quadratic against linear, more so on the CPU; 900 ms against 90 ms at 3K tokens (Llama 7B, RTX 4090), and "
            "5K tokens are copied in 3.79 ms from host to host, 5.34 ms from host to GPU.",
            _lengths,
            ("tokens", "cached_share", "full_s", "cached_s", "ttft_x"),
            draw_slope,
            lambda wanted: "text that comes along as modules of about 256 tokens, one question",
            _no_large_models,
        ),
        "pc-table1": Figure(
            "accuracy over modules",
            "comparable on all sets and models; the largest differences of Llama2 7B: -3.25 (passage retrieval), "
            "-2.68 (2WikiMultihopQA), +1.26 (MuSiQue).",
            _accuracy,
            ("dataset", "method", "n", "full", "cached", "blended", "same", "paper_full", "paper_cached"),
            _draw_accuracy,
            _by_questions,
            _no_paper_models,
        ),
        "pc-table2": Figure(
            "memory of one cached token",
            "0.03 MB (BERT) to 4.53 MB (Falcon 180B), in 16 bits. That counts a key and a value for each head, also of "
            "models whose heads share them: Falcon 40B and 180B and Llama 2 70B take 16, 29 and 8 times less.",
            _memory,
            ("what", "heads", "kv_heads", "paper_mb", "all_heads_mb", "mb_per_token"),
            _draw_memory,
            lambda wanted: "MB of 2^20 bytes; the last row measured",
        ),
    }
)
"""By the name they have on the command line."""
