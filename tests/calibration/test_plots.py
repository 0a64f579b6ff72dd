"""Titles of pictures."""

from pathlib import Path

from ragfuse.calibration.plots import model_in_title


def test_a_title_names_a_model_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    assert model_in_title(str(tmp_path / "tiny.gguf")) == "tiny"
    assert model_in_title(str(tmp_path)) == tmp_path.name
    assert model_in_title("org/tiny-0.5B") == "org/tiny-0.5B"
