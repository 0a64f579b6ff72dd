"""The fixtures of tests/promises/models."""

from tests.promises.models.conftest import folder, retell

__all__ = ["folder", "retell"]
