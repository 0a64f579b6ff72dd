"""The release check: its order, what it asks a person, and what a failed step leaves."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from release import __main__ as command
from release.check import Failed, Release
from release.distributions import (
    IMPORTS,
    MAIN,
    ROOT,
    Distribution,
    distributions,
    open_questions,
)
from release.environment import Environment, logged
from release.sbom import made_public

ONE = Distribution("ragfuse-kv", "1.2", ROOT)


def release(tmp_path: Path, found: Any = (ONE,)) -> Release:
    made = Release(list(found), tmp_path, io.StringIO())
    made.built.mkdir()
    return made


# what is released


def test_every_pyproject_of_the_repository_is_released_behind_what_it_stands_on() -> None:
    found = distributions()
    assert {each.name for each in found} == set(IMPORTS)
    tracked = logged(["git", "ls-files", "*pyproject.toml"], ROOT).stdout.split()
    assert {each.source / "pyproject.toml" for each in found} == {ROOT / name for name in tracked}
    names = [each.name for each in found]
    for each in found:
        assert all(names.index(need) < names.index(each.name) for need in each.needs), each.name
    assert "langchain-ragfuse" in next(each for each in found if each.name == "ragfuse-bench").needs
    assert all(MAIN in each.needs for each in found if each.name != MAIN)


@pytest.mark.parametrize(
    "changelog",
    [
        "## [1.2]\n\n### Added\n- x\n",
        "## [1.20] - 2030-01-01\n",
        "## [Unreleased]\n\n### Added\n- x\n\n## [1.2] - 2030-01-01\n",
    ],
)
def test_a_changelog_that_a_release_could_not_use_is_asked_about(changelog: str) -> None:
    (asked,) = open_questions([ONE], changelog, [])
    assert "1.2" in asked


def test_the_changelog_has_the_form_that_a_release_uses() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
    headings = [line for line in lines if line.startswith("## ")]
    versions = headings[headings[0] == "## [Unreleased]" :]
    assert all(re.fullmatch(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", line) for line in versions)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert {line.removeprefix("### ") for line in lines if line.startswith("### ")} <= kinds
    main = next(each for each in distributions() if each.name == MAIN)
    released = [line.split("[")[1].split("]")[0] for line in versions]
    assert main.version not in released[1:]


def test_a_failed_step_ends_the_check_names_the_log_and_leaves_dist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, log = tmp_path / "dist", tmp_path / "logs" / "dist.log"
    out.mkdir()
    (out / "old-1.0.tar.gz").write_text("old")
    works = list[Path]()

    def broken(self: Release) -> str:
        works.append(self.work)
        logged(["echo", "seen"], self.work, None, self.log)
        raise Failed("no index")

    monkeypatch.setattr(Release, "install_tools", broken)
    said = CliRunner().invoke(app(), ["--out", str(out), "--log", str(log)])
    assert said.exit_code == 1
    assert "tools: failed. no index" in said.output
    assert str(log) in said.output
    assert log.read_text() == "$ echo seen\nseen\n[0]\n\n"
    assert [path.name for path in out.iterdir()] == ["old-1.0.tar.gz"]
    assert not works[0].exists()


def app() -> Any:
    import typer

    made = typer.Typer()
    made.command()(command.main)
    return made


def test_a_list_of_packages_names_no_path_of_this_machine_and_every_package_by_its_address() -> (
    None
):
    site = {"type": "website", "url": "https://example.org"}
    ours = {"name": "haystack_ragfuse", "version": "1.2"}
    torch = {"name": "torch", "version": "2", "purl": "pkg:pypi/torch@2"}
    components = [
        {**ours, "externalReferences": [{"url": "file:///tmp/x.whl"}]},
        {**torch, "externalReferences": [site]},
    ]
    main = {"component": {"name": "ragfuse-kv", "version": "1.2"}}
    told = made_public({"metadata": main, "components": components})
    assert "file:" not in str(told)
    assert told["metadata"]["component"]["purl"] == "pkg:pypi/ragfuse-kv@1.2"
    assert [each["purl"] for each in told["components"]] == [
        "pkg:pypi/haystack-ragfuse@1.2",
        "pkg:pypi/torch@2",
    ]
    assert told["components"][1]["externalReferences"] == [site]


# the environment


def test_programs_run_in_an_empty_folder_without_this_processs_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAGFUSE_MODEL", "mine")
    log = io.StringIO()
    environment = Environment.make(tmp_path, log)
    code = (
        "import os, sys; print(os.getcwd(), sys.path, sorted(n for n in os.environ if"
        " n.startswith('RAGFUSE')))"
    )
    said = environment.run("python", "-c", code)
    assert said.returncode == 0
    assert said.stdout.startswith(str(environment.folder))
    assert str(ROOT) not in said.stdout
    assert "['RAGFUSE_HOME']" in said.stdout
    assert said.stdout in log.getvalue()
    assert environment.run("python", "-c", "import ragfuse").returncode != 0
