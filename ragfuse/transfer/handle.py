"""Handles, which give another engine the KV of one prompt, and digests of models and weights.

A handle consists of JSON types, because the engines may share nothing but the version of ragfuse.
Each engine computes digests of its model, weights and prompt. The digests of both engines must
match.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from blake3 import blake3
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from ragfuse.errors import TransferError
from ragfuse.types.keys import ChunkKey, digest, token_digest
from ragfuse.types.kv import ChunkKV

UNKNOWN = "unknown"
"""The digest of weights that are not in safetensors files. This digest matches any digest."""
N_VALUES = 64
"""Maximum number of values per tensor that enter the digest of weights."""
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


@functools.lru_cache(maxsize=8)
def sample_weights(folder: Path | None) -> str:
    """Return a digest of a model's weights (32 hex digits), or `UNKNOWN` if it cannot be computed.

    The digest covers names, shapes and the first values of tensors, rounded to bfloat16. So it does
    not depend on the dtype of the files, nor on how the weights are split into files. The digest is
    cached, so the files are read only on the first call.

    Args:
        folder: The model's folder. None gives `UNKNOWN`.
    """
    try:
        return UNKNOWN if folder is None else _sample(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return UNKNOWN


def _sample(folder: Path) -> str:
    index, files = folder / _INDEX, {_WHOLE}
    if index.is_file():
        files = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    parts = dict[str, bytes]()
    for file in files:
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                found = opened.get_slice(name)
                shape = found.get_shape()
                places = (*(slice(0, 1) for _ in shape[1:]), slice(0, N_VALUES)) if shape else ...
                first = found[places].float().to(torch.bfloat16).contiguous()
                values = first.view(torch.int16).numpy().tobytes()
                parts[name] = f"{name} {shape} ".encode() + values
    hasher = blake3()
    for name in sorted(parts):
        hasher.update(len(parts[name]).to_bytes(8, "little") + parts[name])
    return str(hasher.hexdigest(length=16)) if parts else UNKNOWN


Name = Annotated[str, Field(min_length=1, max_length=512)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(gt=0, lt=1 << 44, strict=True)]
_EXACT = ConfigDict(extra="forbid")
_LAYOUT = re.compile(r"until-([0-9]{1,12})-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class TransferModel:
    """Properties of a model that must be equal in the prefilling and in the decoding engine.

    Args:
        name: Name of the model, as configured in both engines.
        n_layers: Number of layers that have KV.
        kv_heads: Number of KV heads of each layer, summed over all ranks.
        head_dim: Dimension of a head's keys, which equals the dimension of the head's values.
        dtype: Name of the dtype of keys and values, such as "bfloat16".
    """

    name: Name
    n_layers: Count
    kv_heads: Count
    head_dim: Count
    dtype: Name
    __pydantic_config__ = _EXACT

    @classmethod
    def of(cls, name: str, kv: ChunkKV) -> Self:
        """Return the properties of the model `name` that computed `kv`. Raise TransferError if
        shape or dtype differ between layers, or between keys and values.
        """
        first = kv.layers[0].keys
        for at, layer in enumerate(kv.layers):
            for part in (layer.keys, layer.values):
                if part.shape != first.shape or part.dtype != first.dtype:
                    raise TransferError(
                        "Keys and values must have one shape and dtype in all layers, found"
                        f" {tuple(first.shape)}, {first.dtype} in layer 0 and"
                        f" {tuple(part.shape)}, {part.dtype} in layer {at}. Generate with"
                        f" '{name}' in this process instead."
                    )
        heads, _, dim = first.shape
        return cls(name, len(kv.layers), heads, dim, str(first.dtype).removeprefix("torch."))

    @property
    def digest(self) -> str:
        """The digest of all fields: 32 hex digits."""
        return digest("transfer", *map(str, asdict(self).values()))

    def __str__(self) -> str:
        return (
            f"{self.name!r:.80} ({self.n_layers} layers, {self.kv_heads} KV heads of"
            f" {self.head_dim}, {self.dtype})"
        )


@dataclass(frozen=True, slots=True)
class TransferHandle:
    """The right to read one prompt's KV. Keep handles secret: anyone with a handle can read the KV.

    Args:
        secret: 32 random hex digits.
        expires_s: Time at which the handle expires, in seconds since the epoch.
        tenant: The tenant's label (`tenant_label`).
        model: The model that computed the KV.
        weights: Digest of that model's weights (`sample_weights`), or "unknown".
        tokens: Digest of the prompt's token ids.
        n_tokens: Number of tokens in the prompt.
        nbytes: Bytes of the encoded KV.
        level: The codec level.
        place: Label of the tier that holds the KV (`TransferPlace.label`).
    """

    secret: Digest
    expires_s: Count
    tenant: Digest
    model: TransferModel
    weights: Digest | Literal["unknown"]
    tokens: Digest
    n_tokens: Count
    nbytes: Count
    level: Name
    place: Name
    __pydantic_config__ = _EXACT

    @staticmethod
    def tenant_label(salt: str) -> str:
        """Return a tenant's label: a digest of the tenant's salt that does not reveal the salt."""
        return digest("transfer tenant", salt)

    @property
    def key(self) -> ChunkKey:
        """The key of the stored KV. Handles have equal keys only if all fields are equal."""
        fields = digest("handle", *map(str, asdict(self).values()))
        return ChunkKey(
            self.model.digest, self.tokens, self.tenant, f"until-{self.expires_s}-{fields}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the handle as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: object) -> TransferHandle:
        """Parse the result of `as_dict`. All fields are checked, because clients pass handles on.

        Raises:
            TransferError: `given` is not a handle.
        """
        try:
            return _HANDLE.validate_python(given)
        except ValidationError as error:
            raise TransferError(
                f"kv_transfer_params is not a handle of ragfuse ({error.errors()[0]['msg']})."
                " Pass on the prefill's kv_transfer_params unchanged."
            ) from error

    def check(
        self, token_ids: Sequence[int], model: TransferModel, now_s: float, weights: str = UNKNOWN
    ) -> None:
        """Check that the KV is for this prompt and model, and has not expired.

        Args:
            token_ids: The ids of the prompt in the decoding engine.
            model: The model of the decoding engine.
            now_s: The time, in seconds since the epoch.
            weights: Digest of the decoding engine's weights. `UNKNOWN` matches any weights.

        Raises:
            TransferError: Prompt, model or weights differ, or the KV has expired.
        """
        if self.model != model:
            raise TransferError(
                f"The KV is of model {self.model}, but this engine has model {model}. Serve the"
                " same model in the same dtype, under one name, for prefill and decode."
            )
        if UNKNOWN not in (self.weights, weights) and self.weights != weights:
            raise TransferError(
                f"The KV was computed with different weights of {self.model.name!r:.80} than this"
                " engine has. Serve the same weight files for prefill and decode."
            )
        if self.tokens != token_digest(token_ids):
            raise TransferError(
                f"The KV is of another prompt: the KV has {self.n_tokens} tokens, this prompt has"
                f" {len(token_ids)}. Pass the prefill's token ids (prompt_token_ids) to the"
                " decoding engine, or use one tokenizer and chat template for prefill and decode."
            )
        if now_s >= self.expires_s:
            raise TransferError(
                f"The KV expired {now_s - self.expires_s:.0f} s ago. Decode sooner, raise"
                " RAGFUSE_TRANSFER_TTL_S, or synchronise the clocks of both machines."
            )


def expired(keys: Iterable[ChunkKey], now_s: float) -> list[ChunkKey]:
    """Return the members of `keys` whose handles have expired."""
    found = ((key, _LAYOUT.fullmatch(key.layout)) for key in keys)
    return [key for key, match in found if match is not None and now_s >= int(match.group(1))]


_HANDLE = TypeAdapter(TransferHandle)
