"""All distributions as a user gets them: built, installed together in an empty environment, used
there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from release.distributions import ROOT, distributions
from release.environment import Environment

pytestmark = pytest.mark.slow

FOUND = distributions()
WANTED = {
    "ragfuse_kv": {
        "ragfuse/py.typed",
        "ragfuse/models/adapters/smollm2-135m-reader/adapter_model.safetensors",
        "ragfuse/models/adapters/smollm2-135m-reader/ragfuse_drift.kv",
        "ragfuse/demo/corpus/warsaw.md",
        "ragfuse/demo/questions.json",
        "ragfuse/serve/page/index.html",
        "ragfuse/serve/page/main.js",
        "ragfuse/serve/page/page.css",
        "ragfuse/text/filler.txt",
    },
    "ragfuse_bench": {"ragfuse_bench/__init__.py", "ragfuse_bench/sets/squad_held_out.json"},
    "langchain_ragfuse": {"langchain_ragfuse/py.typed"},
    "haystack_ragfuse": {"haystack_integrations/components/generators/ragfuse/py.typed"},
    "vllm_ragfuse": {"vllm_ragfuse/py.typed"},
    "llama_index_llms_ragfuse": {"llama_index/llms/ragfuse/py.typed"},
}
NO_INDEX = (
    "No matching distribution found",
    "Could not find a version",
    "NewConnectionError",
    "ConnectionError",
)


@dataclass(frozen=True)
class Place(Environment):
    """An environment with the wheels in it, and an empty folder to run in."""

    def add(self, *what: str) -> None:
        """Install, or skip where there is no package index to install from."""
        _or_skip(self.install(*what))


def _or_skip(done: subprocess.CompletedProcess[str]) -> None:
    said = done.stdout + done.stderr
    if done.returncode and any(sign in said for sign in NO_INDEX):
        pytest.skip("no package index to build and install from")
    assert done.returncode == 0, said[-3000:]


def _wheels(dist: Path) -> list[str]:
    """The wheels that the packages of a user need: all but the benchmarks'."""
    return [
        str(each)
        for each in sorted(dist.glob("*.whl"))
        if not each.name.startswith("ragfuse_bench")
    ]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source archives, and the wheels that were built from them alone."""
    folder = tmp_path_factory.mktemp("dist")
    for each in FOUND:
        command = [sys.executable, "-m", "build", "--outdir", str(folder), str(each.source)]
        _or_skip(subprocess.run(command, capture_output=True, text=True, check=False))
    return folder


@pytest.fixture(scope="module")
def place(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """An environment of its own, with the wheels but the benchmarks', and what they ask for."""
    place = Place.make(tmp_path_factory.mktemp("empty"))
    place.add("-c", str(ROOT / "constraints.txt"), *_wheels(dist))
    return place


@pytest.mark.parametrize("name", WANTED)
def test_a_wheel_holds_what_it_runs_on_and_no_tests(dist: Path, name: str) -> None:
    (wheel,) = dist.glob(f"{name}-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert WANTED[name] <= names
    assert any(each.endswith("licenses/LICENSE") for each in names)
    tops = {each.split("/")[0] for each in names if ".dist-info/" not in each}
    assert tops == {min(WANTED[name]).split("/")[0]}
    assert [each for each in names if Path(each).name.startswith(("test", "conftest"))] == []
    assert [each for each in names if each.endswith((".pyc", ".bin"))] == []


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("llama_index_llms_ragfuse", "llama_index/llms"),
        ("haystack_ragfuse", "haystack_integrations/components/generators"),
    ],
)
def test_no_wheel_claims_the_folders_that_belong_to_all_of_a_framework(
    dist: Path, name: str, folder: str
) -> None:
    (wheel,) = dist.glob(f"{name}-*.whl")
    owners = [folder, *map(str, Path(folder).parents)]
    assert not {f"{owner}/__init__.py" for owner in owners} & set(zipfile.ZipFile(wheel).namelist())


def test_the_commands_work_in_an_empty_folder_without_any_extra(place: Place) -> None:
    helped = place.run("ragfuse", "--help")
    assert helped.returncode == 0, helped.stderr
    assert list(place.folder.iterdir()) == []
    assert json.loads(place.run("ragfuse", "doctor", "--json", "-").stdout)


def test_an_extra_that_is_not_installed_is_named(place: Place) -> None:
    said = place.run("ragfuse", "demo")
    assert said.returncode != 0
    assert "ragfuse-kv[demo" in said.stdout + said.stderr
    assert "Traceback" not in said.stdout + said.stderr
