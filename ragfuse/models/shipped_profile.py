"""The profile file in a model's folder: number of filler tokens, calibrated policy and ratio."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ragfuse.errors import ModelError
from ragfuse.types.profiles import ModelProfile

SHIPPED_FILE = "ragfuse_profile.json"
SHIPPED_VERSION = 1
"""Version of the file that `write_shipped` writes."""


@dataclass(frozen=True)
class ShippedProfile:
    """The part of a model's profile that is stored in the model's folder.

    Args:
        filler_tokens: Number of filler tokens that precede a chunk during encoding.
        policy: The calibrated policy. "" if no policy was safe, or before calibration.
        ratio: The calibrated recompute ratio.
        version: The `SHIPPED_VERSION` with which the file was written.
    """

    filler_tokens: Annotated[int, Field(ge=0)]
    policy: str = ""
    ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    version: Literal[1] = 1

    def over(self, profile: ModelProfile) -> ModelProfile:
        """Return a copy of `profile` with the shipped filler tokens, and with the shipped policy
        and ratio if there are any.
        """
        profile = replace(profile, filler_tokens=self.filler_tokens)
        return profile.calibrated(True, self.policy, self.ratio) if self.policy else profile


def read_shipped(folder: Path) -> ShippedProfile | None:
    """Read the profile file in a model's folder; return None if there is no such file.

    Raises:
        ModelError: The file is damaged, or was written by a different version.
    """
    file = folder / SHIPPED_FILE
    try:
        return TypeAdapter(ShippedProfile).validate_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        raise ModelError(
            f"'{file}' is not a valid {SHIPPED_FILE} of version {SHIPPED_VERSION}:"
            f" {error}\nRemove the file, or create the file again with `ragfuse adapt`."
        ) from error


def write_shipped(folder: Path, shipped: ShippedProfile) -> None:
    """Write a profile file into a model's folder."""
    (folder / SHIPPED_FILE).write_text(json.dumps(vars(shipped), indent=1) + "\n", encoding="utf-8")
