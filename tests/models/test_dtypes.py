"""`dtype="auto"` is what the device is quick in, and means the same as naming it."""

import pytest
import torch

from ragfuse.engine.engine import Engine
from ragfuse.errors import SettingsError
from ragfuse.models.dtypes import auto_dtype, resolve_auto
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
def test_bfloat16_is_taken_where_the_cpu_has_units_for_it(capabilities, dtype):
    assert auto_dtype("cpu", capabilities) == dtype


def test_what_is_named_stays():
    settings = Settings(dtype="float16")
    assert resolve_auto(settings) == settings


def test_who_leaves_it_open_shares_the_engine_of_who_names_it(tmp_path):
    named = {"home": tmp_path, "disk_bytes": 0}
    left_open, said = Settings(**named), Settings(**named, dtype=auto_dtype("cpu"))
    assert left_open.dtype == "auto"
    assert Engine.shared(left_open) is Engine.shared(said)
    assert Engine.shared(left_open).settings.dtype == said.dtype


def test_settings_that_load_with_a_secret_or_an_object_are_not_written_down():
    assert Settings(model_kwargs={"revision": "main"}).as_public()["model_kwargs"] == {
        "revision": "main"
    }
    for options, found in (
        ({"token": "hf_x"}, "a secret in model_kwargs"),
        ({"torch_dtype": torch.float16}, "cannot be saved as JSON"),
    ):
        with pytest.raises(SettingsError, match=found):
            Settings(model_kwargs=options).as_public()
