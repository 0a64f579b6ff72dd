"""Options for loading a model, by name. What transformers makes of them: `models.loader`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

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
"""Options for loading a model: those of transformers' `from_pretrained`, and whether an adapter is merged."""


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
        options = given
        if isinstance(given, str):
            try:
                options = json.loads(given or "{}")
            except ValueError:
                options = None
        if not isinstance(options, Mapping):
            raise ValueError(
                'wanted a JSON object of options by name, such as {"revision": "main"}, found something else (the '
                "option --model-kwargs, the variable RAGFUSE_MODEL_KWARGS)"
            )
        strange = next((str(name) for name in options if name not in LOADING), None)
        if strange is not None:
            near = get_close_matches(strange, LOADING, 1)
            meant = f"; did you mean {near[0]}?" if near else f"; the options are: {', '.join(LOADING)}"
            raise ValueError(f"'{strange}' is not an option for loading a model{meant}")
        return cls({str(name): value for name, value in options.items()})
