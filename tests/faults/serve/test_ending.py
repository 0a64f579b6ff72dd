"""How a server ends: by a signal, with all that is written saved; by a kill, with nothing wrong
left behind.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ragfuse import Engine, Settings
from tests.kits.serve import (
    CHAT,
    LONG,
    Served,
    asking,
    process,
    refused,
    said,
    serving,
    settings_of,
    wait_for,
    with_documents,
    writers,
)


def model_of(root: str) -> str:
    return str(httpx.get(f"{root}/v1/models").json()["data"][0]["id"])


def ask(root: str, **fields: Any) -> httpx.Response:
    body = {"model": model_of(root), "messages": [said()], **fields}
    return httpx.post(f"{root}{CHAT}", json=body, timeout=120)


@contextmanager
def begun(root: str, **fields: Any) -> Iterator[Iterator[str]]:
    """A streamed answer whose first words have come; the lines behind them."""
    body = {"model": model_of(root), "messages": [said()], "stream": True, **fields}
    with httpx.stream("POST", f"{root}{CHAT}", json=body, timeout=120) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if '"content": ' in line)
        yield lines


def all_encoded(root: str) -> bool:
    return httpx.get(f"{root}/v1/ragfuse/store").json()["waiting_to_be_encoded"] == 0


def stopped(run: subprocess.Popen[str]) -> None:
    run.send_signal(signal.SIGTERM)
    assert ended(run) == 0


def ended(run: subprocess.Popen[str]) -> int:
    return run.wait(120)


def settled_answer(settings: Settings) -> dict[str, Any]:
    """What a server says over six documents once all is kept that questions before left to be
    encoded.

    Without prefix caching: a prompt that was computed whole would be answered from there, and not
        from the store.
    """
    with process(settings, RAGFUSE_PREFIX_CACHE="false") as (run, root):
        for _ in range(3):
            told = ask(root, **with_documents(6)).json()
            wait_for(lambda: all_encoded(root))
        stopped(run)
    return dict(told)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end_and_saves_what_they_brought(
    tiny_settings: Settings, sent: int
) -> None:
    log = list[str]()
    with process(tiny_settings, log=log, RAGFUSE_MAX_TOKENS="200", RAGFUSE_SERVE_GRACE_S="600") as (
        run,
        root,
    ):
        with begun(root, **with_documents()) as lines:
            run.send_signal(sent)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
        assert ended(run) == 0
    with Engine(tiny_settings) as engine:
        assert len(engine.store.tier("disk").list()) == 3
    told = [line.strip() for line in log if line.startswith("Stop")]
    assert told[0].startswith("Stopping: 1 running, cut off after 600 s")
    assert told[1:] == ["Stopped."]


def test_a_server_says_what_it_waits_for_and_that_it_stopped(
    tiny_path: Path, tmp_path: Path
) -> None:
    settings = settings_of(tiny_path, tmp_path, serve_grace_s=600)
    lines = list[str]()
    with ThreadPoolExecutor(1) as client, serving(settings, tell=lines.append) as served:
        first = client.submit(served.chat, max_tokens=LONG)
        wait_for(writers)
        served.server.stop()
        wait_for(lambda: lines)
        served.server.stop()
        refused(first.result(), 503)
    assert [line[:11] for line in lines] == ["Stopping: 1", "Stopped."]


def test_while_it_stops_new_requests_are_refused_and_old_ones_answered(
    tiny_path: Path, tmp_path: Path
) -> None:
    settings = settings_of(tiny_path, tmp_path, serve_together=1, serve_grace_s=600)
    with ThreadPoolExecutor(1) as client, serving(settings) as served:
        first = client.submit(served.chat, max_tokens=200)
        wait_for(writers)
        with asking(served) as second:
            wait_for(lambda: served.waiting() == 1)
            served.server.stop()
            head = second.recv(1 << 16)
            assert b" 503 " in head.splitlines()[0]
            assert b"retry-after: 5" in head
        with pytest.raises(httpx.ConnectError):
            served.chat()
        assert first.result().json()["usage"]["completion_tokens"] == 200


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_chunks_that_are_right_or_none(
    tiny_settings: Settings, tmp_path: Path
) -> None:
    other = tiny_settings.model_copy(update={"store": tmp_path / "other"})
    with process(tiny_settings) as (run, root):
        assert ask(root, **with_documents(2)).status_code == 200  # its chunks are being saved now
        with begun(root, max_tokens=600, **with_documents(4)):
            run.kill()
            assert ended(run) == -signal.SIGKILL
    told, fresh = settled_answer(tiny_settings), settled_answer(other)
    assert told["choices"][0]["message"]["content"] == fresh["choices"][0]["message"]["content"]
    with Engine(tiny_settings) as engine, Engine(other) as twin:
        disk, same = engine.store.tier("disk"), twin.store.tier("disk")
        keys = {entry.key for entry in disk.list()} & {entry.key for entry in same.list()}
        assert len(keys) >= 6
        for key in keys:
            n_layers = disk.stat([key])[key].n_layers
            layers = [each.store.read_layers(key, 0, n_layers, "disk") for each in (engine, twin)]
            assert None not in layers
            for mine, theirs in zip(*layers, strict=True):
                assert torch.allclose(mine.keys, theirs.keys, atol=1e-5)
                assert torch.allclose(mine.values, theirs.values, atol=1e-5)
        assert disk.counts["corrupt"] == 0


def test_a_port_that_is_taken_and_a_host_without_keys_are_refused_in_one_line(
    served: Served, tiny_settings: Settings
) -> None:
    from typer.testing import CliRunner

    from ragfuse.cli.main import app

    names = ("model", "dtype", "store", "home")
    told = {f"RAGFUSE_{name.upper()}": str(getattr(tiny_settings, name)) for name in names}
    for host, port, word in (("127.0.0.1", served.port, "127.0.0.1"), ("0.0.0.0", 0, "API key")):
        arguments = ["serve", "--port", str(port), "--host", host]
        result = CliRunner().invoke(app, arguments, env=told)
        assert result.exit_code == 1
        assert word in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_turn_leaves_its_conversation_whole_without_that_turn_or_none(
    tiny_settings: Settings, tmp_path: Path
) -> None:
    turns = [
        said(f"How many ships {each}?")
        for each in ("came in the first year", "sank", "were seen again")
    ]
    with process(tiny_settings) as (run, root):
        answer = ask(root, messages=turns[:1], session_id="ships").json()
        with begun(root, messages=turns[1:2], session_id="ships", max_tokens=600):
            run.kill()
            assert ended(run) == -signal.SIGKILL
    with process(tiny_settings) as (run, root):
        told = ask(root, messages=turns[2:], session_id="ships").json()
    history = [turns[0], answer["choices"][0]["message"]]
    with process(tiny_settings.model_copy(update={"store": tmp_path / "other"})) as (run, root):
        whole, none = (ask(root, messages=[*before, turns[2]]).json() for before in (history, []))
    sizes = [each["usage"]["prompt_tokens"] for each in (told, whole, none)]
    assert sizes[0] in sizes[1:]
    same = whole if sizes[0] == sizes[1] else none
    assert told["choices"][0]["message"]["content"] == same["choices"][0]["message"]["content"]
