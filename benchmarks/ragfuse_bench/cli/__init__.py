"""`ragfuse bench ...`: one file a group of commands. `ragfuse` finds `bench` by its entry point."""

from ragfuse_bench.cli import codec, conversation, matching, modules, prefix, sessions, throughput
from ragfuse_bench.cli.speed import bench

__all__ = ["bench"]

bench.command("codec")(codec.codec)
bench.command("stream")(codec.stream)
bench.command("conversation")(conversation.conversation)
bench.command("throughput")(throughput.throughput)
bench.command("sessions")(sessions.sessions)
bench.command("modules")(modules.modules)
bench.command("matching")(matching.matching)
bench.command("prefix")(prefix.prefix)
