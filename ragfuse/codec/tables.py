"""Codec tables: the per-channel statistics of a model's KV that CacheGen's codec needs.

The tables are profiled once from real text (`cachegen.py`) and stored apart from the encoded
layers. Every number takes a byte or two. All numbers that the decoder needs are derived from these
bytes by integer operations or a single rounding, so encoder and decoder agree on every machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from pydantic import ConfigDict, TypeAdapter

from ragfuse.types.kv import RopeLayout

TABLES_VERSION: Final = 4
STEPS_PER_OCTAVE: Final = 8
"""`to_codes` has this many codes per octave. An octave is a factor of 2."""
MIDDLE: Final = 128

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


def to_codes(numbers: npt.ArrayLike) -> bytes:
    """Round positive numbers to one byte each, on a logarithmic scale of eighths of an octave."""
    with np.errstate(divide="ignore"):
        logs = np.log2(np.asarray(numbers, dtype=np.float64))
    codes: npt.NDArray[np.uint8] = np.clip(
        np.rint(logs * STEPS_PER_OCTAVE) + MIDDLE, 1, 255
    ).astype(np.uint8)
    return codes.tobytes()


def from_codes(codes: bytes) -> Floats:
    """Invert `to_codes`: return the float32 number of each code."""
    whole = np.frombuffer(codes, dtype=np.uint8)
    return np.exp2((whole.astype(np.float64) - MIDDLE) / STEPS_PER_OCTAVE).astype(np.float32)


_BASE64 = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


@dataclass(frozen=True)
class Channels:
    """Statistics of the channels of one layer's keys (or values), as bytes, head by head.

    Args:
        heads: H, the number of KV heads.
        dim: D, the number of channels of a head.
        mean: Mean of each channel, float16.
        step: Quantisation step of each channel, as a one-byte code (`to_codes`). The width of a
            bin is the step times the codec level's width.
        spread: Standard deviation of each channel, in steps, as a one-byte code (`to_codes`).
    """

    heads: int
    dim: int
    mean: bytes
    step: bytes
    spread: bytes
    __pydantic_config__ = _BASE64

    @cached_property
    def means(self) -> Floats:
        """Mean of each channel, float32 `[H, 1, D]`."""
        flat = np.frombuffer(self.mean, dtype="<f2").astype(np.float32)
        return flat.reshape(self.heads, 1, self.dim)

    @cached_property
    def steps(self) -> Floats:
        """Quantisation step of each channel, float32 `[H * D]`."""
        return from_codes(self.step)

    @cached_property
    def rms(self) -> Floats:
        """Root mean square of each channel's values, float32 `[H, 1, D]`; never 0."""
        above = (from_codes(self.spread) * self.steps).reshape(self.means.shape)
        rms: Floats = np.sqrt(np.square(self.means) + np.square(above))
        return rms

    @property
    def spreads(self) -> Ints:
        """Standard deviation of each channel, in steps, as codes of `to_codes`, int32 `[H * D]`."""
        return np.frombuffer(self.spread, dtype=np.uint8).astype(np.int32)


@dataclass(frozen=True)
class LayerTables:
    """The codec tables of one layer.

    Args:
        keys: Statistics of the layer's keys.
        values: Statistics of the layer's values.
        rope: The RoPE layout of the layer. None if KV is not rotated back before encoding.
    """

    keys: Channels
    values: Channels
    rope: RopeLayout | None = None


@dataclass(frozen=True)
class CodecTables:
    """The codec tables of a model. Immutable.

    Args:
        layers: The codec tables of each layer.
    """

    layers: tuple[LayerTables, ...]

    @cached_property
    def digest(self) -> str:
        """Digest of all layers' tables, 16 hex digits."""
        return blake3(json.dumps(self.as_dict()).encode()).hexdigest(8)

    def as_dict(self) -> dict[str, Any]:
        """Return the version and all tables as plain JSON types, with bytes as base64."""
        return {"version": TABLES_VERSION, **_TABLES.dump_python(self, mode="json")}

    @classmethod
    def from_dict(cls, data: Any) -> CodecTables | None:
        """Parse the result of `as_dict`. Return None if `data` is invalid or of another version.

        The digest is not checked. The caller must compare it with the expected digest.
        """
        try:
            return (
                _TABLES.validate_json(json.dumps(data))
                if data["version"] == TABLES_VERSION
                else None
            )
        except (KeyError, TypeError, ValueError):
            return None


_TABLES = TypeAdapter(CodecTables)
