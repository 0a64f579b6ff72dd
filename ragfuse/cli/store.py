"""`ragfuse store`: list, delete, pin and archive stored entries, without loading a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ragfuse.cli.engine import confirm, open_kv
from ragfuse.cli.options import Yes, option, screen
from ragfuse.cli.show import counted, plain, progress_bar, say, short, show_table, when
from ragfuse.errors import InputError, StoreError
from ragfuse.settings import Settings
from ragfuse.types.sizes import size_text

if TYPE_CHECKING:
    from ragfuse.cli.entries import EntryFilter, EntryRow, OpenStore
    from ragfuse.store.archive import Copied

store = typer.Typer(
    no_args_is_help=True,
    help=(
        "Manage stored KV, without loading a model.\n\nChanges take effect at once in all"
        " processes, except for KV that the processes hold in memory. If RAGFUSE_SALT (a tenant's"
        " secret) is set, ls, rm, pin and export apply to that tenant, or to the tenant of"
        " --tenant; if not, to all tenants. gc and import apply to the whole store."
    ),
)

FILTER = MappingProxyType(
    {
        "keys": Annotated[
            list[str] | None,
            typer.Argument(
                help="First characters of keys, as `ragfuse store ls` shows them.",
                show_default="any key",
            ),
        ],
        "tier": Annotated[str | None, option("--tier", "Only entries in this tier.", "all tiers")],
        "source": Annotated[
            str | None,
            option("--source", "Only texts whose source contains this.", "any source"),
        ],
        "model": Annotated[
            str | None,
            option(
                "--model", "Only entries of this model (name or start of digest).", "all models"
            ),
        ],
        "tenant": Annotated[
            str | None,
            option(
                "--tenant",
                "Only entries of the tenant with this salt or name ('': no salt).",
                "RAGFUSE_SALT if set, else all tenants",
            ),
        ],
    }
)
"""Options that select entries."""
All = Annotated[
    bool,
    typer.Option("--all", help="All entries: of the tenant if a salt is set, else of all tenants."),
]


@store.command("ls")
@screen("store", **FILTER)
def ls(
    console: Console,
    settings: Settings,
    limit: Annotated[
        int, typer.Option(min=0, help="Entries to show, most recently used first; 0: all.")
    ] = 50,
    **conditions: Any,
) -> dict[str, Any]:
    """List entries, and totals per tier and tenant. --json has all entries, with their texts.

    A star marks pinned entries. The column "encoded" says what preceded the chunk at encoding:
    nothing (alone), a prompt's first tokens (prefix), or filler text (filler).
    """
    with _selected(settings, console, conditions) as (kept, entry_filter, rows):
        from ragfuse.store.tier import totals

        entries = [row.entry for row in rows]
        tiers, catalog = totals(kept.store.tiers, entries), kept.catalog.strict
        tenants = [
            {
                **vars(owner),
                "name": owner.name,
                "texts": catalog.count_texts(owner.digest),
                "sessions": catalog.count_sessions(owner.digest),
                "nbytes": sum(each.nbytes for each in entries if each.key.model == owner.digest),
            }
            for owner in kept.tenants(entry_filter)
        ]
    tenants.sort(key=lambda each: -each["nbytes"])
    shown = [
        {
            "key": row.entry.key.tokens[:12] + "*" * row.entry.pinned,
            "tier": row.entry.tier,
            "encoded": row.entry.key.encoded,
            "source": short(Path(next(iter(row.sources), "")).name),
            "tokens": row.entry.n_tokens,
            "nbytes": row.entry.nbytes,
            "hits": row.entry.hits,
            "used": when(row.entry.last_used),
        }
        for row in rows[: limit or None]
    ]
    if shown:
        show_table(console, shown)
        if len(shown) < len(rows):
            say(console, f"{len(rows) - len(shown):,} more: --limit 0 shows all.")
        show_table(console, tiers)
        names = ("name", "texts", "sessions", "nbytes")
        show_table(console, [{name: each[name] for name in names} for each in tenants])
    return {
        "entries": [row.as_dict() for row in rows],
        "nbytes": sum(entry.nbytes for entry in entries),
        "tiers": tiers,
        "tenants": tenants,
    }


@store.command("rm")
@screen("store", **FILTER)
def rm(
    console: Console, settings: Settings, all_: All = False, yes: Yes = False, **conditions: Any
) -> tuple[dict[str, Any], bool]:
    """Delete stored KV. The text of a chunk is deleted with the chunk's last KV.

    If RAGFUSE_SALT is set, only the entries of the salt's tenant are deleted, unless --tenant
    selects another tenant. Without a salt, --all deletes the entries of all tenants.

    Exit status 1 if nothing matches, or if a tier does not answer. If a tier does not answer,
    nothing is deleted. To delete from a tier that answers, use --tier.
    """
    _require_choice(conditions, all_, "delete")
    with _selected(settings, console, conditions, whole=True) as (kept, entry_filter, rows):
        chunks = kept.chunks(rows, entry_filter)
        if chunks:
            confirm(f"Delete {describe(rows)}, and the texts of chunks without other entries?", yes)
        dropped, n_texts = kept.clear(rows, chunks, entry_filter.tier)
    nbytes = sum(entry.nbytes for entry in dropped)
    if chunks:
        entries = counted(len(dropped), "entry", "entries")
        say(console, f"Deleted {entries} ({size_text(nbytes)}), {counted(n_texts, 'text')}.")
    result = {"dropped": len(dropped), "nbytes": nbytes, "texts": n_texts}
    return result, bool(chunks or all_)


@store.command("pin")
@screen("store", **FILTER)
def pin(
    console: Console,
    settings: Settings,
    all_: All = False,
    off: Annotated[
        bool, typer.Option("--off", help="Unpin instead, so that chunks can be evicted again.")
    ] = False,
    **conditions: Any,
) -> tuple[dict[str, Any], bool]:
    """Pin chunks: pinned chunks are never evicted or expired. Exit status 1 if nothing matches."""
    _require_choice(conditions, all_, "pin")
    with _selected(settings, console, conditions) as (kept, _, rows):
        # Redis and buckets evict by their own rules
        rows = [row for row in rows if kept.store.tier(row.entry.tier).pins]
        changing = [row for row in rows if row.entry.pinned is off]
        keys = {row.entry.key for row in changing}
        kept.store.pin(keys, not off)
    word = "unpinned" if off else "pinned"
    say(console, f"{describe(changing)} {word}, {len(rows) - len(changing):,} were {word} already.")
    return {word: len(keys), "already": len(rows) - len(changing)}, bool(rows or all_)


@store.command("export")
@screen("store", **FILTER)
def export(
    console: Console,
    settings: Settings,
    file: Annotated[Path, typer.Argument(help="The archive to write.")],
    yes: Yes = False,
    **conditions: Any,
) -> tuple[dict[str, Any], bool]:
    """Write the selected chunks to an archive. By default, all chunks are selected, or all chunks
    of RAGFUSE_SALT's tenant if a salt is set. Anyone who has the archive can read its texts.

    Exit status 1 if a chunk cannot be read, or if a tier does not answer. In both cases, an
    existing file is not replaced. To export from a tier that answers, use --tier.
    """
    from ragfuse.store import archive

    with _selected(settings, console, conditions, whole=True) as (kept, entry_filter, rows):
        if file.is_file():
            confirm(f"'{file}' exists already. Overwrite it?", yes)
        with progress_bar(
            console, "exporting", "Nothing was written; an existing file is unchanged."
        ) as report:
            tables = kept.store.levels.table_entries()  # to decode levels cg1 to cg4
            entries = [*(row.entry for row in rows), *tables]
            wanted = {known for row in rows for known in row.known}
            owners, catalog = kept.tenants(entry_filter), kept.catalog.strict
            # oldest first
            texts = [each for owner in owners for each in catalog.texts(owner.digest)]
            known = [each for each in texts if each in wanted]
            copied = archive.export(kept.store, file, entries, known, report)
    result = _told(console, copied, f"written to {file}")
    if copied.missing:
        say(console, f"{counted(copied.missing, 'entry', 'entries')} could not be read.")
    return {**result, "file": str(file)}, not copied.missing


@store.command("import")
@screen("store")
def import_(
    console: Console,
    settings: Settings,
    file: Annotated[Path, typer.Argument(help="An archive written by `ragfuse store export`.")],
    tier: Annotated[
        str | None, option("--tier", "Target tier.", "the first persistent tier")
    ] = None,
) -> dict[str, Any]:
    """Import the chunks of an archive. Imported chunks are found only with the same
    model, dtype and salt.

    The author of an archive controls what the model reads: import only archives from people you
    trust.
    """
    from ragfuse.store import archive

    stopped = "The entries imported so far stay. Run the same command again to continue."
    with (
        open_kv(settings, console, may_be_new=True) as kept,
        progress_bar(console, "importing", stopped) as report,
    ):
        copied = archive.import_(kept.store, file, tier, kept.add_texts, report)
    return _told(console, copied, f"imported, {copied.known} were there before")


@store.command("gc")
@screen("store")
def gc(console: Console, settings: Settings) -> dict[str, Any]:
    """Delete expired entries (ttl_s), and leftovers of interrupted writes.

    Exit status 1 if a tier does not respond.
    """
    from ragfuse.store import deletion

    with open_kv(settings, console) as kept, console.status("looking at every file"):
        freed, silent = deletion.gc(kept.store), kept.store.silent()
    for name, (expired, nbytes) in freed.items():
        say(console, f"{name}: {expired:,} expired, {size_text(nbytes)} freed")
    if silent:
        raise StoreError(deletion.unanswered(silent, "expired entries there were not deleted"))
    return {
        "tiers": {
            name: {"expired": expired, "nbytes": nbytes}
            for name, (expired, nbytes) in freed.items()
        }
    }


def _require_choice(conditions: dict[str, Any], all_: bool, verb: str) -> None:
    """Raise InputError if neither conditions nor --all were given, or if both were given."""
    if all_ == any(each is not None and each != [] for each in conditions.values()):
        raise InputError(
            f"Choose what to {verb} by keys, --tier, --source, --model or --tenant. To choose"
            " everything, use --all alone."
        )


@contextmanager
def _selected(
    settings: Settings, console: Console, conditions: dict[str, Any], whole: bool = False
) -> Iterator[tuple[OpenStore, EntryFilter, list[EntryRow]]]:
    """Open the store and select entries. If `whole`, an unresponsive tier raises StoreError."""
    with open_kv(settings, console) as kept:
        from ragfuse.cli.entries import EntryFilter
        from ragfuse.store.deletion import unanswered

        entry_filter = EntryFilter(**{**conditions, "keys": tuple(conditions["keys"] or ())})
        selects_all = entry_filter == EntryFilter()
        if settings.salt and entry_filter.tenant is None:
            entry_filter = replace(entry_filter, tenant=settings.salt)
        with console.status("reading the store"):
            rows = kept.selected(entry_filter)
        tier = entry_filter.tier
        silent = [name for name in kept.store.silent() if tier in (None, name)]
        if silent and whole:
            raise StoreError(unanswered(silent, "nothing was changed or written"))
        for name in silent:
            say(console, f"Tier {name} does not answer: the entries there are not listed.")
        if not rows and not silent:
            nothing = "No entry in the store matches. RAGFUSE_SALT, if set, selects one tenant."
            empty = "The store is empty. Fill the store: ragfuse ingest PATH."
            say(console, empty if selects_all and not settings.salt else nothing)
        yield kept, entry_filter, rows


def describe(rows: Sequence[EntryRow]) -> str:
    """Return a short description of entries: number, size and tenants."""
    names = "".join(f" of {plain(name)}" for name in dict.fromkeys(row.tenant.name for row in rows))
    nbytes = sum(row.entry.nbytes for row in rows)
    return f"{counted(len(rows), 'entry', 'entries')} ({size_text(nbytes)}){names}"


def _told(console: Console, copied: Copied, where: str) -> dict[str, Any]:
    """Print the counts of an export or import, and return the counts as JSON types."""
    done = f"{counted(copied.entries, 'entry', 'entries')} and {counted(copied.texts, 'text')}"
    say(console, f"{done} ({size_text(copied.nbytes)}) {where}.")
    return copied._asdict()
