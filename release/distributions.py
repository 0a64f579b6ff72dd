"""The distributions of this repository: where their sources lie, what they are called, what must be
uploaded first.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAIN = "ragfuse-kv"
IMPORTS = {
    "ragfuse-kv": "ragfuse",
    "ragfuse-bench": "ragfuse_bench",
    "langchain-ragfuse": "langchain_ragfuse",
    "llama-index-llms-ragfuse": "llama_index.llms.ragfuse",
    "haystack-ragfuse": "haystack_integrations.components.generators.ragfuse",
    "vllm-ragfuse": "vllm_ragfuse",
}
"""The name to import of each distribution."""


@dataclass(frozen=True)
class Distribution:
    """One distribution.

    Args:
        name: Its name on a package index.
        version: Its version.
        source: The folder with its pyproject.toml.
        needs: Names of what it stands on, as far as that is in this repository, with any extra.
    """

    name: str
    version: str
    source: Path
    needs: tuple[str, ...] = ()

    @classmethod
    def read(cls, source: Path) -> Distribution:
        """Return the distribution of a folder, from its pyproject.toml."""
        told = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = [
            each for extra in told.get("optional-dependencies", {}).values() for each in extra
        ]
        names = {_name(each) for each in (*told.get("dependencies", ()), *extras)} & set(
            IMPORTS
        ) - {told["name"]}
        return cls(told["name"], told["version"], source, tuple(sorted(names)))

    @property
    def imported(self) -> str:
        """The name to import."""
        return IMPORTS[self.name]

    @property
    def stem(self) -> str:
        """What its files' names begin with."""
        return f"{self.name.replace('-', '_')}-{self.version}"

    @property
    def files(self) -> tuple[str, str]:
        """The names of its wheel and of its source archive."""
        return f"{self.stem}-py3-none-any.whl", f"{self.stem}.tar.gz"


def distributions(root: Path = ROOT) -> list[Distribution]:
    """Return all distributions of a repository, each behind what it stands on: the order in which
    they are uploaded.
    """
    sources = [root, root / "benchmarks", *sorted((root / "integrations").iterdir())]
    return ordered(
        [Distribution.read(each) for each in sources if (each / "pyproject.toml").exists()]
    )


def ordered(found: Iterable[Distribution]) -> list[Distribution]:
    """Return distributions with each behind those that it needs; raise ValueError if they need each
    other.
    """
    left, done = list(found), list[Distribution]()
    while left:
        names = {each.name for each in left}
        free = [each for each in left if not names & set(each.needs)]
        if not free:
            raise ValueError(f"These distributions need each other: {', '.join(sorted(names))}.")
        done += free
        left = [each for each in left if each not in free]
    return done


def open_questions(
    found: Sequence[Distribution], changelog: str, changed: Sequence[str]
) -> list[str]:
    """Return what a person should settle before anything is uploaded; [] if nothing is open.

    Args:
        found: What is to be released.
        changelog: The text of CHANGELOG.md.
        changed: Files that differ from the last commit, as git names them.
    """
    questions = []
    main = next(each for each in found if each.name == MAIN)
    if not re.search(
        rf"^## \[{re.escape(main.version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE
    ):
        today = date.today().isoformat()
        questions.append(
            f"CHANGELOG.md has no heading with a date for {main.version}. Write '##"
            f" [{main.version}] - {today}' over what stands under Unreleased."
        )
    elif _entries_under("Unreleased", changelog):
        questions.append(
            f"CHANGELOG.md has entries under Unreleased, above {main.version}. Move what"
            f" {main.version} has below its heading."
        )
    others = sorted({each.version for each in found} - {main.version})
    if others:
        questions.append(
            f"{MAIN} is {main.version}, others are {', '.join(others)}. Is that meant?"
        )
    if changed:
        questions.append(
            f"{len(changed)} files differ from the last commit, {changed[0]} among them. Commit"
            " first."
        )
    return questions


def _entries_under(heading: str, changelog: str) -> bool:
    """Return whether a changelog has entries under a heading of the second level."""
    found = re.search(
        rf"^## \[{re.escape(heading)}\].*?$(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    return found is not None and re.search(r"^- ", found[1], re.MULTILINE) is not None


def _name(requirement: str) -> str:
    """Return the name in a requirement such as `ragfuse-kv[remote]>=0.1`."""
    match = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""
