"""`dtype="auto"` is what the device is quick in, and means the same as naming it."""

import pytest
import torch

from ragfuse.engine.engine import Engine
from ragfuse.models.device import auto_dtype, resolve_auto
from ragfuse.settings import Settings


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, "float32"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True, "avx512_bf16": False}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_bfloat16_is_taken_where_the_cpu_has_units_for_it(capabilities, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert auto_dtype("cpu") == dtype


def test_a_named_dtype_stays():
    settings = Settings(dtype="float16")
    assert resolve_auto(settings) == settings


def test_settings_with_dtype_auto_share_the_engine_of_those_that_name_it(tmp_path):
    named = {"home": tmp_path, "disk_bytes": 0}
    left_open, said = Settings(**named), Settings(**named, dtype=auto_dtype("cpu"))
    assert left_open.dtype == "auto"
    assert Engine.shared(left_open) is Engine.shared(said)
    assert Engine.shared(left_open).settings.dtype == said.dtype
