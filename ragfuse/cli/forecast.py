"""What an ingest will do, told before it begins: files, tokens, bytes of KV, time. From samples, so it is rough."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ragfuse.cli.entries import counted
from ragfuse.cli.files import texts_of
from ragfuse.cli.room import room_nbytes_of, target_tiers, token_nbytes_in
from ragfuse.errors import InputError
from ragfuse.types.sizes import capacity_text, duration_text, size_text

if TYPE_CHECKING:
    from ragfuse.cli.library import Library
    from ragfuse.engine.engine import Engine

READING_S = 3.0
"""Most seconds for reading files to count their tokens; the others are judged by these."""
SAMPLE_CHARS = 200_000
"""Most characters of a file that are counted."""
UNREAD_RATE = 0.2
"""Tokens per byte of a file of which no other of its type could be read."""
FULLNESS = 0.75
"""How full a splitter makes a chunk, about."""
SAMPLE_CHUNKS = 8
"""Chunks that are embedded to see how long that takes."""


@dataclass(frozen=True)
class IngestForecast:
    """What an ingest will do.

    Args:
        files: Files to ingest.
        known: Those that are in the index already, as they are, under their own name or another.
        tokens: About how many tokens the other files have.
        nbytes: About how many bytes of KV they take; 0 where none is computed now.
        token_nbytes: Bytes of KV a token.
        tier: The tier that gets it.
        capacity: How many bytes that tier can hold, by its setting and by the disk's free space.
        seconds: About how long it takes; None: unknown.
    """

    files: int
    known: int
    tokens: int
    nbytes: int = 0
    token_nbytes: int = 0
    tier: str = ""
    capacity: int = 0
    seconds: float | None = None

    def in_words(self) -> str:
        """Return the forecast in one line, such as "7 files, about 41,000 tokens, 1.9 GB of 20 GiB in disk ..."."""
        if self.known == self.files:
            return f"{counted(self.files, 'file')}, all in the index already."
        parts = [counted(self.files, "file") + (f" ({self.known:,} in the index already)" if self.known else "")]
        new = "new " if self.known else ""
        parts.append(f"about {rounded(self.tokens):,} {new}tokens" if self.tokens else f"no {new}text")
        if self.nbytes:
            kv = f"{size_text(self.nbytes)} of KV ({size_text(self.token_nbytes)} a token)"
            parts.append(f"{kv} into {self.tier}, which holds {capacity_text(self.capacity)}")
        if self.seconds is not None:
            lasts = duration_text(self.seconds)
            parts.append(lasts if lasts.startswith("less") else f"about {lasts}")
        return ", ".join(parts) + "."


def forecast(library: Library, engine: Engine, files: Sequence[Path], encodes: bool, here: bool) -> IngestForecast:
    """Return what an ingest will do, by reading and computing a little of it.

    Args:
        library: The index.
        engine: The engine, its model loaded.
        files: The files to ingest.
        encodes: Whether KV is computed.
        here: Whether that happens in this process, whose speed is known then.
    """
    new = library.new_of(files)
    n_tokens, sample = _tokens_of(new, engine)
    known = len(files) - len(new)
    if not new or not n_tokens:
        return IngestForecast(len(files), known, n_tokens)
    run = sample[: int(engine.settings.chunk_tokens * FULLNESS)]
    n_chunks = max(1, n_tokens / max(1, len(run)))
    encodes = encodes and not engine.model.profile.refusal
    seconds = n_chunks * (_embedding_s(library, engine, run) + (_encoding_s(engine, run) if encodes else 0.0))
    found = IngestForecast(len(files), known, n_tokens, seconds=seconds if here else None)
    if not encodes:
        return found
    tier = target_tiers(engine, len(run))[0]
    token_nbytes = token_nbytes_in(engine, tier, run)
    return IngestForecast(
        found.files,
        known,
        n_tokens,
        int(n_tokens * token_nbytes),
        int(token_nbytes),
        tier,
        int(room_nbytes_of(engine, tier)),
        found.seconds,
    )


def rounded(n: int) -> int:
    """Return a number with its first two digits, the others 0."""
    unit: int = 10 ** max(0, len(str(n)) - 2)
    return round(n / unit) * unit


def _tokens_of(files: Sequence[Path], engine: Engine) -> tuple[int, list[int]]:
    """Return about how many tokens files have, and some of these; small files of each type are read for it."""
    rates, until, sample = defaultdict[str, list[float]](list), time.perf_counter() + READING_S, list[int]()
    sizes = {file: file.stat().st_size for file in files}
    counts = dict[Path, float]()
    for file in sorted(files, key=lambda file: (len(rates[file.suffix.lower()]), sizes[file])):
        if time.perf_counter() > until and rates[file.suffix.lower()]:
            continue
        try:
            text = "\n\n".join(texts_of(file, warns=False))
        except InputError:  # told when it is indexed
            counts[file] = 0.0
            continue
        ids = engine.tokens(text[:SAMPLE_CHARS])
        counts[file] = len(ids) * max(1.0, len(text) / SAMPLE_CHARS)
        rates[file.suffix.lower()].append(counts[file] / max(1, sizes[file]))
        sample = sample if len(sample) >= len(ids) else ids
    for file in set(files) - set(counts):
        known = rates[file.suffix.lower()]
        counts[file] = sizes[file] * (sum(known) / len(known) if known else UNREAD_RATE)
    return round(sum(counts.values())), sample


def _embedding_s(library: Library, engine: Engine, run: Sequence[int]) -> float:
    """Return the seconds that embedding a chunk takes."""
    texts = [engine.model.tokenizer.decode(run)] * SAMPLE_CHUNKS
    library.embeddings.embed_documents(texts[:1])  # the first call of a process takes longer
    began = time.perf_counter()
    library.embeddings.embed_documents(texts)
    return (time.perf_counter() - began) / len(texts)


def _encoding_s(engine: Engine, run: Sequence[int]) -> float:
    """Return the seconds that encoding a chunk takes."""
    before, seconds = engine.runtime.encoder.filler(len(run)), 0.0
    for _ in range(2):  # the first call of a process takes longer
        began = time.perf_counter()
        engine.model.encode_with_filler(run, before) if before else engine.model.encode(run)
        seconds = time.perf_counter() - began
    return seconds
