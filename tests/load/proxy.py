"""Lines with real bandwidths for tests: short cuts of published traces, in front of real servers.

The cuts are of https://github.com/confiwent/Real-world-bandwidth-traces (MIT licence, in `traces.json` with the names
of its files), which collects measurements of HSDPA phones, FCC broadband, Oboe and Puffer.
"""

from __future__ import annotations

import json
from pathlib import Path

from ragfuse.bench.line import Trace, recorded

HERE = Path(__file__).parent


def published() -> dict[str, Trace]:
    """A trace of each collection, by its name, as it was measured: far slower than a line between servers."""
    kept = json.loads((HERE / "traces.json").read_text(encoding="utf-8"))["traces"]
    return {each["set"]: recorded(each["set"], each["t_s_mbps"]) for each in kept}
