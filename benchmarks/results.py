"""`python -m benchmarks.results`: docs/results.md from the JSON of the runs under docs/benchmarks.

Nothing is typed by hand: what a run did not measure is not on the page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.modules import modules
from benchmarks.ray_tables import ray
from benchmarks.reuse import matching, prefix
from benchmarks.tables import number, table
from benchmarks.waiting import conversation, streams, throughput

DOCS = Path(__file__).parents[1] / "docs"
Result = Mapping[str, Any]

HEAD = """# Results

Made by `make results` from the files in [benchmarks](benchmarks), each written by `ragfuse bench ... --json`,
`ragfuse calibrate --json` or `python -m benchmarks.peers --json` unless a note says otherwise.
What the columns mean: [quality.md](quality.md).
Times are CPU time unless said, and full prefill's is measured beside each.
"""


def page(folder: Path) -> str:
    """The whole page from all runs in a folder."""
    runs = {path.name: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}
    parts = [HEAD]
    for title, belongs, lines in SECTIONS:
        mine = {name: run for name, run in runs.items() if belongs(run)}
        if mine:
            parts.append(f"## {title}\n")
            for name, run in mine.items():
                parts.append("\n".join([*lines(run), "", *_picture(folder, name), _where(name, run), ""]))
    return "\n".join(parts).rstrip() + "\n"


def _picture(folder: Path, name: str) -> Iterator[str]:
    """The picture that lies beside a run under its name."""
    beside = Path(name).with_suffix(".png")
    if (folder / beside).exists():
        yield f"![{beside.stem}](benchmarks/{beside})"
        yield ""


def _where(name: str, run: Result) -> str:
    where, given = run.get("machine", {}), {**run.get("options", {}), **run}
    dtype = f" in {given['dtype']}" if "dtype" in given else ""
    versions = run.get("versions", {})
    device = where.get("gpu") or where.get("cpu", "")
    said = [
        f"`{given['model']}`{dtype}" if given.get("model") else "",
        f"chunks of up to {given['chunk_tokens']} tokens" if given.get("chunk_tokens") else "",
        f"{device}, {run['threads']} thread{'s' * (run['threads'] > 1)}" if "threads" in run else device,
        f"torch {versions['torch']}, transformers {versions['transformers']}" if versions else "",
        "allocator tuned" if run.get("malloc", {}).get("tuned") else "allocator untuned",
        str(run.get("date", ""))[:10],
        run.get("note", ""),
    ]
    return f"[{name}](benchmarks/{name}): " + "; ".join(part for part in said if part) + "."


def _interval(found: Sequence[float] | None, form: str = ".3f") -> str:
    return "" if not found else f"{found[0]:{form}}..{found[1]:{form}}"


def _named(row: Result) -> str:
    """Method and ratio, where it has one."""
    ratio = row.get("ratio")
    return row["method"] if ratio is None or row["method"] in ("full", "none") else f"{row['method']} {ratio:.0%}"


def _quality(run: Result) -> Iterator[str]:
    for dataset in dict.fromkeys(row["dataset"] for row in run["results"]):
        mine = [row for row in run["results"] if row["dataset"] == dataset]
        summary = mine[0]["rouge_l"] is not None
        score = "ROUGE-L" if summary else "F1"
        answered = mine[0].get("n_answered") or 0
        few = f"; {score}, EM and the same answers of {answered} of them" if 0 < answered < mine[0]["n"] else ""
        yield f"**{dataset}**, n = {mine[0]['n']}, {mine[0]['tokens']:,.0f} prompt tokens{few}"
        yield ""
        columns = ("method", score, "95%", "- full (95%)", "EM", "KL", "of reuse's (95%)", "top-1", "same", "TTFT")
        yield from table(columns, [_quality_row(row, "rouge_l" if summary else "f1") for row in mine])
        yield ""


def _quality_row(row: Result, score: str) -> list[str]:
    over = row.get("kl_over_reuse")
    return [
        _named(row),
        number(row[score]),
        _interval(row.get(f"{score}_ci")),
        "" if row["method"] == "full" else _difference(row),
        number(row["em"]),
        number(row["kl"]),
        "" if over is None else f"{over:.3f} ({_interval(row.get('kl_over_reuse_ci'), '.2f')})",
        number(row["top1"]),
        number(row["identical"], ".0%"),
        f"{row['ttft_x']:.1f}x",
    ]


def _difference(row: Result) -> str:
    """The difference to full prefill's score with its interval; nothing where no answers were written."""
    found = row.get("to_full")
    return "" if found is None else f"{found:+.3f} ({_interval(row.get('to_full_ci'), '+.3f')})"


def _calibration(run: Result) -> Iterator[str]:
    yield f"{run['advice']} {run['questions']} questions, {run['seconds']:.0f} s."
    yield ""
    columns = ("policy", "ratio", "KL of reuse's", "95%", "top-1", "TTFT", "safe")
    yield from table(
        columns,
        [
            [
                each["policy"],
                f"{each['ratio']:.0%}",
                number(each["kl_over_reuse"]),
                _interval((each["low"], each["high"])),
                number(each["top1"]),
                f"{each['ttft_x']:.1f}x",
                "yes" if each["is_safe"] else "",
            ]
            for each in run["tried"]
        ],
    )


def _codec(run: Result) -> Iterator[str]:
    raw, piece = run["answers"]["raw"], run["piece"]
    reached = ", ".join(run["reached"]) or "no level"
    yield (
        f"Contexts of {run['context_tokens']:,} tokens; F1 on n = {raw['n']} questions, {raw['f1']:.3f} over raw KV; "
        f"speeds on {piece['tokens']:,} tokens, by the second of one core. Small and close enough: {reached}."
    )
    yield ""
    columns = ("level", "of fp16", "int8 over it", "KL", "top-1", "top-1 in answers", "F1 - raw (95%)")
    columns += ("encode MB/s", "decode MB/s", "decoding over prefilling")
    rows = [*run["levels"], *run["baselines"]]
    yield from table(columns, [_codec_row(row) for row in rows])
    yield ""
    keys = ("bytes_over_fp16", "kl", "top1")
    ideas = [[idea["name"], *(number(idea[key]) for key in keys)] for idea in run["ideas"]]
    yield from table(("idea", "of fp16", "KL", "top-1"), ideas)
    yield ""
    found = [(f"{row['shape']}, {_coded_by(row['level'], row)}", row["decode_over_prefill"]) for row in run["shapes"]]
    shapes = [[name, f"{share:.4f}"] for name, share in found]
    yield from table(("shape, level", "decoding over prefilling"), shapes)
    yield ""
    yield f"The paper: {run['paper']}"
    for sentence in run["absent"]:
        yield ""
        yield sentence


def _coded_by(name: str, row: Result) -> str:
    return f"{name} by {row['coder']}" if row.get("coder") else name  # earlier runs compared two coders


def _codec_row(row: Result) -> list[str]:
    delta = row["f1_delta"]
    return [
        _coded_by(row["name"], row),
        number(row["bytes_over_fp16"]),
        number(row["x_vs_int8"], ".2f"),
        number(row["kl"], ".4f"),
        *(number(row[key]) for key in ("top1", "top1_answers")),
        "" if delta is None else f"{delta:+.3f} ({_interval(row['f1_delta_ci'], '+.3f')})",
        *(number(row[key], ",.0f") for key in ("encode_mbps", "decode_mbps")),
        number(row["decode_over_prefill"], ".1%"),
    ]


def _peers(run: Result) -> Iterator[str]:
    yield f"The same ids for everyone, one at a time, answers of up to {run['answer_tokens']} tokens; by the wall."
    speedups = ("speedup over transformers", "speedup of ragfuse")
    columns = ("", "first token", *speedups, "CPU", "same first token", "same answer")
    for tokens in dict.fromkeys(row["tokens"] for row in run["results"]):
        rows = [row for row in run["results"] if row["tokens"] == tokens]
        shape = "{n} prompts of {tokens:,.0f} tokens, {chunks} of {pool} recurring chunks each:"
        yield ""
        yield shape.format_map(rows[0])
        yield ""
        yield from table((*columns, "memory", "disk"), [_peer_row(row) for row in rows])
    yield ""
    yield _peers_note(run)
    for sentence in run["absent"]:
        yield ""
        yield sentence


def _peer_row(row: Result) -> list[str]:
    return [
        f"{row['peer']} ({row['what']})",
        f"{row['wall_s'] * 1e3:,.0f} ms",
        f"{row['speedup']:.2f}x",
        "" if row["ragfuse_speedup"] is None else f"{row['ragfuse_speedup']:.2f}x",
        f"{row['cpu_s'] * 1e3:,.0f} ms",
        f"{row['same_first_token']:.0%}",
        f"{row['same_answer']:.0%}",
        f"{row['resident_bytes'] / 1e6:,.0f} MB",
        f"{row['disk_bytes'] / 1e6:,.0f} MB",
    ]


def _peers_note(run: Result) -> str:
    versions = ", ".join(dict.fromkeys(row["version"] for row in run["results"]))
    encoded = [f"{row['encode_s']:.1f} s" for row in run["results"] if row["peer"] == "ragfuse" and "encode_s" in row]
    took = f" ragfuse encoded the chunks before, once, in {', '.join(encoded)}." if encoded else ""
    room = f" Each may keep {run['memory_gib']} GiB of KV in memory, which vLLM takes at once."
    return f"{versions}.{took}{room}"


def _engines(run: Result) -> Iterator[str]:
    yield (
        "Chunks x tokens of a chunk, which recur in changing order and have been met before; over HTTP, answers of "
        f"{run['options']['answer_tokens']} tokens. tokens/s: of all answers, over the whole load; of one answer: the "
        "median one's, behind its first token. "
        f"vLLM wrote {run['decoded'].get('decoded', 0):.0f} of ragfuse's answers."
    )
    yield ""
    columns = ("prompts", "at once", "server", "first token", "faster than vLLM", "tokens/s", "of one answer")
    yield from table(
        columns,
        [
            [
                row["shape"],
                str(row["together"]),
                way,
                f"{found['ttft_s']:.2f} s",
                "" if way == "vllm" else f"{row['ways']['vllm']['ttft_s'] / found['ttft_s']:.1f}x",
                f"{found['tokens_per_s']:.1f}",
                f"{found['decode_tokens_per_s']:.1f}",
            ]
            for row in run["measured"]
            for way, found in row["ways"].items()
        ],
    )


def _adapt(run: Result) -> Iterator[str]:
    yield (
        f"{run['steps']} steps in {run['seconds'] / 60:.0f} minutes. KL to full prefill on held-out documents, nothing "
        "recomputed, nats a token: "
        + ", ".join(f"{each['kl']:.3f} ({each['step']})" for each in run["evaluations"])
        + " (behind so many steps). Calibration with the adapter:"
    )
    yield ""
    yield from _calibration(run["calibration"])


def _dropin(run: Result) -> Iterator[str]:
    yield f"Chains of {run['chunks']} chunks, the model swapped; by the wall, {run['timed']}."
    yield ""
    columns = ("", "theirs", "ours", "faster", "CPU", "same chunks", "same answers", "right, theirs and ours", "reused")
    rows = [(name, run[name]) for name in ("langchain", "llama_index")]
    yield from table(
        columns,
        [
            [
                f"{name}, {each['tokens']:,} tokens",
                f"{each['theirs_s']:.2f} s",
                f"{each['ours_s']:.2f} s",
                f"{each['ttft_ratio']:.1f}x",
                f"{each['ttft_ratio_cpu']:.1f}x",
                "yes" if each["same_documents"] else "no",
                f"{each['agree']:.0%}",
                f"{each['right_theirs']} and {each['right_ours']} of {len(each['questions'])}",
                f"{each['tokens_reused'] / each['tokens_in_all']:.0%}",
            ]
            for name, each in rows
        ],
    )
    cost = run["langchain"]["lines"]
    yield ""
    yield (
        f"Lines changed: {cost['changed']} of the chain's {cost['of']}, and its import; added: {cost['added']}. "
        "Counted in the programs that were run."
    )


_PLACES = {
    "memory": "in memory",
    "pinned": "in pinned memory of the host",
    "gpu": "in the memory of the GPU",
    "disk": "on disk",
}


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.2 else f"{1e3 * seconds:.0f} ms"


def _ttft(run: Result) -> Iterator[str]:
    yield f"`{run['policy']}` at {run['options']['ratio']:.0%}, KV {_PLACES[run['options'].get('kv', 'memory')]}."
    yield ""
    columns = ("chunks", "tokens", "full", "fused", "faster", "plain reuse", "prefix caching", "of the ideal")
    yield from table(
        columns,
        [
            [
                str(each["chunks"]),
                f"{each['tokens']:,}",
                _duration(each["full_s"]),
                _duration(each["fused_s"]),
                f"{each['speedup']:.2f}x",
                f"{each['reuse_x']:.1f}x",
                f"{each['prefix_x']:.2f}x",
                f"{each['efficiency']:.0%}",
            ]
            for each in run.get("by_chunks") or [run]
        ],
    )


def _kernels(run: Result) -> Iterator[str]:
    yield f"{run['tokens']:,} tokens, {run['layers']} layers; read back on the accelerator's path: {run['syncs']}."
    yield ""
    paths = ("cpu", "accelerator")
    columns = ("prefill", *(f"{path}: {what}" for path in paths for what in ("operations", "of full", "views")))
    rows = []
    for name in run["cpu"]:
        counts = ((run[path][name], run[path]["full"], run["views"][path][name]) for path in paths)
        cells = ((f"{n:,}", f"{n / full:.2f}", f"{views:,}") for n, full, views in counts)
        rows.append([name, *(cell for path_cells in cells for cell in path_cells)])
    yield from table(columns, rows)


def _decode(run: Result) -> Iterator[str]:
    ways = ("ragfuse", "transformers", "vllm")
    rows = [[f"{row['context']:,}", *(number(row[way], ".1f") for way in ways)] for row in run["ms_a_token"]]
    yield from table(("tokens of context", *(f"{way}, ms a token" for way in ways)), rows)


def _load(run: Result) -> Iterator[str]:
    yield f"{run['nbytes'] / 1e6:.1f} MB of KV, `{run['policy']}` at {run['ratio']:.0%}, files cold; wall time."
    yield ""
    columns = ("MB/s", "from memory", "read ahead", "over memory", "read when used", "over memory")
    yield from table(
        columns,
        [
            [
                f"{each['mbps']:g}",
                *(f"{each[name]:.2f} s" for name in ("ram_s", "threaded_s")),
                f"{each['threaded_over_ram']:.2f}x",
                f"{each['sync_s']:.2f} s",
                f"{each['sync_over_ram']:.2f}x",
            ]
            for each in run["by_mbps"]
        ],
    )


def _controller(run: Result) -> Iterator[str]:
    yield (
        f"Time to the first token of {run['plans']} plans: off by {run['median_abs_err']:.1%} (median), "
        f"{run['p90_abs_err']:.1%} (90%); the ratio by at most {number(run['ratio_gap_max'], '.2f')}."
    )
    yield ""
    columns = ("MB/s", "policy", "least ratio", "chosen", "best by trying")
    yield from table(
        columns,
        [
            [f"{each['mbps']:g}", each["policy"], *(f"{each[name]:.2f}" for name in ("least", "chosen", "best"))]
            for each in run["by_mbps"]
        ],
    )


def _store(run: Result) -> Iterator[str]:
    columns = ("tier", "read MB/s", "a plain file", "write MB/s", "a plain file", "reads/s", "writes/s")
    keys = ("read_mbps", "raw_read_mbps", "write_mbps", "raw_write_mbps", "reads_per_s", "writes_per_s")
    rows = [[each["tier"], *(number(each[key], ",.0f") for key in keys)] for each in run["tiers"]]
    yield from table(columns, rows)
    yield ""
    yield (
        f"Six chunks are looked up among {run['index_rows']:,} in {run['lookup_us_p50']:.0f} us (99%: "
        f"{run['lookup_us_p99']:.0f} us); the index takes {run['index_mb_per_million']:.0f} MB of memory and "
        f"{run['index_file_mb_per_million']:.0f} MB of disk for a million. A request whose chunks are saved behind it "
        f"takes {run['request_slowdown']:+.1%} longer, one right behind it, while they are, "
        f"{run['next_request_slowdown']:+.1%}."
    )


def _sessions(run: Result) -> Iterator[str]:
    drawn = run["loads"]["drawn"]
    yield (
        f"{drawn['sessions']:,} conversations of {drawn['turns']:.2f} turns, {drawn['over_4k']:.0%} of more than 4,096 "
        f"tokens; the first {run['warm_turns']:,} turns warm the tiers up. Shares of turns whose KV was found. "
        f"{run['events']:,} events, {run['events_per_s']:,.0f} a second of one core."
    )
    yield ""
    columns = ("setting, policy", "hit", "in memory", "on disk", "of turns with a history", "first token", "waiting")
    rows = []
    for setting in run["settings"]:
        for policy in (name for name in setting if name != "name"):
            mine = setting[policy]
            shares = [f"{mine[key]:.1%}" for key in ("hit", "ram", "disk", "later_hit")]
            times = [f"{mine['first_token_s'] * 1e3:,.0f} ms", f"{mine['waiting']:,.0f}"]
            rows.append([f"{setting['name']}, {policy.replace('_', ' ')}", *shares, *times])
    yield from table(columns, rows)


def _has(name: str, inside: str = "") -> Callable[[Result], bool]:
    """Whether a run has a key, or the first of its list has one."""
    if not inside:
        return lambda run: name in run
    return lambda run: isinstance(run.get(name), list) and any(inside in first for first in run[name][:1])


SECTIONS: tuple[tuple[str, Callable[[Result], bool], Callable[[Result], Iterator[str]]], ...] = (
    ("Quality", _has("results", "dataset"), _quality),
    ("Calibration", _has("tried", "is_safe"), _calibration),
    ("Levels of KV", _has("levels", "encode_mbps"), _codec),
    ("KV over a line, under a deadline", _has("ttft_x_vs_int8"), streams),
    ("A conversation that grows", _has("ttft_reduction"), conversation),
    ("A server under load", _has("rate_x_vs_full"), throughput),
    ("Conversations on one server, simulated", _has("settings", "look_ahead"), _sessions),
    ("Prompts over modules", _has("speedup_2k"), modules),
    ("Beside what people use today", _has("results", "peer"), _peers),
    ("Whole servers: vLLM, ragfuse, both", _has("measured", "ways"), _engines),
    ("Several processes, with Ray", lambda run: any(part in run for part in ("simulation", "bulk", "serving")), ray),
    ("Adapters that encode chunks", _has("evaluations"), _adapt),
    ("Prefix caching", _has("identical_share"), prefix),
    ("Known passages, altered", _has("ms_per_8k"), matching),
    ("The model swapped in a chain", _has("langchain"), _dropin),
    ("Time to first token, random weights", _has("prefix_x"), _ttft),
    ("Operations of a prefill", _has("syncs"), _kernels),
    ("Decoding one answer", _has("ms_a_token"), _decode),
    ("Reading ahead", _has("threaded_over_ram"), _load),
    ("The loading controller", _has("ratio_gap_max"), _controller),
    ("The store", _has("disk_read_over_raw"), _store),
)


if __name__ == "__main__":
    (DOCS / "results.md").write_text(page(DOCS / "benchmarks"), "utf-8")
