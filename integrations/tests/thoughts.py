"""A model that thinks before it answers, and answers that it is made to give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragfuse import Engine, Settings
from tests.kits.scripted import Script, spelled
from tests.kits.thinking import thinking_model


@pytest.fixture(scope="module")
def thinking(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine over a model whose prompts open a thought."""
    home = tmp_path_factory.mktemp("thinking")
    folder = thinking_model(tiny_path, home / "model")
    settings = Settings(model=str(folder), dtype="float32", home=home, max_tokens=40)
    with Engine(settings) as made:
        yield made


def saying(engine: Engine, text: str) -> dict[str, Any]:
    """Return the options of `generate` that make one answer say this and end."""
    end = engine.model.tokenizer.eos_token_id
    return {"logits_processor": [Script([*spelled(engine, text), end])]}
