"""The simulation of many conversations: nothing is lost or made up, whatever the policy."""

import json
from dataclasses import replace

import numpy as np
import pytest
from ragfuse_bench.options import SessionOptions
from ragfuse_bench.sessions import run
from ragfuse_bench.sessions.lengths import PAPER_TURNS, packaged
from ragfuse_bench.sessions.server import GB, SERVERS, Server
from ragfuse_bench.sessions.simulate import Given, Simulation
from ragfuse_bench.sessions.trace import Turn, described, drawn
from typer.testing import CliRunner

from ragfuse.cli.main import app

SMALL = replace(SERVERS["LLaMA-13B"], window=None, batch=1)
"""A server on which people wait, and no conversation is cut."""
PLENTY = 10**15


POLICIES = SessionOptions.policies


@pytest.fixture(scope="module")
def talks():
    return drawn(packaged(), 120, 10.0, seed=3)


def simulated(talks, policy="look-ahead", memory=16 * GB, disk=40 * GB, server=SMALL, **more):
    return Simulation(talks, Given(server, memory, disk, policy, **more)).run()


@pytest.mark.parametrize("policy", [*POLICIES, "none"])
def test_every_turn_is_a_hit_a_miss_or_a_first_one(talks, policy):
    tally = simulated(talks, policy)
    assert (
        tally.turns == sum(map(len, talks)) == tally.ram + tally.disk + tally.missed + tally.first
    )
    assert tally.first == len(talks)
    assert tally.rates()["hit"] == pytest.approx((tally.ram + tally.disk) / tally.turns)
    assert tally.events == 2 * tally.turns + tally.fetched


@pytest.mark.parametrize("policy", POLICIES)
def test_with_memory_for_all_every_later_turn_hits_in_it(talks, policy):
    tally = simulated(talks, policy, memory=PLENTY)
    assert tally.rates()["later_hit"] == 1
    assert (tally.missed, tally.disk, tally.fetched) == (0, 0, 0)


def test_a_turn_served_alone_takes_what_its_tokens_take():
    server = Server("round", 1, 1000.0, None, 1, batch=2, usual_tokens=1000)
    turns = (Turn(100, 10, 0.0), Turn(50, 10, 1e6))
    tally = Simulation([turns], Given(server, PLENTY, 0, "lru")).run()
    assert tally.first_token_s == pytest.approx(150 * server.prefill_s)
    assert tally.saved_tokens == 110
    again = Simulation([turns], Given(server, 0, 0, "none")).run()
    assert again.first_token_s == pytest.approx((150 + 110) * server.prefill_s)


def test_what_is_drawn_has_the_paper_s_turns_and_the_real_lengths():
    lengths = packaged()
    found = drawn(lengths, 4000, 1.0, seed=0)
    said = described(found)
    assert said["turns"] == pytest.approx(PAPER_TURNS, rel=0.05)
    assert np.mean([len(talk) == 1 for talk in found]) == pytest.approx(0.27, abs=0.03)
    answers = [turn.answer for talk in found for turn in talk]
    assert np.median(answers) == pytest.approx(lengths.answers[len(lengths.answers) // 2], rel=0.05)
    assert max(answers) <= lengths.answers[-1]
    assert found[-1][0].pause_s == pytest.approx(4000, rel=0.1)


def test_a_full_window_loses_its_earliest_half():
    turns = tuple(Turn(100, 900, 1.0) for _ in range(5))
    tally = simulated([turns], memory=PLENTY, server=SERVERS["LLaMA-13B"])
    assert (tally.missed, tally.ram) == (0, 4)
    # 4,000 and 1,000 overflow the window of 4,096
    assert tally.saved_tokens == 1000 + 2000 + 3000 + 1952


def test_the_command_writes_what_it_must(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "QUICK_SHARE", 1 / 100)
    out = tmp_path / "sessions.json"
    result = CliRunner().invoke(app, ["bench", "sessions", "--quick", "--json", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert [row["name"] for row in found["settings"]] == ["128G/2T", "128G/10T"]
    assert found["loads"]["drawn"]["sessions"] == 90
    for row in found["settings"]:
        for policy in ("look_ahead", "lru", "fifo"):
            rates = row[policy]
            assert rates["hit"] == pytest.approx(rates["ram"] + rates["disk"])
            assert 0 <= rates["hit"] <= rates["later_hit"] <= 1
    assert found["events_per_s"] > 0
