"""URLs of tiers as people and logs may see them: without users, passwords and keys."""

from __future__ import annotations

import re

_PARTED = re.compile(r"([?&])")
_SECRET = re.compile(r"user|pass|secret|token|key", re.IGNORECASE)


def without_user(url: str) -> str:
    """Return a URL without its user and password, which stand between // and the last @."""
    scheme, slashes, rest = url.partition("//")
    return scheme + slashes + rest.rpartition("@")[2]


def shown(url: str) -> str:
    """Return a URL without users, passwords and keys, those among its parameters included."""
    head, *parameters = _PARTED.split(without_user(url.strip()))
    return head + "".join(map(_hidden, parameters))


def _hidden(parameter: str) -> str:
    name, equals, _ = parameter.partition("=")
    return f"{name}=..." if equals and _SECRET.search(name) else parameter
