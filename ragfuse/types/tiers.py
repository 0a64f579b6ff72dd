"""The kinds of tiers that URLs open, named in this one place. Imports no torch, as settings use it
too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierKind:
    """One kind of tier.

    Args:
        name: The name of its tiers; several of a kind are numbered: `redis`, `redis-2`.
        schemes: Schemes of its URLs; "": a folder without a scheme; "*": all schemes that no other
            kind has.
        home: Its class as `module:class`, imported when a tier is opened.
        extra: The ragfuse extra to install for it; "" for none.
    """

    name: str
    schemes: tuple[str, ...]
    home: str
    extra: str = ""


TIER_KINDS = (
    TierKind("disk", ("",), "ragfuse.store.disk:DiskTier"),
    TierKind("redis", ("redis", "rediss", "unix"), "ragfuse.store.redis:RedisTier", extra="redis"),
    TierKind("objects", ("*",), "ragfuse.store.objects:ObjectTier", extra="objects"),
)
"""All kinds that a URL can open, the one of all other schemes last; the memory tier belongs to the
process and has no URL.
"""


def kind_of_scheme(scheme: str) -> TierKind:
    """Return the kind of tier that a URL with this scheme opens."""
    return next(kind for kind in TIER_KINDS if {scheme, "*"} & {*kind.schemes})
