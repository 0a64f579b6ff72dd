"""The simulation of replicas: nothing is lost, memory is bounded, and following chunks finds more than turns do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from ragfuse_bench.ray import run
from ragfuse_bench.ray.options import RayOptions
from ragfuse_bench.ray.simulate import POLICIES, SimulatedReplica, lookup_us, simulate
from ragfuse_bench.ray.workload import (
    BLOCK,
    TOPIC_PASSAGES,
    TimedRequest,
    conversations,
    questions,
    whole_conversations,
)
from rich.console import Console
from typer.testing import CliRunner

from ragfuse.cli.main import app
from ragfuse.errors import SettingsError

SMALL = RayOptions(parts=("simulation",), replicas=4, corpus=2000, questions=400, talks=40, seed=3)


def test_turns_of_a_conversation_repeat_its_blocks_behind_one_shared_block() -> None:
    _, trace = conversations(None, 30, 1.0, seed=3)
    assert [request.at_s for request in trace] == sorted(request.at_s for request in trace)
    times = Counter(chunk for request in trace for chunk in request.chunks)
    assert times[0] == len([request for request in trace if request.tokens >= BLOCK])
    assert any(count > 1 for chunk, count in times.items() if chunk)
    assert all(set(request.chunks.values()) <= {BLOCK} and request.fresh >= 1 for request in trace)


def test_a_sample_of_a_trace_has_whole_conversations_that_come_back() -> None:
    _, trace = conversations(None, 60, 1.0, seed=3)
    sample = whole_conversations(trace, 5, seed=1)
    assert [request.at_s for request in sample] == sorted(request.at_s for request in sample)
    chosen = {list(request.chunks)[1] for request in sample}
    assert len(chosen) == 5
    assert sample == [request for request in trace if chosen & set(list(request.chunks)[1:2])]
    assert min(Counter(list(request.chunks)[1] for request in sample).values()) > 1


def test_questions_retrieve_most_passages_of_one_topic() -> None:
    for request in questions(50, 2000, 10.0, seed=1):
        topics = Counter(chunk // TOPIC_PASSAGES for chunk in request.chunks)
        assert max(topics.values()) >= 5
        assert len(request.chunks) in (5, 6)


def test_a_replica_keeps_what_was_used_last_within_its_memory() -> None:
    replica = SimulatedReplica(capacity=20)
    assert replica.answer(TimedRequest(0.0, {1: 10, 2: 10}, 1), 1.0)[0] == 0
    assert replica.answer(TimedRequest(1.0, {1: 10}, 1), 1.0)[0] == 10
    assert replica.answer(TimedRequest(2.0, {3: 10}, 1), 1.0)[0] == 0
    assert list(replica.memory) == [1, 3]
    assert replica.tokens == 20
    assert replica.queue(2.0) == 3
    assert replica.queue(1e9) == 0


def test_following_chunks_finds_more_than_turns_do_and_no_replica_has_far_more_work() -> None:
    _, trace = conversations(None, 300, 1.0, seed=3)
    capacity = sum({chunk: tokens for request in trace for chunk, tokens in request.chunks.items()}.values()) // 10
    found = {policy: simulate(trace, 2, capacity, policy) for policy in POLICIES}
    assert found["chunks"]["hit_share"] > 1.3 * found["round robin"]["hit_share"]
    assert found["chunks"]["work_over_mean"] < 1.5
    assert found["chunks"]["requests_over_mean"] < 1.5
    assert found["round robin"]["requests_over_mean"] <= 1.01


def test_the_result_is_plain_json_and_a_picture_is_drawn(tmp_path: Path) -> None:
    result = run.run_simulations(SMALL, Console(quiet=True))
    assert json.loads(json.dumps(result)) == result
    assert [row["policy"] for row in result["corpus"]["policies"]] == list(POLICIES)
    run.draw(result, tmp_path / "ray.png")
    assert (tmp_path / "ray.png").stat().st_size > 1000


def test_a_decision_is_timed() -> None:
    taken = lookup_us(100, 4, 6, 20)
    assert 0 < taken["p50"] <= taken["p99"] <= taken["max"]


@pytest.mark.parametrize("options", [{"parts": ("all",)}, {"parts": ()}, {"parts": ("bulk",), "plot": Path("x.png")}])
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        RayOptions(**options)  # type: ignore[arg-type]


def test_the_parts_that_need_ray_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragfuse.ray.cluster.find_spec", lambda name: None)
    said = CliRunner().invoke(app, ["bench", "ray", "--parts", "bulk"])
    assert said.exit_code == 1
    assert "Wanted the package ray" in said.output
