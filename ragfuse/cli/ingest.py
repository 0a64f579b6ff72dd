"""`ragfuse ingest`: add documents to the index, and the KV of their chunks to the store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ragfuse.cli.engine import is_local, loaded_engine, tokenizer_for
from ragfuse.cli.files import READABLE_TYPES, find_files, texts_of
from ragfuse.cli.options import ENGINE, Index, Ray, RayCPUs, option, screen
from ragfuse.cli.show import counted, listed, plain, progress_bar, say, short
from ragfuse.errors import InputError
from ragfuse.settings import Settings
from ragfuse.types.sizes import size_text

if TYPE_CHECKING:
    from ragfuse.cli.library import Library
    from ragfuse.engine.engine import Engine
    from ragfuse.remote.remote_engine import Answerer
    from ragfuse.types.answer import Ingested

Chunks = Sequence[tuple[str, str]]
"""(text, source) of each chunk."""
EncodeChunks = Callable[["Engine", Chunks, Console], Mapping[str, Any]]
"""Encodes chunks and returns at least the counts that `NOTHING` has."""
RESUMES = "Run the same command again to continue."
NOTHING = MappingProxyType({"encoded": 0, "tokens": 0, "nbytes": 0, "seconds": 0.0})
"""The counts if no chunk was encoded."""


@screen(*ENGINE, "chunk_tokens")
def ingest(
    console: Console,
    settings: Settings,
    paths: Annotated[list[Path], typer.Argument(help=f"Files or folders: {READABLE_TYPES}.")],
    index: Index = "default",
    no_kv: Annotated[
        bool,
        typer.Option("--no-kv", help="Only index; KV is computed when a question needs it."),
    ] = False,
    ray: Ray = None,
    ray_workers: Annotated[
        int | None,
        option(
            "--ray-workers",
            "Number of engines that encode on the Ray cluster.",
            "one for each node or GPU",
            min=1,
        ),
    ] = None,
    ray_cpus: RayCPUs = None,
) -> dict[str, Any]:
    """Split documents into chunks, index them, and compute each chunk's KV.

    Run the command again after an interruption or a change: only new text is embedded and encoded.
    Text that was removed from the paths is deleted from index and store.
    """
    from ragfuse.cli.library import Library

    library = Library(settings, index)
    find_files(paths, library.sources())
    encoder: EncodeChunks | None = encode
    if no_kv:
        encoder = None
    elif ray is not None:
        from ragfuse.ray.cluster import check_cluster

        check_cluster(settings)
        encoder = partial(_encode_on_ray, address=ray, workers=ray_workers, cpus=ray_cpus)
    with loaded_engine(settings, console) as engine:
        result = add_documents(library, engine, paths, console, encoder)
    say(console, f'Ask: ragfuse ask "..."{"" if index == "default" else f" --index {index}"}')
    return {"index": index, **result}


def split_documents(
    paths: Sequence[Path],
    settings: Settings,
    tokenizer: Any,
    console: Console,
    known: Collection[str] = (),
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Split documents into chunks, and print every skipped file with the reason.

    Args:
        paths: Files and folders.
        settings: Settings of chunk length and overlap.
        tokenizer: The LLM's tokenizer, which measures chunks.
        console: Console for progress.
        known: Paths of the index's documents, as in `find_files`.

    Returns:
        (text, path) of each chunk, and (path, reason) of each skipped file.

    Raises:
        InputError: A path does not exist, or no file contains text.
    """
    from ragfuse.text.file_texts import split_text

    files, chunks = find_files(paths, known), list[tuple[str, str]]()
    skipped = list[tuple[str, str]]()
    with progress_bar(console, "reading", RESUMES) as report:
        for number, file in enumerate(files):
            report(number, len(files), f"reading {short(file.name)}")
            try:
                texts = texts_of(file)
            except InputError as error:
                skipped.append((str(file), str(error)))
                continue
            for text in texts:
                parts = split_text(text, settings, tokenizer)
                chunks += [(part, str(file.resolve())) for part in parts]
    for reason in dict.fromkeys(why for _, why in skipped):
        names = listed(path for path, why in skipped if why == reason)
        say(console, f"left out: {names}: {plain(reason)}")
    if files and not chunks:
        raise InputError(
            f"There is no text in {counted(len(files), 'file')}; the lines above say why."
        )
    return chunks, skipped


def encode(engine: Engine, chunks: Chunks, console: Console) -> Mapping[str, Any]:
    """Compute and store the KV of all chunks and of the prompt's prefix."""
    from ragfuse.cli.prompts import prefix_of

    refusal = engine.model.profile.refusal
    if refusal:
        say(
            console,
            f"No KV is stored for this model; questions are answered by full prefill: {refusal}",
        )
    if refusal or not chunks:
        return NOTHING
    most = len(chunks) * engine.settings.chunk_tokens * engine.model.nbytes_per_token
    room = max(tier.capacity for tier in engine.store.tiers)
    if most > room:
        say(
            console,
            f"These chunks may need {size_text(most)}, but the store holds {size_text(room)}. The"
            " store evicts the least recently used chunks, which are computed again when a"
            " question needs them. To keep all chunks, raise RAGFUSE_DISK_BYTES.",
            "yellow",
        )
    with progress_bar(console, "encoding", RESUMES) as report:

        def show(done: Ingested) -> None:
            rate = f"{done.tokens / max(done.seconds, 1e-9):,.0f} tokens/s {size_text(done.nbytes)}"
            report(done.chunks, len(chunks), f"encoding {rate}")

        done = engine.ingest(chunks, prefix_of(engine), show)
    for tier in engine.store.tiers:
        failed = tier.counts["refused"] + tier.counts["failed"]
        if failed:
            say(
                console,
                f"{counted(failed, 'write')} to {tier.name} failed; missing KV is computed later.",
            )
    return {name: getattr(done, name) for name in NOTHING}


def _encode_on_ray(
    engine: Engine,
    chunks: Chunks,
    console: Console,
    address: str,
    workers: int | None,
    cpus: float | None,
) -> Mapping[str, Any]:
    """Compute the KV of all chunks on a Ray cluster, and the prompt prefix's KV in this process."""
    from ragfuse.cli.prompts import prefix_of
    from ragfuse.ray.bulk import encode as encode_in_bulk

    engine.ingest((), prefix_of(engine))
    unique = list(dict(chunks).items())
    done = encode_in_bulk(unique, engine.settings, address=address, workers=workers, cpus=cpus)
    engine.know(unique)
    if done.unsaved:
        say(
            console,
            f"{counted(done.unsaved, 'write')} to shared tiers failed. Run the command again;"
            " until then, questions compute the chunks that no tier has.",
        )
    return done.as_dict()


def add_documents(
    library: Library,
    answerer: Answerer,
    paths: Sequence[Path],
    console: Console,
    encoder: EncodeChunks | None = encode,
) -> dict[str, Any]:
    """Update an index from files and folders, encode its chunks, and return the counts.

    When a document loses a chunk, the chunk's KV is deleted, unless another document has the same
    chunk. With a server, no KV is encoded or deleted here. The server encodes a question's
    chunks after answering the question.

    Args:
        library: The index.
        answerer: The engine, or the client of a server.
        paths: Files and folders.
        console: Console for progress.
        encoder: Encodes the chunks. If None, or with a server, no chunk is encoded here.

    Returns:
        Counts of chunks, files and KV, and the skipped files, in JSON types.
    """
    settings, before = library.settings, set(library.chunks())
    known = {source for _, source in before}
    chunks, skipped = split_documents(
        paths, settings, tokenizer_for(answerer, settings), console, known
    )
    n_files = len({source for _, source in chunks})
    with progress_bar(console, "embedding", RESUMES) as report:

        def embedded() -> Iterator[tuple[str, str]]:
            for number, chunk in enumerate(chunks):
                report(number, len(chunks))
                yield chunk

        library.update(paths, embedded())
    done = encoder(answerer, chunks, console) if encoder and is_local(answerer) else NOTHING
    left = before - set(library.chunks())
    if left:
        _forget(answerer, library, left, console)
    figures = f"{done['tokens']:,} tokens, {size_text(done['nbytes'])}, {done['seconds']:.1f} s"
    of_files = f"{counted(len(chunks), 'chunk')} of {counted(n_files, 'file')}"
    say(console, f"{of_files} in '{library.name}'; {done['encoded']:,} encoded now ({figures}).")
    return {
        **done,
        "files": n_files,
        "skipped": skipped,
        "chunks": len(chunks),
        "left": len(left),
    }


def _forget(
    answerer: Answerer, library: Library, left: Set[tuple[str, str]], console: Console
) -> None:
    from ragfuse.store.deletion import leave_source

    sources, freed = {source for _, source in left}, 0
    if is_local(answerer):
        texts = {text for text, _ in left}
        held = leave_source(answerer.catalog.strict, answerer.digest, texts, sources.__contains__)
        freed = answerer.forget(texts - held - {text for text, _ in library.chunks()})
    what = f"{counted(len(left), 'chunk')} of {listed(sorted(sources))}, {size_text(freed)} of KV"
    say(console, f"removed from the index: {what}")
