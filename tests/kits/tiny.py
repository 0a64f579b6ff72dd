"""What the tests of the engine and of what stands on it share: texts, prompts, an engine over a
tiny random model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragfuse import Engine, Piece, Settings, Trace
from ragfuse.store import DiskTier

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTION = "Use only what the passages say.\n\n"
QUESTION = "Question: Who?"
CHUNKS = tuple(
    f"Passage {name}. The keeper of the {name} lighthouse counted {count} ships in one night; its"
    f" door is {hue}."
    for name, count, hue in (
        ("northern", "forty", "green"),
        ("southern", "ninety-one", "red, which was dear"),
        ("eastern", "no", "white, every single year"),
        ("western", "two hundred", "blue"),
        ("inner", "six or seven", "in no colour at all"),
        ("outer", "a thousand", "black, to be seen in snow"),
    )
)


def messages(
    chunks: Sequence[str] = CHUNKS, question: str = QUESTION, head: str = INSTRUCTION
) -> list[Any]:
    """One user message: an instruction, chunks as exact pieces, a question."""
    parts: list[str | Piece] = [Piece(head)]
    for number, text in enumerate(chunks):
        parts += [Piece(text, "chunk", f"book-{number}"), Piece("\n\n")]
    return [("user", (*parts, Piece(question)))]


def ingest(engine: Engine, chunks: Sequence[str] = CHUNKS) -> None:
    """All chunks behind the beginning of `messages`."""
    prefix = engine.prefix(messages(chunks))
    done = engine.ingest([(text, f"book-{number}") for number, text in enumerate(chunks)], prefix)
    assert done.encoded == len(chunks)


def chunk_hits(trace: Trace) -> list[bool]:
    return [segment.hit for segment in trace.segments if segment.kind == "chunk"]


def adds_up(trace: Trace) -> bool:
    return trace.tokens_reused + trace.tokens_recomputed + trace.tokens_fresh == trace.tokens


def on_disk_only(settings: Settings) -> Engine:
    """An engine whose store reads every layer from disk, whenever it is asked."""
    return Engine(settings.model_copy(update={"memory_bytes": 0}))


def file_of(engine: Engine, text: str, context: str = "") -> Path:
    """Where the KV of a chunk lies."""
    tier = next(tier for tier in engine.store.tiers if isinstance(tier, DiskTier))
    key = engine.runtime.encoder.key(engine.tokens(text), context)
    files = (path for path in (tier.path / "chunks").rglob("*") if path.is_file())
    found = [path for path in files if str(key).encode() in path.read_bytes()[:1024]]
    assert len(found) == 1
    return found[0]


def python(code: str, *arguments: object, **environment: str) -> Any:
    """What a python process of its own prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def known_texts(engine, source):
    """The known texts of a source, those that other processes have added among them."""
    return [
        each.text for each in engine.catalog.strict.texts(engine.digest) if each.source == source
    ]
