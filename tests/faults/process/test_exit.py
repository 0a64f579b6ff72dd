"""The end of a process waits for threads that compute: an interpreter that ends within native code
aborts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from ragfuse import Settings

BEFORE = """
import atexit, sys, threading, time

@atexit.register  # before ragfuse is imported, so after its own
def last():
    print("alive:", sorted(t.name for t in threading.enumerate() if t.name.startswith("ragfuse-")), flush=True)

"""


def run(program: str, settings: Settings | None = None) -> subprocess.CompletedProcess[str]:
    home = settings.home if settings is not None else "."
    model = settings.model if settings is not None else ""
    named = {
        "HOME": home,
        "MODEL": model,
        "STORE": f"{home}/kv",
        "DTYPE": "float32",
        "MAX_TOKENS": 4000,
    }
    environment = {
        **os.environ,
        **{f"RAGFUSE_{name}": str(value) for name, value in named.items() if settings},
    }
    command = [sys.executable, "-c", BEFORE + textwrap.dedent(program)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=600, check=False
    )


def test_the_end_waits_for_own_threads_and_for_callers_that_compute():
    done = run("""
        from ragfuse.process.jobs import EXITING, at_work, start_thread

        def own():
            EXITING.wait()
            time.sleep(0.3)
            sys.stdout.write("own thread is done\\n")

        def callers():
            with at_work(), at_work():
                EXITING.wait()
                time.sleep(0.3)
                sys.stdout.write("computed\\n")
            sys.stdout.write("went on\\n")

        start_thread("own", own)
        threading.Thread(target=callers, daemon=True).start()
        """)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()[:2]) == ["computed", "own thread is done"]
    assert done.stdout.splitlines()[2:] == ["alive: []"]


def test_nothing_more_is_computed_after_that():
    done = run("""
        @atexit.register
        def late():
            from ragfuse.process.jobs import at_work, start_thread
            for begin in (lambda: at_work().__enter__(), lambda: start_thread("late", print)):
                try:
                    begin()
                except Exception as error:
                    print(error)

        import ragfuse.process.jobs
        """)
    assert done.stdout.count("shutting down") == 2, done.stderr


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("for piece in engine.stream(TEXT):", "break"),
        ("for piece in kept.pieces():", "raise ValueError('mine')"),
        ("for piece in kept.pieces():", "sys.exit(3)"),
    ],
)
def test_an_answer_that_is_half_read_ends_before_the_process(tiny_settings, how, end):
    done = run(
        f"""
        from ragfuse import Engine
        TEXT = "one two three four"
        engine = Engine()
        kept = engine.stream(TEXT)
        {how}
            {end}
        """,
        tiny_settings,
    )
    assert done.returncode == (0 if end == "break" else 1 if "mine" in end else 3), done.stderr
    assert done.stdout.splitlines()[-1] == "alive: []", done.stderr
    assert "terminate" not in done.stderr


def test_a_callers_thread_gets_no_answer_that_was_cut_off(tiny_settings):
    done = run(
        """
        from ragfuse import Ask, Engine
        engine, began = Engine(), threading.Event()

        def ask():
            while True:
                began.set()
                text = engine.answer("one two three four", Ask(max_tokens=300)).text
                print(len(text), flush=True)

        engine.answer("one", Ask(max_tokens=1))
        threading.Thread(target=ask, daemon=True).start()
        began.wait()
        time.sleep(0.2)
        """,
        tiny_settings,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[-1] == "alive: []"
    assert len(set(lines[:-1])) <= 1


def test_a_callers_ingest_is_waited_for_up_to_its_chunk(tiny_settings):
    done = run(
        """
        from ragfuse import Engine
        engine, begun = Engine(), threading.Event()

        def texts():
            for n in range(100_000):
                yield f"Passage {n} tells of the keeper who counted ships in one night and wrote it down. " * 3, "book"
                begun.set()

        threading.Thread(target=lambda: engine.ingest(texts()), daemon=True).start()
        begun.wait()
        """,
        tiny_settings,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "alive: []"
