"""`ragfuse ingest`: put documents into the index and the KV of their chunks into the store."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ragfuse.cli.answerer import is_local
from ragfuse.cli.engine import loaded_engine
from ragfuse.cli.files import READABLE_TYPES, find_files
from ragfuse.cli.options import (
    Device,
    Dtype,
    Index,
    Json,
    Model,
    ModelKwargs,
    Ray,
    RayCPUs,
    Store,
    console_for,
    default_of,
    option,
    settings_of,
    write_json,
)
from ragfuse.cli.show import counted, listed, plain, short
from ragfuse.errors import InputError
from ragfuse.telemetry.progress import progress
from ragfuse.types.sizes import size_text

if TYPE_CHECKING:
    from ragfuse.cli.library import Library
    from ragfuse.engine.engine import Engine, Ingested
    from ragfuse.ray.bulk import BulkSummary
    from ragfuse.remote.answerer import Answerer
    from ragfuse.settings import Settings

Chunks = Sequence[tuple[str, str]]
"""(text, source) of each chunk."""


def ingest(
    paths: Annotated[list[Path], typer.Argument(help=f"Files or folders: {READABLE_TYPES}.")],
    index: Index = "default",
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    model_kwargs: ModelKwargs = None,
    store: Store = None,
    chunk_tokens: Annotated[
        int | None, option("--chunk-tokens", "Size of a chunk, in tokens of the model.", default_of("chunk_tokens"))
    ] = None,
    no_kv: Annotated[bool, typer.Option("--no-kv", help="Only index; compute KV when a question needs it.")] = False,
    ray: Ray = None,
    ray_workers: Annotated[
        int | None,
        option("--ray-workers", "Engines that encode on the Ray cluster.", "one for each node or GPU", min=1),
    ] = None,
    ray_cpus: RayCPUs = None,
    json: Json = None,
) -> None:
    """Split documents into chunks, index them, and compute each chunk's KV. After an interruption, run it again.

    Ingested again, only what is new is embedded and encoded, and what is gone from these paths leaves index and store.
    """
    from ragfuse.cli.library import Library

    settings = settings_of(
        model=model, dtype=dtype, device=device, model_kwargs=model_kwargs, store=store, chunk_tokens=chunk_tokens
    )
    library, console = Library(settings, index), console_for(json)
    find_files(paths, library.sources())
    if ray is not None:
        from ragfuse.ray.cluster import check_cluster

        check_cluster(settings)
    from ragfuse.types.ingested import Ingested

    done, summary = Ingested(), None
    with loaded_engine(settings, console) as engine:
        split, left = index_documents(library, engine.model.tokenizer, paths, console)
        chunks = split.chunks
        if ray is not None and not no_kv:
            summary = encode_on_ray(engine, chunks, console, ray, ray_workers, ray_cpus)
            done = Ingested(summary.chunks, summary.encoded, summary.tokens, summary.nbytes, summary.seconds)
        elif not no_kv:
            done = encode(engine, chunks, console)
        forget_left(engine, library, left, console)
    figures = f"{done.tokens:,} tokens, {size_text(done.nbytes)}, {done.seconds:.1f} s"
    kv = "without KV" if no_kv else f"{done.encoded:,} encoded now ({figures})"
    of_files = f"{counted(len(chunks), 'chunk')} of {counted(len(split.documents), 'file')}"
    console.print(f"[bold]{of_files} in '{index}'[/]; {kv}.", highlight=False, soft_wrap=True)
    console.print(f'Ask: ragfuse ask "..."{"" if index == "default" else f" --index {index}"}', highlight=False)
    result = {
        "index": index,
        "files": len(split.documents),
        "skipped": [[str(path), why] for path, why in split.skipped],
        "chunks": len(chunks),
        "left": len(left),
        "encoded": done.encoded,
        "nbytes": done.nbytes,
    }
    write_json({**result, **({} if summary is None else {"ray": summary.as_dict()})}, json)


@dataclass(frozen=True)
class SplitDocuments:
    """The chunks of documents.

    Args:
        documents: The chunks of each document, by its path.
        skipped: (path, reason) of what was left out.
    """

    documents: Mapping[str, Sequence[str]]
    skipped: Sequence[tuple[Path, str]]

    @property
    def chunks(self) -> list[tuple[str, str]]:
        """(text, source) of each chunk."""
        return [(text, source) for source, texts in self.documents.items() for text in texts]


def split_documents(
    paths: Sequence[Path], settings: Settings, tokenizer: Any, console: Console, known: Collection[str] = ()
) -> SplitDocuments:
    """Split files and folders into chunks; print what is left out, and why.

    Args:
        paths: What a person named.
        settings: They say how long chunks are.
        tokenizer: The LLM's, by which chunks are measured.
        console: Where progress is shown.
        known: As for `find_files`.

    Raises:
        InputError: A path is not there, or no file holds text.
    """
    from ragfuse.cli.library import split_file

    found = find_files(paths, known)
    documents, skipped = dict[str, list[str]](), list(found.skipped)
    columns = TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeRemainingColumn()
    with progress(console, *columns) as bar:
        task = bar.add_task("reading", total=sum(file.stat().st_size for file in found.files))
        for file in found.files:
            bar.update(task, description=f"reading {escape(short(file.name))}")
            try:
                documents[str(file.resolve())] = list(split_file(file, settings, tokenizer))
            except InputError as error:
                skipped.append((file, str(error)))
            bar.advance(task, file.stat().st_size)
    by_reason = dict[str, list[str]]()
    for path, why in skipped:
        by_reason.setdefault(why, []).append(str(path))
    for why, names in by_reason.items():
        line = f"[yellow]left out[/]: {escape(listed(names))}: {escape(plain(why))}"
        console.print(line, highlight=False, soft_wrap=True)
    if found.files and not documents:
        raise InputError(f"Wanted text, found none in {counted(len(found.files), 'file')}; the lines above say why.")
    return SplitDocuments(documents, skipped)


def index_documents(
    library: Library, tokenizer: Any, paths: Sequence[Path], console: Console
) -> tuple[SplitDocuments, set[tuple[str, str]]]:
    """Bring an index up to date with files and folders.

    Args:
        library: The index.
        tokenizer: The LLM's, by which chunks are measured.
        paths: What a person named.
        console: Where progress is shown.

    Returns:
        The documents there, and (text, source) of each chunk that left the index.
    """
    before = set(library.chunks())
    split = split_documents(paths, library.settings, tokenizer, console, {source for _, source in before})
    with progress(console) as bar:
        library.update(paths, bar.track(split.chunks, description="embedding"))
    return split, before - set(library.chunks())


def forget_left(answerer: Answerer, library: Library, left: Set[tuple[str, str]], console: Console) -> None:
    """Delete the KV of chunks that left an index, unless another document holds the same text.

    A server keeps what it has.
    """
    if not left:
        return
    from ragfuse.store.deletion import leave_source

    sources = {source for _, source in left}
    freed = 0
    if is_local(answerer):
        texts = {text for text, _ in left}
        held = leave_source(answerer.catalog.strict, answerer.digest, texts, sources.__contains__)
        freed = answerer.forget(texts - held - {text for text, _ in library.chunks()})
    what = f"{counted(len(left), 'chunk')} of {listed(sorted(sources))}, {size_text(freed)} of KV"
    console.print(f"left the index: {what}", highlight=False, markup=False, soft_wrap=True)


def encode(engine: Engine, chunks: Chunks, console: Console) -> Ingested:
    """Compute the KV of all chunks and of the prompt's prefix, and write it to the store, with a progress bar."""
    from ragfuse.cli.prompts import prefix_of
    from ragfuse.engine.engine import Ingested

    refusal = engine.model.profile.refusal
    if refusal:
        console.print(
            f"[yellow]No KV is stored[/] for this model; questions are answered by full prefill: {escape(refusal)}"
        )
    if refusal or not chunks:
        return Ingested()
    chunks = _fitting_chunks(engine, chunks, console)
    columns = (
        TextColumn("encoding"),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with progress(console, *columns) as bar:
        task = bar.add_task("encoding", total=len(chunks), rate="")

        def show(done: Ingested) -> None:
            rate = f"{done.tokens / max(done.seconds, 1e-9):,.0f} tokens/s {size_text(done.nbytes)}"
            bar.update(task, completed=done.chunks, rate=rate)

        done = engine.ingest(chunks, prefix_of(engine), show)
    for tier in engine.store.tiers:
        failed = tier.counts["refused"] + tier.counts["failed"]
        if failed:
            message = f"{counted(failed, 'write')} to {tier.name} failed: what no tier has is computed when needed."
            console.print(message, style="yellow", highlight=False)
    return done


def encode_on_ray(
    engine: Engine, chunks: Chunks, console: Console, address: str, workers: int | None, cpus: float | None
) -> BulkSummary:
    """Compute the KV of all chunks on a Ray cluster, and that of the prompt's prefix here."""
    from ragfuse.cli.prompts import prefix_of
    from ragfuse.ray.bulk import encode as encode_in_bulk

    engine.ingest((), prefix_of(engine))
    unique = list(dict(chunks).items())
    done = encode_in_bulk(unique, engine.settings, address=address, workers=workers, cpus=cpus)
    engine.know(unique)
    if done.unsaved:
        lost = f"{counted(done.unsaved, 'chunk')} {'is' if done.unsaved == 1 else 'are'} in no shared tier"
        console.print(f"[yellow]{lost}[/]; run it again to store them, else questions compute them.", highlight=False)
    return done


def target_tiers(engine: Engine, n_tokens: int) -> list[str]:
    """Return the names of the tiers that new chunks of `n_tokens` are written to: slow ones, or all if none is slow."""
    slow = [tier.name for tier in engine.store.tiers if tier.slow]
    chosen = engine.runtime.encoder.home(n_tokens, n_tokens * engine.model.nbytes_per_token)
    return [chosen] if chosen is not None else slow or [tier.name for tier in engine.store.tiers]


def _fitting_chunks(engine: Engine, chunks: Chunks, console: Console) -> Chunks:
    """Return as many of the first chunks as the store can hold: more of them would evict the first ones again."""
    sample = [engine.tokens(text) for text, _ in chunks[:: max(1, len(chunks) // 50)]]
    n_tokens, run = sum(map(len, sample)) / len(sample), sample[0]
    rooms = dict[str, tuple[float, float]]()  # each of these tiers gets all chunks: (bytes, chunks) that fit
    for name in target_tiers(engine, int(n_tokens)):
        tier = engine.store.tier(name)
        room: float = tier.capacity
        folder = getattr(tier, "path", None)
        if isinstance(folder, Path):
            room = min(room, tier.nbytes + 0.95 * shutil.disk_usage(folder).free)
        packed = engine.store.levels.of(name) != ("raw",) and len(run) > 0
        token_nbytes = (
            engine.runtime.encoder.nbytes_in(name, run) / len(run) if packed else engine.model.nbytes_per_token
        )
        rooms[name] = room, 0.95 * room / (token_nbytes * max(1.0, n_tokens))
    name = max(rooms, key=lambda name: rooms[name][1])
    room, fitting = rooms[name]
    if fitting >= len(chunks):
        return chunks
    console.print(
        f"[yellow]Tier {name} can hold {size_text(room)}[/]: the first {int(fitting):,} of {len(chunks):,} chunks are "
        "encoded now, the others when a question needs them. Free space on its disk, or raise the bytes of the tier.",
        highlight=False,
        soft_wrap=True,
    )
    return chunks[: int(fitting)]
