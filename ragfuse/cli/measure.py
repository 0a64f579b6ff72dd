"""`ragfuse measure`: measure this machine's speed, for the load plans of later prompts."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ragfuse.cli.engine import loaded_engine
from ragfuse.cli.options import ENGINE, screen
from ragfuse.cli.show import counted, progress_bar, say, show_table
from ragfuse.settings import Settings


@screen(*ENGINE, "tiers")
def measure(console: Console, settings: Settings) -> dict[str, Any]:
    """Measure the speed of the model and the tiers. Later prompts are planned by these timings."""
    with loaded_engine(settings, console) as engine:
        with progress_bar(console, "measuring") as report:
            machine = engine.timings.measure(
                engine.model,
                engine.store,
                engine.digest,
                lambda what, done: report(done, 1.0, what),
            )
        is_kept = engine.catalog.strict.is_open
    say(console, f"Full prefill of {engine.model.name}, {counted(machine.threads, 'thread')}:")
    points = [
        {"tokens": tokens, "measured s": seconds, "fitted s": machine.prefill_s(tokens)}
        for tokens, seconds in machine.prefill_points
    ]
    show_table(console, points)
    tiers = [
        {
            "tier": tier,
            "ms per read": 1000 * speed.read_s,
            "MB/s read": f"{1e-6 / speed.byte_s:,.0f}"
            if speed.byte_s > 1e-11
            else "shared, not copied",
        }
        for tier, speed in machine.tiers.items()
    ]
    show_table(console, tiers)
    codec = [
        {
            "level": level,
            "us per token decoded": 1e6 * token_s,
            "size / raw": machine.packed.get(level, 1.0),
        }
        for level, token_s in machine.decode.items()
    ]
    show_table(console, codec)
    kept = f"Saved in {settings.store_path}. Prompts are now planned by these timings."
    say(
        console,
        kept if is_kept else "Not saved: there is no disk tier (disk_bytes is 0).",
    )
    return machine.as_dict()
