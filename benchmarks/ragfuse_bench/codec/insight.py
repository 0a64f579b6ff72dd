"""CacheGen's insights into KV, measured here: neighbours are close, layers differ, groups tell (figures 3 to 5)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from ragfuse_bench.codec.contexts import Context, absent, read_contexts
from ragfuse_bench.codec.fidelity import Loss, Told, mean_loss, rounded_between
from ragfuse_bench.codec.kv import Bank
from ragfuse_bench.codec.statistics import GROUPINGS, PARTS, STEP, Entropies, Moments, Variance, parts_of, variance_of
from ragfuse_bench.figure import Rows, Wanted
from ragfuse_bench.presets import bench_model

from ragfuse.errors import ModelError
from ragfuse.hf.model import HFModel
from ragfuse.telemetry.progress import progress
from ragfuse.types.kv import ChunkKV

LAYER_GROUPS = 6
ROUNDED_BITS = 3
PAPER_VARIANCE = 2.4, 2.9


def model_of(wanted: Wanted) -> HFModel:
    """The model to measure; ModelError for one that reads no text, or whose KV cannot be reused."""
    settings = wanted.settings
    model = bench_model(settings.model, settings.dtype, settings.device, settings.home)
    if model.profile.refusal or not model.has_tokenizer:
        why = model.profile.refusal or "it has no tokenizer, so it reads no text."
        raise ModelError(f"The KV of {settings.model} cannot be coded: {why} Measure another model.")
    return model


def contexts_of(wanted: Wanted, model: HFModel) -> list[Context]:
    """The contexts that are wanted of each set."""
    return read_contexts(model, wanted.folder, wanted.limit or 10**9, wanted.context_tokens)


def with_kv(wanted: Wanted, model: HFModel, what: str) -> Iterator[tuple[Context, ChunkKV]]:
    """Each context with its raw KV, computed once; a bar says how far it is."""
    bank, contexts = Bank(model, wanted.kept), contexts_of(wanted, model)
    with progress(wanted.console) as bar:
        for context in bar.track(contexts, description=what):
            yield context, bank.kv(context.token_ids)


def by_contexts(wanted: Wanted) -> str:
    """What such a figure was measured with."""
    most = f"at most {wanted.limit} contexts" if wanted.limit else "all contexts"
    return f"{most} a set of {wanted.context_tokens:,} tokens"


def not_at_hand(wanted: Wanted) -> list[str]:
    """What of the paper's models and data sets, and of our own wishes, is not here."""
    sets = ["TriviaQA", "NarrativeQA", "WikiText", *absent(wanted.folder)]
    return [f"Not at hand: Mistral-7B, Llama-34B, Llama-70B and Llama-7B/13B; {', '.join(sets)}."]


# figure 3


def variances(wanted: Wanted) -> Rows:
    """How much smaller deltas vary than values: by layer and part, and over all layers."""
    model, found = model_of(wanted), defaultdict[tuple[str, int], list[Variance]](list)
    for _, kv in with_kv(wanted, model, "variances"):
        for at, layer in enumerate(kv.layers):
            for part, values in parts_of(layer, at, model.profile):
                found[part, at].append(variance_of(values))
    rows = [_falls(part, str(at), found[part, at]) for part in PARTS for at in range(model.n_layers)]
    return [*(_all_layers(part, rows) for part in PARTS), *rows]


def _falls(part: str, layer: str, of: Sequence[Variance]) -> dict[str, Any]:
    """A layer's row: variance over deltas', mean over contexts."""

    def times(a: str, b: str) -> float:
        return mean(float(getattr(each, a) / max(getattr(each, b), 1e-30)) for each in of)

    return {
        "part": part,
        "layer": layer,
        "over_delta": times("layer", "delta"),
        "over_anchor": times("layer", "anchor"),
        "own_over_delta": times("channel", "delta"),
        "own_over_anchor": times("channel", "anchor"),
        "n": len(of),
    }


def _all_layers(part: str, rows: Rows) -> dict[str, Any]:
    mine = [row for row in rows if row["part"] == part]
    names = ("over_delta", "over_anchor", "own_over_delta", "own_over_anchor")
    return {"part": part, "layer": "mean", **{name: mean(row[name] for row in mine) for name in names}} | {
        "n": mine[0]["n"]
    }


def draw_variances(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Variance over deltas' by layer; below 1 a delta tells less than the value itself."""
    for index, part in enumerate(PARTS):
        mine = [row for row in rows if row["part"] == part and row["layer"] != "mean"]
        at = [int(row["layer"]) for row in mine]
        axes.plot(at, [row["over_delta"] for row in mine], "o-", color=f"C{index}", label=part, markersize=3)
        known = [row["own_over_delta"] for row in mine]
        axes.plot(at, known, "--", color=f"C{index}", label=f"{part}, each channel about its mean")
    axes.axhspan(*PAPER_VARIANCE, color="grey", alpha=0.25, label="the paper's")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_yticks((0.5, 1, 2, 5), ("0.5", "1", "2", "5"))
    axes.minorticks_off()
    axes.set_xlabel("layer")
    axes.set_ylabel("variance of values over that of deltas")
    axes.get_figure().legend(fontsize=7, loc="outside lower center", ncols=2)


# figure 4


def sensitivity(wanted: Wanted) -> Rows:
    """What rounding a group of layers costs: both parts, keys alone, values alone."""
    model = model_of(wanted)
    edges = [model.n_layers * at // LAYER_GROUPS for at in range(LAYER_GROUPS + 1)]
    spans = [span for span in pairwise(edges) if span[0] < span[1]]
    losses = defaultdict[tuple[int, int, str], list[Loss]](list)
    for context, kv in with_kv(wanted, model, "sensitivity"):
        told = Told.of(model, kv, context.follow)
        for lo, hi in (*spans, (0, model.n_layers)):
            for part in ("both", "keys", "values"):
                losses[lo, hi, part].append(told.loss(model, rounded_between(kv, lo, hi, ROUNDED_BITS, part)))
    return [_sensitive(lo, hi, losses) for lo, hi in (*spans, (0, model.n_layers))]


def _sensitive(lo: int, hi: int, losses: Mapping[tuple[int, int, str], Sequence[Loss]]) -> dict[str, Any]:
    both, keys, values = (mean_loss(losses[lo, hi, part]) for part in ("both", "keys", "values"))
    n = len(losses[lo, hi, "both"])
    return {
        "layers": f"{lo}-{hi - 1}",
        "kl": both.kl,
        "top1": both.top1,
        "kl_keys": keys.kl,
        "kl_values": values.kl,
        "n": n,
    }


def draw_sensitivity(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """KL by group of layers."""
    groups = rows[:-1]
    for index, (key, label) in enumerate((("kl", "both"), ("kl_keys", "keys"), ("kl_values", "values"))):
        at = [place + 0.27 * (index - 1) for place in range(len(groups))]
        axes.bar(at, [row[key] for row in groups], 0.27, label=label)
    axes.set_xticks(range(len(groups)), [row["layers"] for row in groups])
    axes.set_xlabel(f"layers rounded to {ROUNDED_BITS} bits")
    axes.set_ylabel("KL to raw KV (nats a token)")
    axes.legend()


# figure 5


def entropies(wanted: Wanted) -> Rows:
    """Bits an element by grouping, a row for each part."""
    model, moments = model_of(wanted), Moments()
    for _, kv in with_kv(wanted, model, "spread"):
        for at, layer in enumerate(kv.layers):
            for part, rows in parts_of(layer, at, model.profile):
                moments.add(part, rows)
    counted = Entropies({part: STEP * moments.deviation(part) for part in PARTS})
    for _, kv in with_kv(wanted, model, "entropies"):
        counted.add(kv, model.profile)
    bits = counted.result()
    return [
        {"part": part, **{grouping.replace(" ", "_"): bits[part, grouping] for grouping in GROUPINGS}} for part in PARTS
    ]


def draw_entropies(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bits an element, a group of bars for each part."""
    for index, grouping in enumerate(GROUPINGS):
        at = [place + 0.16 * (index - 2) for place in range(len(rows))]
        axes.bar(at, [row[grouping.replace(" ", "_")] for row in rows], 0.16, label=grouping)
    axes.set_xticks(range(len(rows)), [row["part"] for row in rows])
    axes.set_ylabel("entropy (bits an element)")
    axes.get_figure().legend(title="grouped by", fontsize=7, loc="outside lower center", ncols=5)
