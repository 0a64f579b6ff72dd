"""The loading benchmark on a tiny model: what it reports, and that a throttled tier changes time
and nothing else.
"""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from ragfuse_bench.load import run_load
from ragfuse_bench.options import LoadOptions
from ragfuse_bench.throttle import ThrottledTier
from rich.console import Console

from ragfuse.load.timings import forget_pages
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier
from tests.store.kit import encoded, key, kv


def small(home: Path, **changes: Any) -> LoadOptions:
    given: dict[str, Any] = {"model": "tiny", "dtype": "float32", "chunks": 3, "chunk_tokens": 24}
    return LoadOptions(
        **{
            **given,
            "question_tokens": 8,
            "mbps": (2.0, 100.0),
            "rounds": 2,
            "home": home,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    home, console = tmp_path_factory.mktemp("home"), Console(file=io.StringIO(), width=160)
    result = run_load(small(home), console)
    assert isinstance(console.file, io.StringIO)
    return json.loads(json.dumps(result)), console.file.getvalue(), home


def test_every_speed_has_its_times_and_the_nearest_to_100_is_the_headline(
    found: tuple[dict[str, Any], str, Path],
):
    result, _, _ = found
    assert [row["mbps"] for row in result["by_mbps"]] == [2.0, 100.0]
    assert result["threaded_over_ram"] == result["by_mbps"][1]["threaded_over_ram"]
    assert result["sync_over_ram"] == result["by_mbps"][1]["sync_over_ram"]
    for row in result["by_mbps"]:
        for case in row["cases"].values():
            assert len(case["wall_s"]["rounds"]) == 2


def test_a_slow_line_takes_as_long_as_its_bytes_do(found: tuple[dict[str, Any], str, Path]):
    result, _, _ = found
    slow = result["by_mbps"][0]
    payload_s = 0.9 * result["nbytes"] / 2e6  # the files hold headers and padding too
    assert slow["sync_s"] >= payload_s
    assert slow["threaded_s"] >= payload_s


def test_a_throttled_tier_gives_the_same_bytes(tmp_path: Path):
    disk = DiskTier(tmp_path, 1 << 20, lru)
    tier = ThrottledTier(disk, 1000.0)
    meta, blobs = encoded(kv())
    assert tier.put(key("a"), meta, blobs)
    forget_pages(tmp_path)
    found = tier.get(key("a"), range(3))
    assert found is not None
    assert all(got.equal(put) for got, put in zip(found[1:], blobs, strict=True))
    assert tier.get(key("b"), range(1)) is None
    assert tier.stat([key("a")]).keys() == disk.stat([key("a")]).keys() == {key("a")}
    tier.pin([key("a")], True)
    assert disk.stat([key("a")])[key("a")].pinned
    assert tier.delete([key("a")]) == 1
    assert not disk.list()
    assert tier.nbytes == 0
    disk.close()
