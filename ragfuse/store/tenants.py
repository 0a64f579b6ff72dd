"""The tenants that entries belong to, as the store's catalog names them. Of a salt only its digest
is ever saved.
"""

from __future__ import annotations

from dataclasses import dataclass

from ragfuse.settings import Settings
from ragfuse.store.catalog import CatalogFile
from ragfuse.types.keys import digest as digest_of

_PREFIX = "tenant-"
"""How the catalog's names of tenants begin."""
NAME_CHARS = 8
"""Characters of the digest of a salt that are a tenant's name."""


def remember_tenant(catalog: CatalogFile, digest: str, settings: Settings) -> None:
    """Save the model and tenant behind a model digest, so that people can be shown names."""
    catalog.put(_PREFIX + digest, Tenant(digest, settings.model, hidden(settings.salt)))


def hidden(salt: str) -> str:
    """Return what may be saved and shown of a salt: its digest, "" for none."""
    return digest_of("tenant", salt) if salt else ""


def tenant_name(salt: str) -> str:
    """Return the name that people know the tenant of a salt by, in lists and in a server's log; ""
    for no salt.
    """
    return hidden(salt)[:NAME_CHARS]


class Tenants(dict[str, "Tenant"]):
    """Tenants by model digest; one whose name is not known has its digest alone."""

    def __missing__(self, digest: str) -> Tenant:
        return Tenant(digest)


def tenants_in(catalog: CatalogFile) -> Tenants:
    """Return the tenants that a catalog has.

    Raises:
        StoreError: The catalog is strict, and cannot be read.
    """
    saved = {digest: catalog.get(_PREFIX + digest, Tenant) for digest in catalog.names(_PREFIX)}
    return Tenants({digest: tenant for digest, tenant in saved.items() if tenant is not None})


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
        return (self.model or self.digest[:8]) + (
            f" (tenant {self.tenant[:NAME_CHARS]})" if self.tenant else ""
        )

    def is_of(self, salt: str) -> bool:
        """Return whether this tenant has that salt ("": no salt); False if its salt is unknown."""
        return bool(self.model) and self.tenant == hidden(salt)

    def is_named(self, name: str) -> bool:
        """Return whether this is a tenant of that name, as lists and a server's log have it, or of
        a longer digest.
        """
        return len(name) >= NAME_CHARS and self.tenant.startswith(name)
