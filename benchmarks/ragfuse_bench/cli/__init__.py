"""`ragfuse bench ...`: one file a group of commands. `ragfuse` finds `bench` by its entry point."""

import typer
from ragfuse_bench.cli.codec import codec
from ragfuse_bench.cli.conversation import conversation
from ragfuse_bench.cli.engines import engines
from ragfuse_bench.cli.modules import modules
from ragfuse_bench.cli.parameters import with_options
from ragfuse_bench.cli.prefix import prefix
from ragfuse_bench.cli.quality import quality
from ragfuse_bench.cli.speed import (
    controller,
    decode,
    dropin,
    kernels,
    load,
    matching,
    ray,
    sessions,
    stream,
    ttft,
)
from ragfuse_bench.cli.throughput import throughput

__all__ = ["bench"]

bench = typer.Typer(
    no_args_is_help=True,
    help="Benchmarks. Methods are measured in turn, round by round, so that changes of the machine affect all alike.",
)
SPEED = (ttft, kernels, decode, load, controller, dropin)
QUALITY = (quality, codec, stream)
REUSE = (conversation, throughput, sessions, modules, matching, prefix, engines, ray)
for command in (*SPEED, *QUALITY, *REUSE):
    bench.command(command.__name__)(with_options(command))
