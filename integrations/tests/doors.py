"""Functions that models may call, and what one of them is called with.

Their annotations are no strings: frameworks read them.
"""

from typing import Literal

from pydantic import BaseModel


class Paint(BaseModel):
    """Paint a door."""

    colour: Literal["red", "green", "blue"]
    coats: Literal[1, 2, 3]


def paint(colour: Literal["red", "green", "blue"], coats: Literal[1, 2, 3]) -> str:
    """Paint a door."""
    return f"The door is {colour} now."


def knock(times: Literal[1, 2]) -> str:
    """Knock at a door."""
    return "Nobody is there."
