"""Which dtype a device is quick in, for settings that leave it open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ragfuse.settings import Settings

_BF16_UNITS = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16")


def quick_dtype(device: str, capabilities: Mapping[str, Any] | None = None) -> str:
    """What `dtype="auto"` stands for on `device`; `capabilities` are the CPU's own unless they are given.

    A CPU without units for bfloat16 takes two to three times as long in it as in float32, whose KV takes twice the
    bytes. GPUs too old for bfloat16 get float16.
    """
    if torch.device(device).type != "cpu":
        able = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if able else "float16"
    found = torch.cpu.get_capabilities() if capabilities is None else capabilities
    return "bfloat16" if any(found.get(unit) for unit in _BF16_UNITS) else "float32"


def settled(settings: Settings) -> Settings:
    """The same with a dtype that is named and folders from the root on; they are equal for whoever said so and whoever
    left it to the device and the working directory."""
    settings = settings.placed()
    if settings.dtype != "auto":
        return settings
    return settings.model_copy(update={"dtype": quick_dtype(settings.device)})
