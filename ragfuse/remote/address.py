"""Where a server is, and with which API key it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

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
        SettingsError: The address is no HTTP address, or the key none that HTTP takes.
    """

    base_url: str
    api_key: str = field(default="", repr=False)
    model: str = ""
    max_retries: int = 2
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", _normalised(self.base_url))
        if not (self.api_key.isascii() and self.api_key.isprintable() and " " not in self.api_key):
            raise SettingsError(
                "The API key has spaces or characters that no key has; wanted ASCII. Copy it again."
            )


def _normalised(given: str) -> str:
    try:
        parts = urlsplit(given.strip())
        is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, or half of an IPv6 address
        is_server = False
    if not is_server or parts.username is not None:
        shown = given.rpartition("@")[2]  # before it may stand a password
        raise SettingsError(
            f"base_url is {shown!r:.120}; wanted the address of a server, such as {LOCAL}, without"
            " a user name."
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}/v1"
