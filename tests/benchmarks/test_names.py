"""The folder of the benchmarks is on Python's path where they are installed, so its modules may
hide packages.
"""

from __future__ import annotations

import re
import tomllib

from tests.tiny import ROOT


def test_no_module_beside_the_benchmarks_has_the_name_of_a_package_that_is_needed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(each for extra in extras for each in extra)]
    packages = {re.split(r"[^A-Za-z0-9_.-]", each)[0].replace("-", "_").lower() for each in wanted}
    assert "ray" in packages
    assert not packages & {path.stem for path in (ROOT / "benchmarks").iterdir()}
