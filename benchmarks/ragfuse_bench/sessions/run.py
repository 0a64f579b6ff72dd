"""`ragfuse bench sessions`: hit rates of eviction policies in the setting of the AttentionStore
paper.

Conversations are drawn from counts of real ones, at the paper's rates. What is simulated are the
policies that ragfuse runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from ragfuse_bench.options import SessionOptions
from ragfuse_bench.sessions.lengths import Lengths, packaged
from ragfuse_bench.sessions.server import GB, SERVERS, Server
from ragfuse_bench.sessions.simulate import Given, Simulation, Tally
from ragfuse_bench.sessions.trace import Talk, described, drawn
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.runner import circumstances
from ragfuse.telemetry.progress import progress

SESSIONS, WARM_TURNS, PER_S = 9000, 10_000, 1.0
"""Of the paper (sections 4.1 and 4.2)."""
QUICK_SHARE = 1 / 6
SETTINGS = (("128G/2T", 128 * GB, 2000 * GB), ("128G/10T", 128 * GB, 10_000 * GB))


@dataclass(frozen=True)
class Load:
    """Conversations of which so many turns warm the tiers up, and the share of the paper's size
    that this is.
    """

    talks: Sequence[Talk]
    warm_turns: int
    share: float

    @property
    def turns(self) -> int:
        """Of all conversations."""
        return sum(map(len, self.talks))


def paper_load(lengths: Lengths, quick: bool, seed: int = 0) -> Load:
    """The paper's load, or a sixth of it."""
    share = QUICK_SHARE if quick else 1.0
    return Load(
        drawn(lengths, round(SESSIONS * share), PER_S, seed), round(WARM_TURNS * share), share
    )


class Bench:
    """Runs simulations behind a progress bar, and counts their events and this process's seconds
    for them.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.events, self.cpu_s = 0, 0.0

    @property
    def events_per_s(self) -> float:
        """By the second of one core, of all runs together."""
        return self.events / self.cpu_s if self.cpu_s else 0.0

    def run(self, load: Load, given: Given, what: str) -> Tally:
        """One simulation, its tiers scaled as the load is."""
        given = replace(
            given,
            memory_bytes=int(given.memory_bytes * load.share),
            disk_bytes=int(given.disk_bytes * load.share),
            warm_turns=load.warm_turns,
        )
        with progress(self._console) as bar:
            task = bar.add_task(what, total=load.turns)
            begun_s = time.process_time()
            tally = Simulation(
                load.talks, given, lambda turns: bar.update(task, completed=turns)
            ).run()
            self.cpu_s += time.process_time() - begun_s
        self.events += tally.events
        return tally


def shown(tally: Tally) -> dict[str, float]:
    """What a run came to, in shares of its turns, seconds of each turn and hours of all."""
    turns = max(tally.turns, 1)
    return {
        **tally.rates(),
        "first_token_s": tally.first_token_s / turns,
        "waiting": tally.waiting / turns,
        "gpu_hours": tally.gpu_s / 3600,
        "mean_kv_bytes": tally.mean_bytes,
    }


def compare(
    bench: Bench, load: Load, server: Server, policies: Sequence[str]
) -> list[dict[str, Any]]:
    """Every policy in every setting; of look-ahead also what it comes to where it knows the paper's
    window alone.
    """
    found = []
    for name, memory, disk in SETTINGS:
        row: dict[str, Any] = {"name": name}
        for policy in policies:
            tally = bench.run(load, Given(server, memory, disk, policy), f"{name}: {policy}")
            row[policy.replace("-", "_")] = shown(tally)
        if "look-ahead" in policies:
            windowed = Given(server, memory, disk, "look-ahead", whole_queue=False)
            row["look_ahead_in_window"] = shown(
                bench.run(load, windowed, f"{name}: look-ahead in its window")
            )
        found.append(row)
    return found


def run_sessions(options: SessionOptions, console: Console) -> dict[str, Any]:
    """All settings, printed, and drawn where a picture is asked for; the result as plain JSON
    types.
    """
    lengths, bench = packaged(), Bench(console)
    load = paper_load(lengths, options.quick, options.seed)
    settings = compare(bench, load, SERVERS["LLaMA-13B"], options.policies)
    print_settings(settings, console)
    speed = f"{bench.events:,} events, {bench.events_per_s:,.0f} a second of one core."
    console.print(f"{speed} Lengths: {lengths.source}.", highlight=False, soft_wrap=True)
    return {
        "settings": settings,
        "events_per_s": bench.events_per_s,
        "events": bench.events,
        "loads": {"drawn": described(load.talks)},
        "warm_turns": load.warm_turns,
        "lengths": lengths.source,
        "quick": options.quick,
        "seed": options.seed,
        **circumstances(torch.device("cpu"), 1),
    }


def print_settings(settings: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A table of hit rates."""
    table = Table("setting", "policy", box=None)
    for column in ("hit", "RAM", "disk", "of later turns", "first token", "waiting"):
        table.add_column(column, justify="right")
    for row in settings:
        for policy in (name for name in row if name != "name"):
            mine = row[policy]
            rates = [f"{mine[key]:.1%}" for key in ("hit", "ram", "disk", "later_hit")]
            table.add_row(
                row["name"],
                policy.replace("_", " "),
                *rates,
                f"{mine['first_token_s'] * 1e3:,.0f} ms",
                f"{mine['waiting']:,.0f}",
            )
    console.print(table)
