"""What each set-up that cannot work says, by a word of it, as JSON; run by the Python that has
vLLM.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm_ragfuse import checks

from ragfuse import Settings, SettingsError
from ragfuse.transfer import TransferModel


def said(check: Callable[[], Any]) -> str:
    """The error's message; "" where there is none."""
    try:
        check()
    except SettingsError as error:
        return str(error)
    return ""


def config(
    n_layers: int = 2, cache_dtype: str = "auto", block_size: int = 16, **parallel: int
) -> Any:
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: n_layers, dtype=torch.float32)
    cache = SimpleNamespace(cache_dtype=cache_dtype, block_size=block_size)
    return SimpleNamespace(
        model_config=model, cache_config=cache, parallel_config=SimpleNamespace(**parallel)
    )


def groups(*specs: Any) -> Any:
    made = [SimpleNamespace(kv_cache_spec=spec, layer_names=["0", "1"]) for spec in specs]
    return SimpleNamespace(kv_cache_groups=made)


def main() -> None:
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=8)
    place = Settings(transfer_url=sys.argv[1])
    model = TransferModel("tiny", 2, 2, 32, "float32")
    good = (
        lambda: checks.Options(load="sync", model="x"),
        lambda: checks.check_version("0.32.7", False),
        lambda: checks.check_version("0.99.0", True),
        lambda: checks.check_roles("kv_consumer", "recompute"),
        lambda: checks.check_parallel(config(tensor_parallel_size=4)),
        lambda: checks.check_groups(config(), groups(full)),
    )
    bad = {
        "lode": lambda: checks.Options(lode="sync"),
        "later": lambda: checks.Options(load="later"),
        "0.320.0": lambda: checks.check_version("0.320.0", False),
        "kv_both": lambda: checks.check_roles("kv_both", "recompute"),
        "recompute": lambda: checks.check_roles("kv_consumer", "fail"),
        "pipeline_parallel_size": lambda: checks.check_parallel(config(pipeline_parallel_size=2)),
        "SlidingWindowSpec": lambda: checks.check_groups(config(), groups(full, window)),
        "3 layers": lambda: checks.check_groups(config(n_layers=3), groups(full)),
        "fp8": lambda: checks.check_groups(config(cache_dtype="fp8"), groups(full)),
        "32": lambda: checks.check_groups(config(block_size=32), groups(full)),
        "cannot be opened": lambda: checks.Setup(model, 16, True, None, place).place(),
        "RAGFUSE_TRANSFER_URL": lambda: checks.Setup(model, 16, True, None, Settings()).place(),
    }
    found = {
        "good": list(map(said, good)),
        "bad": {word: said(check) for word, check in bad.items()},
        "loaded": [name for name in sys.modules if name.startswith("ragfuse.hf")],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
