"""A model's generation config is checked before it is believed, and completed where it has no end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ragfuse import ModelError
from ragfuse.engine.options import ends_of
from ragfuse.models.generation_config import GENERATION_FIELDS
from ragfuse.models.loader import load_model


@pytest.fixture
def folder(tiny_path: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_path, tmp_path / "model")
    return tmp_path / "model"


def write(folder: Path, **fields: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe"])
def test_a_damaged_one_is_not_left_out_in_silence(folder: Path, text: bytes) -> None:
    (folder / "generation_config.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"Wanted a JSON object in '.+generation_config\.json'"):
        load_model(folder, "float32")


@pytest.mark.parametrize("name", sorted(GENERATION_FIELDS))
@pytest.mark.parametrize("value", [{"a": 1}, True, [[1]]])
def test_a_field_of_the_wrong_kind_is_named(folder: Path, name: str, value: object) -> None:
    write(folder, **{name: value})
    with pytest.raises(ModelError, match=rf"Wanted a .+ as {name} in '.+', found .+\. Correct the file\."):
        load_model(folder, "float32")


@pytest.mark.parametrize(
    "fields",
    [
        {"eos_token_id": 2, "stop_strings": "x", "temperature": 0.5},
        {"eos_token_id": [2, 3], "stop_strings": ["x", "y"], "suppress_tokens": [1], "top_k": 20, "top_p": None},
        {"of_another_version": "yes", "transformers_version": "4.1"},
    ],
)
def test_fields_of_the_right_kind_and_unknown_ones_are_taken(folder: Path, fields: dict[str, Any]) -> None:
    write(folder, **fields)
    assert load_model(folder, "float32").n_layers


def test_the_tokenizers_end_ends_an_answer_where_the_config_has_none(folder: Path) -> None:
    write(folder)
    model = load_model(folder, "float32")
    assert model.tokenizer.eos_token_id is not None
    assert ends_of(model) == (model.tokenizer.eos_token_id,)
    write(folder, eos_token_id=[7, 8])
    assert ends_of(load_model(folder, "float32")) == (7, 8)
