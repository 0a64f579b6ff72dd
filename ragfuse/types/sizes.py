"""Byte sizes and durations as text."""

from __future__ import annotations

UNLIMITED = 1 << 62
"""The capacity in bytes of a tier that evicts by its own rules, such as Redis."""
_UNITS = ("KB", "MB", "GB", "TB", "PB")


def size_text(nbytes: float) -> str:
    """Return a number of bytes with a decimal unit: "46 KB", "4.8 MB", "1.9 GB"."""
    value, unit = float(nbytes), "B"
    for larger in _UNITS:
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if value >= 9.95 or unit == "B" else f"{value:.1f} {unit}"


def capacity_text(nbytes: int) -> str:
    """Return a capacity as text: "no limit", whole MiB, GiB or TiB ("20 GiB"), or `size_text`."""
    if nbytes == UNLIMITED:
        return "no limit"
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if nbytes and not nbytes % (1 << shift):
            return f"{nbytes >> shift:,} {unit}"
    return size_text(nbytes)


def duration_text(seconds: float) -> str:
    """Return a rounded duration: "less than a second", "8 seconds", "6 minutes", "2.5 hours"."""
    if seconds < 1:
        return "less than a second"
    if seconds < 90:
        n = round(seconds)
        return f"{n} second{'s' if n != 1 else ''}"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    hours = seconds / 3600
    return f"{hours:.0f} hours" if hours >= 10 else f"{hours:.1f} hours"
