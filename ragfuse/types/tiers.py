"""The kinds of tiers that URLs open: the one place that names them. No torch: settings read it, too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierKind:
    """One kind of tier.

    Args:
        name: What its tiers are called, with a number where there are several: `redis`, `redis-2`.
        schemes: Schemes of its URLs; "": folders without a scheme; "*": all that no other kind has.
        home: Its class as module:class, imported when a tier is opened.
        extra: The extra of the package that it needs, "" for none.
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
"""All kinds that a URL can open; memory belongs to the process, and has no URL."""


def kind_of_scheme(scheme: str) -> TierKind:
    """Return the kind of tier that URLs of a scheme open."""
    named = next((kind for kind in TIER_KINDS if scheme in kind.schemes), None)
    return named or next(kind for kind in TIER_KINDS if "*" in kind.schemes)
