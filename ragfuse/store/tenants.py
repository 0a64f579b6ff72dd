"""Who an entry belongs to, as a store's catalog names them: of a salt, nothing but its digest is written down."""

from __future__ import annotations

from dataclasses import dataclass

from ragfuse.settings import Settings
from ragfuse.store.catalog import CatalogQueries
from ragfuse.types.keys import digest as digest_of


def remember_tenant(catalog: CatalogQueries, digest: str, settings: Settings) -> None:
    """Write down what stands behind a digest in keys, so that people are told names; of a salt, its digest alone."""
    found = {"model": settings.model, "dtype": settings.dtype, "tenant": hidden(settings.salt)}
    catalog.settle(f"tenant-{digest}", found)


def hidden(salt: str) -> str:
    """What may be written down and shown of a salt: its digest, "" for none."""
    return digest_of("tenant", salt) if salt else ""


@dataclass(frozen=True)
class Tenant:
    """Who an entry belongs to: the digest in its key, and what is known of it ("" where nothing is).

    tenant: the digest of the salt, "" for none.
    """

    digest: str
    model: str = ""
    tenant: str = ""

    @property
    def name(self) -> str:
        """For people: the model and its tenant, or the digest's beginning."""
        return (self.model or self.digest[:8]) + (f" (tenant {self.tenant[:8]})" if self.tenant else "")
