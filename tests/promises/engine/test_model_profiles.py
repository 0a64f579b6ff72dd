"""The quality gate: who is refused, and what is said once."""

import shlex
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from ragfuse import Engine, Settings
from ragfuse.engine.model_records import (
    calibrate_command,
    refusal_of,
)
from ragfuse.hf.model import HFModel
from ragfuse.hf.verify import Verdict
from ragfuse.models.loader import load_model
from ragfuse.types.profiles import UNCALIBRATED, UNCALIBRATED_DENSE, ModelProfile
from tests.kits.tiny import CHUNKS, messages

KNOWN, INEXACT = ModelProfile("m"), ModelProfile("m", verified=False)


@pytest.mark.parametrize(
    ("profile", "policy", "refused"),
    [
        (KNOWN, "auto", ""),
        (KNOWN.calibrated(True, "lego", 0.1), "auto", ""),
        (INEXACT, "auto", "verify"),
        (INEXACT, "hkvd", ""),
        (KNOWN.calibrated(False), "auto", "calibrate"),
        (KNOWN.calibrated(False), "lego", ""),
        (ModelProfile("m", refusal="no KV"), "hkvd", "no KV"),
    ],
)
def test_a_failed_verdict_refuses_what_was_not_asked_for_and_the_probe_refuses_all(
    profile, policy, refused
):
    found = refusal_of(profile, policy)
    assert refused in found
    assert bool(refused) == bool(found)


@pytest.mark.parametrize(
    ("profile", "choice", "default"),
    [
        (KNOWN, None, UNCALIBRATED),
        (ModelProfile("m", mode="dense"), None, UNCALIBRATED_DENSE),
        (KNOWN.calibrated(False, "lego", 0.1), None, UNCALIBRATED),
        (KNOWN.calibrated(True, "lego", 0.1), ("lego", 0.1), ("lego", 0.1)),
    ],
)
def test_a_safe_calibration_is_the_choice_else_the_default(profile, choice, default):
    assert (profile.choice, profile.default_choice) == (choice, default)


def test_a_command_that_is_told_is_about_the_model_as_it_is_here(tmp_path):
    folder = tmp_path / "my models" / "m"
    folder.mkdir(parents=True)
    settings = Settings(
        model=str(folder),
        store=tmp_path / "my store",
        model_kwargs={"revision": "r", "token": "hf"},
    )
    model = object.__new__(HFModel)  # what a command needs to know of a loaded one
    model.name, model.dtype, model.device = str(folder), torch.float16, torch.device("cpu")
    model.model = torch.nn.Module()
    model.model.config = LlamaConfig(name_or_path=str(folder))
    told = shlex.split(calibrate_command(settings, model))
    assert told == [
        *("ragfuse", "calibrate", "--model", str(folder), "--dtype", "float16"),
        *(
            "--model-kwargs",
            '{"revision": "r"}',
            "--store",
            str(tmp_path / "my store"),
            "--docs",
            "PATH",
        ),
    ]


def test_an_uncalibrated_model_answers_at_the_default_and_a_hint_names_it_once(
    tiny_settings, caplog
):
    tiny = load_model(Path(tiny_settings.model), "float32", "cpu")
    with Engine(Settings(home=tiny_settings.home, dtype="float32"), tiny) as engine:
        engine.ingest([(chunk, "book") for chunk in CHUNKS], engine.prefix(messages()))
        traces = [engine.answer(messages()).trace for _ in range(2)]
    assert [(trace.policy, trace.ratio) for trace in traces] == [UNCALIBRATED] * 2
    assert caplog.text.count(f"ragfuse calibrate --model {shlex.quote(tiny.name)} --") == 1


def test_verify_s_verdict_is_kept(tiny_settings, monkeypatch):
    with Engine(tiny_settings) as engine:
        assert engine.runtime.profile.verified is None
        assert engine.runtime.verify().passed
    with Engine(tiny_settings) as engine:
        assert engine.runtime.profile.verified is True
        monkeypatch.setattr("ragfuse.engine.runtime.verify", lambda *how: Verdict("m", False, ()))
        engine.runtime.verify()
    with Engine(tiny_settings) as engine:
        assert "verify" in engine.answer(messages()).trace.fallback_reason
