"""An answer that is read while it is written: by loops, event loops and several at once, closed,
dropped or failing.
"""

import asyncio
import gc
import threading

import pytest

from ragfuse.engine.answer_stream import AnswerStream
from ragfuse.errors import InputError
from ragfuse.types.answer import Answer, Trace

ANSWER = Answer("one two three", (1, 2, 3), "stop", Trace())


def three(say, gone):
    for word in ("one", " two", " three"):
        say(word)
    return ANSWER


class Slow:
    """Says a word whenever it may, until it is told that nobody listens."""

    def __init__(self):
        self.more, self.ended = threading.Semaphore(0), threading.Event()

    def __call__(self, say, gone):
        while not gone.is_set():
            if self.more.acquire(timeout=0.01):
                say("word ")
        self.ended.set()
        return ANSWER


def failing(say, gone):
    say("one")
    raise KeyError("lost")


def test_pieces_come_in_order_with_pauses_and_the_answer_at_the_end_or_alone():
    assert AnswerStream(three).answer is ANSWER
    with AnswerStream(three) as stream:
        assert next(iter(stream)) == "one"
        assert list(stream) == [" two", " three"]
        assert stream.answer is ANSWER
        assert list(stream) == []
    assert stream.answer is ANSWER


@pytest.fixture
def run():
    """A writer that says a word."""
    run = Slow()
    run.more.release()
    return run


def test_closing_ends_the_writer_and_there_is_no_answer(run):
    with AnswerStream(run) as stream:
        assert next(iter(stream)) == "word "
    assert run.ended.is_set()
    assert list(stream) == []
    with pytest.raises(InputError, match="closed"):
        _ = stream.answer


def test_finishing_ends_the_writer_and_what_is_written_is_the_answer(run):
    stream = AnswerStream(run)
    assert next(iter(stream)) == "word "
    stream.finish()
    assert stream.answer is ANSWER
    assert run.ended.is_set()


def test_dropping_a_stream_half_read_ends_the_writer(run):
    for _ in AnswerStream(run):
        break
    gc.collect()
    assert run.ended.wait(60)


@pytest.mark.parametrize(
    ("end", "is_abandoned"), [(AnswerStream.finish, False), (AnswerStream.cancel, True)]
)
def test_the_writer_hears_whether_anybody_reads_what_it_has_written(end, is_abandoned):
    told = []

    def write(say, enough):
        enough.wait(60)
        told.append(enough.is_abandoned)
        return ANSWER

    stream = AnswerStream(write)
    end(stream)
    list(stream)
    stream.close()
    assert told == [is_abandoned]


def test_closing_from_elsewhere_wakes_a_reader_that_waits():
    stream, said = AnswerStream(Slow()), []
    reader = threading.Thread(target=lambda: said.extend(stream))
    reader.start()
    stream.close()
    reader.join(60)
    assert not reader.is_alive()
    with pytest.raises(InputError, match="closed"):
        _ = stream.answer


def test_what_fails_is_raised_after_what_was_said_and_again_for_the_answer():
    stream, said = AnswerStream(failing), []
    with pytest.raises(KeyError, match="lost"):
        said.extend(iter(stream))
    with pytest.raises(KeyError, match="lost"):
        _ = stream.answer
    assert list(stream) == []


async def test_an_event_loop_reads_it_all():
    stream = AnswerStream(three)
    assert [text async for text in stream] == ["one", " two", " three"]
    assert stream.answer is ANSWER


async def test_an_event_loop_is_not_held_up():
    run = Slow()
    stream = AnswerStream(run)

    async def first():
        async for text in stream:
            return text

    reading = asyncio.create_task(first())
    await asyncio.sleep(0)
    assert not reading.done()
    run.more.release()
    assert await reading == "word "
    stream.close()


def test_an_event_loop_that_is_closed_ends_the_writer(run):
    stream = AnswerStream(run)

    async def one():
        async for text in stream:
            return text

    assert asyncio.run(one()) == "word "
    run.more.release()
    assert run.ended.wait(60)
