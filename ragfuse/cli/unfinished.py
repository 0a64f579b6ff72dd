"""Ingests that have not ended: a note in the folder of an index for each, so that whoever asks it is told.

An ingest writes its note before it indexes the first file, and deletes it after the last one.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragfuse.cli.files import is_gone
from ragfuse.types.keys import digest

SUFFIX = ".unfinished"
"""How the names of notes end."""


@dataclass(frozen=True)
class UnfinishedIngest:
    """An ingest that has begun and has not ended.

    Args:
        note: The file that says so.
        paths: What was to be ingested: files and folders, as absolute paths.
        sources: Path of each document that was to be in the index at its end.
    """

    note: Path
    paths: tuple[str, ...]
    sources: tuple[str, ...]

    @classmethod
    def begun(cls, folder: Path, paths: Sequence[Path], files: Sequence[Path]) -> UnfinishedIngest:
        """Return the ingest of `paths` into the index in `folder`; the same paths have one note."""
        named = tuple(dict.fromkeys(str(path.resolve()) for path in paths))
        sources = tuple(dict.fromkeys(str(file.resolve()) for file in files))
        return cls(folder / f"{digest('ingest', *sorted(named))[:16]}{SUFFIX}", named, sources)

    @classmethod
    def read(cls, note: Path) -> UnfinishedIngest | None:
        """Return what a note says; None for one that is gone or damaged."""
        try:
            data = json.loads(note.read_text(encoding="utf-8"))
            return cls(note, tuple(map(str, data["paths"])), tuple(map(str, data["sources"])))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def as_json(self) -> str:
        """Return the text of the note."""
        return json.dumps({"paths": self.paths, "sources": self.sources})

    def in_words(self, index: str, documents: Mapping[str, tuple[int, int]]) -> str:
        """Return what is known of it and what to do.

        Args:
            index: Name of the index.
            documents: (parts that are stored, parts in all) of each document of the index.
        """
        there = sum(documents[source][0] == documents[source][1] for source in self.sources if source in documents)
        names = ", ".join(f"'{Path(path).name or path}'" for path in self.paths)
        n, verb = len(self.sources), "is" if there == 1 else "are"
        command = shlex.join(["ragfuse", "ingest", *self.paths, *(() if index == "default" else ("--index", index))])
        return (
            f"The ingest of {names} was interrupted, or goes on elsewhere; {there:,} of {n:,} "
            f"{'file' if n == 1 else 'files'} {verb} in the index '{index}'. To have all: {command}"
        )


def unfinished_in(folder: Path) -> Iterator[UnfinishedIngest]:
    """Yield the ingests into the index in `folder` that have not ended."""
    for note in sorted(folder.glob(f"*{SUFFIX}")):
        found = UnfinishedIngest.read(note)
        if found is not None:
            yield found


def end(folder: Path, done: Collection[str]) -> None:
    """Delete the notes of ingests that have nothing left to do: all of their documents are done, or gone from disk."""
    for each in unfinished_in(folder):
        if all(source in done or is_gone(Path(source)) for source in each.sources):
            with contextlib.suppress(OSError):
                each.note.unlink()
