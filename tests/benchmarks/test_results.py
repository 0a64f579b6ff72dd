"""The page of results says what the committed runs say, and nothing else."""

import json
from pathlib import Path

from benchmarks.results import DOCS, page


def test_the_committed_page_is_what_the_committed_runs_give() -> None:
    assert (DOCS / "results.md").read_text("utf-8") == page(DOCS / "benchmarks"), "Run make results."


def test_every_kind_of_run_has_its_section(tmp_path: Path) -> None:
    quality = {"dataset": "d", "method": "hkvd", "ratio": 0.15, "n": 3, "tokens": 9.0, "f1": 0.5, "f1_ci": [0.4, 0.6]}
    quality |= {"to_full_ci": [-0.1, 0.1], "em": 0.3, "rouge_l": None, "kl": 0.2, "kl_over_reuse": 0.25}
    quality |= {"kl_over_reuse_ci": [0.1, 0.4], "top1": 0.9, "identical": 0.8, "ttft_x": 4.0}
    tried = {"policy": "lego", "ratio": 0.06, "kl_over_reuse": 0.2, "low": 0.1, "high": 0.3, "top1": 0.95}
    peer = {"peer": "hf", "what": "generate", "wall_s": 0.5, "cpu_s": 0.4, "speedup": 1.0, "same_first_token": 1.0}
    peer |= {"ragfuse_speedup": 4.5, "same_answer": 0.5, "resident_bytes": 10**9, "disk_bytes": 0, "version": "x 1"}
    peer |= {"n": 2, "tokens": 90.0, "chunks": 6, "pool": 8}
    ours = {**peer, "peer": "ragfuse", "encode_s": 3.21, "ragfuse_speedup": None}
    ttft = {"chunks": 6, "tokens": 3104, "full_s": 4.0, "fused_s": 1.0, "speedup": 4.0, "reuse_x": 20.0}
    runs = {
        "a": {"results": [quality], "model": "m", "dtype": "bfloat16"},
        "b": {"tried": [{**tried, "ttft_x": 5.0, "is_safe": True}], "advice": "Do.", "questions": 8, "seconds": 60.0},
        "d": {"results": [peer, ours], "absent": ["vllm is left out."], "answer_tokens": 16, "memory_gib": 2},
        "e": {**ttft, "prefix_x": 1.1, "efficiency": 0.9, "policy": "hkvd", "options": {"ratio": 0.15, "model": "q05"}},
    }
    load = {"mbps": 100.0, "ram_s": 1.0, "threaded_s": 1.05, "sync_s": 1.4, "threaded_over_ram": 1.05}
    runs["f"] = {**load, "by_mbps": [{**load, "sync_over_ram": 1.4}], "nbytes": 37_700_000}
    runs["f"] |= {"policy": "hkvd", "ratio": 0.15, "model": "q05"}
    speed = {"mbps": 30.0, "policy": "hkvd", "least": 0.15, "chosen": 0.42, "best": 0.41}
    errors = {"median_abs_err": 0.08, "p90_abs_err": 0.2, "ratio_gap_max": 0.01}
    runs["g"] = {**errors, "plans": 60, "by_mbps": [speed], "model": "q05"}
    disk = {"tier": "disk", "read_mbps": 900.0, "raw_read_mbps": 1000.0, "write_mbps": 400.0, "raw_write_mbps": None}
    index = {"index_rows": 10**6, "lookup_us_p50": 70.0, "lookup_us_p99": 150.0, "index_mb_per_million": 8.0}
    runs["h"] = {"tiers": [{**disk, "reads_per_s": 100.0, "writes_per_s": 60.0}], "disk_read_over_raw": 0.9, **index}
    runs["h"] |= {
        "index_file_mb_per_million": 274.0,
        "request_slowdown": 0.01,
        "next_request_slowdown": 0.2,
        "model": "q05",
    }
    swap = {"theirs_s": 3.0, "ours_s": 0.75, "ttft_ratio": 4.0, "ttft_ratio_cpu": 4.2, "same_documents": True}
    swap |= {"agree": 0.5, "right_theirs": 1, "right_ours": 2, "tokens": 3000, "tokens_reused": 2400}
    swap |= {"tokens_in_all": 3000, "questions": [{}, {}], "lines": {"changed": 1, "imports": 1, "added": 1, "of": 6}}
    runs["i"] = {"langchain": swap, "llama_index": swap, "chunks": 6, "timed": "from question to token", "model": "m"}
    level = {"name": "cg2", "coder": "zstd", "bytes_over_fp16": 0.19, "x_vs_int8": 2.7, "kl": 0.0123, "top1": 0.95}
    level |= {"top1_answers": 0.97, "f1_delta": -0.01, "f1_delta_ci": [-0.03, 0.01], "encode_mbps": 90.0}
    level |= {"decode_mbps": 1200.0, "decode_over_prefill": 0.05}
    runs["j"] = {"levels": [level], "baselines": [{**level, "name": "int4", "coder": "", "f1_delta": None}]}
    runs["j"] |= {"ideas": [{**level, "name": "+ deltas"}], "shapes": [{**level, "shape": "l8b", "level": "cg2"}]}
    runs["j"] |= {"answers": {"raw": {"n": 300, "f1": 0.6}}, "piece": {"tokens": 1500}, "reached": ["cg2"]}
    runs["j"] |= {"context_tokens": 6000, "paper": "p", "absent": ["Not at hand: Mistral-7B."]}
    hits = {"hit": 0.7, "ram": 0.65, "disk": 0.05, "later_hit": 0.79, "first_token_s": 0.052, "waiting": 2060.0}
    drawn = {"sessions": 9000, "turns": 5.74, "over_4k": 0.149}
    runs["l"] = {"settings": [{"name": "128G/2T", "look_ahead": hits}], "loads": {"drawn": drawn}, "warm_turns": 10}
    runs["l"] |= {"events": 10**6, "events_per_s": 2e4}
    use = {"name": "trip", "dataset": "", "tokens": 423, "cached_share": 0.948, "ttft_x": 6.1, "same": False}
    use |= {"answer_full": "May", "answer_cached": "A `train`\nin May"}
    asked = {"dataset": "held-out", "n": 12, "tokens": 1088.0, "cached_share": 0.986, "ttft_x": 10.8, "same": 0.5}
    process = {"loaded_rss": {"on": 1e9, "off": 1e9}, "peak_rss": {"on": 12e8, "off": 15e8}}
    process |= {"above_model": {"on": 2e8, "off": 5e8}, "batch_memory_ratio": 0.8, "above_model_ratio": 0.4}
    process |= {"module_nbytes": 48e6}
    longer = {**process, "tokens": 4096, "module_nbytes": 192e6, "batch_memory_ratio": 0.5}
    runs["m"] = {"cases": [use], "by_set": [{**asked, "score_full": 0.5, "score_cached": 0.4}], "paper": "p"}
    runs["m"] |= {
        "slope": [{"tokens": 2106, "full_s": 7.0, "cached_s": 0.4}],
        "speedup_2k": 11.5,
        "mostly_cached": {"tokens": 2155, "cached_share": 0.951, "ttft_x": 11.5},
        "mb_per_token": 0.0461,
    }
    runs["m"] |= {"growth": {"full": 1.2, "cached": 0.4}, "model": "m"}
    runs["m"] |= {
        "memory": {
            "by_allocator": {"one arena": process},
            "allocator": "one arena",
            "by_tokens": [longer],
            "prompts": 8,
            "tokens": 1024,
        }
    }
    by = {"text": 0.0, "int8": 0.001, "fixed": 0.02, "adaptive": 0.01}
    late = {"deadline_s": 8.86, "paper_s": 1.0, "violations": dict.fromkeys(by, 0.25), "ttft_s": by}
    runs["o"] = {"deadlines": [{**late, "kl": by, "top1": by, "f1": by}], "kinds": {"random": 10, "measured": 10}}
    runs["o"] |= {"traces": 20, "pieces": 6, "tokens": [6129], "fixed": "cg2"}
    runs["o"]["levels"] = {"cg2": 9.0}
    runs["o"] |= {"ttft_x_vs_text": 6.88, "ttft_x_vs_int8": 3.31, "scale": {"derived": "By 622 MB."}}
    timed = {"turn": 2, "tokens": 900, "reused": 800, "full_s": 2.0, "history_s": 0.2, "reduction": 0.9}
    runs["p"] = {"turns": [{"turn": 1, "tokens": 99, "reused": 0}, timed], "ttft_reduction": 0.9, "top1_bf16": 0.99}
    runs["p"] |= {"ttft_reduction_min": 0.8, "token_equal_fp32": True}
    runs["p"] |= {"perplexity": {"kept": 20.0, "recomputed": 20.01, "naive": 300.0, "bare": 30.0, "n_sinks": 4}}
    load = {"rate": 0.5, "n": 40, "mean_s": 1.25, "p95_s": None, "lost": 0}
    ways = {name: {"alone_s": 0.5, "loads": [load]} for name in ("full", "prefix", "ragfuse")}
    runs["q"] = {"rate_x_vs_full": 3.1, "rate_x_vs_prefix": None, "batch_x": 2.5, "methods": ways, "lost": 0}
    runs["q"] |= {
        "batch": {"together": 50.0, "alone": 20.0},
        "rss_growth": 0.01,
        "at_ttft_s": 1.0,
        "kept_busy": {**load, "n": 700, "p95_s": 2.5},
        "rates": {"ragfuse": {"at_least": True}},
    }
    for name, run in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    made = page(tmp_path)
    said = "hkvd 15% | 0.500 | 0.400..0.600", "| lego | 6% | 0.200", "500 ms", "vllm is left", "4.00x"
    said += (
        "| hf (generate) | 500 ms | 1.00x | 4.50x |",
        "2 prompts of 90 tokens, 6 of 8",
        "once, in 3.2 s. Each may keep",
    )
    said += (
        "| 100 | 1.00 s | 1.05 s | 1.05x | 1.40 s | 1.40x",
        "| 30 | hkvd | 0.15 | 0.42 | 0.41",
        "| disk | 900 | 1,000",
        "| llama_index, 3,000 tokens | 3.00 s | 0.75 s | 4.0x | 4.2x | yes | 50% | 1 and 2 of 2 | 80% |",
        "| cg2 by zstd | 0.190 | 2.70 | 0.0123 | 0.950 | 0.970 | -0.010 (-0.030..+0.010) | 90 | 1,200 | 5.0% |",
        "| + deltas | 0.190",
        "| l8b, cg2 by zstd | 0.0500 |",
        "Not at hand: Mistral-7B.",
        "| 128G/2T, look ahead | 70.0% | 65.0% | 5.0% | 79.0% | 52 ms | 2,060 |",
        "Lines changed: 1 of the chain's 6",
        "11.5 times faster at 2,155 tokens, 95.1% of them cached.",
        "| trip | 423 | 94.8% | 6.1x |  |  | 0% |",
        "| held-out, n = 12 | 1,088 | 98.6% | 10.8x | 0.500 | 0.400 | 50% |",
        "| 1,024 (48 MB) | one arena, sharing on | 1,000 MB | 1,200 MB | 200 MB | 80% | 40% |",
        "| 4,096 (192 MB) | one arena, sharing off |",
        "`May` / `A 'train' in May`",
        "| 1 s (8.9 s here) | fixed (cg2) | 25% | 0.02 s |",
        "3.3 times faster than 8 bits. By 622 MB.",
        "| 2 | 900 | 800 | 2.00 s | 0.200 s | 90% |",
        "| ragfuse | 0.50 | 40 | 1.250 s |  | 0 |",
        "| ragfuse, kept busy | 0.50 | 700 | 1.250 s | 2.500 s | 0 |",
        "With 1 s adaptive streams are late 1.000 times as often as 8 bits, where at most 0.1 was wanted.",
    )
    for wanted in said:
        assert wanted in made
    assert made.count("](benchmarks/") == len(runs)
