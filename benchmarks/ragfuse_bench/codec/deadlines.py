"""CacheGen's figure 13, from what `ragfuse bench stream` measured: how often each way is late, and at what quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragfuse_bench.figure import Rows, Wanted, shown

from ragfuse.errors import InputError

COMMAND = "stream"


def late(wanted: Wanted) -> Rows:
    """A row for each deadline and way: the share of streams that were late, and F1."""
    if wanted.result is None:
        raise InputError(
            f"What streams did over a changing line was not given. Run `ragfuse bench {COMMAND} --json FILE` first, "
            "and give it here as --data FILE."
        )
    return shown(wanted.result, COMMAND, _late)


def _late(result: Mapping[str, Any]) -> Rows:
    return [
        {
            "deadline_s": float(each["deadline_s"]),
            "method": method,
            "violations": float(violations),
            "f1": each.get("f1", {}).get(method),
        }
        for each in result["deadlines"]
        for method, violations in each["violations"].items()
    ]


def draw_late(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bars of late streams by way, a group for each deadline."""
    deadlines = list(dict.fromkeys(row["deadline_s"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    width = 0.8 / len(methods)
    for index, method in enumerate(methods):
        mine = [row for row in rows if row["method"] == method]
        at = [deadlines.index(row["deadline_s"]) + width * (index - (len(methods) - 1) / 2) for row in mine]
        axes.bar(at, [100 * row["violations"] for row in mine], width, label=method)
    axes.set_xticks(range(len(deadlines)), [f"{deadline:g} s" for deadline in deadlines])
    axes.set_xlabel("deadline")
    axes.set_ylabel("streams that were late (%)")
    axes.legend()
