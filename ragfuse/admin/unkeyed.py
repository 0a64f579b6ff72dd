"""Entries of a server's store that none of its API keys finds, as they belong to tenants of other salts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ragfuse.store import KVStore
from ragfuse.store.catalog import CatalogQueries
from ragfuse.store.tenants import hidden, tenants_in


def unkeyed(store: KVStore, catalog: CatalogQueries, model: str, salts: Iterable[str]) -> Counter[str]:
    """Return how many entries of a model other tenants have, copies once, by the digests of their salts.

    Args:
        store: The store.
        catalog: Its catalog, strict.
        model: The model, by its name or folder.
        salts: The salts of the keys.

    Raises:
        StoreError: The catalog cannot be read.
    """
    own, name = {hidden(salt) for salt in salts}, Path(model).name
    others = {
        digest: tenant.tenant
        for digest, tenant in tenants_in(catalog).items()
        if tenant.tenant not in own and Path(tenant.model).name == name
    }
    return Counter(others[key.model] for key in {entry.key for entry in store.entries()} if key.model in others)


def in_words(found: Counter[str]) -> str:
    """Return what `unkeyed` found, and how a key finds these entries; "" for none."""
    n_unsalted, n_salted = found[""], found.total() - found[""]
    told = []
    if n_unsalted:
        told.append(
            f"No key finds {_entries(n_unsalted)} of this store ingested without a salt: give them to a key with "
            "a colon before it, :KEY."
        )
    if n_salted:
        told.append(
            f"No key finds {_entries(n_salted)} of this store under other salts: give what was ingested under "
            "RAGFUSE_SALT=SALT to a key as SALT:KEY."
        )
    return " ".join(told)


def _entries(n: int) -> str:
    return f"{n:,} {'entry' if n == 1 else 'entries'}"
