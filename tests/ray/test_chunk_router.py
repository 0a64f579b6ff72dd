"""The router's choice, without Ray: who holds most comes first, within the bound, and tenants are apart."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ragfuse.ray.chunk_router import HORIZON, MAX_SENT, ChunkRouter, ReplicaView, RoutedRequest, chunk_digest

A, B, C = "a", "b", "c"


def test_the_replica_that_holds_most_bytes_comes_first() -> None:
    router = ChunkRouter([A, B, C])
    router.report(A, {1, 2})
    router.report(B, {3})
    assert router.rank(RoutedRequest({1: 10, 2: 10, 3: 50})) == [B, A, C]
    assert router.rank(RoutedRequest({1: 10, 2: 10, 3: 15})) == [A, B, C]
    assert router.held_bytes(A, RoutedRequest({1: 10, 2: 10, 3: 15})) == 20
    assert router.held_bytes("nobody", RoutedRequest({1: 10})) == 0


def test_what_nobody_holds_goes_to_the_one_with_the_least_work() -> None:
    router = ChunkRouter([A, B])
    router.send(A, RoutedRequest({1: 1}, 5))
    assert router.rank(RoutedRequest({9: 1})) == [B, A]
    assert router.loads() == {A: 5, B: 0}


def test_a_chunk_that_was_sent_counts_as_held_until_reports_say_otherwise() -> None:
    router, request = ChunkRouter([A, B]), RoutedRequest({7: 1})
    router.send(B, request)
    assert router.rank(request)[0] == B
    router.report(B, set())  # may be older than the request
    assert router.held_bytes(B, request) == 1
    router.report(B, set())
    assert router.held_bytes(B, request) == 0


def test_a_report_replaces_the_one_before() -> None:
    view = ReplicaView()
    view.report({1, 2})
    view.report({2, 3})
    assert [view.held_bytes(RoutedRequest({digest: 1})) for digest in (1, 2, 3)] == [0, 1, 1]


def test_a_replica_with_a_long_queue_comes_last_although_it_holds_all() -> None:
    router = ChunkRouter([A, B, C])
    router.report(A, {1})
    request = RoutedRequest({1: 1})
    assert router.rank(request, {A: 2, B: 0, C: 0})[0] == A
    assert router.rank(request, {A: 9, B: 1, C: 1})[-1] == A


def test_one_hot_chunk_does_not_bring_all_work_to_one_replica() -> None:
    names = [str(number) for number in range(8)]
    router, sent = ChunkRouter(names), Counter[str]()
    for _ in range(4000):
        request = RoutedRequest({1: 1})
        name = router.rank(request)[0]
        router.send(name, request)
        sent[name] += 1
    assert max(sent.values()) <= 1.5 * 4000 / len(names)


def test_work_counts_and_not_only_requests() -> None:
    router, work = ChunkRouter([A, B]), Counter[str]()
    for number in range(2000):
        request = RoutedRequest({number % 2: 1}, 100 if number % 2 else 1)
        name = router.rank(request)[0]
        router.send(name, request)
        work[name] += request.cost
    assert max(work.values()) <= 1.5 * sum(work.values()) / 2


def test_old_work_is_forgotten() -> None:
    router = ChunkRouter([A, B])
    for _ in range(20 * HORIZON):
        router.send(A, RoutedRequest())
    assert router.loads()[A] <= 4 * HORIZON


def test_a_new_replica_is_not_flooded_and_one_that_is_gone_is_forgotten() -> None:
    router = ChunkRouter([A, B])
    for name in (A, B, A, B):
        router.send(name, RoutedRequest({1: 1}, 10))
    router.keep_only([B, C])
    assert router.loads() == {B: 20, C: 20}
    assert router.rank(RoutedRequest({1: 1})) == [B, C]
    router.report(A, {1})
    router.send(A, RoutedRequest({1: 1}))
    assert set(router.loads()) == {B, C}


def test_an_empty_view_is_kept_when_others_come_and_go() -> None:
    router = ChunkRouter([A, B])
    router.send(A, RoutedRequest(cost=8))
    router.keep_only([A, B, C])
    assert router.loads() == {A: 8, B: 0, C: 4}


def test_what_is_believed_without_a_report_is_bounded() -> None:
    view = ReplicaView()
    view.send(RoutedRequest(dict.fromkeys(range(MAX_SENT + 10), 1)))
    assert view.held_bytes(RoutedRequest(dict.fromkeys(range(MAX_SENT + 10), 1))) == MAX_SENT
    assert view.held_bytes(RoutedRequest({MAX_SENT + 9: 1, 0: 1})) == 1


def test_a_digest_of_one_tenant_is_none_of_another() -> None:
    assert chunk_digest("s", "chunk", "text") == chunk_digest("s", "chunk", "text")
    others = [("t", "chunk", "text"), ("s", "session", "text"), ("s", "chunk", "texts"), ("sc", "hunk", "text")]
    assert chunk_digest("s", "chunk", "text") not in {chunk_digest(*each) for each in others}
    assert 0 <= chunk_digest("", "chunk", "\ud800") < 2**64


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.dictionaries(st.integers(0, 9), st.integers(1, 100)), st.integers(0, 50)), max_size=60),
)
def test_every_ranking_has_every_replica_once(n: int, asked: list[tuple[dict[int, int], int]]) -> None:
    names = [str(number) for number in range(n)]
    router = ChunkRouter(names)
    for chunks, cost in asked:
        request = RoutedRequest(chunks, cost)
        ranked = router.rank(request, {names[0]: cost})
        assert sorted(ranked) == names
        router.send(ranked[0], request)


def test_a_decision_over_10_000_known_chunks_takes_less_than_a_millisecond() -> None:
    router, known = ChunkRouter([A, B]), list(range(1, 2**60, 2**60 // 10_000))
    router.report(A, known[::2])
    router.report(B, known[1::2])
    taken = []
    for at in range(300):
        request = RoutedRequest(dict.fromkeys(known[at : at + 6], 160), 960)
        began = time.perf_counter()
        router.rank(request)
        taken.append(time.perf_counter() - began)
    assert sorted(taken)[len(taken) // 2] < 1e-3


def test_the_router_needs_neither_ray_nor_torch() -> None:
    code = "import sys, ragfuse.ray.chunk_router; print({'ray', 'torch'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
