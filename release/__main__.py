"""`python -m release`: build and check all distributions, a line a step; what passes is put under
dist/.

Nothing is uploaded. What failed leaves dist/ as it was.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from release.check import Failed, Release, changed_files
from release.distributions import ROOT, Distribution, distributions, open_questions

OURS = ("*.whl", "*.tar.gz", "*.cdx.json")
"""What earlier checks left in the folder; it makes way for what this one built."""


def main(
    out: Annotated[Path, typer.Option(help="Where the checked files are put.")] = ROOT / "dist",
    log: Annotated[Path, typer.Option(help="Gets every command and all that it printed.")] = ROOT
    / "build/dist.log",
) -> None:
    """Build and check all distributions; exit status 1 if a step fails."""
    console = Console(highlight=False, soft_wrap=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    found = distributions()
    with (
        tempfile.TemporaryDirectory(prefix="ragfuse-dist-") as work,
        log.open("w", encoding="utf-8") as written,
    ):
        release = Release(found, Path(work), written)
        for name, step in release.steps:
            began = time.monotonic()
            try:
                with console.status(f"{name} ..."):
                    said = step()
            except Failed as failure:
                console.print(f"{name}: failed. {failure}", markup=False)
                console.print(f"All that was printed: {log}. {out} is as it was.", markup=False)
                raise typer.Exit(1) from None
            console.print(f"{name:<9} {said}  ({time.monotonic() - began:.0f} s)", markup=False)
        put(release.built, out)
    for line in left(
        found,
        out,
        open_questions(found, (ROOT / "CHANGELOG.md").read_text("utf-8"), changed_files()),
    ):
        console.print(line, markup=False)


def put(built: Path, out: Path) -> None:
    """Move what was built to its folder, in place of what an earlier check put there."""
    out.mkdir(parents=True, exist_ok=True)
    for pattern in OURS:
        for old in out.glob(pattern):
            old.unlink()
    for path in sorted(built.iterdir()):
        shutil.move(path, out / path.name)


def left(found: Sequence[Distribution], out: Path, questions: Sequence[str]) -> list[str]:
    """Return the lines that say what is left for a person to do."""
    out = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    lines = ["", "Left for a person. Nothing was uploaded."]
    lines += [f"First: {question}" for question in questions]
    lines.append(
        "Upload in this order, as each stands on those before it; a version can be uploaded once"
        " only:"
    )
    for number, each in enumerate(found, 1):
        files = " ".join(str(out / name) for name in each.files)
        lines.append(f"{number}. {each.name} {each.version}\n   twine upload {files}")
    version = found[0].version
    lines.append(f"Then: git tag v{version}; attach the SBOM, {out}/*.cdx.json, to the release.")
    return lines


if __name__ == "__main__":
    typer.run(main)
