"""Pieces of KV over real lines to real servers: each arrives whole, at a level that the deadline
allows, or is text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from ragfuse_bench.line import constant, line_to
from ragfuse_bench.stream.lines import published

from ragfuse.load.stream import BYTES_UNREADABLE, GIVEN_UP, NOT_WAITED_FOR, Link, Stream
from ragfuse.plan.stream_level import StreamPart
from ragfuse.store import KVStore
from ragfuse.store.redis import RedisTier
from ragfuse.types.plan import Fetch
from tests.kits.redis_server import RedisServer
from tests.kits.replay import SCALE
from tests.kits.store import CODECS, encoded_at, key, kv, same

LAYERS, TOKENS, PIECES = 3, 1000, 4
CHUNKS = tuple(kv(seed, TOKENS, n_layers=LAYERS) for seed in range(PIECES))
SIZES = {level: encoded_at(CHUNKS[0], level)[0].nbytes for level in ("raw", "int8")}


class Watched(KVStore):
    """A store with one tier that says which piece is about to be read."""

    def __init__(self, tier, line):
        super().__init__([tier])
        self.line, self.before = line, lambda number: None
        self.reads: list[int] = []

    def read_encoded(self, wanted, first, count, tier, level):
        number = next(at for at in range(PIECES) if key(at) == wanted)
        self.reads.append(number)
        self.before(number)
        return super().read_encoded(wanted, first, count, tier, level)


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    """The port of a server."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server.port
    server.kill()


@pytest.fixture
def store(redis):
    """Chunks at two levels on a real server behind a line."""
    with line_to(redis) as line:
        tier = RedisTier(f"redis://127.0.0.1:{line.port}/0", name="line", timeout_s=3.0)
        for number, chunk in enumerate(CHUNKS):
            assert tier.put(key(number), *encoded_at(chunk, "raw", "int8"))
        with Watched(tier, line) as store:
            store.lookup([key(number) for number in range(PIECES)])
            yield store


@dataclass
class Case:
    """A stream to be: seconds of its deadline, and to compute a piece."""

    store: Watched
    text_s: float | None = 1.0
    link: Link = field(default_factory=Link)

    def run(self, deadline_s, **terms):
        """What came, decoded and compared."""
        parts = parts_of(self.text_s)
        with Stream(self.store, parts, LAYERS, self.link, deadline_s, **terms, clock=Since()) as s:
            s.run()
            for layer in range(LAYERS):
                found = s.read(layer)
                assert set(found) == set(s.received)
                assert all(
                    same(found[at], at_level(at, level, layer))
                    for at, (level, _) in s.received.items()
                )
        for segment, (level, nbytes) in s.received.items():
            steps = [each for each in s.pieces if segment in each.segments and not each.why]
            assert [each.level for each in steps] in (["raw"], ["int8"], ["int8", "raw"])
            assert level == steps[-1].level
            assert nbytes == sum(each.nbytes for each in steps)
        assert set(s.received) | set(s.text) == set(range(PIECES))
        assert not set(s.received) & set(s.text)
        return s


def part(number, text_s, segments=()):
    """A chunk at both levels, for the segment of its number or these."""
    fetch = Fetch(number, key(number), "line", "raw", SIZES["raw"], TOKENS, tuple(SIZES.items()))
    return StreamPart(fetch, segments or (number,), TOKENS * max(1, len(segments)), text_s)


def parts_of(text_s):
    return [part(at, text_s) for at in range(PIECES)]


def opened(store, parts, deadline_s, prior=None, link=None, clock=None):
    return Stream(
        store, parts, LAYERS, link or Link(), deadline_s, prior=prior, clock=clock or Since()
    )


class Since:
    """Seconds since it was made."""

    def __init__(self):
        import time

        self._clock, self._began = time.perf_counter, time.perf_counter()

    def __call__(self):
        return self._clock() - self._began


def at_level(segment, level, layer):
    meta, blobs = encoded_at(CHUNKS[segment], level)
    return CODECS[level].decode(blobs[layer], meta.layers[layer])


def levels(stream):
    """What each piece came as."""
    return [piece.level for piece in stream.pieces]


def mbps(number):
    return constant(number * 1e6)


@pytest.mark.parametrize(("text_s", "why"), [(1.0, GIVEN_UP), (None, BYTES_UNREADABLE)])
def test_a_line_that_stands_still_is_given_up_and_what_had_come_is_used(store, text_s, why):
    store.line.start(mbps(4))
    store.before = lambda number: store.line.start(constant(0.0)) if number == 2 else None
    stream = Case(store, text_s).run(1.5, prior=4e6)
    assert sorted(stream.received) == [0, 1]
    assert stream.text == {2: why, 3: why}


def test_a_line_that_breaks_in_the_middle_of_a_piece_loses_nothing_but_bytes(store):
    store.line.start(mbps(8), breaks=[1.5 * SIZES["raw"]])
    stream = Case(store, text_s=60.0).run(30.0, prior=1e9)
    assert sorted(stream.received) == list(range(PIECES))
    assert store.line.carried > sum(piece.nbytes for piece in stream.pieces if not piece.why)


@pytest.mark.parametrize("course", [*published(SCALE, 3.0)], ids=lambda course: course.name)
def test_whatever_a_line_does_each_segment_arrives_whole_or_is_text(store, course):
    store.line.start(course.trace.to_mean(2e6, 1.0))
    stream = Case(store, text_s=0.5).run(1.0)
    assert sum(piece.nbytes for piece in stream.pieces) <= store.line.carried


def test_a_segment_that_is_gone_takes_no_other_with_it(store):
    store.before = lambda number: store.tiers[0].delete([key(1)]) if number == 0 else None
    parts = parts_of(60.0)
    with opened(store, parts, 30.0, 1e9) as stream:
        stream.run()
        assert set(stream.read(0)) == {0, 2, 3}
    assert stream.text == {1: BYTES_UNREADABLE}
    assert all(piece.segments == (1,) for piece in stream.pieces if piece.why)


def test_an_entry_that_segments_share_crosses_the_line_once(store):
    parts = [part(0, 60.0, (0, 1)), part(2, 60.0)]
    with opened(store, parts, 30.0, 1e9) as stream:
        stream.run()
        found = stream.read(0)
        assert found[0] is found[1]
    assert set(store.reads) == {0, 2}
    assert sorted(stream.received) == [0, 1, 2]
    assert [stream.received[at][1] > 0 for at in range(3)] == [True, False, True]
    assert stream.pieces[0].segments == (0, 1)


def test_something_of_all_comes_first_and_better_levels_while_time_is_left(store):
    parts = parts_of(60.0)
    store.line.start(mbps(4))
    with opened(store, parts, 30.0, 1e4) as stream:
        stream.run()
        for layer in range(LAYERS):
            assert all(
                same(kv, at_level(at, "raw", layer)) for at, kv in stream.read(layer).items()
            )
    assert levels(stream)[:1] == ["int8"]
    assert {level for level, _ in stream.received.values()} == {"raw"}
    assert not stream.text


def test_a_line_that_falls_while_better_levels_come_costs_no_time_and_nothing_that_was_there(store):
    parts = parts_of(60.0)
    store.line.start(mbps(0.5))
    deadline_s = 2 * PIECES * SIZES["raw"] / 0.5e6
    seen = []

    def stands(number):
        seen.append(number)
        if len(seen) == PIECES + 1:
            store.line.start(constant(0.0))

    store.before = stands
    with opened(store, parts, deadline_s) as stream:
        stream.run()
        assert set(stream.read(0)) == set(range(PIECES))
    assert stream.pieces[-1].why == NOT_WAITED_FOR
    assert {level for level, _ in stream.received.values()} == {"int8"}


# without a server


def test_a_link_lets_so_many_read_at_once_and_no_more():
    slot = Link(2).slot
    assert [slot.acquire(blocking=False) for _ in range(3)] == [True, True, False]


def test_what_a_link_carried_counts_for_all_who_share_it_and_not_for_ever():
    now = [0.0]
    link = Link(clock=lambda: now[0])
    assert link.throughput is None
    with link.joined(), link.joined():
        link.record(1000, 2.0)
    assert link.throughput == 1000.0
    now[0] = 1e6
    assert link.throughput is None
