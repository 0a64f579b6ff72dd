"""`ragfuse store top`: what the tiers hold and how often they are hit, over and over; of a store, or of a server."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ragfuse.cli.answerer import APIKey, Server, refuse_with_server
from ragfuse.cli.opened import open_admin
from ragfuse.cli.options import Json, Store, console_for, option, refuse_without, settings_of, write_json
from ragfuse.errors import ServerError
from ragfuse.types.sizes import capacity_text, size_text

FILL_CHARS = 20
"""Width of the bar that shows how full a tier is."""
_METRIC = re.compile(r"^(ragfuse_\w+?)(?:_total)?(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class TierUse:
    """A tier at one moment: its entries, bytes, capacity, and hits and misses so far (misses None: unknown)."""

    entries: int = 0
    nbytes: int = 0
    capacity: int = 0
    hits: int = 0
    misses: int | None = None


@dataclass(frozen=True)
class StoreUse:
    """A store at one moment; `others` has what else a server tells, by name."""

    at: float
    tiers: Mapping[str, TierUse]
    others: Mapping[str, float] = field(default_factory=dict)


def top(
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 2.0,
    times: Annotated[
        int | None, option("--times", "End after this many looks.", "go on until Ctrl-C; 1 without a terminal", min=1)
    ] = None,
    server: Server = None,
    api_key: APIKey = None,
    store: Store = None,
    json: Json = None,
) -> None:
    """Show what each tier holds and how often it is hit, again every two seconds, until Ctrl-C.

    Of a store, hits of all processes are counted, and what was looked up in vain is not known. With --server, hit rates
    are those of the API key's tenant at that server, which knows both.
    """
    refuse_without("--server", server is not None, api_key=api_key)
    refuse_with_server(server, store=store)
    console, settings = console_for(json), settings_of(api_key=api_key)
    looks = times if times is not None else None if console.is_terminal else 1
    if server is not None:
        last = _look(console, partial(_of_server, server, settings.api_key), every, looks)
    else:
        with _store_reader(store, console) as read:
            last = _look(console, read, every, looks)
    write_json({"tiers": {name: vars(tier) for name, tier in last.tiers.items()}, **last.others}, json)


def _look(console: Console, read: Callable[[], StoreUse], every: float, looks: int | None) -> StoreUse:
    """Show one look after the other; return the last one."""
    first = before = now = read()
    n = 1
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    try:
        if live is not None:
            live.start()
        while True:
            shown = _table(first, before, now)
            if live is None:
                console.print(shown)
            else:
                live.update(shown, refresh=True)
            if n == looks:
                return now
            sleep(every)
            before, now, n = now, read(), n + 1
    except KeyboardInterrupt:
        return now
    finally:
        if live is not None:
            live.stop()


def _table(first: StoreUse, before: StoreUse, now: StoreUse) -> Group:
    """Return the tiers with their hits since the beginning, since the look before, and their hit rate."""
    knows_misses = any(tier.misses is not None for tier in now.tiers.values())
    table = Table("tier", "full", box=None, pad_edge=False)
    headings = ["entries", "size", "of", "hits", "hits/s", *(["hit rate", "now"] if knows_misses else ())]
    for heading in headings:
        table.add_column(heading, justify="right")
    seconds = max(now.at - before.at, 1e-9)
    for name, tier in now.tiers.items():
        was, began = before.tiers.get(name, TierUse()), first.tiers.get(name, TierUse())
        full = min(1.0, tier.nbytes / tier.capacity) if tier.capacity else 0.0
        bar = Text("\u2588" * round(FILL_CHARS * full), "blue") + Text(
            "\u2591" * (FILL_CHARS - round(FILL_CHARS * full)), "grey50"
        )
        rates = [_rate(tier, TierUse(misses=0)), _rate(tier, was)] if knows_misses else []
        table.add_row(
            name,
            bar + Text(f" {full:4.0%}"),
            f"{tier.entries:,}",
            size_text(tier.nbytes),
            capacity_text(tier.capacity),
            f"{tier.hits:,}" + (f" (+{tier.hits - began.hits:,})" if tier.hits > began.hits else ""),
            f"{max(0, tier.hits - was.hits) / seconds:.1f}",
            *rates,
        )
    lines = [Text(f"{name}: {value:,.0f}", "dim") for name, value in now.others.items()]
    return Group(table, *lines)


def _rate(tier: TierUse, since: TierUse) -> str:
    """Return the share of lookups that found something since a moment; "-" where there were none."""
    hits, misses = tier.hits - since.hits, (tier.misses or 0) - (since.misses or 0)
    return f"{hits / (hits + misses):.0%}" if hits + misses > 0 else "-"


@contextmanager
def _store_reader(store: Path | None, console: Console) -> Iterator[Callable[[], StoreUse]]:
    """Yield a function that reads the store as it is now."""
    with open_admin(store, console) as admin:

        def read() -> StoreUse:
            entries, nbytes, hits = Counter[str](), Counter[str](), Counter[str]()
            for entry in admin.store.entries():
                entries[entry.tier] += 1
                nbytes[entry.tier] += entry.nbytes
                hits[entry.tier] += entry.hits
            tiers = {
                tier.name: TierUse(entries[tier.name], nbytes[tier.name], tier.capacity, hits[tier.name])
                for tier in admin.store.tiers
            }
            return StoreUse(monotonic(), tiers)

        yield read


def _of_server(url: str, api_key: str) -> StoreUse:
    """Read a server's metrics.

    Raises:
        ServerError: Nothing answers there, or it is no ragfuse server, or it wants another key.
    """
    import httpx

    from ragfuse.remote import ServerAddress

    address = ServerAddress(url, api_key)
    try:
        root = address.base_url.removesuffix("/v1")
        reply = httpx.get(f"{root}/metrics", headers=address.headers, timeout=10.0, trust_env=bool(address.proxy))
    except httpx.HTTPError as error:
        raise ServerError(f"No server answers at {address.place} ({error}). Correct --server.") from error
    if reply.status_code == 401:
        raise ServerError(f"The server at {address.place} wants another API key. Give it as --api-key.")
    if reply.status_code != 200 or "ragfuse_requests" not in reply.text:
        raise ServerError(f"What answers at {address.place} is no ragfuse server. Correct --server.")
    sums = dict[str, Counter[str]]()
    for name, labels, value in _METRIC.findall(reply.text):
        label = dict(_LABEL.findall(labels))
        sums.setdefault(name, Counter())[label.get("tier") or label.get("kind") or ""] += int(float(value))
    found = {what: sums.get(f"ragfuse_tier_{what}", Counter[str]()) for what in ("entries", "bytes", "hits", "misses")}
    tiers = {
        name: TierUse(
            found["entries"][name], found["bytes"][name], capacity, found["hits"][name], found["misses"][name]
        )
        for name, capacity in sums.get("ragfuse_tier_capacity_bytes", Counter[str]()).items()
    }
    tokens = sums.get("ragfuse_prompt_tokens", Counter())
    others = {
        "requests being answered": sums["ragfuse_requests_running"][""],
        "requests waiting": sums["ragfuse_requests_waiting"][""],
        "prompt tokens reused": tokens["reused"],
        "prompt tokens recomputed": tokens["recomputed"],
        "prompt tokens fresh": tokens["fresh"],
    }
    return StoreUse(monotonic(), tiers, others)
