"""What is encoded after an answer, and the thread that does it: once each, to the end or not at all."""

import gc
import threading
import weakref

import pytest
import torch

from ragfuse import Engine, ModelError, Settings, SettingsError
from ragfuse.engine.background import MAX_WAITING_JOBS, BackgroundEncoder, EncodeJob, JobKind, jobs_after
from ragfuse.engine.encoder import Encoder
from ragfuse.hf import probe
from ragfuse.hf.model import ENCODE_STEP_TOKENS
from ragfuse.schemas.layout import SchemaRun
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import Fetch, LoadPlan
from ragfuse.types.prompt import Prompt, Segment
from ragfuse.types.reasons import ENCODING
from tests.tiny import CHUNKS, chunk_hits, messages

KEY = ChunkKey("model", "tokens")


def work(number: int) -> EncodeJob:
    return EncodeJob("chunk", (number,), f"text {number}")


class Desk:
    """Saves what it gets once its gate is open."""

    def __init__(self) -> None:
        self.gate, self.begun, self.done = threading.Event(), threading.Event(), []

    def save(self, work: EncodeJob) -> None:
        self.begun.set()
        assert self.gate.wait(60)
        self.done.append(work.tokens[0])


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.gate.set()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ragfuse-encode"]


def test_work_is_done_in_order_each_once(desk):
    saver = BackgroundEncoder(desk.save)
    for number in (1, 2, 1, 3, 2, 1):
        saver.submit(work(number))
    desk.gate.set()
    assert saver.flush()
    assert desk.done == [1, 2, 3]


def test_what_is_done_may_come_again(desk):
    desk.gate.set()
    saver = BackgroundEncoder(desk.save)
    for _ in range(2):
        saver.submit(work(1))
        saver.flush()
    assert desk.done == [1, 1]


def test_what_does_not_fit_is_dropped_and_counted(desk):
    saver = BackgroundEncoder(desk.save)
    saver.submit(work(0))
    assert desk.begun.wait(60)
    for number in range(1, MAX_WAITING_JOBS + 4):
        saver.submit(work(number))
    desk.gate.set()
    saver.close()
    assert desk.done == list(range(MAX_WAITING_JOBS + 1))
    assert saver.dropped == 3


def test_what_fails_is_told_and_the_rest_is_done(caplog):
    done = []

    def save(work: EncodeJob) -> None:
        if work.tokens == (1,):
            raise RuntimeError("no room in the attic")
        done.append(work.tokens[0])

    saver = BackgroundEncoder(save)
    for number in range(3):
        saver.submit(work(number))
    saver.close()
    assert done == [0, 2]
    assert "no room in the attic" in caplog.text


def test_closing_finishes_what_waits_and_takes_no_more(desk):
    saver = BackgroundEncoder(desk.save)
    for number in range(3):
        saver.submit(work(number))
    desk.gate.set()
    saver.close()
    saver.submit(work(9))
    saver.close()
    assert desk.done == [0, 1, 2]
    assert saver.dropped == 1
    assert saver.flush()


def test_closing_in_no_time_finishes_only_what_is_at_hand(desk):
    saver = BackgroundEncoder(desk.save)
    for number in range(3):
        saver.submit(work(number))
    assert desk.begun.wait(60)
    closing = threading.Thread(target=saver.close, args=(0.0,))
    closing.start()
    while saver.dropped < 2:
        closing.join(0.01)
    desk.gate.set()
    closing.join(60)
    assert desk.done == [0]
    assert not closing.is_alive()


def test_flushing_with_a_limit_gives_up(desk):
    saver = BackgroundEncoder(desk.save)
    saver.submit(work(0))
    assert not saver.flush(0.01)


def test_what_is_forgotten_is_neither_encoded_nor_learnt_from(desk):
    saver = BackgroundEncoder(desk.save)
    run = tuple(range(20, 30))
    saver.submit(work(1))
    assert desk.begun.wait(60)
    prompts = [Prompt((Segment((8, 99, *run[1:-1], 99), 0),)), Prompt((Segment((7, 8, 9), 0),))]
    waiting = [
        EncodeJob("chunk", run),
        EncodeJob("prefix", (5, 6, *run, 3), n_prefix=2),
        *(EncodeJob("learn", prompt.token_ids, plan=LoadPlan(prompt, 0.1, "hkvd", ())) for prompt in prompts),
        work(2),
    ]
    for each in waiting:
        saver.submit(each)
    forgetting = threading.Thread(target=saver.forget, args=({run, ()},))
    forgetting.start()
    desk.gate.set()
    forgetting.join(60)
    saver.close(60)
    assert desk.done == [1, 7, 2]


@pytest.mark.parametrize(
    ("kind", "is_encoded"),
    [("chunk", True), ("run", True), ("copy", True), ("learn", False), ("prefix", False)],
)
def test_a_run_waits_only_in_jobs_of_its_own_tokens(desk, kind: JobKind, is_encoded: bool):
    saver, run = BackgroundEncoder(desk.save), (1, 2, 3)
    saver.submit(EncodeJob("chunk", (0,)))
    assert desk.begun.wait(60)
    saver.submit(EncodeJob(kind, run))
    assert saver.is_waiting(run) is is_encoded
    desk.gate.set()
    saver.close()


@pytest.mark.parametrize(
    ("job", "called"),
    [
        (EncodeJob("chunk", (3, 4), "text", "book"), ["wait_idle", "keep_chunk", "note"]),
        (EncodeJob("run", (3, 4), run=SchemaRun(("m",), ())), ["wait_idle", "keep_run"]),
        (EncodeJob("prefix", (3, 4), n_prefix=1), ["wait_idle", "extend"]),
        (EncodeJob("copy", (3, 4), keys=(KEY,)), ["store"]),
        (EncodeJob("learn", plan=LoadPlan(Prompt((Segment((3, 4), 0),)), 0.1, "hkvd", ())), ["learn"]),
    ],
    ids=lambda each: each.kind if isinstance(each, EncodeJob) else "",
)
def test_each_kind_of_job_does_its_own_work_alone(
    engine: Engine, monkeypatch, job: EncodeJob, called: list[str]
) -> None:
    stage, seen = engine._remember, []

    def record(name: str):
        return lambda *args, **named: seen.append(name)

    for where, method, name in (
        (stage._runtime.model.batcher, "wait_idle", "wait_idle"),
        (Encoder, "keep_chunk", "keep_chunk"),
        (Encoder, "keep_run", "keep_run"),
        (stage._prefixes, "extend", "extend"),
        (stage._runtime.store, "warm", "store"),
        (stage._prompts, "note", "note"),
        (stage, "_learn", "learn"),
    ):
        monkeypatch.setattr(where, method, record(name))
    stage._do(job)
    assert seen == called


def test_nobody_hangs_when_many_submit_while_it_is_closed(desk):
    desk.gate.set()
    for _ in range(50):
        saver, gate = BackgroundEncoder(desk.save), threading.Barrier(5)

        def submit(saver=saver, gate=gate):
            gate.wait()
            for number in range(20):
                saver.submit(work(number))

        busy = [threading.Thread(target=submit) for _ in range(4)]
        for thread in busy:
            thread.start()
        gate.wait()
        saver.close()
        for thread in busy:
            thread.join(60)
            assert not thread.is_alive()
        assert saver.flush(60)
    assert threads() == []


def test_an_idle_saver_has_no_thread_and_holds_nobody():
    class Owner:
        def __init__(self) -> None:
            self.saver = BackgroundEncoder(self.save)

        def save(self, work: EncodeJob) -> None: ...

    owner = Owner()
    owner.saver.submit(work(1))
    owner.saver.flush()
    gone = weakref.ref(owner)
    for thread in threads():
        thread.join(60)
    del owner
    gc.collect()
    assert gone() is None


def after(prompt: Prompt, *hits: int) -> list[EncodeJob]:
    """What is encoded after a prompt of which these segments were read."""
    fetches = tuple(Fetch(index, prompt.segments[index].keys[0], "memory", "raw", 1) for index in hits)
    return list(jobs_after(LoadPlan(prompt, 0.1, "hkvd", fetches)))


def chunk(number: int, start: int, **given: object) -> Segment:
    """One token as a chunk with a key of its own."""
    key = ChunkKey("model", f"tokens-{number}")
    return Segment((3 + number,), start, "chunk", (key,), f"book-{number}", f"text-{number}", **given)


def test_chunks_that_were_missed_are_encoded_and_the_prompt_s_beginning_is_not():
    prompt = Prompt((Segment((1, 2), 0, "prefix", (KEY,)), *(chunk(i, 2 + i) for i in range(3)), Segment((9,), 5)))
    missed = [EncodeJob("chunk", (3 + i,), f"text-{i}", f"book-{i}") for i in range(3)]
    assert after(prompt, 0, 1, 2, 3) == []
    assert after(prompt, 0, 2) == [missed[0], missed[2]]
    assert after(prompt) == missed
    assert after(prompt, 1, 2, 3) == []


def test_a_chunk_that_was_missed_in_several_places_is_encoded_once():
    prompt = Prompt((chunk(0, 0), chunk(1, 1), chunk(0, 2), Segment((9,), 3)))
    first, second = EncodeJob("chunk", (3,), "text-0", "book-0"), EncodeJob("chunk", (4,), "text-1", "book-1")
    assert after(prompt) == [first, second]
    assert after(prompt, 0) == [second]


def test_of_a_chunk_that_stands_in_part_in_a_prompt_all_is_encoded():
    prompt = Prompt((chunk(0, 0, rows=(1, 2), stored=(7, 3, 8)), Segment((9,), 1)))
    assert after(prompt) == [EncodeJob("chunk", (7, 3, 8), "text-0", "book-0")]


def test_a_question_that_comes_while_documents_are_encoded_says_so_and_waits_for_a_few_tokens(
    tiny_settings: Settings,
) -> None:
    settings = tiny_settings.model_copy(update={"prefix_cache": False})
    with Engine(settings) as engine:
        gate, real = threading.Event(), engine._remember.jobs._save

        def held(work: EncodeJob) -> None:
            gate.wait(60)
            real(work)

        engine._remember.jobs._save = held
        try:
            first = engine.answer(messages(CHUNKS[:2])).trace
            second = engine.answer(messages(CHUNKS[:2])).trace
        finally:
            gate.set()
        engine.flush()
        third = engine.answer(messages(CHUNKS[:2])).trace
    assert ENCODING not in first.summary
    assert {each.why for each in second.segments if each.kind == "chunk"} == {ENCODING}
    assert "still being encoded" in second.summary
    assert chunk_hits(third) == [True, True]
    assert third.as_dict()["summary"] == third.summary


def test_a_context_is_computed_in_steps_between_which_others_have_the_model(engine: Engine) -> None:
    model, ids = engine.model, engine.tokens(CHUNKS[0])
    context = (engine.tokens(CHUNKS[1]) * 8)[: 2 * ENCODE_STEP_TOKENS + 7]
    whole = probe.plain_kv(
        model.model,
        torch.tensor([[*context]], device=model.device),
        torch.arange(-len(context), 0, device=model.device),
    )
    held = []
    real = type(model.lock).acquire

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.lock), "acquire", lambda self, *a, **k: held.append(1) or real(self, *a, **k))
        found = model._context_kv(tuple(context))
    assert len(held) == 5  # a look, three steps, and the keeping
    for kv, wanted in zip(found, whole, strict=True):
        torch.testing.assert_close(kv.keys, wanted.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kv.values, wanted.values, rtol=1e-4, atol=1e-5)
    assert model._context_kv(tuple(context)) is found
    assert model.encode(ids, context).n_tokens == len(ids)


def test_a_long_run_is_encoded_in_steps_to_what_it_is_at_once(engine: Engine) -> None:
    model, context = engine.model, engine.tokens(CHUNKS[1])
    ids = (engine.tokens(CHUNKS[0]) * 8)[: 3 * ENCODE_STEP_TOKENS + 5]
    before = model._context_kv(tuple(context))
    whole = probe.plain_kv(
        model.model, torch.tensor([[*ids]], device=model.device), torch.arange(len(ids), device=model.device), before
    )
    for kv, wanted in zip(model.encode(ids, context).layers, whole, strict=True):
        torch.testing.assert_close(kv.keys, wanted.keys[:, len(context) :], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kv.values, wanted.values[:, len(context) :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [{"settings": "smollm2-135m-reader"}, {"store": "/somewhere"}])
def test_an_engine_that_is_given_names_in_the_wrong_places_says_where_they_go(given: dict[str, str]) -> None:
    with pytest.raises((ModelError, SettingsError), match=r"Settings\(store="):
        Engine(**given)  # type: ignore[arg-type]
