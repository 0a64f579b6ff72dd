"""Folders, URLs and addresses as settings hold them: absolute, so that a later change of the folder does not matter."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit


def placed_folder(folder: str | Path) -> Path:
    """Return the absolute path of a folder, with `~` expanded."""
    return Path(os.path.abspath(os.path.expanduser(folder)))


def tier_placed(url: str) -> str:
    """Return a tier's URL, with an absolute path where it names a folder of this machine."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return str(placed_folder(url)) if url.strip() else url
    return f"{scheme}://{placed_folder(rest)}" if scheme.lower() in ("file", "local") and rest else url


def server_address(url: str) -> str:
    """Return the address of a server without its path `/v1`; ValueError for anything but scheme, host and port."""
    wanted = "wanted the address of a server, as http://HOST:PORT, found "
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{wanted}one that cannot be read ({error})") from None
    if "@" in parts.netloc:
        raise ValueError(f"{wanted}one with a user or password; set RAGFUSE_DECODE_KEY to the API key")
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{wanted}{url!r:.80}")
    if parts.path.rstrip("/") not in ("", "/v1") or parts.query or parts.fragment:
        raise ValueError(f"{wanted}{url!r:.80}; leave out what follows the port")
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}" + (f":{port}" if port is not None else "")


def model_placed(name: str) -> str:
    """Return the absolute path where a model's name is an existing folder; any other name unchanged."""
    try:
        is_folder = bool(name.strip()) and os.path.isdir(os.path.expanduser(name))
    except ValueError:  # no path at all
        is_folder = False
    return str(placed_folder(name)) if is_folder else name
