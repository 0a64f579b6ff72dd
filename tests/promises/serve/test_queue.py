"""Who is answered next: so many at once, tenants in turns, none beyond the room there is, none
longer than it may.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ragfuse import Ask, Engine, InputError, Settings
from ragfuse.engine.answer_stream import AnswerStream
from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_queue import Job
from ragfuse.serve.run import AnswerRequest, AnswerRun, Completed, TextDelta
from tests.kits.serve import (
    BLUE,
    GREEN,
    TENANTS,
    Served,
    asking,
    refused,
    serving,
    wait_for,
    with_documents,
    writers,
)
from tests.kits.tiny import CHUNKS


@pytest.fixture(scope="module")
def narrow(make_server: Callable[..., Served], tiny_path: Path) -> Served:
    """A server of two tenants that answers one request at a time and lets two wait."""
    return make_server(TENANTS, model=tiny_path, serve_together=1, serve_waiting=2).of(BLUE)


def test_more_than_may_wait_hear_when_to_come_again_and_no_tenant_takes_every_place(
    narrow: Served,
) -> None:
    queue = narrow.service.queue
    with ExitStack() as clients:
        for at, key in enumerate((BLUE, BLUE, GREEN)):
            clients.enter_context(asking(narrow.of(key)))
            wait_for(lambda at=at: queue.running and len(queue) == at)
            assert at == 0 or refused(narrow.chat(), 429)
        answer = narrow.chat()
        assert refused(answer, 429)["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
        assert narrow.get("/health").status_code == 200
    wait_for(narrow.is_idle)
    assert narrow.chat(max_tokens=2).status_code == 200


def test_what_waits_is_brought_to_memory_meanwhile(narrow: Served) -> None:
    assert narrow.chat(max_tokens=2, **with_documents()).status_code == 200
    engine = narrow.engine()
    engine.flush()
    memory = engine.store.tier("memory")
    chunks = {engine.runtime.encoder.key(engine.tokens(text)).tokens for text in CHUNKS[:3]}
    memory.delete([entry.key for entry in memory.list()])
    with asking(narrow):
        wait_for(writers)
        with asking(narrow, **with_documents()):
            # not only what the first one leaves
            wait_for(lambda: any(entry.key.tokens in chunks for entry in memory.list()))
            assert narrow.waiting() == 1
    wait_for(narrow.is_idle)


def test_a_turn_that_does_not_come_in_time_is_an_error(tiny_settings: Settings) -> None:
    late = {"serve_together": 1, "serve_timeout_s": 0.5}
    with serving(tiny_settings.model_copy(update=late)) as served:
        queue = served.service.queue
        queue.running = (Job(Future(), "", None),)  # type: ignore[arg-type]
        assert refused(served.chat(), 504)["code"] == "timeout"
        queue.running = ()
        assert served.is_idle()


def test_an_answer_that_does_not_begin_in_time_is_an_error(tiny_settings: Settings) -> None:
    with serving(tiny_settings.model_copy(update={"serve_timeout_s": 1e-6})) as served:
        for streams in (False, True):
            assert refused(served.chat(stream=streams), 504)["code"] == "timeout"
        wait_for(served.is_idle)


async def test_a_turn_whose_time_is_over_is_kept_as_far_as_it_was_said(
    tiny_path: Path, tmp_path: Path
) -> None:
    settings = Settings(model=str(tiny_path), dtype="float32", store=tmp_path / "store")
    with Engine(settings) as engine:
        requests = [AnswerRequest([("user", "Who?")], Ask(max_tokens=3000, session="one"))]
        run = AnswerRun(requests, engine, asyncio.get_running_loop().time() + 600, lambda: None)
        items = run.read()
        first = await anext(items)
        run.finish()
        *_, last = [item async for item in items]
        assert isinstance(first, TextDelta)
        assert isinstance(last, Completed)
        assert (last.is_late, last.finish_reason) == (True, "length")
        assert 0 < len(last.answer.token_ids) < 3000
        assert last.answer.text.startswith(first.text)
        (turn,) = engine.sessions.show("one").turns
        assert turn.messages[-1].text == last.answer.text
        answer = await asyncio.to_thread(
            engine.answer, [("user", "And then?")], Ask(session="one", max_tokens=2)
        )
        assert answer.trace.history_reused >= last.answer.trace.tokens


@pytest.mark.parametrize("late", [False, True])
async def test_a_request_keeps_its_place_until_its_prefill_ends_however_often_it_is_given_up(
    late: bool,
) -> None:
    begun, prefilled, ended = threading.Event(), threading.Event(), asyncio.Event()

    def write(say: Any, enough: threading.Event) -> Any:
        begun.set()
        prefilled.wait(60)
        raise InputError("The answer was stopped before it began. Ask again.")

    class Slow:
        def stream(self, question: Any, ask: Ask, *, on_prepared: object) -> AnswerStream:
            return AnswerStream(write)

    loop, engine = asyncio.get_running_loop(), Slow()
    deadline_s = loop.time() + (1 if late else 600)
    run = AnswerRun([AnswerRequest("a", Ask())], engine, deadline_s, ended.set)  # type: ignore[arg-type]
    await asyncio.to_thread(begun.wait, 60)
    reading = asyncio.ensure_future(anext(run.read()))
    if not late:
        run.cancel()
    with pytest.raises(APIError, match="did not start in time" if late else "server is stopping"):
        await asyncio.wait_for(reading, 60)
    run.cancel()
    assert not ended.is_set()
    prefilled.set()
    await asyncio.wait_for(ended.wait(), 60)
