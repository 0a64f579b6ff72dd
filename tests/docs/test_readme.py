"""`python -m docs.readme`: READMEs are run as shown, and what they say that is printed is held
against the run.
"""

from pathlib import Path

import pytest

from docs.readme import README, check, printed, programs

PAGE = """\
# Page

```python
x = 40
print("the answer is", x + 2)
```
<!-- printed -->
```text
the answer is 41
```

<!-- not run: it needs a network -->
```python
raise SystemExit("never")
```

```bash
ragfuse doctor
```

1. In a list:

   ```python
   print("x is", x)  # names stay
   ```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(PAGE)
    return path


def test_programs_are_the_python_that_is_run() -> None:
    assert programs(PAGE) == [
        'x = 40\nprint("the answer is", x + 2)\n',
        'print("x is", x)  # names stay\n',
    ]
    assert [(told.lines, told.program) for told in printed(PAGE)] == [(("the answer is 41",), 0)]


def test_numbers_may_differ_and_words_may_not(page: Path) -> None:
    assert check(page) == ""
    page.write_text(PAGE.replace("the answer is 41", "the question is 41"))
    wrong = check(page)
    assert "the question is 41" in wrong
    assert "the answer is 42" in wrong


def test_what_is_printed_is_written_anew(page: Path) -> None:
    assert check(page, write=True) == ""
    assert page.read_text() == PAGE.replace("is 41", "is 42")


def test_a_program_that_fails_says_how(page: Path) -> None:
    page.write_text(PAGE.replace("x = 40", "x = y"))
    with pytest.raises(SystemExit, match="NameError: name 'y' is not defined"):
        check(page)


@pytest.mark.slow
@pytest.mark.parametrize("path", README, ids=lambda path: path.parent.name)
def test_every_readme_runs_as_it_is_shown(path: Path) -> None:
    assert check(path) == ""
