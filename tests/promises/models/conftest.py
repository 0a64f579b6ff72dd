"""A model's folder of a test's own, to be damaged or changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def folder(varied_path, tmp_path):
    shutil.copytree(varied_path, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def retell():
    """Change fields of a JSON file."""

    def changed(file: Path, **fields: Any) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return changed
