"""Allowed values of settings: codec levels, policies, kinds of tiers, loading options."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ragfuse.errors import SettingsError
from ragfuse.types.arguments import meant
from ragfuse.types.plan import AUTO


@dataclass(frozen=True)
class CodecLevel:
    """A codec level: how strongly stored KV is compressed, and by which codec.

    Args:
        name: Name of the level in settings, entries and traces.
        codec: Name of the codec that `codec.levels.codec_for` returns for the level.
        width: Bin width of a `cachegen` level, in units of each channel's quantisation step
            (CacheGen 5.2).
    """

    name: str
    codec: str
    width: float = 1.0


LEVELS = (
    CodecLevel("raw", "raw"),
    CodecLevel("int8", "uniform"),
    CodecLevel("cg1", "cachegen", width=0.4),
    CodecLevel("cg2", "cachegen", width=1.0),
    CodecLevel("cg3", "cachegen", width=1.3),
    CodecLevel("cg4", "cachegen", width=1.9),
)
"""All codec levels, from the lossless to the most lossy level."""
LEVEL_NAMES = tuple(level.name for level in LEVELS)
"""The names of all codec levels, in the order of `LEVELS`."""


def loss(level: str) -> int:
    """Return the rank of a codec level by loss: 0 is lossless. Unknown levels rank last."""
    return LEVEL_NAMES.index(level) if level in LEVEL_NAMES else len(LEVEL_NAMES)


POLICY_NAMES = (
    "full",
    "none",
    "random",
    "hkvd",
    "lego",
    "lexical",
    "query",
)
"""The names of all selection policies, in the order of `fuse.select.POLICIES`."""
COUNTED = re.compile(r"lego-0*([1-9][0-9]*)")
"""Matches names such as `lego-8`, the policy that recomputes each chunk's first 8 tokens."""


def no_policy(name: str) -> SettingsError:
    """Return the error for an unknown policy. The error suggests the closest name or lists all."""
    known = (AUTO, *POLICY_NAMES, "lego-16")
    return SettingsError(
        f"There is no selection policy '{name}'. {meant(name, known, 'Use one of')}", "policy"
    )


def as_setting(name: str) -> str:
    """Validate a policy's name for pydantic: return a known name, raise ValueError for others."""
    if name not in (AUTO, *POLICY_NAMES) and not COUNTED.fullmatch(name):
        raise ValueError(f"wanted one of {', '.join((AUTO, *POLICY_NAMES))}")
    return name


EVICTION_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "lru": "ragfuse.plan.evict:by_use",
        "look-ahead": "ragfuse.plan.evict:by_next_use",
    }
)
"""The rank function of each eviction policy, as the `module:function` that `plan.evict` imports."""


@dataclass(frozen=True)
class TierKind:
    """A kind of tier, such as disk or Redis, and the URLs that open a tier of this kind.

    Args:
        name: Name of the first tier of this kind. Further tiers are numbered, such as `redis-2`.
        schemes: Schemes of the URLs. "" means a path without a scheme. "*" means all other schemes.
        home: The tier's class as `module:class`, imported when a tier is opened.
        extra: The extra of ragfuse that the tier needs, as in `ragfuse[redis]`. "" for none.
    """

    name: str
    schemes: tuple[str, ...]
    home: str
    extra: str = ""


TIER_KINDS = (
    TierKind("disk", ("",), "ragfuse.store.disk:DiskTier"),
    TierKind("redis", ("redis", "rediss", "unix"), "ragfuse.store.redis:RedisTier", extra="redis"),
    TierKind("objects", ("*",), "ragfuse.store.objects:ObjectTier", extra="objects"),
)
"""All kinds of tiers that a URL can open. The last kind takes the remaining schemes."""


def kind_of_scheme(scheme: str) -> TierKind:
    """Return the kind of tier that a URL with this scheme opens."""
    return next(kind for kind in TIER_KINDS if {scheme, "*"} & {*kind.schemes})


LOADING = (
    "revision",
    "trust_remote_code",
    "attn_implementation",
    "device_map",
    "token",
    "torch_dtype",
    "dtype",
    "quantization_config",
    "max_memory",
    "offload_folder",
    "offload_buffers",
    "experts_implementation",
    "subfolder",
    "cache_dir",
    "local_files_only",
    "variant",
    "gguf_file",
    "merge_adapter",
)
"""Options for loading a model: `merge_adapter`, and options of transformers' `from_pretrained`."""


class LoadingOptions(dict[str, Any]):
    """Options for loading a model, by name. This dict is hashable and must never be mutated."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items(), key=lambda item: item[0])))

    @classmethod
    def read(cls, given: Any) -> LoadingOptions:
        """Return loading options from a mapping, or from the JSON text of an object.

        Raises:
            ValueError: A name is not in `LOADING`, or `given` is neither a mapping nor JSON text.
        """
        try:
            options = dict(json.loads(given or "{}") if isinstance(given, str) else given)
        except (TypeError, ValueError):
            raise ValueError(
                'wanted a JSON object of options, such as {"revision": "main"}'
            ) from None
        for name in options:
            if name not in LOADING:
                hint = meant(str(name), LOADING).rstrip(".")
                raise ValueError(f"there is no option '{name}' for loading a model ({hint})")
        return cls(options)
