"""The shapes that benchmarks name."""

from pathlib import Path

import pytest
import torch
from ragfuse_bench.presets import bench_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_random_model_has_the_wanted_dtype_and_can_be_fused(dtype: str, tmp_path: Path) -> None:
    model = bench_model("tiny", dtype, "cpu", tmp_path)
    assert {parameter.dtype for parameter in model.model.parameters()} == {getattr(torch, dtype)}
    assert model.profile.refusal == ""
