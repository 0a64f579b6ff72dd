"""Counting operations and timing decoding, on a tiny model: what they report, and that nothing is
read back.
"""

import json
from pathlib import Path

from ragfuse_bench.decode import run_decode
from ragfuse_bench.kernels import run_kernels
from ragfuse_bench.options import DecodeOptions, KernelOptions
from rich.console import Console

PREFILLS = ["full", "none", "lexical", "query", "hkvd"]


def test_every_prefill_is_counted_and_an_accelerator_reads_nothing_back(tmp_path: Path) -> None:
    found = run_kernels(KernelOptions("tiny", "float32", 3, 40, 8, tmp_path), Console(quiet=True))
    assert json.loads(json.dumps(found)) == found
    for counts in (found, found["views"]):
        for path in ("cpu", "accelerator"):
            assert list(counts[path]) == PREFILLS
            assert min(counts[path].values()) > 0
    assert found["syncs"] == 0


def test_decoding_is_timed_beside_transformers(tmp_path: Path) -> None:
    options = DecodeOptions("tiny", "float32", (24, 48), steps=4, rounds=1, home=tmp_path)
    result = run_decode(options, Console(quiet=True))
    assert json.loads(json.dumps(result)) == result
    assert [row["context"] for row in result["ms_a_token"]] == [24, 48]
    for row in result["ms_a_token"]:
        assert len(row["rounds_s"]["ragfuse"]) == len(row["rounds_s"]["transformers"]) == 1
        assert row["vllm"] is None
