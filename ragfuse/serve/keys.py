"""API keys, and the tenant and salt that each stands for."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from ragfuse.errors import InputError, SettingsError
from ragfuse.types.keys import digest

MIN_KEY_CHARS = 16
"""Shortest API key allowed, in characters."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class APITenant:
    """The tenant of an API key.

    Args:
        name: A label for metrics and the queue; it does not reveal the API key.
        salt: The salt of all store keys of this tenant's entries, which keeps tenants apart.
    """

    name: str
    salt: str


class Keys:
    """The accepted API keys, kept as digests.

    Args:
        given: Keys as `KEY`, each a tenant of its own, or as `SALT:KEY`, the tenant of that salt.
        salt: Without keys, everybody is the tenant of this salt.

    Raises:
        SettingsError: A key is too short, or holds spaces or non-ASCII characters.
    """

    def __init__(self, given: Iterable[str] = (), salt: str = "") -> None:
        self._open = APITenant("all", salt)
        self._held = tuple(_held(text) for text in given)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tenants(self) -> Sequence[APITenant]:
        """All tenants, each once even if it has several keys."""
        return tuple(dict.fromkeys(tenant for _, tenant in self._held)) or (self._open,)

    def tenant(self, authorization: str | None) -> APITenant | None:
        """Return the tenant whose key an `Authorization` header holds; None for an unknown key. Constant time."""
        if not self._held:
            return self._open
        scheme, _, key = (authorization or "").partition(" ")
        shown = _digest(key.strip() if scheme.lower() == "bearer" else "")
        found = None
        for held, tenant in self._held:
            if hmac.compare_digest(held, shown):
                found = tenant
        return found


def check_host(host: str, keys: Keys) -> None:
    """Raise SettingsError for a server without keys on a host that other machines reach."""
    if host not in LOOPBACK and not len(keys):
        raise SettingsError(
            f"Wanted an API key for a server at '{host}', which other machines reach; found none. Give --api-key, "
            "--api-keys-file or RAGFUSE_API_KEYS, or serve at 127.0.0.1."
        )


def read_keys(path: Path) -> list[str]:
    """Read API keys from a file, one per line, without empty lines and lines that begin with #."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Wanted a text file of API keys, one a line, found '{path}': {error}.") from error
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def _held(text: str) -> tuple[bytes, APITenant]:
    salt, colon, key = text.rpartition(":")
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise SettingsError(
            f"Wanted API keys of at least {MIN_KEY_CHARS} letters, digits and signs, found one of {len(key)}. Make "
            "one: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    name = digest("tenant", salt if colon else key)[:8]
    return _digest(key), APITenant(name, salt if colon else digest("key's salt", key))


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogatepass")).digest()
