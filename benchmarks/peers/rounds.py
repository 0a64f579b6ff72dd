"""The measurement: every peer answers every prompt in turn, one at a time, and the clock on the
wall counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ragfuse_bench.rounds import speedup
from rich.console import Console

from benchmarks.peers.offers import OFFERS
from benchmarks.peers.process import Peer, PeerError
from benchmarks.peers.prompts import Recurring
from ragfuse.telemetry.progress import progress

YARDSTICK = next(iter(OFFERS))
"""The peer whose tokens the others' are compared with."""
OURS = "ragfuse"
WARM_UP = 1
"""Prompts that everyone answers before it counts."""


@dataclass(frozen=True)
class Reply:
    """One answer: seconds on the wall and of CPU until the first token was known, and the answer's
    ids.
    """

    wall_s: float
    cpu_s: float
    ids: tuple[int, ...]


def reply(
    peer: Peer, ids: Sequence[int], max_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> Reply:
    """Ask a peer, and read its answer to the end, so that nothing of it runs beside the next."""
    cpu, wall = peer.process.cpu_s, clock()
    tokens = peer.answer(ids, max_tokens)
    first = next(tokens, None)
    wall_s, cpu_s = clock() - wall, peer.process.cpu_s - cpu
    if first is None:
        raise peer.process.failure("answered no token")
    return Reply(wall_s, cpu_s, (first, *tokens))


@dataclass
class Match:
    """Peers on prompts of several lengths.

    Args:
        peers: Running peers by name; one that fails is left out from then on.
        max_tokens: Most tokens of an answer.
        ends: Ids that end an answer.
        console: Where progress is shown.
    """

    peers: dict[str, Peer]
    max_tokens: int
    ends: frozenset[int]
    console: Console

    def __post_init__(self) -> None:
        self.failed: list[str] = []

    def measure(self, work: Recurring) -> list[dict[str, Any]]:
        """Warm all up, then ask everyone every prompt; one row of figures a peer.

        Raises:
            PeerError: The yardstick failed.
        """
        held = {
            name: self._guarded(name, lambda peer: peer.hold(work.chunks)) or {}
            for name in [*self.peers]
        }
        replies: dict[str, list[Reply]] = {name: [] for name in self.peers}
        before = sum(len(work.beginnings) for name in self.peers if OFFERS[name].keeps_many)
        with progress(self.console) as bar:
            task = bar.add_task("prompts", total=before + len(work.prompts) * len(self.peers))
            for name in [*self.peers]:
                for ids in work.beginnings if OFFERS[name].keeps_many else ():
                    bar.update(task, description=f"beginnings: {name}")
                    self._guarded(name, lambda peer, ids=ids: reply(peer, ids, 1))  # type: ignore[misc]
                    bar.advance(task)
            for index, ids in enumerate(work.prompts):
                for name in [*self.peers]:
                    bar.update(task, description=f"{len(ids):,} tokens, prompt {index}: {name}")
                    # type: ignore[misc]
                    found = self._guarded(
                        name, lambda peer, ids=ids: reply(peer, ids, self.max_tokens)
                    )
                    if found is not None:
                        replies[name].append(found)
                    bar.advance(task)
        counted = {name: replies[name][WARM_UP:] for name in self.peers}
        tokens = sum(map(len, work.prompts[WARM_UP:])) / len(work.prompts[WARM_UP:])
        shape = {
            "tokens": tokens,
            "n": len(work.prompts) - WARM_UP,
            "chunks": work.drawn,
            "pool": len(work.chunks),
        }
        return [{**shape, **self._row(name, counted), **held[name]} for name in self.peers]

    def _guarded(self, name: str, act: Callable[[Peer], Any]) -> Any:
        """What a peer gives; None where it fails, which leaves it out."""
        if name not in self.peers:
            return None
        try:
            return act(self.peers[name])
        except PeerError as error:
            if name == YARDSTICK:
                raise
            self.peers.pop(name).process.close()
            self.failed.append(f"{name} is left out: {error}")
            self.console.print(self.failed[-1], highlight=False, markup=False)
            return None

    def _row(self, name: str, replies: Mapping[str, Sequence[Reply]]) -> dict[str, Any]:
        mine, wanted, ours = replies[name], replies[YARDSTICK], replies.get(OURS)
        peer, pairs = self.peers[name], list(zip(replies[name], replies[YARDSTICK], strict=True))
        seconds = [each.wall_s for each in mine]
        return {
            "peer": name,
            "version": peer.version,
            "wall_s": median(seconds),
            "cpu_s": median(each.cpu_s for each in mine),
            "rounds_s": seconds,
            "speedup": speedup([each.wall_s for each in wanted], seconds),
            "ragfuse_speedup": speedup(seconds, [each.wall_s for each in ours])
            if ours is not None
            else None,
            "same_first_token": sum(a.ids[0] == b.ids[0] for a, b in pairs) / len(pairs),
            "same_answer": sum(self._text(a) == self._text(b) for a, b in pairs) / len(pairs),
            "resident_bytes": peer.process.resident_bytes,
            "disk_bytes": peer.disk_bytes,
        }

    def _text(self, found: Reply) -> tuple[int, ...]:
        """The ids of an answer before its end."""
        end = next(
            (index for index, token in enumerate(found.ids) if token in self.ends), len(found.ids)
        )
        return found.ids[:end]
