"""The names of the selection policies, which settings know without torch. The policies themselves: `fuse.select`."""

from __future__ import annotations

import re
from difflib import get_close_matches

from ragfuse.errors import SettingsError
from ragfuse.types.policy_cost import AUTO

POLICY_NAMES = (
    "full",
    "none",
    "random",
    "hkvd-flat",
    "hkvd",
    "hkvd:k",
    "hkvd:v",
    "hkvd-flat:k",
    "hkvd-flat:v",
    "lego",
    "lexical",
    "hybrid",
    "query",
    "query-gradual",
)
"""All policies of `fuse.select.POLICIES`, in order."""
POLICY_SIMILARITY = 0.7
"""Least similarity of a policy that may be meant by a name that is none's."""
ALL_NAMES = ", ".join((AUTO, *POLICY_NAMES, "lego-N (N tokens: lego-16)"))
"""What a setting may name, for people."""
_COUNTED = re.compile(r"lego-0*[1-9][0-9]*")


def is_policy(name: str) -> bool:
    """Return whether there is a selection policy called `name`; `auto` stands for one."""
    return name in (AUTO, *POLICY_NAMES) or _COUNTED.fullmatch(name) is not None


def no_policy(name: str) -> SettingsError:
    """Return the error for a name that is no policy's: it says which there are, and which one may be meant."""
    meant = f" Did you mean {near}?" if (near := nearest_policy(name)) else ""
    return SettingsError(f"No selection policy '{name}'.{meant} It is one of: {ALL_NAMES}.", "policy")


def nearest_policy(name: str) -> str:
    """Return the policy that may be meant by a name that is none's; "" for none."""
    return next(iter(get_close_matches(name.strip().lower(), (AUTO, *POLICY_NAMES), 1, POLICY_SIMILARITY)), "")


def known_policy(name: str) -> None:
    """Raise SettingsError for a name that is not a selection policy."""
    if not is_policy(name):
        raise no_policy(name)


def as_setting(name: str) -> str:
    """Return the name of a selection policy as it is; ValueError, in the words of settings, for one that is none's."""
    if not is_policy(name):
        meant = f"; did you mean {near}?" if (near := nearest_policy(name)) else ""
        raise ValueError(f"wanted one of: {ALL_NAMES}; found '{name}'{meant}")
    return name
