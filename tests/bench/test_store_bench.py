"""The store's benchmark on few small entries: the figures it promises, and nothing left behind."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from ragfuse_bench.options import StoreOptions
from ragfuse_bench.store import run_store
from rich.console import Console

from ragfuse.errors import SettingsError


@pytest.fixture(scope="module")
def found(varied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    home, console = tmp_path_factory.mktemp("home"), Console(file=io.StringIO(), width=200)
    sizes = {"chunks": 3, "tokens": 16, "layers": 3, "index_rows": 500, "lookups": 20, "requests": 1, "rounds": 1}
    urls = (f"file://{home / 'mine'}",)
    result = run_store(StoreOptions(**sizes, model=str(varied_path), home=home, urls=urls), console)
    assert isinstance(console.file, io.StringIO)
    return json.loads(json.dumps(result)), console.file.getvalue(), home


def test_each_tier_has_its_speeds_and_the_disk_its_device_beside_it(found: tuple[dict[str, Any], str, Path]):
    result, _, _ = found
    assert [row["tier"] for row in result["tiers"]] == ["memory", "disk", "objects", "objects-2"]
    memory, disk, *objects = result["tiers"]
    assert all(row["read_mbps"] > 0 and row["write_mbps"] > 0 for row in objects)
    assert memory["read_mbps"] > 0
    assert memory["raw_read_mbps"] is None
    assert disk["raw_read_mbps"] > 0
    assert result["disk_read_over_raw"] == disk["read_over_raw"] > 0
    assert disk["mb"] == 3 * 3 * 2 * 2 * 16 * 64 * 2 / 1e6


def test_the_index_is_as_large_as_was_asked(found: tuple[dict[str, Any], str, Path]):
    result, _, _ = found
    assert result["index_rows"] == 500
    assert result["lookup_us_p50"] <= result["lookup_us_p99"]
    assert result["index_file_mb_per_million"] > 50  # a row holds a key of two digests


def test_nothing_is_left_behind(found: tuple[dict[str, Any], str, Path]):
    _, text, home = found
    assert not list(home.glob("bench-*"))
    assert not [path for path in home.rglob("*") if path.suffix == ".kv"]
    assert "a plain file" in text
    assert "looked up among 500" in text


def test_an_index_smaller_than_a_prompt_is_refused():
    with pytest.raises(SettingsError, match="rows from 6 on"):
        StoreOptions(index_rows=3)
