"""CacheGen's figure 13, from what `ragfuse bench stream` measured: how often each way is late, and at what quality."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragfuse.bench.figure import Rows, Wanted
from ragfuse.errors import InputError

WANTED = "Run `ragfuse bench stream --json FILE` first, and give it here as --data FILE."


def late(wanted: Wanted) -> Rows:
    """A row for each deadline and way: the share of streams that were late, and F1."""
    path = _file(wanted)
    try:
        deadlines = json.loads(path.read_text("utf-8"))["deadlines"]
        return [
            {
                "deadline_s": float(each["deadline_s"]),
                "method": method,
                "violations": float(violations),
                "f1": each.get("f1", {}).get(method),
            }
            for each in deadlines
            for method, violations in each["violations"].items()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"'{path}' is not what `ragfuse bench stream` writes: {error!r}. {WANTED}") from error


def _file(wanted: Wanted) -> Path:
    for name in wanted.sets:
        if Path(name).is_file():
            return Path(name)
    raise InputError(f"What streams did over a changing line was not given. {WANTED}")


def by_streams(wanted: Wanted) -> str:
    """What the figure was made from."""
    return f"as {_file(wanted).name} says"


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
