"""`ragfuse ingest`: put documents into the index and the KV of their chunks into the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from ragfuse.cli.files import READABLE_TYPES, FilesToIngest, guessed_encoding, shown_name
from ragfuse.cli.gone import (
    Absent,
    documents_named,
    forget_absent,
    forget_documents,
    found_for,
    say_forgotten,
    say_kept_elsewhere,
    say_quoted,
)
from ragfuse.cli.loaded import loaded_engine
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
    index_option,
    option,
    refuse_without,
    settings_of,
    write_json,
)
from ragfuse.cli.room import room_nbytes_of, target_tiers, token_nbytes_in
from ragfuse.cli.show import NAMED, short
from ragfuse.errors import InputError
from ragfuse.telemetry.progress import progress
from ragfuse.types.sizes import size_text

if TYPE_CHECKING:
    from ragfuse.cli.library import Library
    from ragfuse.engine.engine import Engine, Ingested
    from ragfuse.ray.bulk import BulkSummary
    from ragfuse.settings import Settings
    from ragfuse.types.keys import ChunkKey

TIER_SIZE_VARIABLES = MappingProxyType(
    {"disk": "RAGFUSE_DISK_BYTES", "memory": "RAGFUSE_MEMORY_BYTES", "gpu": "RAGFUSE_GPU_BYTES"}
)
"""The environment variable that sets the size of each tier; all other tiers have RAGFUSE_TIER_BYTES."""

Chunks = Sequence[tuple[str, str]]
"""(text, source) of each chunk."""


def ingest(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help=f"Files or folders: {READABLE_TYPES}.", show_default="none: needs --remove"),
    ] = None,
    index: Index = "default",
    remove: Annotated[
        list[str] | None,
        option(
            "--remove",
            "Forget this document, or those in this folder, and their KV: a path, or the end of one. May be repeated.",
            "none",
        ),
    ] = None,
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

    A folder that is ingested again is as it is then: moved files have new names, and files that are gone are forgotten.
    """
    refuse_without("--ray", ray is not None, ray_workers=ray_workers, ray_cpus=ray_cpus)
    settings = settings_of(
        model=model, dtype=dtype, device=device, model_kwargs=model_kwargs, store=store, chunk_tokens=chunk_tokens
    )
    from ragfuse.cli.library import Library

    library = Library(settings, index)
    if bool(paths) == bool(remove):
        raise typer.BadParameter("Give either files and folders to ingest, or --remove NAME.", param_hint="PATHS")
    refuse_without("PATHS", bool(paths), chunk_tokens=chunk_tokens, no_kv=no_kv, ray=ray)
    if no_kv and ray is not None:
        raise InputError("--ray encodes on a cluster, and --no-kv encodes nothing: leave out one of them.")
    if remove:
        _remove(library, remove, console_for(json), json)
        return
    assert paths
    if ray is not None:
        from ragfuse.ray.cluster import check_cluster

        check_cluster(settings, ray)
    console, documents = console_for(json), found_for(library, paths)
    print_skipped(console, documents)
    if not documents.files:
        _forget_all(library, paths, documents, console, json)
        return
    from ragfuse.types.ingested import Ingested

    before = library.sources()
    with loaded_engine(settings, console) as engine:
        with console.status("looking at the documents"):
            from ragfuse.cli.forecast import forecast

            told = forecast(library, engine, documents.files, encodes=not no_kv, here=ray is None).in_words()
        console.print(told, highlight=False, markup=False, soft_wrap=True)
        chunks, failed = add_files(library, engine.model.tokenizer, paths, documents.files, console)
        left = forget_absent(library, engine, paths, documents, console, before)
        on_ray: BulkSummary | None = None
        if no_kv:
            done = Ingested()
        elif ray is None:
            done = encode(engine, chunks, console)
        else:
            on_ray, done = encode_on_ray(engine, chunks, console, ray, ray_workers, ray_cpus)
    skipped = [*documents.skipped, *failed]
    in_all, here_now = library.sources(), {source for _, source in chunks}
    there = f"{_counted(len(chunks), 'chunk')}[/] of {_counted(len(here_now), 'file')}"
    there += f" in '{index}'" if here_now == in_all.keys() else f"; {_sums(in_all)} in '{index}' in all"
    console.print(f"[bold]{there}{', without KV' if no_kv else f'; {_encoded_in_words(done)}'}.", soft_wrap=True)
    if skipped:
        console.print(f"[yellow]{_left_out(skipped)} left out[/], see above; all else was read.", highlight=False)
    console.print(f'Ask: ragfuse ask "..."{index_option(index)}', highlight=False)
    result = _result(library, documents, skipped, left, len(chunks), done)
    write_json({**result, **({} if on_ray is None else {"ray": on_ray.as_dict()})}, json)


def _forget_all(
    library: Library, paths: Sequence[Path], found: FilesToIngest, console: Console, json: Path | None
) -> None:
    """Forget what the index has from paths where no document is left."""
    with library.ingesting(paths, ()):
        left = forget_absent(library, None, paths, found, console, library.sources())
    console.print(f"{_sums(library.sources())} in '{library.name}' now.", highlight=False, markup=False)
    write_json(_result(library, found, found.skipped, left), json)


def _result(
    library: Library,
    found: FilesToIngest,
    skipped: Sequence[tuple[Path, str]],
    left: Absent,
    n_chunks: int = 0,
    done: Ingested | None = None,
) -> dict[str, Any]:
    """Return an ingest as JSON."""
    return {
        "index": library.name,
        "files": len(found.files),
        "skipped": [[str(path), why] for path, why in skipped],
        "chunks": n_chunks,
        "encoded": 0 if done is None else done.encoded,
        "nbytes": 0 if done is None else done.nbytes,
        **{name: getattr(done, name, 0) for name in ("stored", "short", "repeated", "elsewhere", "unsaved")},
        "moved": dict(left.moved),
        "forgotten": list(left.gone),
    }


def _remove(library: Library, names: Sequence[str], console: Console, json: Path | None) -> None:
    """Forget documents that are named."""
    sources = list(dict.fromkeys(source for name in names for source in documents_named(library, name)))
    known = library.sources()
    forgotten = forget_documents(library, sources)
    say_forgotten(console, sources, sum(known.get(source, 0) for source in sources), forgotten)
    say_kept_elsewhere(console, library, sources)
    quoting = say_quoted(console, library.settings, sources)
    left = library.sources()
    console.print(f"{_sums(left)} in '{library.name}' now.", highlight=False, markup=False)
    result = {"index": library.name, "forgotten": sources, "nbytes": forgotten.nbytes, "sessions": quoting}
    write_json({**result, "chunks": sum(left.values()), "files": len(left)}, json)


def _sums(sources: Mapping[str, int]) -> str:
    return f"{_counted(sum(sources.values()), 'chunk')} of {_counted(len(sources), 'file')}"


def _encoded_in_words(done: Ingested) -> str:
    """Return how many chunks were encoded, and what became of the others."""
    others, parts = done.stored, list[str]()
    if done.encoded:
        figures = f"{done.tokens:,} tokens, {size_text(done.nbytes)}, {done.seconds:.1f} s"
        parts.append(f"{done.encoded:,} encoded now ({figures})")
    if others:
        alone = "all" if others > 1 else "it"
        whole = alone if others == done.chunks else f"the other {others:,}" if done.encoded else f"{others:,}"
        parts.append(f"{whole} {'was' if others == 1 else 'were'} stored already")
    if done.elsewhere:
        whose = f"{done.elsewhere:,} {'was' if done.elsewhere == 1 else 'were'} stored meanwhile"
        parts.append(f"{whose} by a worker that died or by another run")
    if done.repeated:
        parts.append(f"{done.repeated:,} {'has' if done.repeated == 1 else 'have'} the text of another")
    if done.short:
        parts.append(f"{done.short:,} {'is' if done.short == 1 else 'are'} too short to be stored")
    return ", ".join(parts) or "none had to be encoded now"


def _left_out(skipped: Sequence[tuple[Path, str]]) -> str:
    """Return how many files and folders were left out."""
    n_folders = sum(path.is_dir() for path, _ in skipped)
    counts = {"file": len(skipped) - n_folders, "folder": n_folders}
    return " and ".join(_counted(n, noun) for noun, n in counts.items() if n)


def add_files(
    library: Library, tokenizer: Any, paths: Sequence[Path], files: Sequence[Path], console: Console
) -> tuple[list[tuple[str, str]], list[tuple[Path, str]]]:
    """Index files with a progress bar; print which ones cannot be parsed or contain no text.

    Args:
        library: The index.
        tokenizer: The LLM's, by which chunks are measured.
        paths: What a person named: files and folders.
        files: The files there.
        console: Where the bar and the left-out files are shown.

    Returns:
        (text, source) of all chunks, and (file, reason) of the files that were left out.

    Raises:
        InputError: No file holds text.
    """
    chunks, failed = list[tuple[str, str]](), list[tuple[Path, str]]()
    columns = TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeRemainingColumn()
    known = library.sources()
    with library.ingesting(paths, files), progress(console, *columns) as bar:
        task = bar.add_task("indexing", total=sum(file.stat().st_size for file in files))
        for file in files:
            before, size = bar.tasks[task].completed, file.stat().st_size
            bar.update(task, description=f"indexing {escape(short(file.name))}")
            try:
                chunks += library.add(file, tokenizer, _report_share(bar, task, before, size))
            except InputError as error:
                failed.append((file, str(error)))
                stays = " What was read of it before stays in the index." if str(file.resolve()) in known else ""
                _print_left_out(console, f"{error}{stays}")
            bar.update(task, completed=before + size)
    left_out = {file for file, _ in failed}
    _print_guessed(console, [file for file in files if file not in left_out])
    if not chunks:
        raise _no_text(files)
    return chunks, failed


def split_documents(
    files: Sequence[Path], settings: Settings, tokenizer: Any, console: Console
) -> list[tuple[str, list[str]]]:
    """Split files without indexing them; print which ones cannot be parsed or contain no text.

    Args:
        files: The files.
        settings: They say how long chunks are.
        tokenizer: The LLM's, by which chunks are measured.
        console: Where the left-out files are shown.

    Returns:
        (name, chunks) of each file that can be read.

    Raises:
        InputError: No file holds text.
    """
    from ragfuse.cli.library import split_file

    texts = list[tuple[str, list[str]]]()
    for file in files:
        try:
            texts.append((str(file), list(split_file(file, settings, tokenizer))))
        except InputError as error:
            _print_left_out(console, str(error))
    read = {name for name, _ in texts}
    _print_guessed(console, [file for file in files if str(file) in read])
    if not texts:
        raise _no_text(files)
    return texts


def _print_left_out(console: Console, reason: str) -> None:
    from ragfuse.types.whole_text import whole_text

    console.print(f"[yellow]left out[/]: {escape(whole_text(reason))}", highlight=False, soft_wrap=True)


def _no_text(files: Sequence[Path]) -> InputError:
    found = _counted(len(files), "file")
    return InputError(f"Wanted text, found none in {found}; the lines above say why. Mend these, or name other files.")


def encode(engine: Engine, chunks: Chunks, console: Console) -> Ingested:
    """Compute the KV of all chunks and of the prompt's prefix, and write it to the store, with a progress bar."""
    from ragfuse.cli.prompts import prefix_of
    from ragfuse.engine.engine import Ingested

    refusal = engine.model.profile.refusal
    if refusal:
        console.print(
            f"[yellow]No KV is stored[/] for this model; questions are answered by full prefill: {escape(refusal)}"
        )
        return Ingested()
    chunks, prefix = _fitting_chunks(engine, chunks, console), prefix_of(engine)
    before = _refused_writes(engine)
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

        done = engine.ingest(chunks, prefix, show)
    repeated, _ = _n_repeated(engine, chunks)
    return replace(done, unsaved=_print_refused(engine, before, chunks, console), repeated=repeated)


def encode_on_ray(
    engine: Engine, chunks: Chunks, console: Console, address: str, workers: int | None, cpus: float | None
) -> tuple[BulkSummary, Ingested]:
    """Compute the KV of all chunks on a Ray cluster, and that of the prompt's prefix here; print what workers did.

    Ray is not started where every tier that outlives the process has every chunk.

    Returns:
        What the workers did, and what became of all chunks. A worker that died has told nothing: what it stored is
        known by what was missing before.
    """
    from ragfuse.cli.prompts import prefix_of
    from ragfuse.ray.bulk import BulkSummary
    from ragfuse.ray.bulk import encode as encode_in_bulk
    from ragfuse.types.ingested import Ingested

    engine.ingest((), prefix_of(engine))
    unique = list(dict(chunks).items())
    keys = _keys_of(engine, unique)
    held = [{*tier.stat(keys)} for tier in engine.store.tiers if tier.slow]
    if held and all(len(found) == len(keys) for found in held):
        console.print("Nothing is left to encode: Ray is not needed.", highlight=False)
        n_short = sum(_is_short(engine, text) for text, _ in unique)
        done = BulkSummary(len(unique), short=n_short)
    else:
        done = encode_in_bulk(unique, engine.settings, address=address, workers=workers, cpus=cpus)
    engine.know(unique)
    n_missing = len(keys) - len({key for found in held for key in found})
    elsewhere = max(0, n_missing - done.encoded - done.unsaved)
    repeated, short = _n_repeated(engine, chunks)
    figures = len(chunks), done.encoded, done.tokens, done.nbytes, done.seconds
    ingested = Ingested(
        *figures, short=done.short + short, unsaved=done.unsaved, repeated=repeated, elsewhere=elsewhere
    )
    for number, each in enumerate(done.workers, 1):
        speed = f"{each.encoded:,} encoded, {size_text(each.nbytes)}, {each.tokens_per_s:,.0f} tokens/s"
        console.print(f"worker {number}: {_counted(each.chunks, 'chunk')}, {speed}", highlight=False)
    if done.unsaved:
        lost = f"{_counted(done.unsaved, 'chunk')} {'is' if done.unsaved == 1 else 'are'} in no shared tier"
        console.print(f"[yellow]{lost}[/]; run it again to store them, else questions compute them.", highlight=False)
    return done, ingested


def print_skipped(console: Console, found: FilesToIngest) -> None:
    """Print which files are left out, a line for each reason."""
    by_reason = dict[str, list[Path]]()
    for path, why in found.skipped:
        by_reason.setdefault(why, []).append(path)
    for why, paths in by_reason.items():
        _print_files(console, "left out", paths, why)


def _print_guessed(console: Console, files: Sequence[Path]) -> None:
    """Print which text files were taken for another encoding than UTF-8, a line for each encoding."""
    by_encoding = dict[str, list[Path]]()
    for file in files:
        by_encoding.setdefault(guessed_encoding(file), []).append(file)
    for encoding, paths in by_encoding.items():
        if encoding:
            _print_files(console, f"read as {encoding}", paths, "not valid UTF-8; convert what is in another encoding")


def _print_files(console: Console, what: str, paths: Sequence[Path], why: str) -> None:
    """Print a line with the names of files, `NAMED` of them at most."""
    shown = ", ".join(map(shown_name, paths[:NAMED]))
    shown += f" and {len(paths) - NAMED:,} more" if len(paths) > NAMED else ""
    console.print(f"[yellow]{what}[/]: {escape(shown)}: {escape(why)}", highlight=False, soft_wrap=True)


def _refused_writes(engine: Engine) -> dict[str, int]:
    """Return how many writes each tier has refused or failed so far."""
    return {tier.name: tier.counts["refused"] + tier.counts["failed"] for tier in engine.store.tiers}


def _print_refused(engine: Engine, before: Mapping[str, int], chunks: Chunks, console: Console) -> int:
    """Print which tiers refused writes since `before`; return how many chunks no persistent tier holds for that."""
    max_writes, silent = len(chunks) + 1, engine.store.silent()  # of each chunk and the prefix
    refused = {
        name: min(max_writes, n - before[name]) for name, n in _refused_writes(engine).items() if n > before[name]
    }
    if not refused:
        return 0
    tiers = [
        f"{_counted(n, 'write')} to {name}{' (does not answer)' if name in silent else ''}"
        for name, n in refused.items()
    ]
    n_lost = _n_not_stored(engine, chunks)
    outcome = (
        f"{_counted(n_lost, 'chunk')} {'is' if n_lost == 1 else 'are'} not stored, but computed when needed"
        if n_lost
        else "all chunks are stored anyway"
    )
    console.print(f"[yellow]Failed: {', '.join(tiers)}[/]; {outcome}.", highlight=False)
    return n_lost


def _n_not_stored(engine: Engine, chunks: Chunks) -> int:
    """Count the chunks of at least `min_chunk_tokens` without an entry in a slow tier (in any, if none is slow)."""
    tiers, keys = engine.store.tiers, _keys_of(engine, chunks)
    stored = {key for tier in [tier for tier in tiers if tier.slow] or tiers for key in tier.stat(keys)}
    return sum(key not in stored for key in keys)


def _keys_of(engine: Engine, chunks: Chunks) -> list[ChunkKey]:
    """Return the keys of the chunks that are long enough to be stored, each once."""
    min_tokens, encoder = engine.settings.min_chunk_tokens, engine.runtime.encoder
    runs = {tuple(ids) for text, _ in chunks if len(ids := engine.tokens(text.strip())) >= min_tokens}
    return [encoder.key(run, encoder.context) for run in runs]


def _is_short(engine: Engine, text: str) -> bool:
    return len(engine.tokens(text.strip())) < engine.runtime.encoder.shortest


def _n_repeated(engine: Engine, chunks: Chunks) -> tuple[int, int]:
    """Return how many chunks have the text of an earlier one: those that can be stored, and those too short for it."""
    n_each = Counter(text for text, _ in chunks)
    again = {text: n - 1 for text, n in n_each.items() if n > 1}
    n_short = sum(n for text, n in again.items() if _is_short(engine, text))
    return sum(again.values()) - n_short, n_short


def _fitting_chunks(engine: Engine, chunks: Chunks, console: Console) -> Chunks:
    """Return as many of the first chunks as the store can hold: more of them would evict the first ones again."""
    sample = [engine.tokens(text) for text, _ in chunks[:: max(1, len(chunks) // 50)]]
    n_tokens = sum(map(len, sample)) / len(sample)
    silent, n_entries = engine.store.silent(), len(chunks)
    tiers = [name for name in target_tiers(engine, int(n_tokens)) if name not in silent]
    token_nbytes = {name: token_nbytes_in(engine, name, sample[0]) for name in tiers}
    room_nbytes = {name: room_nbytes_of(engine, name) for name in tiers}
    # Each of these tiers gets all chunks, so it is enough that they fit into one.
    roomiest = max(tiers, key=lambda name: room_nbytes[name] / token_nbytes[name], default="")
    needed_nbytes = n_tokens * n_entries * token_nbytes.get(roomiest, 0.0)
    if not roomiest or needed_nbytes <= room_nbytes[roomiest]:
        return chunks
    fitting = int(room_nbytes[roomiest] / needed_nbytes * len(chunks) * 0.95)
    is_disk_full = room_nbytes[roomiest] < engine.store.tier(roomiest).capacity
    setting = TIER_SIZE_VARIABLES.get(roomiest, "RAGFUSE_TIER_BYTES")
    advice = "Free space on its disk" if is_disk_full else f"Raise {setting}"
    console.print(
        f"[yellow]The KV of all {len(chunks):,} chunks takes about {size_text(needed_nbytes)}, but {roomiest} can "
        f"hold {size_text(room_nbytes[roomiest])}[/]: the first {fitting:,} {'is' if fitting == 1 else 'are'} "
        f"encoded now, the others when a question needs them. {advice} to store more; --no-kv encodes none."
    )
    return chunks[:fitting]


def _report_share(bar: Progress, task: Any, before: float, size: int) -> Any:
    return lambda done: bar.update(task, completed=before + done * size)


def _counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
