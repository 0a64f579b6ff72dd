"""The drift of prompts that were measured is gone once it is added."""

from pathlib import Path

import torch

from ragfuse.hf.model import HFModel
from ragfuse.models.loader import load_model
from training.data import Source
from training.drift import drawn, measured, pairs
from training.rules import Passage, Question

SOURCES = [
    Source(
        Passage(f"T{i}", f"Passage {i} says that {i * 37} men went to town {i} by ship."),
        (Question("How?", "by ship"),),
    )
    for i in range(9)
]


def test_what_was_measured_is_gone_once_it_is_added(tiny_path: Path) -> None:
    model = load_model(tiny_path, "float32")
    cases = list(drawn(SOURCES, 3))
    before = measured(pairs(model, cases), model.profile.rope)
    with_it = HFModel(model.model, model.tokenizer, drift=before)
    after = measured(pairs(with_it, cases), model.profile.rope)
    assert all(layer.values.abs().max() > 1e-4 for layer in before.layers[1:])
    for new in after.layers:
        torch.testing.assert_close(new.values, torch.zeros_like(new.values), atol=1e-5, rtol=0)
        torch.testing.assert_close(new.keys, torch.zeros_like(new.keys), atol=1e-5, rtol=0)
