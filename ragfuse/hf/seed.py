"""Seeded random numbers for one thread, independent of other threads.

torch has one random state for all threads, so seeding it would change the numbers of other threads,
and they would change those of this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

T = TypeVar("T")


class Seeded(TorchFunctionMode):
    """A context in which this thread samples (`torch.multinomial`) as it would after
    `torch.manual_seed(seed)`.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, with our generator if it samples."""
        options = kwargs or {}
        if func is torch.multinomial:
            device = args[0].device
            if device not in self._generators:
                self._generators[device] = torch.Generator(device).manual_seed(self._seed)
            options = {**options, "generator": self._generators[device]}
        return func(*args, **options)


def undrawn(do: Callable[[], T]) -> T:
    """Call a function that draws no random numbers, bypassing `Seeded`, which costs a little at
    every torch call.
    """
    if not has_torch_function((do,)):
        return do()
    return handle_torch_function(do, ())
