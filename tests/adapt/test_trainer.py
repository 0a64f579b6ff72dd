"""A training goes on where it stopped, keeps the best weights, and takes no folder of something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragfuse import Engine, Settings
from ragfuse.adapt import examples, teacher
from ragfuse.adapt import run as adapt_run
from ragfuse.adapt import trainer as module
from ragfuse.adapt.checkpoint import (
    RECIPE_FILE,
    STATE_FILE,
    WORK_FOLDER,
    AdapterFolder,
    AdaptRecipe,
    Evaluation,
    TrainingState,
    require_place,
)
from ragfuse.adapt.examples import Documents
from ragfuse.adapt.run import Adaptation, free_nbytes, training_nbytes
from ragfuse.adapt.trainer import (
    StepReport,
    TrainingLimits,
    hidden_distance,
    kl_along,
    kv_distance,
    layers_compared,
)
from ragfuse.errors import InputError, ModelError, RefusedError
from ragfuse.hf.chunk_adapter import ADAPTER_WEIGHTS
from ragfuse.hf.rounding_error import kl
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.loader import load_model
from ragfuse.models.shipped_profile import SHIPPED_FILE, ShippedProfile, write_shipped
from tests.adapt.test_examples import documents

STEPS = TrainingLimits(0, 6)
DOCUMENTS = documents(3, 12)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask little, measure often, and save after each step."""
    monkeypatch.setattr(adapt_run, "QUESTIONS", 3)
    monkeypatch.setattr(teacher, "ANSWER_TOKENS", 3)
    monkeypatch.setattr(examples, "SIZES", (2, 3))
    for name, value in {"EVALUATE_STEPS": 2, "HELD_EXAMPLES": 2, "SAVE_S": 0.0}.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def settings(varied_path: Path, tmp_path: Path) -> Settings:
    return Settings(model=str(varied_path), dtype="float32", store=tmp_path / "store", home=tmp_path / "home")


@pytest.fixture
def run(settings: Settings, tmp_path: Path) -> Callable[..., Any]:
    """Trains into a folder of the test, as a process of its own would; gives the state."""

    def run(
        name: str = "out",
        limits: TrainingLimits = STEPS,
        stop_at: int | None = None,
        killed_at: int | None = None,
        given: Documents = DOCUMENTS,
        rank: int = 2,
    ) -> Any:
        adaptation = Adaptation(settings)
        try:
            trainer = adaptation.prepare(given, tmp_path / name, rank)

            def report(report: StepReport) -> None:
                if report.state.step == killed_at:
                    raise ChildProcessError

            return trainer.run(limits, report, lambda: trainer.state.step == stop_at)
        finally:
            adaptation.close()

    return run


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / CHUNK_ADAPTER / ADAPTER_WEIGHTS)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: w for n, w in load_file(folder / WORK_FOLDER / STATE_FILE).items() if n.startswith("weight.")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_was_stopped_or_killed_ends_with_the_weights_of_one_that_was_not(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    whole = run("whole")
    assert (whole.step, whole.finished) == (6, "all steps are made")
    stopped = run("parts", stop_at=3)
    assert (stopped.step, stopped.finished) == (3, "")
    with pytest.raises(ChildProcessError):
        run("parts", killed_at=5)
    (tmp_path / "parts" / ".partial").mkdir()
    (tmp_path / "parts" / WORK_FOLDER / f".{STATE_FILE}").write_bytes(b"half")
    answers = (tmp_path / "parts" / WORK_FOLDER / "answers.jsonl").open("a")
    answers.write('{"example": "9')
    answers.close()
    ended = run("parts")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    assert same(adapter(tmp_path / "whole"), adapter(tmp_path / "parts"))
    assert [each.kl for each in ended.evaluations] == [each.kl for each in whole.evaluations]
    assert not list((tmp_path / "parts").rglob(".*"))


def test_it_learns_and_the_best_is_kept(
    run: Callable[..., Any], tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALE_EVALUATIONS", 3)
    kept, put = list[Any](), AdapterFolder.put

    def noted(folder: AdapterFolder, write: Callable[[Path], object]) -> None:
        kept.append(json.loads(folder.log.read_text().splitlines()[-1])["held"])
        put(folder, write)

    monkeypatch.setattr(AdapterFolder, "put", noted)
    state = run(limits=TrainingLimits(0, 24), rank=4)
    assert state.best is not None
    assert state.best.kl < 0.9 * state.evaluations[0].kl
    assert kept[-1] == asdict(state.best)
    lines = [json.loads(line) for line in (tmp_path / "out" / WORK_FOLDER / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    assert len(steps) == state.step


def test_what_gains_nothing_ends_early(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    monkeypatch.setattr(module, "STALE_EVALUATIONS", 2)
    monkeypatch.setattr(module, "kl_along", lambda wanted, found: kl_along(wanted, found) * 0 + 1)
    state = run(limits=TrainingLimits(0, 50))
    assert state.step == 4
    assert "gained nothing" in state.finished


def test_a_run_that_is_stopped_before_it_was_measured_leaves_what_it_learnt(
    run: Callable[..., Any], tmp_path: Path, settings: Settings
) -> None:
    run(stop_at=1)
    assert all(
        name in {CHUNK_ADAPTER, SHIPPED_FILE, WORK_FOLDER}
        for name in (path.name for path in (tmp_path / "out").iterdir())
    )
    with Engine(settings.model_copy(update={"model": str(tmp_path / "out")})) as engine:
        assert engine.model.chunk_adapter is not None
        assert engine.model.profile.filler_tokens == 256
        assert engine.runtime.encoder.filler_tokens == 256


def test_the_encoding_of_an_adapter_is_honoured_but_for_a_setting_by_hand(
    run: Callable[..., Any], tmp_path: Path, settings: Settings
) -> None:
    run(limits=TrainingLimits(0, 1))
    write_shipped(tmp_path / "out", ShippedProfile(40, "lexical", 0.2))
    named = {"model": str(tmp_path / "out"), "dtype": "float32", "store": tmp_path / "store", "home": tmp_path / "home"}
    with Engine(Settings(**named)) as engine:
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
    with pytest.raises(ModelError, match="Wanted version 1"):
        load_model(tmp_path / "out", "float32", home=tmp_path / "home")


def test_a_folder_of_something_else_is_refused_and_left_alone(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="found other files"):
        run()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_folder_of_another_training_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    run(stop_at=1)
    with pytest.raises(InputError, match="other --rank"):
        run(rank=3)
    with pytest.raises(InputError, match="other documents"):
        run(given=documents(2, 20))
    file = tmp_path / "out" / WORK_FOLDER / RECIPE_FILE
    for text in ("{", "[]"):
        file.write_text(text)
        with pytest.raises(InputError, match=f"found '{file}' damaged"):
            run()


def test_an_adapter_is_no_model_to_adapt(run: Callable[..., Any], tmp_path: Path, settings: Settings) -> None:
    run(limits=TrainingLimits(0, 1))
    with pytest.raises(ModelError, match="folder of an adapter"):
        Adaptation(settings.model_copy(update={"model": str(tmp_path / "out")}))


def test_a_student_that_is_not_the_engine_is_refused(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from ragfuse.hf import branches

    monkeypatch.setattr(branches, "_placed", lambda keys, starts, layout: keys)
    with pytest.raises(ModelError, match="does not take a mask"):
        run()


def test_distances() -> None:
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


def test_chunks_without_filler_are_refused(settings: Settings, tmp_path: Path) -> None:
    adaptation = Adaptation(settings.model_copy(update={"filler_tokens": 0}))
    with pytest.raises(InputError, match="Wanted filler text"):
        adaptation.prepare(DOCUMENTS, tmp_path / "out", 2)
    adaptation.close()
    assert not (tmp_path / "out").exists()


def test_memory_is_stated(settings: Settings) -> None:
    adaptation = Adaptation(settings)
    assert 1e6 < training_nbytes(adaptation.plain, 2) < training_nbytes(adaptation.plain, 200) < 1e9
    assert free_nbytes(adaptation.plain.device) > 1e8
    adaptation.close()


def test_what_cannot_be_read_apart_is_refused_at_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    from ragfuse.hf import branches

    monkeypatch.setattr(branches.probe, "is_alibi", lambda config: True)
    with pytest.raises(RefusedError, match="ALiBi"):
        Adaptation(settings)


RECIPE = AdaptRecipe("m", "base", "d", 256, 2, 1e-3, 0)


@pytest.fixture
def begun(tmp_path: Path) -> AdapterFolder:
    """A folder in which a training was saved."""
    folder = AdapterFolder(tmp_path / "out", RECIPE, ShippedProfile(256))
    folder.save(TrainingState(3, 1.5, [Evaluation(0, 0.5)]), {"weight.a": torch.ones(2)})
    return folder


def test_a_saved_state_is_read_back_and_a_missing_one_is_none(begun: AdapterFolder) -> None:
    kept = begun.load()
    assert kept is not None
    assert kept[0] == TrainingState(3, 1.5, [Evaluation(0, 0.5)])
    assert torch.equal(kept[1]["weight.a"], torch.ones(2))
    begun.state_file.unlink()
    assert begun.load() is None


def damages(file: Path) -> dict[str, Callable[[], object]]:
    whole, one = file.read_bytes(), {"a": torch.ones(1)}
    return {
        "cut": lambda: file.write_bytes(whole[:-4]),
        "no state": lambda: save_file(one, file),
        "odd state": lambda: save_file(one, file, metadata={"state": '{"evaluations": [{"step": "x"}]}'}),
    }


@pytest.mark.parametrize("kind", ["cut", "no state", "odd state"])
def test_a_damaged_state_is_told_by_its_file_and_left_alone(begun: AdapterFolder, kind: str) -> None:
    damages(begun.state_file)[kind]()
    found = begun.state_file.read_bytes()
    with pytest.raises(
        InputError, match=f"found '{begun.state_file}' damaged .*name another folder with --out"
    ) as told:
        begun.load()
    assert "\n" not in str(told.value)
    assert begun.state_file.read_bytes() == found


def test_a_state_that_lacks_weights_starts_no_training(
    begun: AdapterFolder, run: Callable[..., Any], settings: Settings, tmp_path: Path
) -> None:
    adaptation = Adaptation(settings)
    try:
        adaptation.prepare(DOCUMENTS, tmp_path / "new", 2)
        save_file({"weight.other": torch.ones(1)}, tmp_path / "new" / WORK_FOLDER / STATE_FILE, {"state": "{}"})
    finally:
        adaptation.close()
    with pytest.raises(InputError, match="damaged"):
        run("new")


def test_a_place_that_cannot_have_an_adapter_is_told_and_not_made(
    tmp_path: Path, begun: AdapterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_place(begun.path)
    require_place(tmp_path / "new" / "deep")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "mine.txt").write_text("mine")
    for place, found in (
        (tmp_path / "file", "found a file at"),
        (tmp_path / "file" / "in" / "it", f"a file at '{tmp_path / 'file'}'"),
        (tmp_path / "others", "found other files at"),
    ):
        with pytest.raises(InputError, match=found):
            require_place(place)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for place, denied in ((tmp_path / "new" / "deep", tmp_path), (begun.path, begun.path)):
        with pytest.raises(InputError, match=f"where nothing can be written to '{denied}'"):
            require_place(place)
    assert not (tmp_path / "new").exists()
