"""What is known of a model and of a machine, as versioned values that survive the process.

Plain values with JSON in and out. Nothing here measures, decides or writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ragfuse.core import RopeLayout

PROFILE_VERSION = 2


@dataclass(frozen=True)
class ModelProfile:
    """One model on one dtype: what the probe found, whether blending is verified, and the chosen policy.

    rope: one per layer, None where keys carry no position. mode: how attention is reached ("rows": our function,
    "dense": the model's own with our mask). refusal: why KV is not reused, "" if it is. errors: the probe's
    measured errors by name. verified: whether fusing was found exact where it must be; None: not looked at.
    safe: whether calibration found a policy and ratio whose answers stay close to full prefill's (these are `policy`
    and `ratio` then); None: not calibrated.
    """

    model: str
    n_layers: int = 0
    rope: tuple[RopeLayout | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    mode: str = "rows"
    refusal: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)
    policy: str = ""
    ratio: float | None = None
    verified: bool | None = None
    safe: bool | None = None
    version: int = PROFILE_VERSION

    @property
    def choice(self) -> tuple[str, float] | None:
        """Policy and ratio that calibration chose; None where there is none, or nothing safe was found."""
        return (self.policy, self.ratio) if self.safe and self.policy and self.ratio is not None else None

    @property
    def probed(self) -> ModelProfile:
        """What the probe found, without what was learned later."""
        return replace(self, policy="", ratio=None, verified=None, safe=None)

    def calibrated(self, safe: bool, policy: str = "", ratio: float | None = None) -> ModelProfile:
        """The same with the outcome of a calibration."""
        return replace(self, safe=safe, policy=policy, ratio=ratio)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelProfile | None:
        """The profile, or None when it was written by another version."""
        if data.get("version") != PROFILE_VERSION:
            return None
        specs = (RopeLayout(**{**s, "inv_freq": tuple(s["inv_freq"])}) if s else None for s in data["rope"])
        return cls(**{**data, "rope": tuple(specs), "windows": tuple(data["windows"])})


@dataclass(frozen=True)
class MachineProfile:
    """Timings of this machine for one model: seconds per token of prefill and per byte of each tier."""

    model: str
    device: str
    prefill_s_per_token: float = 0.0
    tier_s_per_byte: Mapping[str, float] = field(default_factory=dict)
    version: int = PROFILE_VERSION

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MachineProfile | None:
        """The profile, or None when it was written by another version."""
        return cls(**data) if data.get("version") == PROFILE_VERSION else None
