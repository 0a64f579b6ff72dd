"""`python -m docs.readme`: READMEs are run as shown."""

from pathlib import Path

import pytest

from docs.readme import README, check


@pytest.mark.slow
@pytest.mark.parametrize("path", README, ids=lambda path: path.parent.name)
def test_every_readme_runs_as_it_is_shown(path: Path) -> None:
    assert check(path) == ""
