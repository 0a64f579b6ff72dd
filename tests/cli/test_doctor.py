"""The doctor: green where all is well, and for everything that is not, one red row that says what
to do.
"""

import json
import os
from pathlib import Path

import pytest

from ragfuse import Engine
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore
from ragfuse.store.redis import RedisTier
from tests.plan.kit import timings
from tests.store.kit import key, kv
from tests.store.redis_server import RedisServer


@pytest.fixture
def doctor(run):
    """doctor(...): the exit status, and the rows by what they are about."""

    def doctor(*arguments, **changed):
        result = run("doctor", *arguments, "--json", "-", **changed)
        assert "Traceback" not in result.output + result.stderr
        said = json.loads(result.stdout)
        assert said["ok"] is (result.exit_code == 0)
        assert all(row["remedy"] for row in said["rows"] if row["state"] == "bad")
        return result.exit_code, {row["what"]: row for row in said["rows"]}

    return doctor


def bad(rows):
    return sorted(what for what, row in rows.items() if row["state"] == "bad")


# with the model


def test_a_question_is_answered_both_ways_and_nothing_is_changed(doctor, tmp_path):
    before = set(Path("/tmp").glob("ragfuse-doctor-*"))
    status, rows = doctor()
    assert (status, bad(rows)) == (0, [])
    # digests of weights, once these are seconds old
    assert set(os.listdir(tmp_path / "user")) <= {"fingerprints"}
    assert set(Path("/tmp").glob("ragfuse-doctor-*")) <= before
    assert "first token after" in rows["full prefill"]["found"]
    assert "4 of 4 chunks" in rows["reuse"]["found"]
    assert {rows[what]["state"] for what in ("verified", "calibrated", "measured")} == {"note"}
    assert rows["verified"]["remedy"].startswith("ragfuse verify ")


def test_the_doctor_shows_what_the_store_knows_of_model_and_machine(
    doctor, tiny_settings, tmp_path
):
    with Engine(tiny_settings.model_copy(update={"store": tmp_path / "user" / "store"})) as engine:
        engine.runtime.verify()
        engine.runtime.learn(engine.runtime.profile.calibrated(True, "lego", 0.06))
        engine.timings.learn(timings(engine, memory=0.0, disk=1e-9))
    _, rows = doctor()
    assert [rows[what]["state"] for what in ("verified", "calibrated", "measured")] == ["ok"] * 3
    assert "lego at 6%" in rows["calibrated"]["found"]
    assert "memory, disk" in rows["measured"]["found"]


def test_a_model_that_cannot_answer_is_one_red_row(doctor):
    status, rows = doctor(RAGFUSE_MODEL="minilm-l6")
    assert (status, bad(rows)) == (1, ["model"])
    assert "minilm-l6" in rows["model"]["found"]


# without it


def test_every_tier_has_a_row_and_one_that_is_silent_is_red(doctor, tmp_path):
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    try:
        tiers = {
            "RAGFUSE_TIERS": json.dumps(
                [server.url(), str(tmp_path / "cold"), f"file://{tmp_path}/far/kv"]
            ),
            "RAGFUSE_TIER_TIMEOUT_S": "0.5",
        }
        with KVStore([RedisTier(server.url())]) as store:
            store.put(key("a"), kv(), wait=True)
        status, rows = doctor("--quick", **tiers)
        named = ["tier disk", "tier redis", "tier disk-2", "tier objects"]
        assert (status, [what for what in rows if what.startswith("tier ")]) == (0, named)
        assert "1 entry, 2.2 KB of" in rows["tier redis"]["found"]
        assert "of 1 read as a test, 0 were damaged" in rows["tier redis"]["found"]
    finally:
        server.kill()
    status, rows = doctor("--quick", **tiers)
    assert (status, bad(rows)) == (1, ["tier redis"])
    assert "does not answer" in rows["tier redis"]["found"]
    assert rows["tier redis"]["remedy"].startswith("start it")
    assert not [name for name in ("cold", "far") if (tmp_path / name).exists()]


def test_damaged_entries_are_counted(doctor, tmp_path):
    folder = tmp_path / "user" / "store"
    with KVStore([DiskTier(folder, 1 << 20, lru)]) as store:
        for i in range(3):
            store.put(key(i), kv(i), wait=True)
    for file in list((folder / "chunks").rglob("*.kv"))[:2]:
        data = bytearray(file.read_bytes())
        data[-65] ^= 255
        file.write_bytes(data)
    status, rows = doctor("--quick")
    assert (status, bad(rows)) == (1, ["tier disk"])
    assert "of 3 read as a test, 2 were damaged" in rows["tier disk"]["found"]
    assert doctor("--quick", RAGFUSE_MODEL="/nowhere/at/all")[0] == 0  # it loads no model
