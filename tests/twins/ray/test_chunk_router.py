"""The router's choice, without Ray: who got most comes first, within the bound, and tenants are
apart.
"""

from collections import Counter

from ragfuse.ray.chunk_router import HORIZON, MAX_SENT, ChunkRouter, chunk_digest

A, B, C = "a", "b", "c"


def test_the_replica_that_got_most_bytes_comes_first():
    assert ChunkRouter([A]).rank({}) == [A]
    router = ChunkRouter([A, B, C])
    router.send(A, {1: 3, 2: 2})
    router.send(B, {3: 4})
    assert router.rank({1: 10, 2: 10, 3: 50}) == [B, A, C]
    assert router.rank({1: 10, 2: 10, 3: 15}) == [A, B, C]
    assert router.rank({9: 1}) == [C, B, A], "what nobody got goes to the one with the least work"


def test_a_replica_with_a_long_queue_comes_last_although_it_got_all():
    router, request = ChunkRouter([A, B, C]), {1: 1}
    router.send(A, request)
    assert router.rank(request, {A: 2, B: 0, C: 0})[0] == A
    assert router.rank(request, {A: 9, B: 1, C: 1})[-1] == A


def test_one_hot_chunk_does_not_bring_all_work_to_one_replica():
    names = [str(number) for number in range(8)]
    router, work = ChunkRouter(names), Counter[str]()
    for number in range(4000):
        request = {1: 100 if number % 2 else 1}
        name = router.rank(request)[0]
        router.send(name, request)
        work[name] += request[1]
    assert max(work.values()) <= 1.5 * sum(work.values()) / len(names)


def test_old_work_is_forgotten():
    router = ChunkRouter([A, B])
    for _ in range(20 * HORIZON):
        router.send(A, {1: 1})
    for _ in range(5 * HORIZON):
        router.send(B, {2: 1})
    assert router.rank({}) == [A, B]


def test_a_new_replica_is_not_flooded_and_one_that_is_gone_is_forgotten():
    router, request = ChunkRouter([A, B]), {1: 10}
    for name in (A, B, B):
        router.send(name, request)
    router.keep_only([B, C])
    router.send(A, request)
    assert router.rank(request) == [B, C]
    assert router.rank({2: 1}) == [B, C], "it begins with the mean of the others' work"


def test_a_router_remembers_a_bounded_number_of_chunks():
    router, first = ChunkRouter([A, B]), {0: 1}
    router.send(A, first)
    assert router.rank(first)[0] == A
    router.send(A, dict.fromkeys(range(1, MAX_SENT + 1), 1))
    assert router.rank(first)[0] == B


def test_a_digest_of_one_tenant_is_none_of_another():
    assert chunk_digest("s", "chunk", "text") == chunk_digest("s", "chunk", "text")
    others = [
        ("t", "chunk", "text"),
        ("s", "session", "text"),
        ("s", "chunk", "texts"),
        ("sc", "hunk", "text"),
    ]
    assert chunk_digest("s", "chunk", "text") not in {chunk_digest(*each) for each in others}
    assert 0 <= chunk_digest("", "chunk", "\ud800") < 2**64
