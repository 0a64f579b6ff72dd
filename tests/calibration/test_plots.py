"""Titles of pictures."""

import pytest

from ragfuse.calibration.plots import model_in_title


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/models/of-mine/tiny.gguf", "tiny"),
        ("~/models/tiny", "tiny"),
        ("../tiny", "tiny"),
        ("org/tiny-0.5B", "org/tiny-0.5B"),
        ("smollm2-135m-reader", "smollm2-135m-reader"),
    ],
)
def test_a_title_names_a_model_without_its_path(given: str, shown: str) -> None:
    assert model_in_title(given) == shown
