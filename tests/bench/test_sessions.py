"""The simulation of many conversations: nothing is lost or made up, whatever the policy."""

import gzip
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from ragfuse_bench.options import SessionOptions
from ragfuse_bench.sessions import run, simulate
from ragfuse_bench.sessions.lengths import PAPER_TURNS, Lengths, packaged, read_lengths, talks_of, tokens_of
from ragfuse_bench.sessions.run import run_sessions
from ragfuse_bench.sessions.server import GB, SERVERS, Server
from ragfuse_bench.sessions.simulate import Given, Simulation
from ragfuse_bench.sessions.tiers import Tiers
from ragfuse_bench.sessions.trace import Turn, described, drawn, mooncake
from rich.console import Console
from typer.testing import CliRunner

from ragfuse.cli.main import app
from ragfuse.errors import InputError
from ragfuse.plan.evict import by_use

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
    assert tally.turns == sum(map(len, talks)) == tally.ram + tally.disk + tally.missed + tally.first
    assert tally.first == len(talks)
    assert tally.rates()["hit"] == pytest.approx((tally.ram + tally.disk) / tally.turns)
    assert tally.events == 2 * tally.turns + tally.fetched


@pytest.mark.parametrize("policy", POLICIES)
def test_with_memory_for_all_every_later_turn_hits_in_it(talks, policy):
    tally = simulated(talks, policy, memory=PLENTY)
    assert tally.rates()["later_hit"] == 1
    assert (tally.missed, tally.disk, tally.fetched) == (0, 0, 0)


def test_without_anything_kept_all_is_missed_and_computed_again(talks):
    tally = simulated(talks, "none")
    assert (tally.ram, tally.disk, tally.saved_tokens) == (0, 0, 0)
    assert tally.first_token_s > simulated(talks, memory=PLENTY).first_token_s


def test_where_room_is_short_look_ahead_hits_most_and_mostly_in_memory(talks):
    found = {policy: simulated(talks, policy).rates() for policy in POLICIES}
    assert found["look-ahead"]["hit"] > max(found["lru"]["hit"], found["fifo"]["hit"]) + 0.05
    assert found["look-ahead"]["ram"] > 3 * max(found["lru"]["ram"], found["fifo"]["ram"])


def test_who_knows_the_whole_queue_hits_no_less_than_who_knows_its_window(talks):
    assert simulated(talks).rates()["hit"] >= simulated(talks, whole_queue=False).rates()["hit"]


def test_a_cut_that_invalidates_kv_costs_hits():
    turns = tuple(Turn(100, 900, 1.0) for _ in range(8))
    server = SERVERS["LLaMA-13B"]
    free, coupled = (simulated([turns], memory=PLENTY, server=server, decoupled=kind) for kind in (True, False))
    assert (free.missed, free.ram) == (0, 7)
    assert coupled.missed == 2  # the window of 4,096 tokens overflows at the fifth turn, and half of it later again


def test_what_is_unused_for_too_long_is_missed():
    turns = (Turn(10, 10, 1.0), Turn(10, 10, 50.0), Turn(10, 10, 5000.0))
    tally = simulated([turns], memory=PLENTY, ttl_s=3600.0)
    assert (tally.ram, tally.missed) == (1, 1)


def test_what_warms_up_is_not_counted(talks):
    all_turns, some = sum(map(len, talks)), simulated(talks, warm_turns=200)
    assert some.turns == all_turns - 200
    assert 0 < some.begun_s < some.ended_s


def test_the_same_seed_gives_the_same_and_another_another():
    first, again, other = (drawn(packaged(), 60, 1.0, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert simulated(first) == simulated(again)


def test_a_turn_served_alone_takes_what_its_tokens_take():
    server = Server("round", 1, 1000.0, None, 1, batch=2, usual_tokens=1000)
    turns = (Turn(100, 10, 0.0), Turn(50, 10, 1e6))
    tally = Simulation([turns], Given(server, PLENTY, 0, "lru")).run()
    assert tally.first_token_s == pytest.approx(150 * server.prefill_s)
    assert tally.saved_tokens == 110
    again = Simulation([turns], Given(server, 0, 0, "none")).run()
    assert again.first_token_s == pytest.approx((150 + 110) * server.prefill_s)


class Recorder(Tiers):
    """Checks after every change that all fits, that nothing is in two tiers, and what is kept."""

    def _make_room(self):
        super()._make_room()
        assert self.memory.nbytes <= int(self.memory_bytes * 0.9)
        assert self.disk.nbytes <= self.disk_bytes
        names = [item.name for tier in (self.memory, self.disk) for item in tier._items.values()]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("policy", POLICIES)
def test_tiers_never_hold_more_than_they_have_room_for_nor_anything_twice(talks, policy, monkeypatch):
    monkeypatch.setattr(simulate, "Tiers", Recorder)
    assert simulated(talks, policy).missed > 0


def test_conversations_of_one_tier_go_to_the_next_and_then_out():
    tiers = Tiers(by_use, 20, 20, free_share=0.0)
    for now, name in enumerate("abcde"):
        tiers.save(name, 10, float(now))
    assert [tiers.find(name, 9.0) for name in "abcde"] == [None, "disk", "disk", "ram", "ram"]
    tiers.fetch("b")
    assert [tiers.find(name, 9.0) for name in "bcde"] == ["disk", "disk", "ram", "ram"]  # least recently used: back
    tiers.use("b", 9.0)
    tiers.fetch("b")
    assert [tiers.find(name, 9.0) for name in "bcde"] == ["ram", "disk", "disk", "ram"]


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


@pytest.fixture
def folder(tmp_path):
    """A folder of data: three conversations, and requests of a trace of which two go on with others."""
    spoken = [
        [("ab" * 8, "c" * 40), ("你好", "好" * 10)],
        [("x" * 4, "y" * 4)],
        [("q" * 400, "r" * 80), ("q" * 40, "r" * 800), ("q" * 4, "r" * 80)],
    ]
    requests = [(0, 1600, [0, 1, 2, 3]), (5000, 900, [0, 9]), (9000, 2600, [0, 1, 2, 7, 8, 10])]
    requests += [(12000, 1100, [0, 5, 6]), (60000, 3100, [0, 1, 2, 7, 8, 11, 12])]
    for path, rows in (
        (
            "multiturn/sharegpt_zh_1k.jsonl.gz",
            [
                {
                    "conversations": [
                        {"from": who, "value": turn[who == "gpt"]} for turn in turns for who in ("human", "gpt")
                    ]
                }
                for turns in spoken
            ],
        ),
        (
            "traces/mooncake_conversation_trace.jsonl.gz",
            [
                {"timestamp": at, "input_length": n, "output_length": 50, "hash_ids": blocks}
                for at, n, blocks in requests
            ],
        ),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(tmp_path / path, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return tmp_path


def test_lengths_are_counted_from_a_folder_and_come_back_from_json(folder):
    lengths = read_lengths(folder)
    assert lengths.turns == ((1, 1), (2, 1), (3, 1))
    assert (lengths.answers[0], lengths.answers[-1]) == (1, 200)
    assert (lengths.pauses[0], lengths.pauses[-1]) == (9, 51)
    assert Lengths.from_dict(json.loads(json.dumps(lengths.as_dict()))) == lengths


def test_tokens_are_reckoned_from_characters():
    assert tokens_of("abcd" * 10) == 10
    assert tokens_of("你好" * 10) == 30
    assert tokens_of("") == 1


def test_a_request_goes_on_with_the_one_whose_whole_blocks_it_begins_with(folder):
    found = mooncake(folder)
    assert sorted(Counter(map(len, found)).items()) == [(1, 2), (3, 1)]
    longest = max(found, key=len)
    assert [(turn.at_s, turn.history, turn.question) for turn in longest] == [
        (0, 0, 1600),
        (9, 1536, 1064),
        (60, 2560, 540),
    ]


def slow_talk(rows, at):
    """The earlier request, all of whose whole blocks this one begins with, that has most of them."""
    mine = rows[at]["hash_ids"][: rows[at]["input_length"] // 512]
    best = (1, -1)
    for earlier in range(at):
        theirs = rows[earlier]["hash_ids"][: rows[earlier]["input_length"] // 512]
        if len(theirs) > 1 and mine[: len(theirs)] == theirs:
            best = max(best, (len(theirs), earlier))
    return best


def test_conversations_of_a_trace_are_those_that_comparing_all_with_all_finds():
    rng, rows = np.random.default_rng(0), []
    for _ in range(120):
        if rows and rng.random() < 0.6:
            base = rows[rng.integers(len(rows))]
            whole = base["input_length"] // 512
            blocks = base["hash_ids"][: rng.integers(1, whole + 1)] if rng.random() < 0.3 else base["hash_ids"][:whole]
        else:
            blocks = [0]
        blocks = [*blocks, *(1000 * len(rows) + k for k in range(rng.integers(1, 4)))]
        rows.append({"input_length": 512 * len(blocks) - int(rng.integers(0, 512)), "hash_ids": blocks})
    talk_of = []
    for at, (_, talk, shared) in enumerate(talks_of(iter(rows))):
        blocks, earlier = slow_talk(rows, at)
        assert (talk, shared) == ((talk_of[earlier], 512 * blocks) if earlier >= 0 else (at, 0))
        talk_of.append(talk)


def test_a_folder_without_the_data_is_refused(tmp_path):
    with pytest.raises(InputError, match="sharegpt"):
        read_lengths(tmp_path)


@pytest.fixture
def small(monkeypatch):
    """A hundredth of the conversations on a hundredth of the bytes, for --quick."""
    monkeypatch.setattr(run, "QUICK_SHARE", 1 / 100)


def test_the_command_writes_what_it_must(tmp_path, folder, small):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "sessions.json", tmp_path / "sessions.png"
    arguments = ["bench", "sessions", "--quick", "--data", str(folder), "--json", str(out), "--plot", str(picture)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    names = [row["name"] for row in found["settings"]]
    assert names == ["128G/2T", "128G/10T", "Mooncake 128G/2T", "Mooncake 128G/10T"]
    for row in found["settings"]:
        for policy in ("look_ahead", "lru", "fifo"):
            rates = row[policy]
            assert rates["hit"] == pytest.approx(rates["ram"] + rates["disk"])
            assert 0 <= rates["hit"] <= rates["later_hit"] <= 1
    assert found["events_per_s"] > 0
    assert str(folder) not in out.read_text()
    assert picture.stat().st_size > 1000


def test_a_folder_that_is_none_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["bench", "sessions", "--data", str(tmp_path / "nowhere")])
    assert result.exit_code == 1


def test_without_data_it_runs_on_what_comes_along(small):
    found = run_sessions(SessionOptions(quick=True), Console(quiet=True))
    assert [row["name"] for row in found["settings"]] == ["128G/2T", "128G/10T"]
    assert found["loads"]["drawn"]["sessions"] == 90
