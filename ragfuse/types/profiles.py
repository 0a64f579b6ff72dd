"""Profiles of a model and of a machine: versioned values that are saved as JSON and outlive the process.

Nothing here measures, decides or writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ragfuse.types.kv import RopeLayout

PROFILE_VERSION = 6
"""Version of ModelProfile; profiles of another version are ignored."""
MACHINE_VERSION = 7
"""Version of MachineProfile; profiles of another version are ignored."""

UNCALIBRATED = ("query", 0.10)
"""Policy and ratio for a model that is not calibrated, over chunks that were encoded behind filler text."""
UNCALIBRATED_DENSE = ("lexical", 0.10)
"""The same for a model that computes attention itself, so that ragfuse does not see what its question attends to."""


@dataclass(frozen=True)
class ModelProfile:
    """The known properties of one model at one dtype.

    Args:
        model: Its name.
        n_layers: Its layers.
        rope: The RoPE layout of each layer; None where keys carry no position.
        windows: The sliding window of each layer in tokens; None for full attention.
        mode: How attention is computed: "rows" by ragfuse, "dense" by the model under ragfuse's mask.
        refusal: Why its KV cannot be reused; "" where it can.
        fixed: Whether a refused model's KV can still be reused at the positions at which it was encoded, as schema
            modules do.
        state: For a refused model: how it continues from a copy of its cache (`hf.kept_states.Kind`).
        errors: Errors that the probe measured, by name.
        policy: The policy that calibration chose.
        ratio: The recompute ratio that calibration chose.
        verified: Whether fusing was found exact where it must be; None: not verified yet.
        safe: Whether calibration found a policy and ratio whose answers stay close to those of full prefill; None: not
            calibrated.
        codec: Statistics of its KV for the `cachegen` levels, as `codec.CodecTables.as_dict` writes them; None: not
            profiled.
        filler_tokens: Tokens of filler text that its chunks are encoded behind, as it was trained to read them; None:
            as the setting says.
        version: `PROFILE_VERSION` when it was written.
    """

    model: str
    n_layers: int = 0
    rope: tuple[RopeLayout | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    mode: str = "rows"
    refusal: str = ""
    fixed: bool = False
    state: Literal["", "run", "token", "whole"] = ""
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
        """Policy and ratio that calibration chose; None without calibration, or where it found nothing safe."""
        return (self.policy, self.ratio) if self.safe and self.policy and self.ratio is not None else None

    @property
    def default_choice(self) -> tuple[str, float]:
        """Policy and ratio of "auto" for chunks that were encoded behind filler text: calibration's, else a default."""
        return self.choice or (UNCALIBRATED if self.mode == "rows" else UNCALIBRATED_DENSE)

    @property
    def probed(self) -> ModelProfile:
        """The profile with only what the probe found, without verification, calibration and codec statistics."""
        return replace(self, policy="", ratio=None, verified=None, safe=None, codec=None)

    def calibrated(self, safe: bool, policy: str = "", ratio: float | None = None) -> ModelProfile:
        """Return the profile with the outcome of a calibration."""
        return replace(self, safe=safe, policy=policy, ratio=ratio)

    def as_dict(self) -> dict[str, Any]:
        """Return the profile in plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelProfile | None:
        """Return the profile that `as_dict` wrote; None where another version wrote it."""
        if data.get("version") != PROFILE_VERSION:
            return None
        specs = (RopeLayout(**{**s, "inv_freq": tuple(s["inv_freq"])}) if s else None for s in data["rope"])
        return cls(**{**data, "rope": tuple(specs), "windows": tuple(data["windows"])})


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Times = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class TierSpeed:
    """How long reading an entry of one tier takes, in seconds.

    Args:
        read_s: For each read of an entry.
        byte_s: For each byte read.
        is_ahead: Whether a thread reads this tier ahead of fusing.
    """

    read_s: Seconds
    byte_s: Seconds
    is_ahead: bool = True


@dataclass(frozen=True)
class FusedCost:
    """The cost of a fused prefill whose cached KV is loaded, in seconds; `plan.estimate.features` applies it.

    Args:
        fixed_s: For any prefill.
        row_s: For each row that is computed in all layers.
        score_s: For each such row and each token of the prompt: the attention between them.
        placed_s: For each cached row that is put in place from memory; on an accelerator that includes the copy to it.
        chosen_s: For each token of a prompt whose rows are chosen by what is computed first.
    """

    fixed_s: Seconds
    row_s: Seconds
    score_s: Seconds
    placed_s: Seconds
    chosen_s: Seconds = 0.0


@dataclass(frozen=True)
class MachineProfile:
    """Timings of one model on one machine. Points are measurements; the other figures were fitted to them.

    Args:
        model: The model's fingerprint.
        device: The device that was measured.
        threads: Compute threads.
        dtype: The model's dtype.
        n_layers: The model's layers.
        prefill: (a, b, c): a full prefill of L tokens takes a + b L + c L^2 seconds.
        fused: Cost factors of a fused prefill.
        tiers: Speed of each tier, by name.
        prefill_points: (tokens, seconds) of full prefills.
        decode: Seconds to decode one token's KV, by codec level; raw is not listed, as it takes no time.
        packed: Size relative to raw, by codec level; raw is not listed.
        version: `MACHINE_VERSION` when it was written.
    """

    model: str
    device: str
    threads: Annotated[int, Field(ge=1)]
    dtype: str
    n_layers: Annotated[int, Field(ge=1)]
    prefill: tuple[Seconds, Seconds, Seconds]
    fused: FusedCost
    tiers: Mapping[str, TierSpeed] = field(default_factory=dict)
    prefill_points: tuple[tuple[Count, Seconds], ...] = ()
    decode: Mapping[str, Seconds] = field(default_factory=dict)
    packed: Mapping[str, Times] = field(default_factory=dict)
    version: int = MACHINE_VERSION

    def as_dict(self) -> dict[str, Any]:
        """Return the profile in plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> MachineProfile | None:
        """Return the profile that `as_dict` wrote; None for other data, or data of another version."""
        if not isinstance(data, Mapping) or data.get("version") != MACHINE_VERSION:
            return None
        try:
            return TypeAdapter(cls).validate_python(dict(data))
        except ValidationError:
            return None
