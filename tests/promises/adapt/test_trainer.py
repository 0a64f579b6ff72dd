"""A training goes on where it stopped, keeps the best weights, and takes no folder of something
else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ragfuse import Engine, Settings
from ragfuse.adapt import examples, teacher
from ragfuse.adapt import trainer as module
from ragfuse.adapt.folder import CHECKPOINTS, RECIPE_FILE, require_place
from ragfuse.adapt.run import Adaptation
from ragfuse.adapt.trainer import (
    hidden_distance,
    kl_along,
    kv_distance,
    layers_compared,
)
from ragfuse.errors import InputError, ModelError
from ragfuse.hf.chunk_adapter import ADAPTER_WEIGHTS
from ragfuse.hf.rounding_error import kl
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.loader import load_model
from ragfuse.models.shipped_profile import SHIPPED_FILE, ShippedProfile, write_shipped
from tests.twins.adapt.test_examples import documents

STEPS = 6
DOCUMENTS = documents(3, 12)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask little, and measure and save often."""
    monkeypatch.setattr(examples, "MAX_QUESTIONS", 3)
    monkeypatch.setattr(teacher, "ANSWER_TOKENS", 3)
    monkeypatch.setattr(examples, "SIZES", (2, 3))
    for name, value in {"EVALUATE_STEPS": 2, "HELD_EXAMPLES": 2}.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def settings(varied_path: Path, tmp_path: Path) -> Settings:
    return Settings(
        model=str(varied_path), dtype="float32", store=tmp_path / "store", home=tmp_path / "home"
    )


@pytest.fixture
def run(settings: Settings, tmp_path: Path) -> Callable[..., Any]:
    """Trains into a folder of the test, as a process of its own would; gives the trainer."""

    def run(
        name: str = "out",
        steps: int | None = STEPS,
        seconds: float = 0,
        stop_at: int | None = None,
        killed_at: int | None = None,
        given: list[tuple[str, str]] = DOCUMENTS,
        rank: int = 2,
    ) -> Any:
        adaptation = Adaptation(settings)
        try:
            trainer = adaptation.prepare(given, tmp_path / name, rank)

            def report(done: float) -> None:
                if trainer.state.global_step == killed_at:
                    raise ChildProcessError

            trainer.run(seconds, steps, report, lambda: trainer.state.global_step == stop_at)
            return trainer
        finally:
            adaptation.close()

    return run


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / CHUNK_ADAPTER / ADAPTER_WEIGHTS)


def last(folder: Path) -> dict[str, torch.Tensor]:
    checkpoints = (folder / CHECKPOINTS).iterdir()
    newest = max(checkpoints, key=lambda each: int(each.name.partition("-")[2]))
    return load_file(newest / ADAPTER_WEIGHTS)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_was_stopped_or_killed_ends_with_the_weights_of_one_that_was_not(run, tmp_path):
    whole = run("whole")
    assert whole.state.global_step == 6
    stopped = run("parts", stop_at=3)
    assert stopped.state.global_step == 3
    with pytest.raises(ChildProcessError):
        run("parts", killed_at=5)
    (tmp_path / "parts" / ".partial").mkdir()
    (tmp_path / "parts" / CHECKPOINTS / "checkpoint-5").mkdir()  # killed while it was saved
    ended = run("parts")
    assert same(last(tmp_path / "whole"), last(tmp_path / "parts"))
    assert same(adapter(tmp_path / "whole"), adapter(tmp_path / "parts"))
    assert ended.evaluations == whole.evaluations
    assert not list((tmp_path / "parts").rglob(".*"))


def test_it_learns_and_the_best_is_kept(run: Callable[..., Any], tmp_path: Path) -> None:
    found = run("whole", 30, rank=16).evaluations
    best = min(found, key=lambda each: each["kl"])
    assert best["kl"] < 0.9 * found[0]["kl"]
    run("until", 30, rank=16, stop_at=best["step"])
    assert same(adapter(tmp_path / "whole"), adapter(tmp_path / "until"))


def test_a_run_that_is_stopped_before_it_was_measured_leaves_what_it_learnt(run, tmp_path):
    run(stop_at=1)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        CHUNK_ADAPTER,
        SHIPPED_FILE,
        CHECKPOINTS,
        RECIPE_FILE,
    }
    assert any(
        bool(weight.any()) for name, weight in adapter(tmp_path / "out").items() if "lora_B" in name
    )


def test_time_that_is_over_ends_a_run_with_a_measurement(run: Callable[..., Any]) -> None:
    assert [each["step"] for each in run(steps=None, seconds=1e-9).evaluations] == [0, 1]


def test_the_encoding_of_an_adapter_is_honoured_but_for_a_setting_by_hand(
    run: Callable[..., Any], tmp_path: Path, settings: Settings
) -> None:
    run(steps=1)
    write_shipped(tmp_path / "out", ShippedProfile(40, "lexical", 0.2))
    named = {
        "model": str(tmp_path / "out"),
        "dtype": "float32",
        "store": tmp_path / "store",
        "home": tmp_path / "home",
    }
    with Engine(Settings(**named)) as engine:
        assert engine.model.chunk_adapter is not None
        assert engine.runtime.encoder.filler_tokens == 40
        assert len(engine.runtime.encoder.filler(100)) == 40
        assert engine.runtime.profile.choice == ("lexical", 0.2)
        engine.runtime.learn(engine.runtime.profile.calibrated(True, "lego", 0.1))
    with Engine(Settings(**named)) as engine:
        assert engine.runtime.encoder.filler_tokens == 40
        assert engine.runtime.profile.choice == ("lego", 0.1)
    with Engine(Settings(**named, filler_tokens=9)) as engine:
        assert engine.runtime.encoder.filler_tokens == 9
    (tmp_path / "out" / SHIPPED_FILE).write_text('{"filler_tokens": -1}')
    with pytest.raises(ModelError, match="of version 1"):
        load_model(tmp_path / "out", "float32", home=tmp_path / "home")


def test_a_folder_of_another_training_is_refused(run, tmp_path):
    run(stop_at=1)
    with pytest.raises(InputError, match="other values of rank"):
        run(rank=3)
    with pytest.raises(InputError, match="other values of documents"):
        run(given=documents(2, 20))


def test_a_student_that_is_not_the_engine_is_refused(run, monkeypatch):
    from ragfuse.hf import branches

    monkeypatch.setattr(branches, "rotated", lambda keys, shift, layout: keys)
    with pytest.raises(ModelError, match="attention mask"):
        run()


def test_distances():
    torch.manual_seed(0)
    wanted, found = torch.randn(2, 5, 9).unbind()
    assert float(kl_along(wanted, found)) == pytest.approx(kl(wanted, found), abs=1e-6)
    states = torch.randn(3, 5, 9)
    assert float(hidden_distance(states, states)) == 0
    assert float(hidden_distance(states, 2 * states)) == pytest.approx(1)
    kv = [(torch.randn(2, 4, 3), torch.randn(2, 4, 3)) for _ in range(3)]
    assert float(kv_distance(kv, kv)) == 0
    assert float(kv_distance(kv, [(2 * keys, values) for keys, values in kv])) == pytest.approx(0.5)
    assert layers_compared(30) == (5, 9, 13, 18, 22, 26, 30)
    assert layers_compared(3) == (1, 2, 3)


def test_chunks_without_filler_are_refused(settings, tmp_path):
    adaptation = Adaptation(settings.model_copy(update={"filler_tokens": 0}))
    with pytest.raises(InputError, match="needs filler text"):
        adaptation.prepare(DOCUMENTS, tmp_path / "out", 2)
    adaptation.close()
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_have_an_adapter_is_told_and_not_made(tmp_path, monkeypatch):
    (tmp_path / "others").mkdir()
    mine = tmp_path / "others" / "mine.txt"
    mine.write_text("mine")
    new = tmp_path / "new" / "deep"
    require_place(new)
    for place, found in (
        (mine, "not a folder"),
        (mine / "in" / "it", "not a folder"),
        (mine.parent, "other files"),
    ):
        with pytest.raises(InputError, match=found):
            require_place(place)
    monkeypatch.setattr("ragfuse.adapt.folder.can_be_written", lambda path: False)
    with pytest.raises(InputError, match="not writable"):
        require_place(new)
    assert list(tmp_path.iterdir()) == [mine.parent]
