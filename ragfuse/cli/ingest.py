"""`ragfuse ingest`: put documents into the index and the KV of their chunks into the store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ragfuse.cli.engine import is_local, loaded_engine, tokenizer_for
from ragfuse.cli.files import READABLE_TYPES, find_files
from ragfuse.cli.options import ENGINE, Index, Ray, RayCPUs, option, screen
from ragfuse.cli.show import counted, listed, plain, progress_bar, say, short
from ragfuse.errors import InputError
from ragfuse.settings import Settings
from ragfuse.types.sizes import size_text

if TYPE_CHECKING:
    from ragfuse.cli.library import Library
    from ragfuse.engine.engine import Engine
    from ragfuse.remote.answerer import Answerer
    from ragfuse.types.ingested import Ingested

Chunks = Sequence[tuple[str, str]]
"""(text, source) of each chunk."""
Encoder = Callable[["Engine", Chunks, Console], Mapping[str, Any]]
"""What encodes chunks, and returns what it did in JSON types."""
RESUMES = "Run the same command again to continue."
SIZED_CHUNKS = 50
"""Chunks whose size is looked at, to tell how many fit the store."""
NOTHING = MappingProxyType({"encoded": 0, "tokens": 0, "nbytes": 0, "seconds": 0.0})
"""What encoding says that did nothing."""


@screen(*ENGINE, "chunk_tokens")
def ingest(
    console: Console,
    settings: Settings,
    paths: Annotated[list[Path], typer.Argument(help=f"Files or folders: {READABLE_TYPES}.")],
    index: Index = "default",
    no_kv: Annotated[
        bool, typer.Option("--no-kv", help="Only index; compute KV when a question needs it.")
    ] = False,
    ray: Ray = None,
    ray_workers: Annotated[
        int | None,
        option(
            "--ray-workers",
            "Engines that encode on the Ray cluster.",
            "one for each node or GPU",
            min=1,
        ),
    ] = None,
    ray_cpus: RayCPUs = None,
) -> dict[str, Any]:
    """Split documents into chunks, index them, and compute each chunk's KV. After an interruption,
    run it again.

    When the same paths are ingested again, only new text is embedded and encoded, and text that is
    gone from them is deleted from index and store.
    """
    from ragfuse.cli.library import Library

    library = Library(settings, index)
    find_files(paths, library.sources())
    encoder: Encoder = encode
    if no_kv:
        encoder = _encode_nothing
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
) -> tuple[dict[str, list[str]], list[tuple[Path, str]]]:
    """Split files and folders into chunks; print what is left out, and why.

    Args:
        paths: What a person named.
        settings: They say how long chunks are.
        tokenizer: The LLM's, by which chunks are measured.
        console: Where progress is shown.
        known: As for `find_files`.

    Returns:
        The chunks of each document, by its path; and (path, reason) of what was left out.

    Raises:
        InputError: A path is not there, or no file holds text.
    """
    from ragfuse.cli.library import split_file

    found = find_files(paths, known)
    documents, skipped = dict[str, list[str]](), list(found.skipped)
    with progress_bar(console, "reading", RESUMES) as report:
        for number, file in enumerate(found.files):
            report(number, len(found.files), f"reading {short(file.name)}")
            try:
                documents[str(file.resolve())] = list(split_file(file, settings, tokenizer))
            except InputError as error:
                skipped.append((file, str(error)))
    by_reason = dict[str, list[str]]()
    for path, why in skipped:
        by_reason.setdefault(why, []).append(str(path))
    for why, names in by_reason.items():
        say(console, f"left out: {listed(names)}: {plain(why)}")
    if found.files and not documents:
        raise InputError(
            f"Wanted text, found none in {counted(len(found.files), 'file')}; the lines above say"
            " why."
        )
    return documents, skipped


def encode(engine: Engine, chunks: Chunks, console: Console) -> Mapping[str, Any]:
    """Compute the KV of all chunks and of the prompt's prefix, and write it to the store, with a
    progress bar.
    """
    from ragfuse.cli.prompts import prefix_of

    refusal = engine.model.profile.refusal
    if refusal:
        say(
            console,
            f"No KV is stored for this model; questions are answered by full prefill: {refusal}",
        )
    if refusal or not chunks:
        return NOTHING
    chunks = _fitting_chunks(engine, chunks, console)
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
                f"{counted(failed, 'write')} to {tier.name} failed: what no tier has is computed"
                " when needed.",
            )
    return {name: getattr(done, name) for name in NOTHING}


def _encode_nothing(engine: Engine, chunks: Chunks, console: Console) -> Mapping[str, Any]:
    return NOTHING


def _encode_on_ray(
    engine: Engine,
    chunks: Chunks,
    console: Console,
    address: str,
    workers: int | None,
    cpus: float | None,
) -> Mapping[str, Any]:
    """Compute the KV of all chunks on a Ray cluster, and that of the prompt's prefix here."""
    from ragfuse.cli.prompts import prefix_of
    from ragfuse.ray.bulk import encode as encode_in_bulk

    engine.ingest((), prefix_of(engine))
    unique = list(dict(chunks).items())
    done = encode_in_bulk(unique, engine.settings, address=address, workers=workers, cpus=cpus)
    engine.know(unique)
    if done.unsaved:
        say(
            console,
            f"In no shared tier: {counted(done.unsaved, 'chunk')}; run it again, else questions"
            " compute them.",
        )
    return {**{name: getattr(done, name) for name in NOTHING}, "ray": done.as_dict()}


def add_documents(
    library: Library,
    answerer: Answerer,
    paths: Sequence[Path],
    console: Console,
    encoder: Encoder = encode,
) -> dict[str, Any]:
    """Bring an index up to date with files and folders, encode its chunks, and say what was done.

    The KV of chunks that left the index is deleted, unless another document holds the same text. A
    server encodes what a question brings, after its answer, and keeps what it has.

    Args:
        library: The index.
        answerer: Who will be asked over it.
        paths: Files and folders.
        console: Where progress is shown.
        encoder: How chunks are encoded; not used at a server.

    Returns:
        What was done, in JSON types.
    """
    settings, before = library.settings, set(library.chunks())
    known = {source for _, source in before}
    documents, skipped = split_documents(
        paths, settings, tokenizer_for(answerer, settings), console, known
    )
    chunks = [(text, source) for source, texts in documents.items() for text in texts]
    with progress_bar(console, "embedding", RESUMES) as report:

        def embedded() -> Iterator[tuple[str, str]]:
            for number, chunk in enumerate(chunks):
                report(number, len(chunks))
                yield chunk

        library.update(paths, embedded())
    done = encoder(answerer, chunks, console) if is_local(answerer) else NOTHING
    left = before - set(library.chunks())
    if left:
        _forget(answerer, library, left, console)
    figures = f"{done['tokens']:,} tokens, {size_text(done['nbytes'])}, {done['seconds']:.1f} s"
    of_files = f"{counted(len(chunks), 'chunk')} of {counted(len(documents), 'file')}"
    say(console, f"{of_files} in '{library.name}'; {done['encoded']:,} encoded now ({figures}).")
    return {
        "files": len(documents),
        "skipped": [[str(path), why] for path, why in skipped],
        "chunks": len(chunks),
        "left": len(left),
        **done,
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
    say(console, f"left the index: {what}")


def _fitting_chunks(engine: Engine, chunks: Chunks, console: Console) -> Chunks:
    """Return as many of the first chunks as the store can hold: more of them would evict the first
    ones again.
    """
    sample = chunks[:: max(1, len(chunks) // SIZED_CHUNKS)]
    longest = max((engine.tokens(text) for text, _ in sample), key=len)
    encoder, slow = engine.runtime.encoder, [tier for tier in engine.store.tiers if tier.slow]
    home = encoder.home(len(longest), len(longest) * engine.model.nbytes_per_token)
    tiers = [engine.store.tier(home)] if home is not None else slow or engine.store.tiers
    room = max(tier.capacity / encoder.nbytes_in(tier.name, longest) for tier in tiers)
    fitting = int(min(len(chunks), 0.95 * room))
    if fitting < len(chunks):
        say(
            console,
            f"The store has room for the first {fitting:,} of {len(chunks):,} chunks, which are"
            " encoded now, the others when a question needs them. Free space on its disk, or raise"
            " RAGFUSE_DISK_BYTES.",
            "yellow",
        )
    return chunks[:fitting]
