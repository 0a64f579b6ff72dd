"""Which device there is, and which dtype it is quick in, for settings that leave these open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from ragfuse.errors import ModelError
from ragfuse.settings import Settings

_BF16_UNITS = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16")


def quick_dtype(device: str, capabilities: Mapping[str, Any] | None = None) -> str:
    """What `dtype="auto"` stands for on `device`; `capabilities` are the CPU's own unless they are given.

    A CPU without units for bfloat16 takes two to three times as long in it as in float32, whose KV takes twice the
    bytes. GPUs too old for bfloat16 get float16.
    """
    kind = torch.device(device).type
    if kind == "mps":
        return "bfloat16" if torch.backends.mps.is_macos_or_newer(14, 0) else "float16"
    if kind != "cpu":
        able = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if able else "float16"
    found = torch.cpu.get_capabilities() if capabilities is None else capabilities
    return "bfloat16" if any(found.get(unit) for unit in _BF16_UNITS) else "float32"


def quick_device() -> str:
    """What `device="auto"` stands for: the first GPU that torch sees, else the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def settled(settings: Settings) -> Settings:
    """The same with device and dtype named, and folders from the root on; they are equal for whoever said them and
    whoever left them open or named folders from the working directory.

    ModelError for a device that torch does not know.
    """
    settings = settings.placed()
    device = quick_device() if settings.device == "auto" else settings.device
    dtype: str = settings.dtype
    told = settings.model_kwargs.get("torch_dtype", settings.model_kwargs.get("dtype"))
    if told not in (None, "auto"):
        dtype = dtype_named(told)
    elif dtype == "auto":
        _device(device)
        dtype = quick_dtype(device)
    if (device, dtype) == (settings.device, settings.dtype):
        return settings
    return settings.model_copy(update={"device": device, "dtype": dtype})


def dtype_named(told: object) -> Literal["float32", "bfloat16", "float16"]:
    """The name of a dtype, from torch's own or its name; ModelError for what KV is not kept in."""
    name = str(told).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"Wanted a dtype of float32, bfloat16 or float16, found '{name}'. Name one of these.")
    return name  # type: ignore[return-value]


def require_device(name: str) -> None:
    """ModelError for a device that torch does not know or does not see."""
    device, found = _device(name), ""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = f"only {torch.cuda.device_count()} of them" if torch.cuda.is_available() else "no CUDA device here"
    if device.type == "mps" and not torch.backends.mps.is_available():
        found = "no Apple GPU here"
    if found:
        raise ModelError(f"Wanted device '{name}', but torch sees {found}. Use --device cpu.")


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ModelError(
            f"Wanted a device such as cpu, cuda, cuda:1, mps or auto, found '{name}'. Use --device cpu."
        ) from error
