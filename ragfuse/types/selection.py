"""The names of the selection policies, which settings know without torch. The policies themselves:
`fuse.select`.
"""

from __future__ import annotations

import re

from ragfuse.errors import SettingsError
from ragfuse.types.arguments import meant
from ragfuse.types.policy_cost import AUTO

POLICY_NAMES = (
    "full",
    "none",
    "random",
    "hkvd-flat",
    "hkvd",
    "lego",
    "lexical",
    "query",
    "query-gradual",
)
"""All policies of `fuse.select.POLICIES`, in order."""
COUNTED = re.compile(r"lego-0*([1-9][0-9]*)")
"""The policy `lego` with the first so many tokens of each chunk."""


def is_policy(name: str) -> bool:
    """Return whether there is a selection policy called `name`; `auto` stands for one."""
    return name in (AUTO, *POLICY_NAMES) or COUNTED.fullmatch(name) is not None


def no_policy(name: str) -> SettingsError:
    """Return the error for a name that is no policy's: it says which one may be meant, or which
    there are.
    """
    known = (AUTO, *POLICY_NAMES, "lego-16")
    return SettingsError(
        f"No selection policy '{name}'. {meant(name, known, 'It is one of')}", "policy"
    )


def as_setting(name: str) -> str:
    """Return the name of a selection policy as it is; ValueError for one that is none's, as
    pydantic wants it.
    """
    if not is_policy(name):
        raise ValueError(str(no_policy(name)).rstrip("."))
    return name
