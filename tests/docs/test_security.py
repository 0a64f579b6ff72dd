"""The threat table names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.findall(
    r"`(tests/[\w/]+\.py)::(test_\w+)`", (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_what_holds_an_attack_is_shown_by_a_test(path: str, name: str) -> None:
    assert re.search(
        rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE
    )


def test_every_row_of_the_table_names_one() -> None:
    lines = (ROOT / "docs" / "security.md").read_text(encoding="utf-8").splitlines()
    rows = [
        line
        for line in lines
        if line.startswith("| ") and not line.startswith(("| attack", "| ---"))
    ]
    assert len(rows) == len(NAMED) > 25
