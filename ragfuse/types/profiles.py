"""What is known of a model and of a machine, as versioned values that survive the process.

Plain values with JSON in and out. Nothing here measures, decides or writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ragfuse.types.kv import RopeLayout

PROFILE_VERSION = 5
"""Version of ModelProfile."""
MACHINE_VERSION = 6
"""Version of MachineProfile."""


@dataclass(frozen=True)
class ModelProfile:
    """One model on one dtype: what the probe found, whether blending is verified, and the chosen policy.

    rope: one per layer, None where keys carry no position. mode: how attention is reached ("rows": our function,
    "dense": the model's own with our mask). refusal: why KV is not reused, "" if it is; fixed: but for modules of a
    schema, which stay where they were encoded. state: what a refused model keeps beside KV per token, and how it goes
    on behind that (`hf.states.Kind`). errors: the probe's measured errors by name. verified: whether fusing was found
    exact where it must be; None: not looked at. safe: whether calibration found a policy and ratio whose answers stay
    close to full prefill's (these are `policy` and `ratio` then); None: not calibrated. codec: how its KV is spread,
    as `codec.CodecTables.as_dict` writes it, for levels that pack by that; None: not profiled.
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
    version: int = PROFILE_VERSION

    @property
    def choice(self) -> tuple[str, float] | None:
        """Policy and ratio that calibration chose; None where there is none, or nothing safe was found."""
        return (self.policy, self.ratio) if self.safe and self.policy and self.ratio is not None else None

    @property
    def probed(self) -> ModelProfile:
        """What the probe found, without what was learned later."""
        return replace(self, policy="", ratio=None, verified=None, safe=None, codec=None)

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


HELD_UP_S = 3e-4
"""By how much a read of a thread holds up the model, where it was not measured: 70 to 300 us were seen on CPUs. With
6 chunks in 7 steps 200 us more are 8 ms."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Times = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Warmth = Literal["cold", "warm", "unknown"]


@dataclass(frozen=True)
class TierSpeed:
    """How long one tier takes, in seconds: to open an entry, for each read of it, for each byte; and to write.

    is_ahead: whether a thread reads it ahead of fusing. points: (reads, bytes, seconds) of the entries that were read.
    reads: whether the medium gave them (cold) or this machine's memory did (warm).
    """

    open_s: Seconds
    read_s: Seconds
    byte_s: Seconds
    write_s: Seconds = 0.0
    write_byte_s: Seconds = 0.0
    is_ahead: bool = True
    points: tuple[tuple[Count, Count, Seconds], ...] = ()
    reads: Warmth = "unknown"


@dataclass(frozen=True)
class FusedCost:
    """What a fused prefill takes whose cached KV is at hand, in seconds; `plan.estimate` says what each is counted in.

    fixed_s: any prefill. row_s: a row computed in every layer. score_s: such a row and one token of the prompt, for its
    attention. placed_s: a cached row put in place, from memory; an accelerator's is copied to it in that time, too.
    check_s, check_row_s: policies that check, and each row that they look at. look_s, look_token_s: policies that look
    at attention first, and each token of the prompt.
    """

    fixed_s: Seconds
    row_s: Seconds
    score_s: Seconds
    placed_s: Seconds
    check_s: Seconds
    check_row_s: Seconds
    look_s: Seconds
    look_token_s: Seconds


@dataclass(frozen=True)
class FusedPoint:
    """One fused prefill that was timed: its policy, rows as in `plan.estimate.Blend`, seconds."""

    policy: str
    tokens: Count
    forced: Count
    candidate_rows: Count
    ratio: Annotated[float, Field(ge=0, le=1)]
    seconds: Seconds


@dataclass(frozen=True)
class MachineProfile:
    """Timings of one model on one machine: full prefill, fused prefills, tiers by name.

    model: its fingerprint. prefill: seconds of full prefill of L tokens, as a + b L + c L^2. Points are what was
    measured, curves what was fitted to them. held_up_s: by how much each read of a thread holds up the model.
    decode: by codec level, seconds to decode a token's KV. packed: by level, its bytes over those of raw. Raw is in
    neither: it takes no time.
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
    fused_points: tuple[FusedPoint, ...] = ()
    held_up_s: Seconds = HELD_UP_S
    decode: Mapping[str, Seconds] = field(default_factory=dict)
    packed: Mapping[str, Times] = field(default_factory=dict)
    version: int = MACHINE_VERSION

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> MachineProfile | None:
        """The profile, or None when it is none or of another version."""
        if not isinstance(data, Mapping) or data.get("version") != MACHINE_VERSION:
            return None
        try:
            return TypeAdapter(cls).validate_python(dict(data))
        except ValidationError:
            return None
