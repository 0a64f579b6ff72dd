"""What many tests share: the embedded models, prepared once in the user's cache, and an engine over
a tiny one.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from transformers import AutoTokenizer, GenerationConfig

from integrations.tests.kit import tiny_path
from ragfuse import Engine, Settings
from ragfuse.models import prepare

__all__ = ["tiny_path"]

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = (
    "False"  # read when Haystack is imported, here or in a test's process
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # the background of a shell ignores Ctrl-C; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine fails no property, and every run draws the same examples. For other ones:
# pytest --hypothesis-profile=drawn
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("drawn", calm)
settings.register_profile("unhurried", calm, derandomize=True)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """The embedded LLM's folder; the first run on a machine prepares it."""
    return prepare("smollm2-135m", Settings().home)


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The embedded embedder's folder."""
    return prepare("minilm-l6", Settings().home)


@pytest.fixture(scope="session")
def varied_path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, but its greedy answers are letters and spaces, hardly one twice: a small error
    changes them.
    """
    folder = tmp_path_factory.mktemp("varied")
    shutil.copytree(tiny_path, folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = {*tokenizer(" abcdefghijklmnopqrstuvwxyz", add_special_tokens=False).input_ids}
    config = GenerationConfig.from_pretrained(folder)
    config.update(
        no_repeat_ngram_size=2,
        suppress_tokens=[id for id in range(len(tokenizer)) if id not in said],
    )
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_settings(varied_path: Path, tmp_path: Path) -> Settings:
    """A random 3-layer model in float32 whose tokens are bytes, over an empty store.

    Without prefix caching, under which a prompt that is asked again shows nothing of its chunks.
    """
    alone = {"prefix_cache": False, "learn": "retrieved", "max_tokens": 12}
    return Settings(
        model=str(varied_path), dtype="float32", store=tmp_path / "store", home=tmp_path, **alone
    )


@pytest.fixture
def engine(tiny_settings: Settings) -> Iterator[Engine]:
    """An engine of the test's own."""
    with Engine(tiny_settings) as engine:
        yield engine
