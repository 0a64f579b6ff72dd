"""Bulk encoding: one process against a cluster, and a cluster whose worker is killed in the middle."""

from __future__ import annotations

import hashlib
import os
import signal
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from ragfuse_bench.ray.options import RayOptions
from rich.console import Console

from ragfuse.engine.engine import Engine
from ragfuse.ray.bulk import BulkSummary, encode
from ragfuse.settings import Settings
from ragfuse.types.keys import ChunkKey

CHUNK_WORDS = 100
WORKERS = 2
BATCH = 8


def texts(n: int) -> list[tuple[str, str]]:
    """(text, source) of `n` chunks, no two alike."""
    made = []
    for number in range(n):
        words = [f"ship{(number * 31 + at * 17) % 997}" for at in range(CHUNK_WORDS)]
        made.append((f"Report {number} of the harbour: {' '.join(words)}.", f"report-{number}"))
    return made


def contents(settings: Settings) -> dict[ChunkKey, str]:
    """The keys of all entries in the disk tier of a store, each with a digest of its KV's bytes."""
    found = {}
    with Engine(settings) as engine:
        tier = next(tier for tier in engine.store.tiers if tier.slow)
        for entry in tier.list():
            key, read = entry.key, tier.get(entry.key, range(entry.n_layers))
            if read is not None:
                digest = hashlib.blake2b(digest_size=16)
                for blob in read[1:]:
                    digest.update(blob.numpy().tobytes())
                found[key] = digest.hexdigest()
    return found


def run_bulk(options: RayOptions, folder: Path, console: Console) -> dict[str, Any]:
    """Encode the same chunks three times, each into a store of its own, and compare what is stored.

    Returns:
        Seconds and tokens per second of each way; whether keys and bytes are those of one process; the cost of Ray: the
        seconds of the cluster's workers and start, over those of one process.
    """
    chunks = texts(options.chunks)
    ways = {way: Settings(store=folder / way, threads=1, memory_bytes=256 << 20) for way in ("one", "ray", "killed")}
    with Engine(ways["one"]) as engine:
        began = perf_counter()
        _ = engine.model
        load_s, began = perf_counter() - began, perf_counter()
        alone = engine.ingest(chunks)
        alone_s = perf_counter() - began
    wanted = contents(ways["one"])
    killed = list[int]()

    def kill(pid: int, done: BulkSummary) -> None:
        if not killed:
            with suppress(ProcessLookupError):  # Ray ends a worker that has nothing left to do
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    result: dict[str, Any] = {
        "chunks": len(chunks),
        "one_process": {
            "seconds": alone_s,
            "load_s": load_s,
            "tokens": alone.tokens,
            "nbytes": alone.nbytes,
            "tokens_per_s": alone.tokens / alone_s,
        },
    }
    for way in ("ray", "killed"):
        done = encode(
            chunks,
            ways[way],
            workers=WORKERS,
            cpus=1,
            batch=BATCH,
            progress=kill if way == "killed" else lambda pid, done: None,
        )
        found = contents(ways[way])
        result[way] = {
            **done.as_dict(),
            "same_keys": found.keys() == wanted.keys(),
            "same_bytes": found == wanted,
            "over_one_process": done.seconds / (alone_s + load_s),
        }
        console.print(
            f"{way}: {done.chunks:,} chunks in {done.seconds:.1f} s (one process {alone_s + load_s:.1f} s), keys "
            f"{_compared(found.keys() == wanted.keys())}, bytes {_compared(found == wanted)}.",
            highlight=False,
        )
    result["killed"]["workers_killed"] = len(killed)
    if not killed:
        console.print("No worker was killed: all had ended. Leave out --quick.", highlight=False)
    again = encode(chunks, ways["killed"], workers=1, cpus=1, batch=BATCH)
    result["again"] = {"encoded": again.encoded, "seconds": again.seconds}
    return result


def _compared(is_equal: bool) -> str:
    return "equal" if is_equal else "differ"
