"""The profile of a model: a versioned value that is saved as JSON and outlives the process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ragfuse.types.kv import RopeLayout

PROFILE_VERSION = 6
"""Version of ModelProfile; profiles of another version are ignored."""

UNCALIBRATED = ("query", 0.10)
"""Policy and ratio of a model without calibration, for chunks encoded after filler text."""
UNCALIBRATED_DENSE = ("lexical", 0.10)
"""The same for a model that computes attention itself, unseen by ragfuse."""


@dataclass(frozen=True)
class ModelProfile:
    """The known properties of one model at one dtype.

    Args:
        model: Its name.
        n_layers: Its layers.
        rope: The RoPE layout of each layer; None where keys carry no position.
        windows: The sliding window of each layer in tokens; None for full attention.
        mode: How attention is computed: "rows" by ragfuse, "dense" by the model under ragfuse's
            mask.
        refusal: Why its KV cannot be reused; "" where it can.
        fixed: Whether a refused model's KV can still be reused at the positions at which it was
            encoded, as schema modules do.
        state: For a refused model: how it continues from a copy of its cache
            (`hf.kept_states.Kind`).
        errors: Errors that the probe measured, by name.
        policy: The policy that calibration chose.
        ratio: The recompute ratio that calibration chose.
        verified: Whether fusing was found exact where it must be; None: not verified yet.
        safe: Whether calibration found a policy and ratio whose answers stay close to those of full
            prefill; None: not calibrated.
        codec: Statistics of its KV for the `cachegen` levels, as `codec.CodecTables.as_dict` writes
            them; None: not profiled.
        filler_tokens: Tokens of filler text that its chunks are encoded after, as it was trained
            to read them; None: as the setting says.
        version: `PROFILE_VERSION` when it was written.
    """

    model: str
    n_layers: int = 0
    rope: tuple[RopeLayout | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    mode: str = "rows"
    refusal: str = ""
    fixed: bool = False
    state: Literal["", "run", "whole"] = ""
    errors: Mapping[str, float] = field(default_factory=dict)
    policy: str = ""
    ratio: float | None = None
    verified: bool | None = None
    safe: bool | None = None
    codec: Mapping[str, Any] | None = None
    filler_tokens: int | None = None
    version: int = PROFILE_VERSION

    @property
    def choice(self) -> tuple[str, float] | None:
        """Policy and ratio that calibration chose; None if it did not run or found none safe."""
        if not self.safe or not self.policy or self.ratio is None:
            return None
        return self.policy, self.ratio

    @property
    def default_choice(self) -> tuple[str, float]:
        """Policy and ratio of "auto": those of the calibration, else a default."""
        return self.choice or (UNCALIBRATED if self.mode == "rows" else UNCALIBRATED_DENSE)

    @property
    def probed(self) -> ModelProfile:
        """The profile with only what the probe found."""
        return replace(self, policy="", ratio=None, verified=None, safe=None, codec=None)

    def calibrated(self, safe: bool, policy: str = "", ratio: float | None = None) -> ModelProfile:
        """Return the profile with the outcome of a calibration."""
        return replace(self, safe=safe, policy=policy, ratio=ratio)

    def as_dict(self) -> dict[str, Any]:
        """Return the profile in plain JSON types."""
        return asdict(self)
