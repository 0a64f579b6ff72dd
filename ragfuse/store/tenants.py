"""The tenants that entries belong to, as the store's catalog names them. Of a salt only its digest is ever saved."""

from __future__ import annotations

from dataclasses import dataclass

from ragfuse.settings import Settings
from ragfuse.store.catalog import CatalogQueries
from ragfuse.types.keys import digest as digest_of

_NAME = "tenant-"
"""How the catalog's names of tenants begin."""


def remember_tenant(catalog: CatalogQueries, digest: str, settings: Settings) -> None:
    """Save the model, dtype and tenant behind a model digest, so that people can be shown names."""
    fields = {"model": settings.model, "dtype": settings.dtype, "tenant": hidden(settings.salt)}
    catalog.settle(f"{_NAME}{digest}", fields)


def hidden(salt: str) -> str:
    """Return what may be saved and shown of a salt: its digest, "" for none."""
    return digest_of("tenant", salt) if salt else ""


@dataclass(frozen=True)
class Tenant:
    """The tenant that an entry belongs to.

    Args:
        digest: The model digest in the entry's key.
        model: Name of the model; "" if unknown.
        tenant: Digest of the tenant's salt; "" for none.
    """

    digest: str
    model: str = ""
    tenant: str = ""

    @property
    def name(self) -> str:
        """For people: the model and its tenant, or the digest's beginning."""
        return (self.model or self.digest[:8]) + (f" (tenant {self.tenant[:8]})" if self.tenant else "")

    def is_of(self, salt: str) -> bool:
        """Return whether this is a tenant of that salt ("": of none); False where it is not known."""
        return bool(self.model) and self.tenant == hidden(salt)


def tenants_in(catalog: CatalogQueries) -> list[Tenant]:
    """Return the tenants that a catalog names."""
    profiles = {name.removeprefix(_NAME): catalog.get(name) or {} for name in catalog.names() if name.startswith(_NAME)}
    return [
        Tenant(digest, str(found.get("model", "")), str(found.get("tenant", ""))) for digest, found in profiles.items()
    ]
