"""Serving with two replicas on a cluster: the share of chunk tokens in the chosen replica's memory, by router.

Conversations of a trace are sent in the order in which they came, one request after the other: each block of a prompt
is a document. After each answer is a pause, much shorter than in the trace, in which replicas encode what they missed.
"""

from __future__ import annotations

import json
import socket
import urllib.request
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from time import monotonic, perf_counter, sleep
from typing import Any

from ragfuse_bench.ray.options import RayOptions
from ragfuse_bench.ray.workload import conversations, whole_conversations
from rich.console import Console

from ragfuse.ray.application import APPLICATION, ROUTER, ReplicaOptions, application
from ragfuse.ray.cluster import shared_settings
from ragfuse.settings import Settings
from ragfuse.telemetry.progress import progress

ROUND_ROBIN = "ragfuse_bench.ray.round_robin:RoundRobinRouter"
ROUTERS = {"round robin": ROUND_ROBIN, "chunks": ROUTER}.items()
MEMORY_SHARE = 0.1
"""Of the KV of all blocks of the trace, what the memory of each replica holds."""
LEAST_BLOCKS = 24
"""What it holds at least, in blocks: two prompts."""
BLOCK_WORDS = 12
MOST_BLOCKS = 12
"""Blocks of one prompt, the latest ones: as many as the tiny prompts of this benchmark hold."""
ASK_S = 600.0
GONE_S = 120.0
"""Seconds that the end of Serve is waited for."""


def run_serving(options: RayOptions, folder: Path, console: Console) -> dict[str, Any]:
    """Send the same requests through each router to two new replicas.

    Returns:
        For each router the share of chunk tokens found in the chosen replica's memory, and the requests of the busiest
        replica over the mean. one_memory_share: what one memory as large as both would find if it dropped what was used
        longest ago; no router of whole requests can be expected to find more.
    """
    from ray import serve

    source, trace = conversations(options.data, options.talks, 1.0, options.seed)
    trace = whole_conversations(trace, options.sent, options.seed)
    prompts = [list(request.chunks)[-MOST_BLOCKS:] for request in trace]
    blocks = {chunk for prompt in prompts for chunk in prompt}
    capacity = int(max(MEMORY_SHARE * len(blocks), LEAST_BLOCKS))
    settings = Settings(
        prefix_cache=False, learn="retrieved", history="asked", placement="all", filler_tokens=0, max_tokens=1
    )
    memory = int(capacity * _block_nbytes(settings, sorted(blocks)))
    rows = []
    for name, router in ROUTERS:
        mine = settings.model_copy(
            update={"store": folder / f"serving-{name.replace(' ', '-')}", "memory_bytes": memory}
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            app = application(shared_settings(mine), (), options=ReplicaOptions(2, cpus=1), router=router)
            serve.run(app, name=APPLICATION, route_prefix="/")
            rows.append({"router": name, **_sent(prompts, options.pause_s, port, Path(mine.model).name, name, console)})
        finally:
            serve.shutdown()
            _wait_until_gone()
    shares = {row["router"]: row["held_share"] for row in rows}
    over = shares["chunks"] / max(shares["round robin"], 1e-9)
    one_memory = _found_by_one(prompts, 2 * capacity)
    for row in rows:
        console.print(
            f"{row['router']}: {row['held_share']:.1%} of chunk tokens in memory, busiest replica "
            f"{row['requests_over_mean']:.2f} of the mean.",
            highlight=False,
        )
    console.print(f"One memory as large as both would find {one_memory:.1%}.", highlight=False)
    return {
        "source": source,
        "conversations": options.sent,
        "requests": len(trace),
        "blocks": len(blocks),
        "memory_share": MEMORY_SHARE,
        "pause_s": options.pause_s,
        "one_memory_share": one_memory,
        "rows": rows,
        "over_round_robin": over,
    }


def _wait_until_gone() -> None:
    """Wait for the end of Serve's controller: on a busy machine the next start would connect to it while it ends."""
    from ray.util import list_named_actors

    until_s = monotonic() + GONE_S
    while monotonic() < until_s and any("SERVE" in str(each["name"]) for each in list_named_actors(True)):
        sleep(0.5)


def _found_by_one(prompts: Sequence[Sequence[int]], capacity: int) -> float:
    """Return the share of blocks found by one memory of `capacity` blocks that drops what was used longest ago."""
    memory, found = OrderedDict[int, None](), 0
    for prompt in prompts:
        found += sum(chunk in memory for chunk in prompt)
        for chunk in prompt:
            memory[chunk] = None
            memory.move_to_end(chunk)
        while len(memory) > capacity:
            memory.popitem(last=False)
    return found / max(1, sum(map(len, prompts)))


def _sent(
    prompts: Sequence[Sequence[int]], pause_s: float, port: int, model: str, what: str, console: Console
) -> dict[str, Any]:
    held = wanted = 0
    by_replica, began = Counter[str](), perf_counter()
    with progress(console) as bar:
        for prompt in bar.track(prompts, description=what):
            documents = [{"text": _block(chunk)} for chunk in prompt]
            question = {"role": "user", "content": "What is the last word?"}
            body = {"model": model, "messages": [question], "documents": documents, "max_tokens": 1}
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=ASK_S) as answer:
                by_replica[answer.headers["x-ragfuse-replica"]] += 1
                segments = json.load(answer)["ragfuse"]["segments"]
            chunks = [each for each in segments if each["kind"] == "chunk"]
            wanted += sum(each["n_tokens"] for each in chunks)
            held += sum(each["n_tokens"] for each in chunks if each["tier"] == "memory")
            sleep(pause_s)
    return {
        "held_share": held / max(1, wanted),
        "requests_over_mean": 2 * max(by_replica.values()) / len(prompts),
        "by_replica": dict(by_replica),
        "seconds": perf_counter() - began,
    }


def _block(number: int) -> str:
    """The text of a block: words that no other block has in this order."""
    return f"Block {number}. " + " ".join(f"w{(number * 7919 + at * 104729) % 9973}" for at in range(BLOCK_WORDS))


def _block_nbytes(settings: Settings, blocks: Sequence[int]) -> float:
    """Mean bytes of the KV of a block."""
    from ragfuse.engine.engine import Engine

    with Engine(settings.model_copy(update={"disk_bytes": 0})) as engine:
        return engine.model.nbytes_per_token * mean(len(engine.tokens(_block(number))) for number in blocks)
