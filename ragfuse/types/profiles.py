"""The profile of a model: a versioned value that is saved as JSON and outlives the process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ragfuse.types.kv import RopeLayout

PROFILE_VERSION = 6
"""Version of `ModelProfile`. Profiles of another version are ignored."""

UNCALIBRATED = ("query", 0.10)
"""Policy and recompute ratio of an uncalibrated model, for chunks encoded after filler text."""
UNCALIBRATED_DENSE = ("lexical", 0.10)
"""Policy and recompute ratio of an uncalibrated model whose `ModelProfile.mode` is "dense"."""


@dataclass(frozen=True)
class ModelProfile:
    """The known properties of one model at one dtype.

    Args:
        model: Name of the model.
        n_layers: Number of layers.
        rope: The RoPE layout of each layer. None for a layer whose keys carry no position.
        windows: The sliding window of each layer in tokens. None for full attention.
        mode: Which attention function is used. "rows" is ragfuse's function. "dense" is the model's
            own function, with ragfuse's mask.
        refusal: Why KV of this model cannot be reused at other positions. "" if it can.
        fixed: True if KV of a model with `refusal` can be reused at the positions at which the KV
            was encoded. Schema modules are reused in this way.
        state: How a model with `refusal` continues from a copy of a cache (`hf.kept_states.Kind`).
        errors: Errors measured by the probe of the model, by name.
        policy: The policy that calibration chose.
        ratio: The recompute ratio that calibration chose.
        verified: True if `verify` passed. None if the model was not verified.
        safe: True if calibration found a policy and ratio whose answers stay close to full
            prefill's. None if the model was not calibrated.
        codec: Statistics of the model's KV for the `cachegen` levels, in the form of
            `codec.CodecTables.as_dict`. None if the statistics were not measured.
        filler_tokens: Number of filler tokens before a chunk when the chunk adapter was trained. If
            None, the setting `filler_tokens` applies.
        version: The `PROFILE_VERSION` with which the profile was written.
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
        """Calibrated policy and ratio. None if calibration found no safe pair or did not run."""
        if not self.safe or not self.policy or self.ratio is None:
            return None
        return self.policy, self.ratio

    @property
    def default_choice(self) -> tuple[str, float]:
        """Policy and ratio of "auto": the calibrated choice if there is one, else a default."""
        return self.choice or (UNCALIBRATED if self.mode == "rows" else UNCALIBRATED_DENSE)

    @property
    def probed(self) -> ModelProfile:
        """A copy with only the results of the probe, without verification and calibration."""
        return replace(self, policy="", ratio=None, verified=None, safe=None, codec=None)

    def calibrated(self, safe: bool, policy: str = "", ratio: float | None = None) -> ModelProfile:
        """Return a copy with the outcome of a calibration."""
        return replace(self, safe=safe, policy=policy, ratio=ratio)

    def as_dict(self) -> dict[str, Any]:
        """Return the profile in plain JSON types."""
        return asdict(self)
