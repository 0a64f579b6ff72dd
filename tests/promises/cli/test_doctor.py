"""The doctor: green where all is well, and for everything that is not, one red row that says what
to do.
"""

import json
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ragfuse import Engine
from ragfuse.store import KVStore
from ragfuse.store.redis import RedisTier
from tests.kits.plan import timings
from tests.kits.redis_server import RedisServer
from tests.kits.store import key, kv


@pytest.fixture
def doctor(run):
    """doctor(...): the exit status, the rows by what they are about, and all that was said."""

    def doctor(*arguments, **changed):
        result = run("doctor", *arguments, "--json", "-", **changed)
        assert "Traceback" not in result.output + result.stderr
        said = json.loads(result.stdout)
        assert said["ok"] is (result.exit_code == 0)
        assert all(row["remedy"] for row in said["rows"] if row["state"] == "bad")
        return result.exit_code, {row["what"]: row for row in said["rows"]}, said

    return doctor


def bad(rows):
    return sorted(what for what, row in rows.items() if row["state"] == "bad")


# with the model


def test_a_question_is_answered_both_ways_and_nothing_is_changed(doctor, tmp_path):
    before = set(Path("/tmp").glob("ragfuse-doctor-*"))
    status, rows, _ = doctor()
    assert (status, bad(rows)) == (0, [])
    # digests of weights, once these are seconds old
    assert set(os.listdir(tmp_path / "user")) <= {"fingerprints"}
    assert set(Path("/tmp").glob("ragfuse-doctor-*")) <= before
    assert "first token after" in rows["full prefill"]["found"]
    assert "4 of 4 chunks" in rows["reuse"]["found"]
    assert {rows[what]["state"] for what in ("verified", "calibrated", "measured")} == {"note"}
    assert rows["verified"]["remedy"].startswith("ragfuse verify ")


def test_commands_that_the_doctor_advises_can_be_pasted_into_a_shell(
    doctor, tiny_settings, tmp_path
):
    model, store = tmp_path / "my models" / "m", tmp_path / "my store"
    shutil.copytree(tiny_settings.model, model)
    _, rows, _ = doctor("--model", str(model), "--dtype", "float16", "--store", str(store))
    told = {
        what: shlex.split(rows[what]["remedy"]) for what in ("verified", "calibrated", "measured")
    }
    assert told["verified"] == ["ragfuse", "verify", str(model), "--dtype", "float16"]
    as_here = ["--model", str(model), "--dtype", "float16", "--store", str(store)]
    assert told["calibrated"] == ["ragfuse", "calibrate", *as_here, "--docs", "PATH"]
    assert told["measured"] == ["ragfuse", "measure", *as_here]


def test_the_doctor_shows_what_the_store_knows_of_model_and_machine(
    doctor, tiny_settings, tmp_path
):
    with Engine(tiny_settings.model_copy(update={"store": tmp_path / "user" / "store"})) as engine:
        engine.runtime.verify()
        engine.runtime.learn(engine.runtime.profile.calibrated(True, "lego", 0.06))
        engine.timings.learn(timings(engine, memory=0.0, disk=1e-9))
    _, rows, _ = doctor()
    assert [rows[what]["state"] for what in ("verified", "calibrated", "measured")] == ["ok"] * 3
    assert "lego at 6%" in rows["calibrated"]["found"]
    assert "memory, disk" in rows["measured"]["found"]
    with Engine(tiny_settings.model_copy(update={"store": tmp_path / "user" / "store"})) as engine:
        engine.runtime.learn(replace(engine.runtime.profile, verified=False, safe=False))
    status, rows, _ = doctor()
    assert (status, bad(rows)) == (1, ["calibrated", "verified"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("minilm-l6", "is not a usable llm"),
        ("no/config", "config.json"),
    ],
)
def test_a_model_that_is_not_there_is_one_red_row(doctor, tmp_path, name, said):
    folder = tmp_path / "no" / "config"
    folder.mkdir(parents=True)
    status, rows, _ = doctor(RAGFUSE_MODEL=name)
    assert (status, bad(rows)) == (1, ["model"])
    assert said in rows["model"]["found"]
    assert rows["model"]["remedy"].startswith("follow the message")


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
        status, rows, _ = doctor("--quick", **tiers)
        named = ["tier redis", "tier disk", "tier objects"]
        assert (status, [what for what in rows if what.startswith("tier ")]) == (0, named)
        assert "1 entry, 2.2 KB of" in rows["tier redis"]["found"]
    finally:
        server.kill()
    status, rows, _ = doctor("--quick", **tiers)
    assert (status, bad(rows)) == (1, ["tier redis"])
    assert "does not answer" in rows["tier redis"]["found"]
    assert rows["tier redis"]["remedy"].startswith("start the server")
    assert doctor("--quick", RAGFUSE_MODEL="/nowhere/at/all")[0] == 0  # it loads no model
    status, rows, _ = doctor("--quick", RAGFUSE_TIERS='["nothing://x"]')
    assert (status, bad(rows)) == (1, ["tiers"])
