"""`python -m benchmarks.attacks`: a server of its own on loopback, attacked for a few minutes; what others feel of it.

Thirty clients send large requests again and again, half of them gone before the answer, beside bodies that are no
JSON, silent connections and floods of `explain`. Meanwhile `/health` is asked from a process of its own,
and the server's memory is watched. The model is a small random one made here, unless `--model` names another: what is
measured is what a request costs before and beside the model.

Figures, with what they are to be: health_worst_s (0.1 at most) the slowest `/health`; peak_over_idle_mb (1,000) the
server's memory above that of a server that has just answered; refused_4mb_s (0.2) the slowest refusal of 4 MB;
unexpected_5xx (0) answers that say the server failed, without
one that announces when to come again (503 with Retry-After).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

TARGETS: Mapping[str, float] = {
    "health_worst_s": 0.1,
    "peak_over_idle_mb": 1000.0,
    "refused_4mb_s": 0.2,
    "unexpected_5xx": 0,
}
"""What each figure is at most."""
WINDOW = 1 << 17
"""Tokens, each a byte, that the model made here takes: large requests pass the gate before it."""
BODY_BYTES = 8 << 20
"""What the server takes, so that 4 MB are read and refused for their length in tokens, not by their size."""
LARGE = 100_000
"""Characters of a large request that is answered."""
CLIENTS = 30
LOAD_S = 60.0
MOST_S = 570.0
"""All of it ends then, whatever is missing: ten minutes with the beginning and the end."""
LEAVES_S = 0.3
"""After which half of the clients are gone."""
ANSWER_S = 60.0
"""Longest wait for one answer."""
SILENT = 600
PROBE = """
import json, socket, sys, time
place, worst, n, failed = ("127.0.0.1", int(sys.argv[1])), 0.0, 0, 0
socket.setdefaulttimeout(30)
print("ready", flush=True)
until_s = time.monotonic() + float(sys.argv[2])
import select
while time.monotonic() < until_s and not select.select([sys.stdin], [], [], 0.03)[0]:
    began = time.perf_counter()
    try:
        with socket.create_connection(place) as line:
            line.sendall(b"GET /health HTTP/1.1\\r\\nhost: localhost\\r\\nconnection: close\\r\\n\\r\\n")
            found = line.recv(100)
            failed += b" 200 " not in found
    except OSError:
        failed += 1
    worst, n = max(worst, time.perf_counter() - began), n + 1
print(json.dumps({"worst": worst, "n": n, "failed": failed}))
"""
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


@dataclass
class Answers:
    """Statuses that came, 0 for none; unexpected: servers' failures that were not announced."""

    statuses: Counter[int] = field(default_factory=Counter)
    unexpected: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, status: int, retry: str | None = None) -> None:
        """One more."""
        with self.lock:
            self.statuses[status] += 1
            self.unexpected += status >= 500 and not (status == 503 and retry)


def make_model(folder: Path) -> Path:
    """A random model of two layers whose tokens are bytes, in this folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate(["<s>", "</s>", *letters])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, max_position_embeddings=WINDOW, **shape
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def server(model: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`ragfuse serve` over an empty store in a process of its own, and its port."""
    told = {"MODEL": model, "STORE": str(folder / "store"), "MAX_TOKENS": "4", "SERVE_BODY_BYTES": str(BODY_BYTES)}
    variables = {f"RAGFUSE_{name}": value for name, value in told.items()}
    run = subprocess.Popen(
        [sys.executable, "-c", "from ragfuse.cli import app; app()", "serve", "--port", "0"],
        env={**os.environ, **variables},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stderr is not None
        line = next((line for line in run.stderr if " answers at " in line), None)
        if line is None:
            raise SystemExit("The server did not begin.")
        threading.Thread(target=run.stderr.read, daemon=True).start()  # so that its log never fills the pipe
        yield run, int(line.split(" answers at ")[1].split("/v1")[0].rpartition(":")[2])
    finally:
        run.terminate()
        try:
            run.wait(40)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()


@contextlib.contextmanager
def peak_of(process: psutil.Process) -> Iterator[list[int]]:
    """The most memory that a process has meanwhile, as the only item."""
    most, over = [process.memory_info().rss], threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            with contextlib.suppress(psutil.Error):
                most[0] = max(most[0], process.memory_info().rss)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def request(path: str, body: bytes, *headers: bytes) -> bytes:
    """A request as it goes over the line."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    return head.encode() + b"".join(headers) + b"\r\n" + body


def send(port: int, data: bytes, answers: Answers, wait_s: float = ANSWER_S) -> tuple[int, float]:
    """Status and seconds of an answer; (0, seconds) where none is waited for any longer."""
    began = time.perf_counter()
    status, retry = 0, None
    with contextlib.suppress(OSError, http.client.HTTPException), socket.create_connection(("127.0.0.1", port)) as line:
        line.settimeout(wait_s)
        line.sendall(data)
        answer = http.client.HTTPResponse(line)
        answer.begin()
        answer.read()
        status, retry = answer.status, answer.getheader("retry-after")
    answers.add(status, retry)
    return status, time.perf_counter() - began


def as_json(**fields: Any) -> bytes:
    """A body."""
    return json.dumps(fields, ensure_ascii=False).encode()


def said(text: str) -> list[dict[str, str]]:
    """One message."""
    return [{"role": "user", "content": text}]


def text_of(n: int, salt: int = 0) -> str:
    """So many characters of words that repeat nowhere."""
    return "".join(f"word{at * 7919 + salt} " for at in range(n // 9 + 1))[:n]


def hostile(model: str) -> Sequence[bytes]:
    """Requests of many kinds that cost a server much, or that two programs read in two ways; each may be refused."""
    ask = {"model": model, "max_tokens": 2}
    half, chunk = b"\xed\xa0\x80", text_of(300, 5)
    titled = as_json(**ask, messages=said("Who?"), documents=[{"text": chunk, "title": "HALF"}])
    utf16 = (
        as_json(**ask, prompt="\u0122", metadata={"a": 1}).decode().replace("1}", "[" * 5000 + "1" + "]" * 5000 + "}")
    )
    lengths = b"transfer-encoding: chunked\r\n"
    return (
        request("/v1/chat/completions", titled.replace(b"HALF", half)),
        request("/v1/chat/completions", titled.replace(b"HALF", b"\\ud800")),
        request("/v1/chat/completions", titled.replace(b"HALF", b"a" * 4000)),
        request("/v1/chat/completions", as_json(**ask, messages=said(f"{chunk}\n\nWho?"))),
        request("/v1/completions", utf16.encode("utf-16-le")),
        request("/v1/completions", b'{"a": ' * 100_000),
        request("/v1/completions", b'{"model": "m", "prompt": "a", "metadata": {"a": [' + b"[]," * 500_000 + b"0]}}"),
        request("/v1/completions", b'{"model": "m", "prompt": "' + b'\\"' * 1_000_000),
        request("/v1/chat/completions", as_json(**ask, messages=[[]] * 100_000)),
        request("/v1/ragfuse/schemas", as_json(pml='<schema name="a">' + '<module name="b">' * 20_000)),
        request("/v1/completions", b"0\r\n\r\n", lengths),
        request("/v1/completions", as_json(**ask, prompt="Who?", session_id="s")),
        b"GET /v1/models HTTP/1.1\nhost: localhost\n\n",
    )


def large(model: str) -> Sequence[bytes]:
    """Large requests that are answered, and one that is refused."""
    ask = {"model": model, "max_tokens": 2}
    return (
        request("/v1/ragfuse/explain", as_json(messages=said(text_of(LARGE, 1)))),
        request("/v1/ragfuse/explain", as_json(messages=said(text_of(LARGE, 2)), documents=[text_of(5000, 3)])),
        request("/v1/completions", as_json(**ask, prompt=text_of(4 * WINDOW, 4))),
        request("/v1/chat/completions", as_json(**ask, messages=said(text_of(3000, 6)))),
    )


def load(port: int, model: str, answers: Answers, seconds: float) -> None:
    """Clients that come and go for so long."""
    until_s, requests = time.monotonic() + seconds, (*large(model), *hostile(model))

    def client(number: int) -> None:
        for turn in range(number, 1 << 30):
            if time.monotonic() >= until_s:
                return
            send(port, requests[turn % len(requests)], answers, LEAVES_S if number % 2 else ANSWER_S)

    with contextlib.ExitStack() as silent:
        for _ in range(SILENT):
            with contextlib.suppress(OSError):
                silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.1, until_s + ANSWER_S - time.monotonic()))


def refusals(port: int, model: str, answers: Answers, times: int = 3) -> float:
    """The slowest refusal of 4 MB, one at a time: as one text, as documents, with escapes, as PML, as bad JSON."""
    text, ask = text_of(4_000_000), {"model": model}
    bodies = (
        ("/v1/chat/completions", as_json(**ask, messages=said(text))),
        ("/v1/chat/completions", as_json(**ask, messages=said("Who?"), documents=[text[:40_000]] * 100)),
        ("/v1/completions", as_json(**ask, prompt="\n" * 2_000_000)),
        ("/v1/ragfuse/explain", as_json(messages=said(text))),
        ("/v1/completions", as_json(**ask, prompt="a", pml=f'<prompt schema="none">{text}</prompt>')),
        ("/v1/ragfuse/schemas", as_json(pml=f'<schema name="a"><module name="b">{text}</module></schema>')),
        ("/v1/completions", as_json(**ask, prompt=text)[:-1]),
    )
    slowest = 0.0
    for path, body in bodies:
        data, took = request(path, body), []
        for _ in range(times):
            status, seconds = send(port, data, answers)
            if status // 100 != 4:
                print(f"4 MB to {path} were answered {status}; wanted a refusal.", file=sys.stderr)
                seconds = max(seconds, ANSWER_S)
            took.append(seconds)
        slowest = max(slowest, min(took))  # the least of each: what else the machine does is no cost of it
    return slowest


def attacked(model: str | None, seconds: float, tell: Callable[[str], object]) -> dict[str, float]:
    """All figures."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="ragfuse-attacks-") as place:
        folder = Path(place)
        tell("loading the model")
        with server(model or str(make_model(folder / "model")), folder) as (run, port):
            answers, process = Answers(), psutil.Process(run.pid)
            name = _name_of(port)
            small = request("/v1/chat/completions", as_json(model=name, messages=said("Who?"), max_tokens=2))
            for _ in range(3):
                status, _ = send(port, small, answers)
                if status != 200:
                    raise SystemExit(f"The server answered {status} before it was attacked.")
            idle = process.memory_info().rss
            tell("refusals of 4 MB")
            with peak_of(process) as most:
                found["refused_4mb_s"] = refusals(port, name, answers)
                tell(f"{CLIENTS} clients for {seconds:.0f} s")
                with probing(port, seconds + 2 * ANSWER_S) as probe:
                    load(port, name, answers, seconds)
                health = json.loads(probe[0])
                status, _ = send(port, small, answers)
            if status != 200 or health["failed"]:
                answers.unexpected += 1
                print(f"Afterwards {status}; {health['failed']} of {health['n']} /health failed.", file=sys.stderr)
            tell(f"answers by status: {dict(sorted(answers.statuses.items()))}; {health['n']} times /health")
            found["health_worst_s"] = health["worst"]
            found["peak_over_idle_mb"] = (most[0] - idle) / 1e6
            found["unexpected_5xx"] = answers.unexpected
    return {name: found[name] for name in TARGETS}


@contextlib.contextmanager
def probing(port: int, most_s: float) -> Iterator[list[str]]:
    """`/health` is asked meanwhile, from a process of its own; what it found is the only item afterwards."""
    told = [sys.executable, "-c", PROBE, str(port), str(most_s)]
    probe = subprocess.Popen(told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert probe.stdin is not None
    assert probe.stdout is not None
    found: list[str] = []
    probe.stdout.readline()
    try:
        yield found
    finally:
        probe.stdin.close()
        found.append(probe.stdout.read())
        probe.wait()
        probe.stdout.close()


def _name_of(port: int) -> str:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    line.request("GET", "/v1/models")
    name = str(json.loads(line.getresponse().read())["data"][0]["id"])
    line.close()
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, show the figures beside what they are to be, and write them down; 1 where one is not."""
    parser = argparse.ArgumentParser(prog="benchmarks.attacks", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--model", help="an embedded name, an id or a folder; a small random one by default")
    parser.add_argument("--seconds", type=float, default=LOAD_S, help="how long the clients come and go")
    told = parser.parse_args(arguments)
    watchdog = threading.Timer(MOST_S, _too_long)
    watchdog.daemon = True
    watchdog.start()
    console = Console()
    found = attacked(told.model, told.seconds, lambda what: console.print(what, highlight=False, markup=False))
    watchdog.cancel()
    table = Table("figure", "found", "at most", box=None)
    for name, most in TARGETS.items():
        table.add_row(name, f"{found[name]:,.3f}", f"{most:,g}")
    console.print(table)
    if told.json:
        told.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(found[name] > most for name, most in TARGETS.items()))


def _too_long() -> None:
    print(f"Not done after {MOST_S:.0f} s: given up.", file=sys.stderr)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
