"""Peers answer in processes of their own, in turn, and are left out with a sentence where they are
absent or fail.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from rich.console import Console

from benchmarks.peers.__main__ import run
from benchmarks.peers.llama_server import LlamaServer, free_port
from benchmarks.peers.offers import OFFERS, ROOT, Given
from benchmarks.peers.process import Peer, PeerError, PeerProcess, Worker
from benchmarks.peers.prompts import Recurring, prompts
from benchmarks.peers.rounds import Match, reply
from benchmarks.peers.weights import bf16_gguf
from ragfuse.settings import Settings

WORKER = """
import os, subprocess, sys, time
from benchmarks.peers.workers.wire import private_stdout, serve

class Fake:
    version = "fake 1"
    def hold(self, chunks):
        return {"encode_s": 0.5, "disk_bytes": len(chunks)}
    def answer(self, ids, max_tokens):
        print("a word of the engine's own")
        os.system("echo and one of a program below it")
        if ids[0] == 13:
            raise ValueError("no such luck")
        if ids[0] == 99:
            time.sleep(60)
        yield from (ids * max_tokens)[:max_tokens]
    def rest(self):
        return {"disk_bytes": 7}

out = private_stdout()
if "below" in sys.argv:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
serve(Fake(), out)
"""
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(json.dumps({"status": "ok", "build_info": "b1-fake"}).encode())
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["prompt"][0] == 13:
            return self.say(b"too long", 400)
        events = [{"tokens": [token], "stop": False} for token in asked["prompt"][: asked["n_predict"]]]
        said = [*events, {"tokens": [], "stop": True}]
        self.say(b"".join(b"data: " + json.dumps(each).encode() + b"\\n\\n" for each in said))
    def say(self, body, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def _started(*arguments: str, code: str = WORKER) -> PeerProcess:
    return PeerProcess("fake", [sys.executable, "-c", code, *arguments], {"PYTHONPATH": str(ROOT)})


@pytest.fixture
def worker() -> Iterator[Worker]:
    process = _started()
    try:
        yield Worker(process, 60.0, 30.0)
    finally:
        process.close()


def test_a_worker_answers_by_lines_whatever_its_engine_prints(worker: Worker) -> None:
    assert worker.version == "fake 1"
    assert worker.hold(["a", "b"]) == {"encode_s": 0.5}
    assert worker.disk_bytes == 2
    found = reply(worker, [4, 5], 3)
    assert found.ids == (4, 5, 4)
    assert 0 < found.wall_s < 30
    assert worker.disk_bytes == 7
    assert worker.process.cpu_s > 0
    assert worker.process.resident_bytes > 1 << 20


def test_a_worker_that_fails_shows_its_last_lines(worker: Worker) -> None:
    with pytest.raises(
        PeerError, match=r"fake ended while it answered \(exit code 1\)(.|\n)*no such luck"
    ):
        list(worker.answer([13], 3))


def test_a_worker_that_is_silent_is_not_waited_for(worker: Worker) -> None:
    worker._answer_s = 0.2
    with pytest.raises(PeerError, match="was silent for too long while it answered"):
        list(worker.answer([99], 3))


def test_a_server_answers_by_http() -> None:
    port = free_port()
    process = _started(str(port), code=SERVER)
    try:
        server = LlamaServer(process, port, 60.0, 30.0)
        assert server.version == "llama.cpp b1-fake"
        assert server.hold(["a"]) == {}
        assert list(server.answer([8, 9, 10], 2)) == [8, 9]
        with pytest.raises(PeerError, match="refused a prompt: too long"):
            list(server.answer([13], 2))
    finally:
        process.close()
    ended = _started(code="import sys; sys.exit('no such model')")
    with pytest.raises(PeerError, match=r"exit code 1(.|\n)*no such model"):
        LlamaServer(ended, port, 60.0, 30.0)
    ended.close()


class _Known:
    """A peer in this process: it answers what it is told to."""

    version, disk_bytes = "known 1", 0

    def __init__(self, process: PeerProcess, tokens: Sequence[int]) -> None:
        self.process, self.tokens = process, tokens
        self.asked: list[int] = []

    def hold(self, chunks: Sequence[str]) -> dict[str, Any]:
        return {}

    def answer(self, ids: Sequence[int], max_tokens: int) -> Iterator[int]:
        self.asked.append(max_tokens)
        if not self.tokens:
            raise self.process.failure("failed")
        yield from self.tokens


def _match(worker: Worker, **tokens: Sequence[int]) -> tuple[Match, dict[str, _Known]]:
    known = {name.replace("_", "-"): _Known(worker.process, each) for name, each in tokens.items()}
    peers: dict[str, Peer] = {**known}
    return Match(peers, 5, frozenset({2}), Console(quiet=True)), known


WORK = Recurring(("a", "b"), 6, ((1,), (2,)), ((1, 2), (2, 1), (1, 1)))


def test_peers_are_compared_with_the_yardstick(worker: Worker) -> None:
    match, known = _match(worker, hf=[7, 8, 2], vllm=[7, 8], ragfuse=[7, 9, 2])
    rows = {row["peer"]: row for row in match.measure(WORK)}
    assert [rows[name]["same_first_token"] for name in ("hf", "vllm", "ragfuse")] == [1, 1, 1]
    assert [rows[name]["same_answer"] for name in ("hf", "vllm", "ragfuse")] == [1, 1, 0]
    assert rows["hf"]["speedup"] == rows["ragfuse"]["ragfuse_speedup"] == 1
    assert rows["vllm"]["n"] == 2  # the first prompt warms up
    assert rows["vllm"]["tokens"] == 2
    assert known["hf"].asked == [5, 5, 5]
    assert known["vllm"].asked == [1, 1, 5, 5, 5]  # the beginnings first


def test_a_peer_that_fails_is_left_out_and_the_yardstick_may_not(worker: Worker) -> None:
    match, _ = _match(worker, hf=[7], hf_prefix=[])
    other = _started()
    match.peers["hf-prefix"] = _Known(other, [])  # whose process is ended
    assert [row["peer"] for row in match.measure(WORK)] == ["hf"]
    assert match.failed[0].startswith("hf-prefix is left out: fake failed")
    assert not other.is_running
    match, _ = _match(worker, hf=[])
    with pytest.raises(PeerError):
        match.measure(WORK)


def test_a_gguf_is_written_anew_from_a_folder(tiny_path: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = load_file(tiny_path / "model.safetensors")
    names = (
        "blk.0.attn_q.weight",
        "blk.0.attn_k.weight",
        "blk.2.ffn_up.weight",
        "output_norm.weight",
        "output.weight",
    )
    original = tmp_path / "original.gguf"
    writer = gguf.GGUFWriter(original, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_file_type(3)
    writer.add_token_list(["a", "b"])
    for name in names:
        writer.add_tensor(name, np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = bf16_gguf(original, tiny_path, tmp_path / "made")
    assert bf16_gguf(original, tiny_path, tmp_path / "made") == made
    reader = gguf.GGUFReader(made)
    assert reader.fields["general.file_type"].contents() == 32
    assert reader.fields["llama.block_count"].contents() == 3
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    found = {
        each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in reader.tensors
    }
    assert found.keys() == set(names)
    up = weights["model.layers.2.mlp.up_proj.weight"].bfloat16().float().numpy()
    assert (found["blk.2.ffn_up.weight"] == up).all()
    queries = weights["model.layers.0.self_attn.q_proj.weight"].bfloat16().float().numpy()
    # four heads of sixteen rows
    assert (found["blk.0.attn_q.weight"][:4] == queries[[0, 8, 1, 9]]).all()


@pytest.mark.slow
def test_peers_without_needs_take_part(tiny_path: Path, tmp_path: Path) -> None:
    console = Console(quiet=True)
    work, ends, most = prompts(str(tiny_path), "bfloat16", [(1200, 3)], 4, Settings().home)
    assert most == 4096
    assert len(set(work[0].prompts)) == 3
    given = Given(
        str(tiny_path), tiny_path, None, None, None, 1, 1 << 30, 2048, 300.0, 60.0, tmp_path
    )
    result = run(given, work, 4, ends, [*OFFERS], console)
    found = {each["peer"]: each for each in result["results"]}
    assert found.keys() == {"hf", "hf-prefix", "ragfuse", "ragfuse-disk"}
    assert found["hf"]["speedup"] == 1.0
    assert found["hf-prefix"]["same_answer"] == 1.0
    assert found["ragfuse-disk"]["disk_bytes"] > found["ragfuse"]["disk_bytes"] == 0
    assert found["ragfuse"]["kv_bytes"] > 0
    assert len(result["absent"]) == 4
    assert json.loads(json.dumps(result)) == result
