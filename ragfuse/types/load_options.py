"""Options for loading a model, by name. What transformers makes of them: `models.loader`."""

from __future__ import annotations

import json
from typing import Any

from ragfuse.types.arguments import meant

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
"""Options for loading a model: those of transformers' `from_pretrained`, and whether an adapter is
merged.
"""


class LoadingOptions(dict[str, Any]):
    """Options for loading a model, by name. Hashable, so that settings are; never mutate one."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items(), key=lambda item: item[0])))

    @classmethod
    def read(cls, given: Any) -> LoadingOptions:
        """Return loading options from a mapping or its JSON.

        Raises:
            ValueError: A name is not in `LOADING`, or it is neither.
        """
        try:
            options = dict(json.loads(given or "{}") if isinstance(given, str) else given)
        except (TypeError, ValueError):
            raise ValueError(
                'wanted a JSON object of options by name, such as {"revision": "main"}'
            ) from None
        for name in options:
            if name not in LOADING:
                hint = meant(str(name), LOADING).rstrip(".")
                raise ValueError(f"'{name}' is not an option for loading a model. {hint}")
        return cls(options)
