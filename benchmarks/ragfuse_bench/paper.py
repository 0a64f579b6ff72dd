"""The figures of the CacheBlend paper, measured here: `ragfuse bench paper fig6` and 7, 8, 10, 12 to 17.

Those of CacheGen are `codec/figures.py`'s, those of AttentionStore `sessions/`'s, those of Prompt Cache
`modules/figures.py`'s.

Each figure is a table beside what the paper says, a picture, and the settings that differ. Quality is measured on the
model that is named, which is far smaller than the paper's; what should carry over are the shapes and the ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

import torch
from ragfuse_bench.codec.figures import CACHEGEN
from ragfuse_bench.figure import Figure, Rows, Wanted, by_random_tokens, run_figure
from ragfuse_bench.modules.figures import PROMPTCACHE
from ragfuse_bench.options import QualityOptions, TtftOptions
from ragfuse_bench.presets import bench_model
from ragfuse_bench.quality.cases import Packing, read_cases
from ragfuse_bench.quality.run import Plan, drawn, measure
from ragfuse_bench.quality.table import results_of
from ragfuse_bench.sessions.documents import DOCUMENTS
from ragfuse_bench.sessions.figures import ATTENTIONSTORE
from ragfuse_bench.sessions.loading import LOADING
from ragfuse_bench.storage import by_device, draw_by_device, draw_pick, pick
from ragfuse_bench.throughput.figure import FIG14
from ragfuse_bench.ttft import run_ttft
from rich.console import Console

from ragfuse.calibration.case import Case
from ragfuse.calibration.deviation import (
    attention_deviation,
    attention_of,
    draw_attention,
    draw_distribution,
    draw_ranks,
    kv_deviation,
    neighbours,
)
from ragfuse.calibration.methods import Lab, Method, methods_of
from ragfuse.calibration.runner import Runner
from ragfuse.errors import ModelError, SettingsError
from ragfuse.hf.model import HFModel
from ragfuse.telemetry.progress import progress

RATIOS = (0.0, 0.05, 0.10, 0.15, 0.20, 0.30, 0.50, 0.80, 1.0)
SWEEP = (0.05, 0.10, 0.15, 0.18, 0.30, 0.50)
SIZES = ((3, 512), (6, 512), (9, 512), (12, 512), (6, 300), (6, 600), (6, 900))
"""Chunks and tokens of each, of figure 15."""
BLEND = "hkvd@alone"
"""The paper's own method: chunks encoded alone, high deviations recomputed."""


def run_paper(name: str, wanted: Wanted, picture: Path | None) -> dict[str, Any]:
    """Measure a figure of one of the papers; SettingsError if there is none of that name."""
    known = {**FIGURES, **CACHEGEN, **ATTENTIONSTORE, **LOADING, **DOCUMENTS, **PROMPTCACHE}
    if name not in known:
        raise SettingsError(f"There is no figure '{name}' here. It is one of: {', '.join(known)}.")
    return run_figure(name, known[name], wanted, picture)


def _model(wanted: Wanted) -> HFModel:
    settings = wanted.settings
    model = bench_model(settings.model, settings.dtype, settings.device, settings.home)
    if model.profile.refusal:
        raise ModelError(
            f"{settings.model} cannot reuse the KV of chunks: {model.profile.refusal} Measure another model."
        )
    return model


def _cases(wanted: Wanted, model: HFModel) -> list[Case]:
    packing = Packing(lambda text: len(model.tokens(text)), wanted.chunk_tokens)
    return [case for name in wanted.sets for case in drawn(read_cases(name, packing), wanted.limit)]


# figures 6, 7 and 8: deviations


def _attention(wanted: Wanted) -> Rows:
    """Figure 6: attention deviation over the recompute ratio, by HKVD and, as a control, by random rows."""
    model = _model(wanted)
    ratios = RATIOS[::2] if wanted.quick else RATIOS
    found: dict[tuple[str, float], list[float]] = {}
    lab = Lab(model)
    with progress(wanted.console) as bar:
        for case in bar.track(_cases(wanted, model), description="attention deviation"):
            methods = [Method(policy, ratio, "alone") for policy in ("hkvd", "random") for ratio in ratios]
            lab.hold(case, methods[:1])
            prompt = lab.prompt(case, "alone")
            n_rows = len(prompt.segments[-1].tokens)
            full = attention_of(model, model.full_prefill(prompt.token_ids), n_rows)
            for method in methods:
                mine = attention_of(model, lab.prefill(method, prompt), n_rows)
                deviation = float(attention_deviation(mine, full).mean())
                found.setdefault((method.policy, method.ratio or 0.0), []).append(deviation)
    lab.close()
    none = mean(found["hkvd", 0.0])
    return [
        {"method": policy, "ratio": ratio, "deviation": mean(values), "of_reuse": mean(values) / none, "n": len(values)}
        for (policy, ratio), values in found.items()
    ]


def _deviations(wanted: Wanted) -> list[torch.Tensor]:
    """KV deviation of full reuse, the rows of chunks that are no exact prefix: float32 [layers, rows] a case."""
    model = _model(wanted)
    lab, method, found = Lab(model), Method("none", 0.0, "alone"), []
    with progress(wanted.console) as bar:
        for case in bar.track(_cases(wanted, model), description="KV deviation"):
            lab.hold(case, [method])
            prompt = lab.prompt(case, "alone")
            pairs = zip(prompt.segments, prompt.spans, strict=True)
            rows = [row for segment, (lo, hi) in pairs if segment.kind == "chunk" for row in range(lo, hi)]
            kv = kv_deviation(lab.prefill(method, prompt).kv, model.full_prefill(prompt.token_ids).kv)
            found.append(kv[:, rows])
    lab.close()
    return found


def _distribution(wanted: Wanted) -> Rows:
    """Figure 7: how KV deviation is spread over tokens, on layers near a quarter, a half and three quarters."""
    found = _deviations(wanted)
    layers, rows = len(found[0]), []
    for layer in (layers // 4, layers // 2, 3 * layers // 4):
        values = torch.cat([each[layer] for each in found])
        top = values.sort(descending=True).values
        for share in (0.01, 0.05, 0.10, 0.15, 0.20, 0.30, 0.50, 0.80):
            at = max(1, round(share * len(top)))
            rows.append(
                {
                    "layer": layer,
                    "share": share,
                    "deviation": float(top[at - 1] / top.mean()),
                    "holds": float(top[:at].square().sum() / top.square().sum()),
                    "n": len(top),
                }
            )
    return rows


def _ranks(wanted: Wanted) -> Rows:
    """Figure 8: rank correlation of neighbouring layers."""
    found = [neighbours(each) for each in _deviations(wanted)]
    return [
        {"layer": layer, "correlation": mean(column), "n": len(column)}
        for layer, column in enumerate(zip(*found, strict=True))
    ]


# figures 12, 13 and 16: quality against time to first token


def _quality(wanted: Wanted, names: Sequence[str], ratios: Sequence[float]) -> Rows:
    model = _model(wanted)
    methods = tuple(methods_of(names, ratios, model))
    options = QualityOptions(sets=wanted.sets, limit=wanted.limit, chunk_tokens=wanted.chunk_tokens)
    rows = results_of(measure(Plan(options, methods, wanted.rows), model, wanted.console))
    return [{**row, "score": row["f1"] if row["rouge_l"] is None else row["rouge_l"]} for row in rows]


def _overall(wanted: Wanted) -> Rows:
    return _quality(wanted, ("full", "prefix", "none", BLEND, "auto"), (0.15,))


def _chains(wanted: Wanted) -> Rows:
    return _quality(wanted, ("full", BLEND, "auto", "mapreduce", "maprerank"), (0.15,))


def _sweep(wanted: Wanted) -> Rows:
    return _quality(wanted, ("full", "none", BLEND, "lexical"), SWEEP[::2] if wanted.quick else SWEEP)


# figures 10, 15 and 17: devices, chunk number, chunk length


def _runner(wanted: Wanted) -> Runner:
    return Runner(1 if wanted.quick else 3, torch.device(wanted.settings.device), wanted.console)


def _picks(wanted: Wanted) -> Rows:
    """Figure 10: the ratio and the device that the controller takes."""
    return pick(_model(wanted), wanted.settings, _runner(wanted))


def _devices(wanted: Wanted) -> Rows:
    """Figure 17: every method's score, and its time from memory and from slower devices."""
    rows = _overall(wanted)
    of = {row["method"]: row for row in rows}
    methods = [(name, name.partition("@")[0], row["ratio"]) for name, row in of.items()]
    times = by_device(_model(wanted), wanted.settings, _runner(wanted), methods)
    score = {(row["dataset"], row["method"]): row["score"] for row in rows}
    sets = dict.fromkeys(row["dataset"] for row in rows)
    return [{"dataset": name, **row, "score": score[name, row["method"]]} for name in sets for row in times]


def _sizes(wanted: Wanted) -> Rows:
    """Time to first token by number and by length of chunks."""
    rows: Rows = []
    base = {"model": wanted.settings.model, "dtype": wanted.settings.dtype, "device": wanted.settings.device}
    rounds, most = (1, 4000) if wanted.quick else (3, 10**6)
    given: dict[str, Any] = {**base, "home": wanted.settings.home, "threads": torch.get_num_threads(), "rounds": rounds}
    for chunks, tokens in (size for size in SIZES if size[0] * size[1] <= most):
        found = run_ttft(TtftOptions(**given, chunks=(chunks,), chunk_tokens=tokens), Console(quiet=True))
        full = found["full_s"]
        rows.append(
            {
                "chunks": chunks,
                "chunk_tokens": tokens,
                "full_s": full,
                "prefix_s": full / found["prefix_x"],
                "fused_s": found["fused_s"],
                "reuse_s": full / found["reuse_x"],
                "ttft_x": found["speedup"],
            }
        )
    return rows


# pictures


def _draw_quality(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Score against time: a color for each method, a line where it has several ratios, a mark for each data set."""
    sets, methods = (list(dict.fromkeys(row[name] for row in rows)) for name in ("dataset", "method"))
    for at, dataset in enumerate(sets):
        mark = "osD^vP*X"[at % 8]
        for index, method in enumerate(methods):
            mine = [row for row in rows if (row["dataset"], row["method"]) == (dataset, method)]
            points = [(1 / row["ttft_x"], row["score"]) for row in mine]
            label = method if len(sets) == 1 else f"{method}, {dataset}"
            axes.plot(*zip(*points, strict=True), f"{mark}-", color=f"C{index}", label=label, markersize=5)
            for row, point in zip(mine if len(mine) > 1 else (), points, strict=False):
                axes.annotate(f"{row['ratio']:.0%}", point, (3, 4), textcoords="offset points", fontsize=7)
    axes.set_xlabel("time to first token, full prefill = 1")
    axes.set_ylabel(f"F1 or ROUGE-L, {', '.join(sets)}")
    axes.legend(fontsize=7)


def _draw_sizes(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator

    labels = [f"{row['chunks']} x {row['chunk_tokens']}" for row in rows]
    at = torch.arange(len(rows)).numpy()
    for index, (key, name) in enumerate(
        (("full_s", "full"), ("prefix_s", "prefix"), ("fused_s", "ragfuse"), ("reuse_s", "reuse"))
    ):
        axes.bar(at + 0.2 * (index - 1.5), [row[key] for row in rows], 0.2, label=name)
    axes.set_xticks(at, labels, rotation=30, ha="right", fontsize=7)
    axes.set_yscale("log", subs=[])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("seconds to the first token")
    axes.legend()


_SCORES = ("dataset", "method", "ratio", "n", "score", "to_full", "kl_over_reuse", "ttft_x")

FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "fig6": Figure(
            "attention deviation falls as more rows are recomputed",
            "the biggest drops come from the first few tokens with the highest KV deviation (Musique, three models).",
            _attention,
            ("method", "ratio", "deviation", "of_reuse", "n"),
            draw_attention,
        ),
        "fig7": Figure(
            "few tokens have much of the KV deviation",
            "about 10-15% of the tokens have a much higher KV deviation than the others.",
            _distribution,
            ("layer", "share", "deviation", "holds", "n"),
            draw_distribution,
        ),
        "fig8": Figure(
            "KV deviations of neighbouring layers rank alike",
            "consistently high between neighbouring layers, so that one layer tells where to look in the next.",
            _ranks,
            ("layer", "correlation", "n"),
            draw_ranks,
        ),
        "fig10": Figure(
            "the ratio and the device that the controller takes",
            "(a) a well chosen ratio adds no delay to loading; (b) the cheapest device whose loading hides behind "
            "recomputing 15% costs no delay either.",
            _picks,
            ("device", "price", "ratio", "load_s", "fuse_s", "predicted_s", "ttft_s", "taken"),
            draw_pick,
            given=by_random_tokens,
        ),
        "fig12": Figure(
            "quality against time to first token",
            "TTFT 2.2-3.3x lower than full recompute, F1 and Rouge-L within 0.02; full reuse far below.",
            _overall,
            _SCORES,
            _draw_quality,
        ),
        "fig13": Figure(
            "beside MapReduce and MapRerank",
            "2-5x lower TTFT and a higher F1 than MapReduce; a higher F1 than MapRerank.",
            _chains,
            _SCORES,
            _draw_quality,
        ),
        "fig14": FIG14,
        "fig15": Figure(
            "by number and length of chunks",
            "CacheBlend stays below full recompute and prefix caching at every size. It varies batch sizes too; here "
            "the prompts of a batch are fused one after the other, so that is not measured.",
            _sizes,
            ("chunks", "chunk_tokens", "full_s", "prefix_s", "fused_s", "reuse_s", "ttft_x"),
            _draw_sizes,
            given=by_random_tokens,
        ),
        "fig16": Figure(
            "quality against time to first token, by recompute ratio",
            "at most .002 F1 or Rouge-L lost at 5-18%, which is 4.1-6.6x lower TTFT (Yi-34B).",
            _sweep,
            _SCORES,
            _draw_quality,
        ),
        "fig17": Figure(
            "every method on memory and on slower devices",
            "less TTFT at about the same quality on RAM and on a slower disk; the slower the device, the closer full "
            "reuse comes to CacheBlend, as loading hides what is recomputed.",
            _devices,
            ("dataset", "device", "method", "ratio", "score", "ttft_s", "ttft_x"),
            draw_by_device,
        ),
    }
)
