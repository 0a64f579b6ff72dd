"""LangChain's chains as baselines: the first token comes when every passage was read."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ragfuse_bench.quality.chains import run_chain

from ragfuse import Engine, Settings
from ragfuse.calibration.case import Case
from ragfuse.calibration.methods import CHAINS
from ragfuse.models.loader import load_model
from ragfuse.plan.evict import lru
from ragfuse.store import KVStore, MemoryTier
from tests.tiny import CHUNKS


@pytest.fixture(scope="module")
def engine(varied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = load_model(varied_path, "float32")
    settings = Settings(home=tmp_path_factory.mktemp("home"))
    with Engine(settings, model, KVStore([MemoryTier(1 << 28, lru)])) as made:
        yield made


@pytest.mark.parametrize("name", CHAINS)
def test_the_clock_of_the_first_token_stops_at_the_last_call(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[float] = []
    real = engine.model.full_prefill

    def noted(*given: Any) -> Any:
        made = real(*given)
        ends.append(time.perf_counter())
        return made

    monkeypatch.setattr(engine.model, "full_prefill", noted)
    told = run_chain(name, engine, Case("made", "1", "Who counted?", ("forty",), CHUNKS[:4]), 6)
    assert len(ends) >= 4
    assert told.wall_s >= ends[-1] - ends[0]
    assert told.text
