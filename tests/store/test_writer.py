"""The writer runs jobs in order, drops what is too much, and survives jobs that fail."""

import threading

from ragfuse.store import Writer


def test_jobs_run_in_order_in_one_other_thread():
    writer, ran = Writer(), []
    for i in range(20):
        assert writer.submit(lambda i=i: ran.append((i, threading.get_ident())))
    assert writer.flush()
    assert [i for i, _ in ran] == list(range(20))
    assert {thread for _, thread in ran} != {threading.get_ident()}
    assert len({thread for _, thread in ran}) == 1
    writer.close()


def test_flush_waits_for_what_was_submitted_before_it_alone():
    writer, gates = Writer(), [threading.Event(), threading.Event()]
    writer.submit(lambda: gates[0].wait(10))
    flushed = threading.Thread(target=writer.flush)
    flushed.start()
    assert writer.flush(0.01) is False
    writer.submit(lambda: gates[1].wait(10))
    gates[0].set()
    flushed.join(5)
    assert not flushed.is_alive()
    gates[1].set()
    assert writer.close()


def test_a_full_queue_drops_and_counts_without_waiting():
    writer, started, go, ran = Writer(limit=2), threading.Event(), threading.Event(), []
    writer.submit(lambda: (started.set(), go.wait(10)))
    assert started.wait(10)
    assert [writer.submit(lambda i=i: ran.append(i)) for i in range(4)] == [True, True, False, False]
    assert writer.dropped == 2
    go.set()
    assert writer.flush()
    assert ran == [0, 1]
    writer.close()


def test_what_somebody_waits_for_is_not_dropped():
    writer, started, go, ran = Writer(limit=1), threading.Event(), threading.Event(), []
    writer.submit(lambda: (started.set(), go.wait(10)))
    assert started.wait(10)
    assert [writer.submit(lambda i=i: ran.append(i), is_awaited=True) for i in range(3)] == [True] * 3
    assert not writer.submit(lambda: ran.append(9))
    go.set()
    writer.close()
    assert (ran, writer.dropped) == ([0, 1, 2], 1)


def test_a_job_that_fails_is_counted_and_the_next_one_runs(caplog):
    writer, ran = Writer(), []
    writer.submit(lambda: 1 / 0)
    writer.submit(lambda: ran.append(1))
    assert writer.flush()
    assert (ran, writer.dropped) == ([1], 1)
    assert "ZeroDivisionError" in caplog.text
    writer.close()
