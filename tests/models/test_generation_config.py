"""A model's generation config is completed where it has no end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ragfuse.engine.options import ends_of
from ragfuse.models.loader import load_model


@pytest.fixture
def folder(tiny_path: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_path, tmp_path / "model")
    return tmp_path / "model"


def write(folder: Path, **fields: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(fields))


def test_the_tokenizers_end_ends_an_answer_where_the_config_has_none(folder: Path) -> None:
    write(folder)
    model = load_model(folder, "float32")
    assert model.tokenizer.eos_token_id is not None
    assert ends_of(model) == (model.tokenizer.eos_token_id,)
    write(folder, eos_token_id=[7, 8])
    assert ends_of(load_model(folder, "float32")) == (7, 8)
