"""A `ragfuse serve` for both siblings' tests: over the tiny model in a thread, over an embedded one
in a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragfuse import Settings
from ragfuse.serve.keys import Keys
from tests.kits.serve import Served, process, serving

KEY = "a-key-of-these-tests-alone"


@pytest.fixture
def served(tiny_path: Path, tmp_path: Path) -> Iterator[Served]:
    """A server of the tiny model that wants a key, with the settings of `tiny_settings`."""
    home = tmp_path / "served"
    alone = {"prefix_cache": False, "learn": "retrieved", "max_tokens": 12}
    settings = Settings(
        model=str(tiny_path), dtype="float32", store=home / "store", home=home, **alone
    )
    with serving(settings, Keys([KEY])) as made:
        yield made


@pytest.fixture(scope="module")
def served_embedded(smollm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `ragfuse serve --model smollm2-135m` in a process of its own."""
    store = tmp_path_factory.mktemp("served-embedded") / "store"
    settings = Settings(model="smollm2-135m", dtype="float32", store=store, max_tokens=48)
    with process(settings) as (_, url):
        yield url


def stored(served: Served) -> None:
    """Wait until all that earlier questions brought is stored."""
    served.service.engine(served.service.keys.tenants[0]).flush()
