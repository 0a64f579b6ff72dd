"""CacheGen's figures that compare levels: size against quality, links, concurrency and length, what all of it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ragfuse_bench.codec.coded import INT8, codecs_of, ideas_of, random_ids
from ragfuse_bench.codec.contexts import read_contexts
from ragfuse_bench.codec.insight import model_of, with_kv
from ragfuse_bench.codec.kv import Continued
from ragfuse_bench.codec.levels import by_set, fidelities, rows_of
from ragfuse_bench.codec.links import PAPER_LOAD_OVER_TEXT, PIECE_TOKENS, Costs, row, ttft
from ragfuse_bench.codec.speed import Speeds, speeds
from ragfuse_bench.figure import Rows, Wanted, shown

from ragfuse.calibration.runner import Runner
from ragfuse.hf.model import HFModel

LENGTHS = (64, 128, 256, 512, 1000, 2000, 4000, 6000)
QUESTION_TOKENS = 32
GBPS = (0.1, 0.2, 0.4, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 30.0, 100.0, 400.0)
REQUESTS = (1, 2, 4, 6, 8, 10)
TEXT = "text"
COMMAND = "codec"
SIZED = ("bytes_over_fp16", "bits_a_value", "x_vs_int8", "kl", "top1", "nats_more", "contexts", "tokens")
"""What a codec makes of contexts, as a row says it."""


def sizes(wanted: Wanted) -> Rows:
    """Figure 9: size against quality, all sets together and each alone."""
    if wanted.result is not None:
        return shown(wanted.result, COMMAND, _sizes)
    model = model_of(wanted)
    found = fidelities(model, with_kv(wanted, model, "levels"), codecs_of(model).all)
    rows = [{"dataset": "all", **each} for each in rows_of(found)] + by_set(found)
    return [{"level": each.pop("name"), **each} for each in rows]


def _sizes(result: Mapping[str, Any]) -> Rows:
    """Of what `bench codec` wrote: what is decoded is the same by either coder."""
    every = [each for each in (*result["levels"], *result["baselines"]) if each["default_coder"]]
    rows = [{"dataset": "all", **each} for each in every] + result["by_set"]
    return [{"dataset": each["dataset"], "level": each["name"], **{key: each[key] for key in SIZED}} for each in rows]


def ideas(wanted: Wanted) -> Rows:
    """Figure 15: the same default level, built up idea by idea."""
    if wanted.result is not None:
        return shown(wanted.result, COMMAND, _ideas)
    model = model_of(wanted)
    codecs = codecs_of(model)
    compared = {INT8: codecs.levels[INT8], **ideas_of(model, codecs)}
    found = fidelities(model, with_kv(wanted, model, "ideas"), compared)
    return [{"idea": each.pop("name"), **each} for each in rows_of(found)]


def _ideas(result: Mapping[str, Any]) -> Rows:
    """Of what `bench codec` wrote."""
    return [{"idea": each["name"], **{key: each[key] for key in SIZED}} for each in result["ideas"]]


def by_bandwidth(wanted: Wanted) -> Rows:
    """Figure 11: seconds to the first token over links of every speed."""
    costs, methods, longest = _measured(wanted)
    return [row(costs, methods, longest, gbps) for gbps in GBPS]


def by_load(wanted: Wanted) -> Rows:
    """Figure 12: by requests that share this machine, then by length of the context."""
    costs, methods, longest = _measured(wanted)
    by_requests = [row(costs, methods, longest, 3.0, requests) for requests in REQUESTS]
    by_length = [row(costs, methods, length, 3.0) for length in LENGTHS if length <= longest]
    return [
        *({"what": "requests", **each} for each in by_requests),
        *({"what": "length", **each} for each in by_length),
    ]


def breakdown(wanted: Wanted) -> Rows:
    """Figure 14: what the time to the first token is made of, encoding beforehand, and bytes kept."""
    model, runner = model_of(wanted), _runner(wanted)
    codecs = codecs_of(model)
    found = speeds(model, piece_of(wanted, model), codecs.levels, runner)
    costs, longest = costs_of(model, found, runner, wanted.context_tokens), wanted.context_tokens
    rows = [{"method": TEXT, **_parts(costs, TEXT, longest)}]
    for name in codecs.levels:
        encode_s = longest * costs.encode_s[name]
        kept = longest * costs.nbytes[name] / 1e6
        rows.append({"method": name, **_parts(costs, name, longest), "encode_s": encode_s, "mb": kept})
    coarse = [name for name in codecs.levels if name != "int8"]
    together = sum(longest * costs.nbytes[name] / 1e6 for name in coarse)
    fp16 = longest * costs.fp16 / 1e6
    return [*rows, {"method": "all levels but int8", "mb": together}, {"method": "fp16", "mb": fp16}]


def by_links(wanted: Wanted) -> str:
    """What a figure of links was made from."""
    return (
        f"{wanted.context_tokens:,} tokens, CPU seconds of one core, links reckoned and scaled so that loading 8 bits "
        f"at 3 Gbit/s takes {PAPER_LOAD_OVER_TEXT} of prefilling"
    )


def _parts(costs: Costs, method: str, tokens: int) -> dict[str, Any]:
    """Seconds by what they go to, at the equivalent of the paper's 3 Gbit/s; decoding that the link does not hide."""
    took = ttft(costs, method, tokens, 3.0)
    decoding = 0.0 if method == TEXT else tokens * costs.decode_s[method]
    return {
        "link_s": took.link_s,
        "decode_s": took.decode_s,
        "compute_s": took.compute_s,
        "ttft_s": took.all_s,
        "decode_cpu_s": decoding,
    }


def _measured(wanted: Wanted) -> tuple[Costs, dict[str, str], int]:
    model, runner = model_of(wanted), _runner(wanted)
    codecs = codecs_of(model)
    timed = {name: codecs.levels[name] for name in (INT8, codecs.default)}
    found = speeds(model, piece_of(wanted, model), timed, runner)
    costs = costs_of(model, found, runner, wanted.context_tokens)
    return costs, {TEXT: TEXT, "int8": INT8, "default": codecs.default}, costs.lengths[-1]


def _runner(wanted: Wanted) -> Runner:
    return Runner(1 if wanted.quick else 3, torch.device(wanted.settings.device), wanted.console)


def piece_of(wanted: Wanted, model: HFModel) -> Sequence[int]:
    """Ids of a piece of real text, as long as those of a stream."""
    tokens = min(PIECE_TOKENS, wanted.context_tokens)
    return read_contexts(model, wanted.folder, 1, tokens)[0].token_ids


def costs_of(model: HFModel, found: Speeds, runner: Runner, longest: int) -> Costs:
    """Prefill by length, reading a question behind the longest context, and what a token of each codec costs."""
    lengths = (*(length for length in LENGTHS if length < longest), longest)
    drawn = [each % model.model.config.get_text_config().vocab_size for each in random_ids(longest)]
    cases = {str(n): _prefill(model, drawn[:n]) for n in lengths}
    behind = Continued(model, model.encode(drawn))
    cases["question"] = lambda: behind.logits(drawn[:QUESTION_TOKENS])
    once = Runner(1, runner.device, runner.console)
    times = {name: each.median_s for name, each in once.measure(cases, "prefill").items()}
    return Costs(
        lengths,
        tuple(times[str(n)] for n in lengths),
        times["question"],
        {name: each.nbytes / found.tokens for name, each in found.by_name.items()},
        {name: each.decode_s / found.tokens for name, each in found.by_name.items()},
        {name: each.encode_s / found.tokens for name, each in found.by_name.items()},
        found.fp16 / found.tokens,
    )


def _prefill(model: HFModel, ids: Sequence[int]) -> Any:
    return lambda: model.full_prefill(ids)


# pictures


def draw_sizes(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """KL against size: our levels as a line, uniform quantisation as another."""
    every = [each for each in rows if each.get("dataset", "all") == "all"]
    for names, label, style in ((("int8", "int4", "int3"), "uniform", "s--"), (None, "levels", "o-")):
        mine = [each for each in every if (each["level"] in names if names else each["level"] not in ("int4", "int3"))]
        mine = sorted(mine, key=lambda each: each["bits_a_value"])
        axes.plot([each["bits_a_value"] for each in mine], [max(each["kl"], 1e-6) for each in mine], style, label=label)
        for each in mine:
            at = (each["bits_a_value"], max(each["kl"], 1e-6))
            axes.annotate(
                f"{each['level']}, top-1 {each['top1']:.0%}", at, (4, 4), textcoords="offset points", fontsize=7
            )
    axes.set_yscale("log")
    axes.set_xlim(right=1.25 * max(each["bits_a_value"] for each in every))  # a label stands behind the last one
    axes.set_xlabel("size (bits a value, everything counted)")
    axes.set_ylabel("KL to raw KV (nats a token)")
    axes.legend()


def draw_ideas(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bits a value by idea."""
    mine = [each for each in rows if each["idea"] != "int8"]
    axes.barh([each["idea"] for each in mine], [each["bits_a_value"] for each in mine])
    for at, each in enumerate(mine):
        axes.annotate(
            f"KL {each['kl']:.3f}", (each["bits_a_value"], at), (4, 0), textcoords="offset points", va="center"
        )
    axes.invert_yaxis()
    axes.set_xlim(right=1.25 * max(each["bits_a_value"] for each in mine))
    axes.set_xlabel("bits a value, everything counted")


def draw_bandwidth(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Time to first token against bandwidth."""
    for name in _methods(rows):
        axes.plot([each["gbps"] for each in rows], [each[f"{name}_s"] for each in rows], "o-", label=name, markersize=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("equivalent of the paper's bandwidth (Gbit/s)")
    axes.set_ylabel("seconds to the first token")
    axes.legend()


def draw_load(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Time to first token by length; dotted over requests of the longest context, at the places 1 to 10."""
    lengths = [each for each in rows if each["what"] == "length"]
    requests = [each for each in rows if each["what"] == "requests"]
    beside = axes.twiny()
    for index, name in enumerate(_methods(rows)):
        color = f"C{index}"
        axes.plot([r["tokens"] for r in lengths], [r[f"{name}_s"] for r in lengths], "o-", color=color, label=name)
        beside.plot([r["requests"] for r in requests], [r[f"{name}_s"] for r in requests], "s:", color=color)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of the context (lines)")
    beside.set_xlabel("requests at a time, longest context (dotted)", fontsize=8)
    axes.set_ylabel("seconds to the first token")
    axes.get_figure().legend(loc="outside lower center", ncols=3)


def draw_breakdown(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Stacked seconds by method."""
    mine = [each for each in rows if each.get("ttft_s") is not None]
    left = [0.0] * len(mine)
    for key, label in (("link_s", "link"), ("decode_s", "decoding, not hidden"), ("compute_s", "computing")):
        axes.barh([each["method"] for each in mine], [each[key] for each in mine], left=left, label=label)
        left = [a + each[key] for a, each in zip(left, mine, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds to the first token")
    axes.legend()


def _methods(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name.removesuffix("_s") for name in rows[0] if name.endswith("_s")]
