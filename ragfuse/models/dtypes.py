"""Resolves the settings `device="auto"` and `dtype="auto"` to what is available and fast on this
machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from ragfuse.errors import ModelError
from ragfuse.settings import Settings

_BF16_UNITS = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16")


def auto_dtype(device: str, capabilities: Mapping[str, Any] | None = None) -> str:
    """Return the dtype that `dtype="auto"` stands for on a device.

    It is bfloat16 if the device computes it natively. A CPU without bfloat16 units is two to three
    times faster in float32, although its KV takes twice the bytes. GPUs too old for bfloat16 get
    float16.

    Args:
        device: Name of the device, such as "cpu" or "cuda:1".
        capabilities: The CPU's capabilities; None: those of this machine.
    """
    kind = torch.device(device).type
    if kind == "mps":
        return "bfloat16" if torch.backends.mps.is_macos_or_newer(14, 0) else "float16"
    if kind != "cpu":
        able = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        return "bfloat16" if able else "float16"
    found = torch.cpu.get_capabilities() if capabilities is None else capabilities
    return "bfloat16" if any(found.get(unit) for unit in _BF16_UNITS) else "float32"


def auto_device() -> str:
    """Return the device that `device="auto"` stands for: a GPU if torch sees one, else the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def resolve_auto(settings: Settings) -> Settings:
    """Return settings with "auto" device and dtype resolved and folders made absolute.

    Settings that mean the same become equal, whether the values were given or left at "auto".

    Raises:
        ModelError: torch does not know the device, or the dtype is not supported.
    """
    settings = settings.placed()
    device = auto_device() if settings.device == "auto" else settings.device
    dtype: str = settings.dtype
    given = settings.model_kwargs.get("torch_dtype", settings.model_kwargs.get("dtype"))
    if given not in (None, "auto"):
        dtype = dtype_named(given)
    elif dtype == "auto":
        require_device(device)
        dtype = auto_dtype(device)
    if (device, dtype) == (settings.device, settings.dtype):
        return settings
    return settings.model_copy(update={"device": device, "dtype": dtype})


def dtype_named(given: object) -> Literal["float32", "bfloat16", "float16"]:
    """Return the name of a dtype, given as a torch dtype or a name; ModelError if KV is not stored
    in it.
    """
    name = str(given).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"Wanted dtype float32, bfloat16 or float16, found '{name}'.")
    return name  # type: ignore[return-value]


def require_device(name: str) -> None:
    """Raise ModelError for a device that torch does not know or does not see."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"Wanted a device that torch sees, found '{name}' ({reason}). Use --device cpu."
        ) from error
