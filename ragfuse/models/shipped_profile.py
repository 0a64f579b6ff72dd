"""What a model's folder says of itself: the encoding that it was trained to read, and the choice of
its calibration.
"""

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
    """The part of a model's profile that lies in its folder.

    Args:
        filler_tokens: Tokens of filler text that its chunks are encoded after.
        policy: The policy that calibration chose; "" without one that is safe.
        ratio: The recompute ratio that calibration chose.
        version: `SHIPPED_VERSION` when it was written.
    """

    filler_tokens: Annotated[int, Field(ge=0)]
    policy: str = ""
    ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    version: Literal[1] = 1

    def over(self, profile: ModelProfile) -> ModelProfile:
        """Return a profile with what this one says."""
        profile = replace(profile, filler_tokens=self.filler_tokens)
        return profile.calibrated(True, self.policy, self.ratio) if self.policy else profile


def read_shipped(folder: Path) -> ShippedProfile | None:
    """Return what a model's folder says of itself; None if it says nothing.

    Raises:
        ModelError: The file is damaged, or another version wrote it.
    """
    file = folder / SHIPPED_FILE
    try:
        return TypeAdapter(ShippedProfile).validate_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        raise ModelError(
            f"Wanted version {SHIPPED_VERSION} of {SHIPPED_FILE}, found something else in '{file}':"
            f" {error}\nRemove the file, or make it again with `ragfuse adapt`."
        ) from error


def write_shipped(folder: Path, shipped: ShippedProfile) -> None:
    """Write what a model's folder says of itself."""
    (folder / SHIPPED_FILE).write_text(json.dumps(vars(shipped), indent=1) + "\n", encoding="utf-8")
