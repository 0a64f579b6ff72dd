"""`ragfuse bench kernels`: the torch operations of a prefill, each of them a kernel launch on a
GPU.

Counted on a CPU, for the CPU's own path and for an accelerator's path that runs there. No time is
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from ragfuse_bench.options import KernelOptions
from ragfuse_bench.presets import bench_model
from ragfuse_bench.rounds import thread_count
from ragfuse_bench.workload import Workload
from rich.console import Console
from rich.table import Table
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ragfuse.calibration.runner import circumstances
from ragfuse.engine.ask import Ask
from ragfuse.engine.engine import Engine
from ragfuse.hf.model import HFModel
from ragfuse.hf.probe import decoder_layers
from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import KVStore, MemoryTier
from ragfuse.types.prompt import Prompt
from ragfuse.types.sizes import UNLIMITED

RATIOS = MappingProxyType({"none": 0.0, "lexical": 0.1, "query": 0.1, "hkvd": 0.15})
"""The ratio of each policy that is counted."""
READS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}
)
"""Operations whose result, or its size, is read back to the host."""
CALLS = frozenset({"tolist", "cpu", "numpy"})
"""Methods that read a tensor back, and on a CPU dispatch nothing."""


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is dispatched: operations that compute or copy, views, and reads back once
    `reading` is set.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computing = self.views = self.syncs = 0
        self.reading = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation and run it; allocating memory counts as nothing."""
        name = func.overloadpacket.__name__
        if func.is_view or name == "_unsafe_view":
            self.views += 1
        elif not name.startswith(("empty", "new_empty")):
            self.computing += 1
        by_mask = name == "index" and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        self.syncs += self.reading and (name in READS or by_mask)
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Counts the calls of methods that read a tensor back into an `Operations`."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call and make it."""
        self._operations.syncs += (
            self._operations.reading and getattr(func, "__name__", "") in CALLS
        )
        return func(*args, **(kwargs or {}))


def counted(model: HFModel, prefill: Callable[[], object]) -> Operations:
    """Return what a prefill dispatches; what is read back counts from the model's first
    layer on.
    """
    found = Operations()

    def begin(module: object, args: object) -> None:
        found.reading = True

    first = decoder_layers(model.model)[0] if not model.profile.refusal else model.model
    handle = first.register_forward_pre_hook(begin)
    try:
        with found, Calls(found):
            prefill()
    finally:
        handle.remove()
    return found


def run_kernels(options: KernelOptions, console: Console) -> dict[str, Any]:
    """Return the result as plain JSON types; `console` shows the table."""
    with thread_count(1), KVStore([MemoryTier(UNLIMITED, lru)]) as store:
        model = bench_model(options.model, options.dtype, "cpu", options.home)
        with Engine(Settings(), model, store) as engine:
            work = Workload(model, options.chunks, options.chunk_tokens, options.question_tokens)
            work.encode([engine], console)
            paths = {
                name: _path(engine, work.prompt(engine), name == "accelerator")
                for name in ("cpu", "accelerator")
            }
    result: dict[str, Any] = {
        **{
            path: {name: each.computing for name, each in found.items()}
            for path, found in paths.items()
        },
        "views": {
            path: {name: each.views for name, each in found.items()}
            for path, found in paths.items()
        },
        "syncs": sum(each.syncs for name, each in paths["accelerator"].items() if name != "full"),
        "ratios": dict(RATIOS),
        "tokens": options.chunks * options.chunk_tokens + options.question_tokens,
        "layers": model.n_layers,
        "model": options.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        **circumstances(model.device, 1),
    }
    _show(result, console)
    return result


def _path(engine: Engine, prompt: Prompt, accelerated: bool) -> dict[str, Operations]:
    """Return what full prefill and every policy dispatch on one path."""
    model = engine.model
    before, model.accelerated = model.accelerated, accelerated
    try:
        asks = {"full": Ask(reuse=False)} | {
            name: Ask(policy=name, ratio=ratio) for name, ratio in RATIOS.items()
        }
        for ask in asks.values():  # what is made once is made before
            engine.prepare(prompt, ask)
        return {
            name: counted(model, partial(engine.prepare, prompt, ask)) for name, ask in asks.items()
        }
    finally:
        model.accelerated = before


def _show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(
        title=(
            f"Torch operations of one prefill of {result['tokens']:,} tokens, {result['layers']}"
            " layers"
        )
    )
    columns = (
        "prefill",
        "CPU's path",
        "of full",
        "views",
        "accelerator's path",
        "of full",
        "views",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "prefill" else "right")
    for name in ("full", *RATIOS):
        row = [name if name not in RATIOS else f"{name} {RATIOS[name]:.0%}"]
        for path in ("cpu", "accelerator"):
            count = result[path][name]
            row += [
                f"{count:,}",
                f"{count / result[path]['full']:.2f}x",
                f"{result['views'][path][name]:,}",
            ]
        table.add_row(*row)
    console.print(table)
    console.print(
        "Operations compute or copy; views do neither. Read back to the host between the first"
        f" layer and the first logits on the accelerator's path: {result['syncs']}."
        f" {result['model']}, {result['dtype']}.",
        highlight=False,
    )
