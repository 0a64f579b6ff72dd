"""Seeded random numbers for one thread, independent of other threads.

torch has one random state for all threads, so seeding it would change the numbers of other threads, and they would
change those of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

T = TypeVar("T")

DRAWN = frozenset({"multinomial", "bernoulli", "normal", "rand", "randn", "randint", "randperm"})
FILLED = frozenset({"bernoulli_", "normal_", "uniform_", "exponential_", "random_", "geometric_", "cauchy_"})
"""Names of torch's functions (`DRAWN`) and methods that draw random numbers and take a generator."""


class Seeded(TorchFunctionMode):
    """A context in which this thread draws the random numbers that `torch.manual_seed(seed)` would give."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, with our generator if it draws numbers without one."""
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        if (name in DRAWN or name in FILLED) and options.get("generator") is None:
            options = {**options, "generator": self._on(_device_of(args, options))}
        return func(*args, **options)

    def _on(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw this thread's random numbers from `seed` while the context is active; None: from torch's own state."""
    if seed is None:
        yield
        return
    with Seeded(seed):
        yield


def undrawn(do: Callable[[], T]) -> T:
    """Call a function that draws no random numbers, bypassing `Seeded`, which costs a little at every torch call."""
    if not has_torch_function((do,)):
        return do()
    return handle_torch_function(do, ())


def _device_of(args: tuple[Any, ...], options: dict[str, Any]) -> torch.device:
    """Return the device that the numbers are drawn on."""
    if options.get("device") is not None:
        return torch.device(options["device"])
    found = (value for value in (*args, *options.values()) if isinstance(value, Tensor))
    return next((tensor.device for tensor in found), torch.device("cpu"))
