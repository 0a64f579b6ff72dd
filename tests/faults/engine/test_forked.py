"""A process that is forked after an engine was made: it gets one error, or ends, and the parent
goes on.
"""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.kits.tiny import ROOT

BEGIN = """
    import os, signal, sys, threading
    from ragfuse import Ask, Engine, Settings, StoreError
    from tests.kits.tiny import CHUNKS, messages

    def forked(work):
        child = os.fork()
        if not child:
            signal.alarm(300)  # what would hang is killed
            work()
            sys.exit(3)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    settings = Settings(
        model=sys.argv[1], store=sys.argv[2], dtype="float32", policy="query", max_tokens=8
    )
"""


def told(settings, code):
    """The lines that a program prints, whose processes all end without a word on standard error."""
    program = textwrap.dedent(BEGIN) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, settings.model, str(settings.store)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_every_use_of_an_engine_is_one_error_in_a_forked_child(tiny_settings):
    lines = told(
        tiny_settings,
        """
        def uses():
            for use in (
                lambda: engine.answer(messages()),
                lambda: engine.stream(messages()),
                lambda: engine.batch([messages()] * 2),
                lambda: engine.prepare(prompt),
                lambda: engine.ingest([(CHUNKS[0], "book")]),
                lambda: engine.prefetch(CHUNKS),
                engine.flush,
                lambda: Engine.shared(settings).answer(messages()),
            ):
                try:
                    use()
                except StoreError as error:
                    print(error, flush=True)
            engine.close()  # the parent's to close

        engine = Engine.shared(settings)
        prompt = engine.prompt(messages())
        wanted = engine.answer(messages()).text
        print(forked(uses), flush=True)
        engine.flush()
        print(engine.answer(messages(), Ask(reuse=False)).text == wanted)
        """,
    )
    assert lines[-2:] == ["3", "True"]
    assert len(lines) == 10
    assert len({*lines[:-2]}) == 1
    assert "spawn" in lines[0]


@pytest.mark.parametrize("work", ["sys.exit()", "engine.__exit__(None)"])
def test_a_child_that_asks_nothing_ends_while_its_parent_is_at_work(tiny_settings, work):
    lines = told(
        tiny_settings,
        f"""
        def ask():
            while not stop.is_set():
                said.append(engine.answer(messages(CHUNKS[len(said) % 3:])).trace.unsaved)

        with Engine(settings) as engine:
            stop, said = threading.Event(), []
            thread = threading.Thread(target=ask)
            thread.start()
            stream = engine.stream(messages())
            codes = {{forked(lambda: {work}) for _ in range(3)}}
            stop.set()
            thread.join()
            engine.flush()
            texts = [bool(stream.answer.text), bool(engine.answer(messages()).text)]
            print(*codes, *texts, {{*said}})
            lost = [tier.counts[what] for tier in engine.store.tiers for what in ("refused", "failed")]
            print(sum(lost), engine.catalog.failures)
        """,
    )
    assert lines == [f"{0 if 'sys' in work else 3} True True {{()}}", "0 0"]


def test_a_process_of_multiprocessing_ends_and_the_store_is_as_it_was(tiny_settings):
    lines = told(
        tiny_settings,
        """
        import multiprocessing

        with Engine(settings) as engine:
            engine.ingest([(text, "book") for text in CHUNKS])
            child = multiprocessing.get_context("fork").Process(target=lambda: None)
            child.start()
            child.join(300)
            print(child.exitcode)
        with Engine(settings) as again:
            print(again.ingest([(text, "book") for text in CHUNKS]).encoded)
        """,
    )
    assert lines == ["0", "0"]
