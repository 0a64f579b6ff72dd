"""Notes written in the background: all of them, and none lost where there is no thread to be had for a while."""

import threading

import pytest

from ragfuse.store.notes import Notes
from tests.store.kit import key


def test_every_note_is_written():
    written = []
    notes = Notes(written.extend)
    for number in range(100):
        notes.add(key(number))
    notes.wait(10.0)
    assert sorted(map(str, written)) == sorted(str(key(number)) for number in range(100))


def test_without_a_thread_notes_wait_for_the_next_one(monkeypatch: pytest.MonkeyPatch):
    written = []
    notes = Notes(written.extend)

    def refused(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        notes.add(key("a"))
        notes.wait(0.0)
    assert written == []
    notes.add(key("b"))
    notes.wait(10.0)
    assert written == [key("a"), key("b")]
