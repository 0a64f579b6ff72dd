"""What a store gives: bytes a second of each tier beside its device, look-ups among a million, what saving costs.

Reads are cold where the system can be told to forget files, checksums are on, entries are read as prompts read theirs:
six at a time. The device's own figure comes from a plain file of the same bytes, written and read in the same rounds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from ragfuse_bench.options import CHUNKS_OF_A_LOOKUP, StoreOptions
from ragfuse_bench.presets import bench_model
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.runner import Runner, Times, circumstances, speedup, thread_count
from ragfuse.codec import RAW
from ragfuse.engine.engine import Ask, Engine
from ragfuse.errors import StoreError
from ragfuse.load.timings import forget_pages
from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import DiskTier, EntryMeta, KVStore, MemoryTier, Tier
from ragfuse.store.factory import open_tier
from ragfuse.store.index import Index
from ragfuse.telemetry.progress import progress
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.sizes import UNLIMITED

BLOCK = 8 << 20
"""Bytes of one read of the plain file."""


def run_store(options: StoreOptions, console: Console) -> dict[str, Any]:
    """The result as plain JSON types; `console` shows progress and the tables."""
    options.home.mkdir(parents=True, exist_ok=True)
    with thread_count(options.threads):
        tiers = _tiers(options, console)
        found = _lookups(options, console)
        slowdown = _slowdown(options, console)
    disk = next(row for row in tiers if row["tier"] == "disk")
    result = {
        "tiers": tiers,
        "disk_read_over_raw": disk["read_over_raw"],
        **found,
        **slowdown,
        "rounds": options.rounds,
        "chunks": options.chunks,
        "chunk": {name: getattr(options, name) for name in ("tokens", "layers", "heads", "dims")},
        **circumstances(torch.device("cpu"), options.threads),
    }
    _show(result, console)
    return result


# bytes a second


def _chunk(options: StoreOptions) -> ChunkKV:
    shape = (2, options.heads, options.tokens, options.dims)
    drawn = torch.Generator().manual_seed(0)
    layers = (torch.randn(shape, generator=drawn).bfloat16() for _ in range(options.layers))
    return ChunkKV(tuple(LayerKV(keys, values) for keys, values in layers))


def _tiers(options: StoreOptions, console: Console) -> list[dict[str, Any]]:
    """A row for memory, a disk folder, objects in files and each URL: entries written and read whole."""
    kv = _chunk(options)
    blobs = tuple(RAW.encode(layer) for layer in kv.layers)
    meta = EntryMeta.of(kv, RAW.name, blobs)
    keys = [ChunkKey(digest("bench"), digest(str(index))) for index in range(options.chunks)]
    runner = Runner(options.rounds, torch.device("cpu"), console)
    with _folder(options) as folder, ExitStack() as held:
        disk = DiskTier(folder / "tier", UNLIMITED, lru)
        held.callback(disk.close)
        plain, names = _Plain(folder / "plain", blobs, options.chunks), ["memory", "disk"]
        rows = [_row(tier, keys, meta, blobs, runner, folder, plain) for tier in (MemoryTier(UNLIMITED, lru), disk)]
        for url in (f"file://{folder / 'objects'}", *options.urls):
            tier = open_tier(url, Settings(), lru, names)
            held.callback(getattr(tier, "close", lambda: None))
            held.callback(tier.delete, keys)
            names.append(tier.name)
            rows.append(_row(tier, keys, meta, blobs, runner, folder))
    return rows


class _Plain:
    """A file of the same bytes, written and read as a plain program would."""

    def __init__(self, path: Path, blobs: Sequence[torch.Tensor], chunks: int) -> None:
        self.path, self._chunks = path, chunks
        self._bytes = torch.cat(list(blobs)).numpy().data
        self._buffer = bytearray(BLOCK)

    def write(self) -> None:
        """All of it, and on the medium."""
        with self.path.open("wb", buffering=0) as file:
            for _ in range(self._chunks):
                view = memoryview(self._bytes)
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())

    def read(self) -> None:
        """All of it, block after block."""
        with self.path.open("rb", buffering=0) as file:
            while file.readinto(self._buffer):
                pass

    def cool(self) -> None:
        """Let the system forget what it holds of it."""
        if hasattr(os, "posix_fadvise") and self.path.exists():
            with self.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _row(
    tier: Tier,
    keys: Sequence[ChunkKey],
    meta: EntryMeta,
    blobs: Sequence[torch.Tensor],
    runner: Runner,
    folder: Path,
    plain: _Plain | None = None,
) -> dict[str, Any]:
    """One tier's figures; the disk's also beside a plain file, in the same rounds."""

    def write() -> None:
        for key in keys:
            if not tier.put(key, meta, blobs):
                raise StoreError(f"The tier {tier.name} keeps nothing; is there room in '{folder}'?")

    def read() -> None:
        for at in range(0, len(keys), CHUNKS_OF_A_LOOKUP):
            prompt = keys[at : at + CHUNKS_OF_A_LOOKUP]
            tier.expect(prompt, range(len(meta.layers)))
            if not all(tier.get(key, range(len(meta.layers))) for key in prompt):
                raise StoreError(f"The tier {tier.name} has lost what was written; is somebody clearing it?")

    def forget() -> None:
        forget_pages(folder)
        if plain is not None:
            plain.cool()

    times: dict[str, Times] = {}
    for way, case in (("write", write), ("read", read)):  # apart: files just replaced slow down whoever reads next
        cases: dict[str, Callable[[], object]] = {way: case}
        if tier.slow and plain is not None:
            cases[f"raw {way}"] = getattr(plain, way)
        times |= runner.measure(cases, tier.name, forget)
    mb = len(keys) * meta.nbytes / 1e6
    seconds = {name: median(each.of("wall")) for name, each in times.items()}
    raw: dict[str, float | None] = {"raw_read_mbps": None, "raw_write_mbps": None, "read_over_raw": None}
    if tier.slow and plain is not None:
        raw = {f"raw_{way}_mbps": mb / seconds[f"raw {way}"] for way in ("read", "write")}
        raw["read_over_raw"] = speedup(times["raw read"].of("wall"), times["read"].of("wall"))
    return {
        "tier": tier.name,
        "read_mbps": mb / seconds["read"],
        "write_mbps": mb / seconds["write"],
        "reads_per_s": len(keys) / seconds["read"],
        "writes_per_s": len(keys) / seconds["write"],
        **raw,
        "mb": mb,
    }


# look-ups


def _lookups(options: StoreOptions, console: Console) -> dict[str, Any]:
    """Microseconds to look six chunks up among many, and the memory and disk that the index takes."""
    process, seconds = psutil.Process(), []
    drawn = torch.Generator().manual_seed(1)
    with _folder(options) as folder, KVStore([DiskTier(folder, UNLIMITED, lru)]) as store:
        keys = _fill(folder / "index.sqlite", options, console)
        before = process.memory_info().rss
        for _ in range(options.lookups):
            wanted = [keys[pick] for pick in torch.randperm(len(keys), generator=drawn)[:CHUNKS_OF_A_LOOKUP].tolist()]
            began = time.perf_counter()
            found = store.lookup(wanted)
            seconds.append(time.perf_counter() - began)
            if len(found) != len(wanted):
                raise StoreError("The index has lost rows that were just written; is somebody clearing it?")
        taken = process.memory_info().rss - before
        nbytes = sum(path.stat().st_size for path in folder.glob("index.sqlite*"))
    seconds.sort()
    millions = options.index_rows / 1e6
    return {
        "index_rows": options.index_rows,
        "lookup_us_p50": 1e6 * seconds[len(seconds) // 2],
        "lookup_us_p99": 1e6 * seconds[int(0.99 * len(seconds))],
        "index_mb_per_million": taken / 1e6 / millions,
        "index_file_mb_per_million": nbytes / 1e6 / millions,
    }


def _fill(path: Path, options: StoreOptions, console: Console) -> list[ChunkKey]:
    """As many rows as are wanted in a disk tier's index, without files; their keys."""
    keys = [ChunkKey(digest("bench"), digest(str(index))) for index in range(options.index_rows)]
    kv = _chunk(replace(options, tokens=1))
    meta = EntryMeta.of(kv, RAW.name, tuple(RAW.encode(layer) for layer in kv.layers))
    index = Index(path, "disk")
    with closing(index), progress(console) as bar, index.write() as transaction:
        for key in bar.track(keys, description="filling the index"):
            index.publish(transaction, meta.entry(key, "disk", meta.nbytes, 0.0))
    return keys


# saving


def _slowdown(options: StoreOptions, console: Console) -> dict[str, Any]:
    """How much slower a request is whose chunks are new and kept, and the one right behind it, while they are saved:
    0.05 is 5%. Beside an engine that finds no chunk long enough to keep; both prefill all of it.
    """
    model = bench_model(options.model, "bfloat16", "cpu", options.home)
    runner, serial = Runner(options.requests, model.device, console), count()
    walls: dict[tuple[str, int], list[float]] = {}
    with _folder(options) as folder, ExitStack() as held:
        store = held.enter_context(KVStore([MemoryTier(UNLIMITED, lru), DiskTier(folder, UNLIMITED, lru)]))
        kept = held.enter_context(Engine(Settings(), model, store))
        none = held.enter_context(Engine(Settings(min_chunk_tokens=1 << 20), model, KVStore([])))

        def ask(engine: Engine) -> object:
            question, chunks = _new_prompt(next(serial))
            return engine.answer(question, Ask(max_tokens=8, documents=chunks))

        with progress(console) as bar:
            for index in bar.track(range(options.requests + 1), description="requests"):
                for name, engine in (("kept", kept), ("none", none)):
                    kept.flush()  # what it saves is in nobody's way but its own next request's
                    for place in (0, 1):
                        sample = runner.once(partial(ask, engine))
                        if index:
                            walls.setdefault((name, place), []).append(sample.wall_s)
        kept.flush()
        saved = len(store.entries())
    if not saved:
        raise StoreError("Nothing was saved behind the requests; is there room for KV in the home folder?")
    over = [speedup(walls["kept", place], walls["none", place]) - 1 for place in (0, 1)]
    request_s = median(walls["none", 0])
    return {
        "request_slowdown": over[0],
        "next_request_slowdown": over[1],
        "request_s": request_s,
        "entries_saved": saved,
    }


def _new_prompt(serial: int) -> tuple[str, list[tuple[str, str]]]:
    """A text with six chunks, and these, that were never seen before, behind a beginning that was not either."""
    chunks = []
    for index in range(CHUNKS_OF_A_LOOKUP):
        text = " ".join(
            f"Report {serial}.{index}.{line} says {(serial + 7 * index) * line % 997}." for line in range(12)
        )
        chunks.append((text, f"report {serial}.{index}"))
    texts = [text for text, _ in chunks]
    parts = [f"These are the reports of round {serial}.", *texts, "Which report says the most?"]
    return "\n\n".join(parts), chunks


@contextmanager
def _folder(options: StoreOptions) -> Iterator[Path]:
    """A folder beside the stores, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.home, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"Entries of {result['tiers'][0]['mb'] / result['chunks']:.1f} MB (cold files, checksums on)")
    for name in ("tier", "read MB/s", "a plain file", "write MB/s", "a plain file", "reads/s", "writes/s"):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for row in result["tiers"]:
        figures = (row[key] for key in ("read_mbps", "raw_read_mbps", "write_mbps", "raw_write_mbps"))
        each = (f"{row[key]:.0f}" for key in ("reads_per_s", "writes_per_s"))
        table.add_row(row["tier"], *("" if value is None else f"{value:.0f}" for value in figures), *each)
    console.print(table)
    for line in (
        f"Disk reads at {result['disk_read_over_raw']:.2f} of a plain file's speed.",
        f"Six chunks are looked up among {result['index_rows']:,} in {result['lookup_us_p50']:.0f} us "
        f"(99%: {result['lookup_us_p99']:.0f} us); the index takes {result['index_mb_per_million']:.0f} MB of memory "
        f"and {result['index_file_mb_per_million']:.0f} MB of disk for a million.",
        f"A request whose chunks are saved behind it takes {100 * result['request_slowdown']:+.1f}% longer, one right "
        f"behind it, while they are, {100 * result['next_request_slowdown']:+.1f}%.",
    ):
        console.print(line, highlight=False)
