"""`ragfuse ingest`: documents into the index, their chunks' KV into the store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ragfuse.cli.library import Found, Library, find_files
from ragfuse.cli.options import Device, Dtype, Index, Json, Model, Store, console_for, settings_of, write_json
from ragfuse.cli.prompts import rag_messages
from ragfuse.engine import Engine, Ingested
from ragfuse.errors import InputError


def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files or folders: txt, md, html, pdf.")],
    index: Index = "default",
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    store: Store = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Size of a chunk in tokens of the model.")] = None,
    no_kv: Annotated[bool, typer.Option("--no-kv", help="Index only; KV is computed when first needed.")] = False,
    json: Json = None,
) -> None:
    """Cut documents into chunks, index them, and compute each chunk's KV once. Interrupted, it goes on next time."""
    settings = settings_of(model=model, dtype=dtype, device=device, store=store, chunk_tokens=chunk_tokens)
    console, found = console_for(json), find_files(paths)
    _tell_skipped(console, found)
    with Engine(settings) as engine:
        library = Library(settings, index)
        chunks, broken = add_files(library, engine, found.files, console)
        if not chunks:
            raise InputError(f"No text was found in {len(found.files)} files. {broken[0] if broken else ''}")
        done = Ingested() if no_kv else encode(engine, chunks, console)
    console.print(
        f"[bold]{len(chunks)} chunks[/] of {len(found.files) - len(broken)} files are in the index '{index}'; "
        f"{done.encoded} were encoded now ({done.tokens:,} tokens, {done.nbytes / 1e6:,.0f} MB of KV, "
        f"{done.seconds:.1f} s)."
    )
    console.print(f'Ask: ragfuse ask "..."{"" if index == "default" else f" --index {index}"}', highlight=False)
    result = {"index": index, "files": len(found.files), "skipped": [[str(p), why] for p, why in found.skipped]}
    write_json({**result, "chunks": len(chunks), "encoded": done.encoded, "nbytes": done.nbytes}, json)


def add_files(
    library: Library, engine: Engine, files: Sequence[Path], console: Console
) -> tuple[list[tuple[str, str]], list[str]]:
    """(text, source) of all files' chunks, with a progress bar; a file that cannot be parsed is named and left out."""
    chunks: list[tuple[str, str]] = []
    broken: list[str] = []
    tokenizer = engine.model.words
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("indexing", total=len(files))
        for file in files:
            bar.update(task, description=f"indexing {file.name[:40]}")
            try:
                chunks += library.add(file, tokenizer)
            except InputError as error:
                broken.append(str(error))
                console.print(f"[yellow]left out[/]: {error}", highlight=False)
            bar.advance(task)
    return chunks, broken


def encode(engine: Engine, chunks: Sequence[tuple[str, str]], console: Console) -> Ingested:
    """The KV of all chunks into the store, behind the prompt's own beginning, with a progress bar."""
    _tell_if_too_large(engine, chunks, console)
    prefix = engine.prefix(rag_messages("?", [chunks[0], chunks[0]]))
    columns = (
        TextColumn("encoding"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("encoding", total=len(chunks), rate="")

        def show(done: Ingested) -> None:
            rate = f"{done.tokens / max(done.seconds, 1e-9):,.0f} tokens/s, {done.nbytes / 1e6:,.0f} MB"
            bar.update(task, completed=done.chunks, rate=rate)

        return engine.ingest(chunks, prefix, show)


def _tell_skipped(console: Console, found: Found) -> None:
    for path, why in found.skipped[:5]:
        console.print(f"[yellow]passed over[/] {path}: {why}", highlight=False)
    if len(found.skipped) > 5:
        console.print(f"[yellow]passed over[/] {len(found.skipped) - 5} more files")


def _tell_if_too_large(engine: Engine, chunks: Sequence[tuple[str, str]], console: Console) -> None:
    tokens = sum(len(text) for text, _ in chunks) / 4
    needed = tokens * engine.model.nbytes_per_token
    capacity = engine.settings.disk_bytes or engine.settings.memory_bytes
    if needed > capacity:
        console.print(
            f"[yellow]The KV of these {len(chunks):,} chunks takes about {needed / 1e9:.0f} GB, the store holds "
            f"{capacity / 1e9:.0f} GB[/]: the oldest will make room. Give it more with RAGFUSE_DISK_BYTES, or use "
            "--no-kv and let questions decide what is worth keeping."
        )
