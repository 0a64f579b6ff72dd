"""Who is answered next: so many at once, tenants in turns, none beyond the room there is, none
longer than it may.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragfuse import Ask, Engine, InputError, Settings
from ragfuse.engine.answer_stream import AnswerStream
from ragfuse.serve.admission import AdmissionControl
from ragfuse.serve.keys import Keys
from ragfuse.serve.refusals import APIError
from ragfuse.serve.run import AnswerRequest, AnswerRun, Completed, TextDelta
from tests.serve.kit import Served, said, serving, settings_of, wait_for, with_documents, writers
from tests.serve.test_gone import is_idle, long_request, raw, send
from tests.tiny import CHUNKS

BLUE, GREEN = "blue-key-of-a-test-0", "green-key-of-a-test-0"


@pytest.fixture(scope="module")
def narrow(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that answers one request at a time and lets two wait."""
    home = tmp_path_factory.mktemp("narrow")
    settings = settings_of(
        tiny_path,
        home,
        serve_together=1,
        serve_waiting=2,
    )
    with serving(settings) as made:
        yield made


def test_more_than_may_wait_are_told_when_to_come_again(narrow: Served) -> None:
    with raw(narrow.port) as first, raw(narrow.port) as second, raw(narrow.port) as third:
        for at, line in enumerate((first, second, third)):
            send(line, long_request(narrow))
            wait_for(
                lambda at=at: (
                    narrow.service.admission.jobs.running
                    and len(narrow.service.admission.jobs) == at
                )
            )
        answer = narrow.chat()
        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
        assert narrow.get("/health").status_code == 200
    wait_for(lambda: is_idle(narrow))
    assert narrow.chat(max_tokens=2).status_code == 200


def test_what_waits_is_brought_to_memory_meanwhile(narrow: Served) -> None:
    assert narrow.chat(max_tokens=2, **with_documents()).status_code == 200
    engine = narrow.service.engine(narrow.service.keys.tenants[0])
    engine.flush()
    memory, chunks = (
        engine.store.tier("memory"),
        {engine.runtime.encoder.key(engine.tokens(text)).tokens for text in CHUNKS[:3]},
    )
    memory.delete([entry.key for entry in memory.list()])
    with raw(narrow.port) as first, raw(narrow.port) as second:
        send(first, long_request(narrow))
        wait_for(writers)
        send(second, long_request(narrow, **with_documents()))
        wait_for(
            lambda: any(entry.key.tokens in chunks for entry in memory.list())
        )  # not only what the first one leaves
        assert len(narrow.service.admission.jobs) == 1  # it waits still
    wait_for(lambda: is_idle(narrow))


def test_a_turn_that_does_not_come_in_time_is_told(tiny_settings: Settings) -> None:
    with serving(
        tiny_settings.model_copy(update={"serve_together": 1, "serve_timeout_s": 0.5})
    ) as served:
        jobs = served.service.admission.jobs
        jobs.submit(Future())  # type: ignore[arg-type]
        held = jobs.take()
        answer = served.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert held is not None
        jobs.done(held)
        assert served.service.admission.is_idle


def test_an_answer_that_does_not_begin_in_time_is_told(tiny_settings: Settings) -> None:
    with serving(tiny_settings.model_copy(update={"serve_timeout_s": 1e-6})) as served:
        for streams in (False, True):
            answer = served.chat(stream=streams)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        wait_for(lambda: is_idle(served))


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
        raise InputError("The stream was closed or finished before the answer began. Ask again.")

    class Slow:
        def stream(self, question: Any, ask: Ask, *, prefilled: object) -> AnswerStream:
            return AnswerStream(write)

    loop, engine = asyncio.get_running_loop(), Slow()
    run = AnswerRun([AnswerRequest("a", Ask())], engine, loop.time() + 600, ended.set)  # type: ignore[arg-type]
    await asyncio.to_thread(begun.wait, 60)
    reading = asyncio.ensure_future(anext(run.read()))
    (run.finish if late else run.cancel)()
    with pytest.raises(APIError, match="did not begin in time" if late else "server is stopping"):
        await asyncio.wait_for(reading, 60)
    run.cancel()
    assert not ended.is_set()
    prefilled.set()
    await asyncio.wait_for(ended.wait(), 60)


async def test_who_is_cancelled_in_the_moment_of_its_turn_gives_it_on() -> None:
    admission = AdmissionControl(1, 10)
    first, second, third = (admission.join(tenant) for tenant in ("a", "a", "b"))
    await first.work
    second.work.cancel()
    admission.leave(first)
    admission.leave(second)
    await third.work
    admission.leave(third)
    assert admission.is_idle


@pytest.mark.slow
def test_two_hundred_clients_at_once_all_get_their_own_answers(
    varied_path: Path, tmp_path: Path
) -> None:
    settings = settings_of(
        varied_path,
        tmp_path,
        max_tokens=6,
    )
    keys = Keys([f"blue:{BLUE}", f"green:{GREEN}"])
    found: dict[int, dict[str, Any]] = {}

    def ask(number: int, served: Served) -> None:
        body = {
            "model": served.service.model,
            "messages": [said(f"Question {number % 20}?")],
            "stream": number % 2 == 0,
        }
        told = {"authorization": f"Bearer {(BLUE, GREEN)[number % 3 == 0]}"}
        answer = httpx.post(f"{served.url}/chat/completions", json=body, headers=told, timeout=300)
        found[number] = {"status": answer.status_code, "text": _text(answer)}

    with serving(settings.model_copy(update={"serve_waiting": 400}), keys) as served:
        threads = [threading.Thread(target=ask, args=(number, served)) for number in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        engine = served.service.engine(keys.tenants[0])
        expected = {n: engine.answer([("user", f"Question {n}?")]).text for n in range(20)}
        assert {each["status"] for each in found.values()} == {200}
        assert {n: each["text"] for n, each in found.items()} == {
            n: expected[n % 20] for n in range(200)
        }
        assert served.service.admission.is_idle
        wait_for(lambda: not writers())


def _text(answer: httpx.Response) -> str:
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return str(answer.json()["choices"][0]["message"]["content"])
    lines = [
        line.removeprefix("data: ")
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines)
