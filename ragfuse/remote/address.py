"""Where a server is, and with which API key it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ragfuse.errors import SettingsError

LOCAL = "http://127.0.0.1:8000/v1"
"""The address that `ragfuse serve` has by default, for error messages."""


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server, with the key and the model that it is asked for.

    Args:
        base_url: The address that `ragfuse serve` prints, with or without `/v1`.
        api_key: The API key; "" where the server needs none. It is never printed.
        model: Name of the model; "": whichever the server has.
        max_retries: How often a request is sent again that found no server or a busy one.
        timeout_s: Seconds that the server may be silent.

    Raises:
        SettingsError: The address is no HTTP address, or a number is out of bounds.
    """

    base_url: str
    api_key: str = field(default="", repr=False)
    model: str = ""
    max_retries: int = 2
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", _normalised(self.base_url))
        if not (self.api_key.isascii() and self.api_key.isprintable() and " " not in self.api_key):
            raise SettingsError("The API key has spaces or characters that no key has; wanted ASCII. Copy it again.")
        if self.max_retries < 0:
            raise SettingsError(f"max_retries is {self.max_retries}; wanted 0 or more.")
        if not self.timeout_s > 0:
            raise SettingsError(f"timeout_s is {self.timeout_s}; wanted seconds above 0.")

    def url(self, path: str) -> str:
        """Return the URL of a route below `/v1`."""
        return f"{self.base_url}/{path}"

    @property
    def proxy(self) -> str:
        """The environment's proxy that requests go through; "" where there is none, and for a server on loopback."""
        parts = urlsplit(self.base_url)
        host = parts.hostname or ""
        if is_loopback(host) or proxy_bypass(host):
            return ""
        proxies = getproxies()
        return proxies.get(parts.scheme) or proxies.get("all", "")

    @property
    def place(self) -> str:
        """The address as error messages name it, with the proxy before it."""
        if not self.proxy:
            return self.base_url
        return f"{self.base_url} (asked through the proxy {_hidden(self.proxy)}; to ask it directly set NO_PROXY)"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each request; compressed replies are not wanted, as their size is bounded as sent."""
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {**key, "accept-encoding": "identity", "content-type": "application/json"}


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is this machine's own."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _normalised(given: str) -> str:
    try:
        parts = urlsplit(given.strip())
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:  # a port that is no number, or half of an IPv6 address
        parts, port_is_fine = urlsplit(""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine:
        raise SettingsError(f"base_url is {_hidden(given)!r:.120}; wanted the address of a server, such as {LOCAL}.")
    if parts.username is not None or parts.password is not None:
        raise SettingsError("base_url holds a user name or password, which would be printed. Give the key as api_key=.")
    if parts.query or parts.fragment:
        raise SettingsError(f"base_url is {given!r:.120}; wanted an address without ? and #, such as {LOCAL}.")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else f'{path}/v1'}"


def _hidden(url: str) -> str:
    """Return a URL without what stands before an @, which may be a password."""
    head, at, tail = url.rpartition("@")
    return f"...@{tail}" if at else tail or head
