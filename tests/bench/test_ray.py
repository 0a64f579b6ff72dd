"""The simulation of replicas: following chunks finds more than turns do."""

from __future__ import annotations

import json

from ragfuse_bench.options import RayOptions
from ragfuse_bench.ray import run
from ragfuse_bench.ray.simulate import POLICIES, simulate
from ragfuse_bench.ray.workload import (
    conversations,
)
from rich.console import Console

SMALL = RayOptions(replicas=4, corpus=2000, questions=400, talks=40, seed=3)


def test_following_chunks_finds_more_than_turns_do_and_no_replica_has_far_more_work() -> None:
    trace = conversations(300, 1.0, seed=3)
    capacity = (
        sum(
            {
                chunk: tokens for request in trace for chunk, tokens in request.chunks.items()
            }.values()
        )
        // 10
    )
    found = {policy: simulate(trace, 2, capacity, policy) for policy in POLICIES}
    assert found["chunks"]["hit_share"] > 1.3 * found["round robin"]["hit_share"]
    assert found["chunks"]["work_over_mean"] < 1.5
    assert found["chunks"]["requests_over_mean"] < 1.5
    assert found["round robin"]["requests_over_mean"] <= 1.01


def test_the_result_is_plain_json() -> None:
    result = run.run_ray(SMALL, Console(quiet=True))
    assert json.loads(json.dumps(result)) == result
    assert [row["policy"] for row in result["corpus"]["policies"]] == list(POLICIES)
