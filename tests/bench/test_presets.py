"""The shapes that benchmarks name."""

from pathlib import Path

import pytest
import torch
from ragfuse_bench.presets import bench_model, preset
from ragfuse_bench.random_model import random_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_random_model_has_the_wanted_dtype_and_can_be_fused(dtype: str, tmp_path: Path) -> None:
    model = bench_model("tiny", dtype, "cpu", tmp_path)
    assert {parameter.dtype for parameter in model.model.parameters()} == {getattr(torch, dtype)}
    assert model.profile.refusal == ""


def test_the_same_seed_gives_the_same_weights_and_leaves_other_draws_alone() -> None:
    tiny = preset("tiny")
    assert tiny is not None
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    first, second = (random_model(tiny.shape, "float32") for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert random_model(tiny.shape, "float32", seed=1).fingerprint != first.fingerprint
    assert torch.equal(torch.rand(1), wanted)
