"""The list of which document has which texts, in a process that is forked."""

from __future__ import annotations

import os
import signal
import stat
import threading
from pathlib import Path

import pytest
from llama_index.llms.ragfuse.ledger import FILE, Ledger


def in_child(ledger: Ledger) -> int:
    """How a forked process ends that notes a text and counts: 0 where it could."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        ledger.note("model", "docs", [("b", "1", "text of the child")])
        os._exit(0 if ledger.collected("model", "docs") == 0 else 1)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_fork_inside_a_change_finds_the_ledger_at_rest_in_parent_and_child(tmp_path: Path, on_disk: bool) -> None:
    ledger = Ledger(tmp_path if on_disk else None)
    ledger.note("model", "docs", [("a", "1", "text")])
    inside, go_on = threading.Event(), threading.Event()
    given: list[str] = []

    def forget(texts: list[str]) -> int:
        inside.set()
        go_on.wait(60)
        given.extend(texts)
        return 0

    def collect() -> None:
        ledger.collect("model", "nothing", lambda *_: False, forget)
        ledger.collect("other", "docs", lambda *_: False, forget)

    ledger.note("other", "docs", [("a", "1", "another text")])
    thread = threading.Thread(target=collect)
    thread.start()
    assert inside.wait(60)
    threading.Timer(0.5, go_on.set).start()  # the fork waits for the change
    assert in_child(ledger) == 0
    thread.join()
    assert given == ["another text"]
    assert ledger.collected("other", "docs") == 1
    if on_disk:
        assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_a_fork_goes_on_though_a_change_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_index.llms.ragfuse.ledger._PAUSE_S", 0.1)
    ledger = Ledger(None)
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with ledger._lock:
            held.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert in_child(ledger) == 0
    finally:
        leave.set()
        thread.join()
    ledger.note("model", "docs", [("a", "1", "text")])
