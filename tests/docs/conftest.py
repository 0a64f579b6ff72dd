"""What the tests of the documentation can be asked for."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="Write anew what the programs of the book print."
    )
