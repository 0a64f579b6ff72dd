"""The server's API keys, and the tenant and salt of each key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from fastapi import Request

from ragfuse.errors import InputError, SettingsError
from ragfuse.store.catalog import tenant_name
from ragfuse.types.keys import digest

MIN_KEY_CHARS = 16
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class APITenant:
    """The tenant of an API key.

    Args:
        salt: Part of all store keys of this tenant, so that tenants never share KV. "" means no
            salt.
    """

    salt: str

    @property
    def name(self) -> str:
        """A name for logs and metrics that does not reveal the salt; "" if there is no salt."""
        return tenant_name(self.salt)


class Keys:
    """The accepted API keys, stored as digests.

    Args:
        given: Texts with one key each. `KEY` has a tenant of its own, `SALT:KEY` belongs to the
            tenant with that salt, and `:KEY` belongs to the tenant without a salt.
        salt: Salt of the only tenant if there are no keys.

    Raises:
        SettingsError: A key is too short, or has spaces, control or non-ASCII characters.
    """

    def __init__(self, given: Iterable[str] = (), salt: str = "") -> None:
        self._default = APITenant(salt)
        self._keys = dict(map(_parse_key, given))

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def tenants(self) -> Sequence[APITenant]:
        """The tenants of all keys, without duplicates; the only tenant if there are no keys."""
        return tuple(dict.fromkeys(self._keys.values())) or (self._default,)

    def tenant(self, authorization: str | None) -> APITenant | None:
        """Return the tenant of the key in an `Authorization` header; None for an unknown key.

        Without keys, all requests have the same tenant. Keys are compared by digest, so that timing
        does not reveal a key.
        """
        if not self._keys:
            return self._default
        scheme, _, key = (authorization or "").partition(" ")
        return self._keys.get(_digest(key.strip() if scheme.lower() == "bearer" else ""))


def tenant_of(request: Request) -> APITenant:
    """Return the tenant of a request's API key."""
    tenant: APITenant = request.state.tenant
    return tenant


def check_host(host: str, keys: Keys) -> None:
    """Raise SettingsError if a server without keys would listen on a non-loopback address."""
    if host not in LOOPBACK and not len(keys):
        raise SettingsError(
            f"Other machines can reach a server at '{host}', so the server needs an API key, but"
            " there is none. Set --api-keys-file or RAGFUSE_API_KEYS, or serve at 127.0.0.1."
        )


def read_keys(path: Path) -> list[str]:
    """Read API keys from a file, one per line, skipping empty lines and lines that begin with #."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"The API key file '{path}' cannot be read: {error}. Write one key per line, in UTF-8."
        ) from error
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def _parse_key(text: str) -> tuple[bytes, APITenant]:
    salt, colon, key = text.rpartition(":")
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise SettingsError(
            f"An API key must have at least {MIN_KEY_CHARS} ASCII characters and no spaces. A key"
            f" of {len(key)} characters breaks this rule. Create a key: python -c 'import secrets;"
            " print(secrets.token_urlsafe(32))'"
        )
    return _digest(key), APITenant(salt if colon else digest("key's salt", key))


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
