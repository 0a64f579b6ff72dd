"""`ragfuse bench ...`: a row of `BENCHMARKS` is a command. `ragfuse` finds `bench` by its entry
point.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from ragfuse_bench.cli.parameters import with_options
from ragfuse_bench.cli.quality import quality
from ragfuse_bench.cli.report import Report, begin
from ragfuse_bench.options import (
    CodecOptions,
    ControllerOptions,
    DecodeOptions,
    DropinOptions,
    KernelOptions,
    LoadOptions,
    MatchingOptions,
    ModuleOptions,
    PrefixOptions,
    RayOptions,
    SessionOptions,
    StreamOptions,
    ThroughputOptions,
    TtftOptions,
)

from ragfuse.cli.options import Device, Dtype, Json, Model

__all__ = ["bench"]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: the function `run_NAME(options, console)` of a module.

    Args:
        name: Of the command.
        module: Where the function is.
        options: Its dataclass of options, whose first line is the command's help.
        by_settings: The function is `run_NAME(settings, options, console)`, and the command takes
            `--model` and the like as `ragfuse ask` does.
        is_timed: It times computing, so it starts again with an allocator that keeps memory.
    """

    name: str
    module: str
    options: type[Any]
    by_settings: bool = False
    is_timed: bool = True

    def command(self) -> Callable[..., None]:
        """Return the function of the command."""

        def by_options(options: Any, json: Json = None) -> None:
            self._run(options, Report(self.name, json))

        def by_settings(
            options: Any,
            model: Model = None,
            dtype: Dtype = None,
            device: Device = None,
            quick: Annotated[bool, typer.Option(help="Short trial run.")] = False,
            json: Json = None,
        ) -> None:
            report, settings = begin(self.name, json, model=model, dtype=dtype, device=device)
            self._run(options.quick() if quick else options, report, settings)

        made: Callable[..., None] = by_settings if self.by_settings else by_options
        made.__name__, made.__doc__ = self.name, self.options.__doc__
        made.__annotations__["options"] = self.options
        return made

    def _run(self, options: Any, report: Report, *settings: Any) -> None:
        from ragfuse.calibration.runner import tune_malloc

        if self.is_timed:
            tune_malloc(report)
            # of threads that begin later
            os.environ["OMP_NUM_THREADS"] = str(getattr(options, "threads", 1))
        run = getattr(import_module(f"ragfuse_bench.{self.module}"), f"run_{self.name}")
        report.write(run(*settings, options, report))


BENCHMARKS = (
    Benchmark("ttft", "ttft", TtftOptions),
    Benchmark("kernels", "kernels", KernelOptions, is_timed=False),
    Benchmark("decode", "decode", DecodeOptions),
    Benchmark("load", "load", LoadOptions),
    Benchmark("controller", "controller", ControllerOptions),
    Benchmark("dropin", "dropin", DropinOptions),
    Benchmark("codec", "codec.report", CodecOptions, by_settings=True),
    Benchmark("stream", "stream.run", StreamOptions),
    Benchmark("throughput", "throughput.run", ThroughputOptions, by_settings=True),
    Benchmark("sessions", "sessions.run", SessionOptions, is_timed=False),
    Benchmark("modules", "modules.run", ModuleOptions, by_settings=True),
    Benchmark("matching", "matching", MatchingOptions),
    Benchmark("prefix", "prefix", PrefixOptions, by_settings=True),
    Benchmark("ray", "ray.run", RayOptions, is_timed=False),
)
bench = typer.Typer(
    no_args_is_help=True,
    help=(
        "Benchmarks. Every round measures all methods one after another, so that a slow minute of"
        " the machine affects them alike."
    ),
)
bench.command("quality")(with_options(quality))
for each in BENCHMARKS:
    bench.command(each.name)(with_options(each.command()))
