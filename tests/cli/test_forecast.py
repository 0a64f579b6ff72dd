"""What an ingest says before it begins, and the live view of a store."""

import json
import re
import shutil
import time

import pytest
from typer.testing import CliRunner

pytest.importorskip("fastapi", reason="the server's extra is not installed")

from ragfuse.cli import top
from ragfuse.cli.forecast import IngestForecast, rounded
from ragfuse.cli.main import app
from tests.serve.kit import serving


@pytest.fixture
def run(tiny_settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours = {"HOME": tmp_path / "user", "MODEL": tiny_settings.model, "DTYPE": "float32", "MAX_TOKENS": 4}
    environment = {f"RAGFUSE_{name}": str(value) for name, value in ours.items()}
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)], env=environment)


@pytest.fixture
def large_disk(monkeypatch):
    """Let the disk have 100 GiB free, whatever this machine's has: a tier's setting is the bound then."""
    free_bytes(monkeypatch, 100 << 30)


def free_bytes(monkeypatch, nbytes):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=nbytes))


def test_ingest_says_first_what_it_will_do_and_is_right(run, book, large_disk):
    (book / "second.md").write_text((book / "lighthouses.txt").read_text().replace("ships", "gulls"))
    (book / "picture.png").write_bytes(b"PNG")
    result = run("ingest", book, "--json", "out.json")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].endswith("picture.png: not a supported type of document ('.png')")
    found = re.match(
        r"2 files, about ([\d,]+) tokens, (\S+) (MB|KB) of KV \((\S+) (B|KB) a token\) into disk, "
        r"which holds 20 GiB, (?:about .+|less than a second)\.",
        lines[1],
    )
    assert found, lines[1]
    told = json.loads((book.parent / "out.json").read_text())
    n_tokens = int(found[1].replace(",", ""))
    encoded = int(re.search(r"encoded now \(([\d,]+) tokens", " ".join(lines))[1].replace(",", ""))
    assert 0.8 * encoded < n_tokens < 1.2 * encoded
    nbytes = float(found[2]) * {"KB": 1e3, "MB": 1e6}[found[3]]
    assert 0.8 * told["nbytes"] < nbytes < 1.2 * told["nbytes"]


def test_a_disk_with_less_room_than_its_setting_bounds_what_it_holds(run, book, monkeypatch):
    free_bytes(monkeypatch, 10_000_000_000)
    assert "into disk, which holds 9.5 GB, " in run("ingest", book).stdout


def test_ingest_says_what_is_in_the_index_already(run, book):
    run("ingest", book)
    assert "1 file, all in the index already." in run("ingest", book).stdout
    (book / "new.md").write_text("A keeper who came later counted nothing at all, and wrote it into no book. " * 20)
    again = run("ingest", book)
    assert "2 files (1 in the index already), about " in again.stdout
    assert "new tokens" in again.stdout


def test_without_kv_no_bytes_are_foreseen(run, book):
    line = run("ingest", book, "--no-kv").stdout.splitlines()[0]
    assert line.startswith("1 file, about ")
    assert "KV" not in line


def test_a_forecast_in_words():
    told = IngestForecast(7, 0, 41_234, 1_900_000_000, 46_080, "disk", 20 << 30, 361.0).in_words()
    assert told == (
        "7 files, about 41,000 tokens, 1.9 GB of KV (46 KB a token) into disk, which holds 20 GiB, about 6 minutes."
    )
    assert [rounded(n) for n in (0, 7, 99, 123, 41_234, 998_000)] == [0, 7, 99, 120, 41_000, 1_000_000]


def test_many_files_are_left_out_in_one_line_a_reason(run, book):
    for number in range(9):
        (book / f"{number}.png").write_bytes(b"PNG")
    (book / "empty.md").write_text("")
    lines = [line for line in run("ingest", book, "--no-kv").stdout.splitlines() if line.startswith("left out")]
    assert lines == [
        "left out: 0.png, 1.png, 2.png, 3.png, 4.png and 4 more: not a supported type of document ('.png')",
        "left out: empty.md: empty",
    ]


# store top


def test_top_shows_hits_as_they_come(run, book, monkeypatch):
    run("ingest", book)
    monkeypatch.setattr(top, "sleep", lambda seconds: run("ask", "What was counted in 1812?", "--top-k", 3))
    result = run("store", "top", "--times", 2, "--json", "out.json")
    assert result.exit_code == 0, result.output
    first, second = (line for line in result.stdout.splitlines() if line.startswith("disk"))
    hits = [int(line.split("GiB")[1].split()[0]) for line in (first, second)]
    assert hits[1] >= hits[0] + 3
    assert f"{hits[1]} (+{hits[1] - hits[0]})" in second
    assert float(second.split()[-1]) > 0 == float(first.split()[-1])
    assert json.loads((book.parent / "out.json").read_text())["tiers"]["disk"]["hits"] == hits[1]


def test_top_of_a_server_knows_what_missed(run, tiny_settings, tmp_path):
    home = tmp_path / "served"
    settings = tiny_settings.model_copy(update={"store": home / "store", "home": home})
    text = "The keeper of the northern lighthouse counted ninety ships, and wrote every name into his book."
    documents = {"documents": [{"text": text, "title": "book"}]}
    with serving(settings) as server:
        for _ in range(3):
            assert server.chat(**documents).status_code == 200
            time.sleep(0.3)  # the document is encoded after the answer
        result = run("store", "top", "--server", server.root, "--json", "-")
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
    assert told["tiers"]["memory"]["hits"] >= 1
    assert told["tiers"]["memory"]["misses"] >= 1
    assert "hit rate" in result.stderr
    assert told["prompt tokens reused"] > 0


def test_top_of_a_server_that_is_not_there(run):
    result = run("store", "top", "--server", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stderr.startswith("ServerError: No server answers at http://127.0.0.1:1/v1")


def test_top_asks_a_server_on_loopback_past_a_proxy(run, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:3128")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert "refused" in run("store", "top", "--server", "http://127.0.0.1:1").stderr
    assert "proxy.invalid:3128" in run("store", "top", "--server", "http://server.invalid:1").stderr
