"""Lines with real bandwidths for tests: short cuts of published traces, in front of real servers.

They come along with the benchmarks, with their origin and licence (MIT): measurements of HSDPA
phones, FCC broadband, Oboe and Puffer.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from ragfuse_bench.line import Trace, recorded

TRACES = Path(str(files("ragfuse_bench"))) / "sets" / "bandwidth.json"


def published() -> dict[str, Trace]:
    """A trace of each collection, by its name, as it was measured: far slower than a line between
    servers.
    """
    kept = json.loads(TRACES.read_text(encoding="utf-8"))["traces"]
    return {each["set"]: recorded(each["set"], each["t_s_mbps"]) for each in kept}
