"""The loading benchmark on a tiny model: what it reports, and that a throttled tier changes time
and nothing else.
"""

import json
from pathlib import Path
from typing import Any

from ragfuse_bench.load import run_load
from ragfuse_bench.options import LoadOptions
from rich.console import Console


def test_every_speed_has_its_times_and_the_nearest_to_100_is_the_headline(tmp_path: Path):
    sizes: dict[str, Any] = {"chunks": 3, "chunk_tokens": 24, "question_tokens": 8, "rounds": 2}
    options = LoadOptions(model="tiny", dtype="float32", mbps=(2.0, 100.0), home=tmp_path, **sizes)
    result = json.loads(json.dumps(run_load(options, Console(quiet=True))))
    slow, fast = result["by_mbps"]
    assert (slow["mbps"], fast["mbps"]) == (2.0, 100.0)
    for name in ("threaded_over_ram", "sync_over_ram"):
        assert result[name] == fast[name]
    for case in (*slow["cases"].values(), *fast["cases"].values()):
        assert len(case["wall_s"]["rounds"]) == 2
    payload_s = 0.9 * result["nbytes"] / 2e6  # the files hold headers and padding too
    assert min(slow["sync_s"], slow["threaded_s"]) >= payload_s
