"""Documents that leave an index: moved or gone from the folder they were ingested from, or named by a person."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ragfuse.cli.answerer import is_local
from ragfuse.cli.entries import counted
from ragfuse.cli.files import DANGLING, FilesToIngest, is_gone, look_for_files
from ragfuse.cli.options import index_option
from ragfuse.cli.show import NAMED, listed, printable
from ragfuse.errors import InputError
from ragfuse.types.sizes import size_text

if TYPE_CHECKING:
    from ragfuse.cli.library import Library, Origin
    from ragfuse.engine.answerer import Answerer
    from ragfuse.settings import Settings
    from ragfuse.store.deletion import ForgottenTexts


@dataclass(frozen=True)
class Absent:
    """Documents of an index that an ingest of their folder did not find.

    Args:
        moved: Those whose file has another place or name now, each with that of the document that it is now.
        gone: Those that were deleted, changed and renamed, or are left out now.
        unread: Those that may still be there, as they or their folder cannot be read.
        away: Those whose drive may not be mounted now.
    """

    moved: Mapping[str, str] = field(default_factory=dict)
    gone: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    away: tuple[str, ...] = ()


def absent(
    origins: Mapping[str, Origin],
    paths: Sequence[Path],
    found: FilesToIngest,
    whole: bool = False,
    before: Collection[str] | None = None,
) -> Absent:
    """Return which documents of an index are gone.

    Args:
        origins: The index's documents, each with what is known of its file.
        paths: The files and folders that are ingested.
        found: What was found at these paths.
        whole: Whether the index has these paths alone, so that each of its documents lay there.
        before: The documents that the index had before this ingest; None: not known, so that none counts as moved.
    """
    there = {str(file.resolve()) for file in found.files}
    skipped = {str(file.resolve()) for file, why in found.skipped if why != DANGLING}  # its target may only be away
    roots, unreadable = _folders(paths), [path.resolve() for path in found.unreadable]
    added = there - (there if before is None else set(before))
    names = {origins[source].content: source for source in sorted(added & origins.keys(), reverse=True)}
    moved, gone, unread, away = dict[str, str](), list[str](), list[str](), list[str]()
    for source, origin in origins.items():
        path = Path(source)
        is_inside = whole or source in skipped or _lies_in(path, roots)
        if source in there:
            continue
        if _lies_in(path, unreadable):
            unread += [source] if is_inside else []
        elif origin.content and origin.content in names and is_gone(path, origin.mount):
            moved[source] = names[origin.content]
        elif not is_inside:
            continue
        elif source in skipped or is_gone(path, origin.mount):
            gone.append(source)
        elif not _exists(path):
            away.append(source)
        elif whole:
            gone.append(source)
    return Absent(moved, tuple(gone), tuple(unread), tuple(away))


def found_for(library: Library, paths: Sequence[Path]) -> FilesToIngest:
    """Return what is at paths that are ingested: documents, or none where those that the index had there are gone.

    Raises:
        InputError: A path is not there, or there is no document and nothing to forget; the message says what the index
            keeps from there.
    """
    try:
        found = look_for_files(paths)
        if found.files or absent(library.origins(), paths, found).gone:
            return found
        raise found.none_at(paths)
    except InputError as error:
        stay = _stay_in(library, paths)
        if not stay:
            raise
        raise InputError(f"{error} {stay}") from error


def documents_named(library: Library, name: str) -> list[str]:
    """Return the documents that a person means by a path, a folder, or the end of a path.

    Raises:
        InputError: There is none in the index, or a name that is no path stands for several.
    """
    known = sorted({*library.sources(), *library.awaited()})
    path = Path(name).expanduser().resolve()
    exact = [source for source in known if name.strip() and _lies_in(Path(source), [path])]
    if exact:
        return exact
    ending = Path(name).parts
    found = [source for source in known if ending and Path(source).parts[-len(ending) :] == ending]
    if len(found) > 1:
        raise InputError(
            f"'{name}' may be {listed(found)} of the index '{library.name}'. Give the whole path, or that of a folder."
        )
    if not found:
        names = {Path(source).name: source for source in known}
        near = difflib.get_close_matches(Path(name).name, names, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"It has: {listed(list(names))}." if names else "It is empty."
        raise InputError(f"Wanted a document of the index '{library.name}', found none named '{name}'. {hint}")
    return found


def forget_documents(library: Library, sources: Collection[str], answerer: Answerer | None = None) -> ForgottenTexts:
    """Remove documents from an index, and the KV of their chunks from the store unless other documents hold the same.

    Args:
        library: The index.
        sources: The documents.
        answerer: Who answers questions here, if a model is loaded; a server keeps the KV that it has.
    """
    return _forget(library, library.remove(sources), sources, answerer)


def _forget(
    library: Library, holders: Mapping[str, str], sources: Collection[str], answerer: Answerer | None
) -> ForgottenTexts:
    """Remove chunks of documents from the store; `holders`: their texts, each with a document that holds it, or ""."""
    from ragfuse.store.deletion import LEARNT, ForgottenTexts, forget_sources
    from ragfuse.types.whole_text import whole_text

    texts = {text: whole_text(holder) for text, holder in holders.items()}
    gone = {*map(whole_text, sources), LEARNT}
    if not texts:
        return ForgottenTexts()
    if answerer is not None and not is_local(answerer):
        return ForgottenTexts()
    if answerer is not None:
        answerer.flush()
        forgotten = forget_sources(answerer.store, answerer.catalog.strict, library.settings.salt, texts, gone)
        answerer.forget(sorted(forgotten.texts))  # what is in memory: beginnings, and passages that were learnt
        return forgotten
    if not _has_store(library.settings):
        return ForgottenTexts()
    from ragfuse.admin.store_admin import StoreAdmin

    with StoreAdmin(library.settings) as admin:
        return admin.forget_sources(texts, gone)


def forget_absent(
    library: Library,
    answerer: Answerer | None,
    paths: Sequence[Path],
    found: FilesToIngest,
    console: Console,
    before: Collection[str],
    whole: bool = False,
) -> Absent:
    """Forget the documents that are gone from folders which were ingested just now; say which, and which are kept.

    With them go the chunks that documents there had before they changed.

    Args:
        library: The index, brought up to date with what was found.
        answerer: Who answers questions here, if a model is loaded.
        paths: The files and folders that were ingested.
        found: What was found at these paths.
        console: Where it is said.
        before: As for `absent`.
        whole: As for `absent`.

    Returns:
        The documents that were moved or forgotten, and those that are kept.
    """
    _forget_replaced(library, answerer, console)
    sources = library.sources()
    told = absent(library.origins(), paths, found, whole, before)
    if told.moved:
        forget_documents(library, told.moved, answerer)  # under their old names: their KV has the new ones from now on
        _say(console, f"moved: {_moves(told.moved)} ({counted(sum(sources[name] for name in told.moved), 'chunk')})")
    if told.gone:
        forgotten = forget_documents(library, told.gone, answerer)
        say_forgotten(console, told.gone, sum(sources[source] for source in told.gone), forgotten)
        say_quoted(console, library.settings, told.gone, answerer)
    if told.unread:
        _say(console, f"kept in the index: {listed(told.unread)}: cannot be read now")
    if told.away:
        folders = dict.fromkeys(str(Path(source).parent) for source in told.away)
        command = shlex.join(["ragfuse", "ingest", *(word for folder in folders for word in ("--remove", folder))])
        they, it = ("it was", "it") if len(told.away) == 1 else ("they were", "them")
        _say(
            console,
            f"kept in the index: {listed(told.away)}: the drive that {they} on may not be mounted now. "
            f"To forget {it}: {command}{index_option(library.name)}",
        )
    return told


def _forget_replaced(library: Library, answerer: Answerer | None, console: Console) -> None:
    """Remove from the store the chunks of earlier versions of documents that no document holds any more."""
    holders, sources = library.take_replaced()
    forgotten = _forget(library, holders, sources, answerer)
    if forgotten.texts:
        size = f", {size_text(forgotten.nbytes)} of KV" if forgotten.nbytes else ""
        chunks = counted(len(forgotten.texts), "old chunk")
        _say(console, f"forgotten of what changed: {listed(sorted(sources))} ({chunks}{size})")


def say_forgotten(console: Console, sources: Sequence[str], n_chunks: int, forgotten: ForgottenTexts) -> None:
    """Say in one line which documents were forgotten, and what of them."""
    kv = f", {size_text(forgotten.nbytes)} of KV" if forgotten.nbytes else ""
    _say(console, f"forgotten: {listed(sources)} ({counted(n_chunks, 'chunk')}{kv})")


def say_kept_elsewhere(console: Console, library: Library, sources: Sequence[str]) -> None:
    """Say which other indexes hold documents that were forgotten here, and how they are forgotten there."""
    from ragfuse.cli.library import Library, is_of_docs

    for name in library.others():
        held = Library(library.settings, name).sources()
        there = [source for source in sources if source in held]
        if there:
            command = shlex.join(["ragfuse", "ingest", *(word for each in there for word in ("--remove", each))])
            they = "its text and KV stay" if len(there) == 1 else "their texts and KV stay"
            which = f"'{name}', which --docs made," if is_of_docs(name) else f"'{name}'"
            forget = f"{command}{index_option(name)}"
            _say(console, f"the index {which} holds {listed(there)} too, so {they}; to forget: {forget}")


def say_quoted(
    console: Console,
    settings: Settings,
    sources: Collection[str],
    answerer: Answerer | None = None,
    but: str | None = None,
) -> list[str]:
    """Say which conversations hold text of documents that were forgotten, and how they are deleted; return their names.

    Args:
        console: Where it is said.
        settings: The settings, which name the store.
        sources: The documents.
        answerer: Who answers questions here, if a model is loaded; a server's conversations are not known.
        but: A conversation that is not named, as one is in it.
    """
    names = [name for name in _quoting(settings, sources, answerer) if name != but]
    if names:
        shown = ", ".join(map(printable, names[:NAMED]))
        shown += f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        hold, it = "holds" if len(names) == 1 else "hold", "it" if len(sources) == 1 else "them"
        command = shlex.join(["ragfuse", "sessions", "rm", *names[:NAMED]])
        who = counted(len(names), "conversation")
        _say(console, f"{who} {hold} text of {it} still, with its KV: {shown}; to delete: {command}")
    return names


def _quoting(settings: Settings, sources: Collection[str], answerer: Answerer | None) -> list[str]:
    from ragfuse.types.whole_text import whole_text

    gone = {*map(whole_text, sources)}
    if answerer is not None:
        return answerer.sessions.quoting(gone) if is_local(answerer) else []
    if not _has_store(settings):
        return []
    from ragfuse.admin.store_admin import StoreAdmin

    with StoreAdmin(settings) as admin:
        return admin.sessions.quoting(gone)


def _stay_in(library: Library, paths: Sequence[Path]) -> str:
    """Return a sentence on documents of an index that lay at paths where none is found now; "" where there is none."""
    places = [path.resolve() for path in paths]
    stay = [source for source in library.sources() if _lies_in(Path(source), places)]
    if not stay:
        return ""
    command = shlex.join(["ragfuse", "ingest", *(word for path in paths for word in ("--remove", str(path)))])
    return f"{listed(stay)} of the index '{library.name}' stay there; to forget: {command}{index_option(library.name)}"


def _moves(moved: Mapping[str, str]) -> str:
    """Return documents with their old and new places below the nearest folder of both, `NAMED` of them at most."""
    moves = list[str]()
    for old, new in sorted(moved.items()):
        above = os.path.commonpath([Path(old).parent, Path(new).parent])
        was, now = (printable(Path(source).relative_to(above).as_posix()) for source in (old, new))
        moves.append(f"{was} is now {now}")
    return ", ".join(moves[:NAMED]) + (f" and {len(moves) - NAMED:,} more" if len(moves) > NAMED else "")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _folders(paths: Iterable[Path]) -> list[Path]:
    return [path.resolve() for path in paths if path.is_dir()]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # not known
        return False


def _lies_in(path: Path, folders: Iterable[Path]) -> bool:
    """Return whether a path is one of these, or in one of them."""
    return any(path.is_relative_to(folder) for folder in folders)


def _has_store(settings: Settings) -> bool:
    """Return whether there is a store that outlives a process."""
    placed = settings.placed()
    return bool(placed.tiers) or bool(placed.disk_bytes and placed.store_path.exists())
