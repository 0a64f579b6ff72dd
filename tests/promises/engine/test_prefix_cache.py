"""Prefix caching on a tiny model in float32: what prompts begin with alike is read, and is what
full prefill gives.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragfuse import Ask, Engine, Settings
from tests.kits.redis_server import until
from tests.kits.tiny import CHUNKS, INSTRUCTION, QUESTION, adds_up, chunk_hits, messages

SYSTEM = (
    "system",
    "You keep the book of a harbour. Say what stands in it, and nothing else, in a few words.",
)
FIRST = [SYSTEM, ("user", "Which ship came first?")]
OTHER = [SYSTEM, ("user", "And who saw it?")]
ONCE = "Once there was a harbour in which forty ships lay."


@pytest.fixture
def on(tiny_settings):
    return tiny_settings.model_copy(update={"prefix_cache": True})


@pytest.fixture
def cached(on):
    with Engine(on) as engine:
        yield engine


def asked(engine, question, **ask):
    answer = engine.answer(question, Ask(**ask))
    engine.flush()
    assert adds_up(answer.trace)
    return answer


def is_full_prefill(engine, ready, n=None, atol=2e-5):
    """The first n rows of a prepared prompt are those of full prefill."""
    full = engine.model.full_prefill(ready.plan.prompt.token_ids)
    for mine, theirs in zip(ready.prefill.kv.layers, full.kv.layers, strict=True):
        torch.testing.assert_close(mine.keys[:, :n], theirs.keys[:, :n], atol=atol, rtol=0)
        torch.testing.assert_close(mine.values[:, :n], theirs.values[:, :n], atol=atol, rtol=0)
    return True


def test_all_but_the_last_token_of_an_identical_prompt_is_reused(cached):
    first = asked(cached, FIRST)
    again = asked(cached, FIRST)
    assert first.trace.tokens_reused == 0
    assert again.trace.tokens_reused == again.trace.tokens_prefix == again.trace.tokens - 1
    assert again.token_ids == first.token_ids


def test_messages_without_a_session_are_reused_with_what_was_answered(cached):
    said = [SYSTEM, ("user", "Count the ships, please.")]
    for _ in range(3):
        answer = asked(cached, said)
        said += [("assistant", answer.text), ("user", "Go on.")]
    assert answer.trace.tokens_prefix > answer.trace.tokens - 60
    assert answer.token_ids == cached.answer(said[:-2], Ask(reuse=False)).token_ids
    assert (cached.sessions.ls(), answer.trace.session) == ([], "")
    assert {entry.tier for entry in cached.store.entries()} == {"memory"}


def test_the_rows_of_a_shared_prefix_are_those_of_full_prefill(cached):
    asked(cached, FIRST)
    ready = cached.prepare(cached.prompt(OTHER))
    assert ready.plan.fetches
    assert is_full_prefill(cached, ready)


def test_rows_computed_behind_a_blended_row_are_never_saved(cached):
    asked(cached, messages())  # all of it is computed, and kept
    first = asked(cached, messages(CHUNKS[::-1]))
    assert any(chunk_hits(first.trace))
    cached.runtime.saves.flush()
    begun = asked(cached, messages(CHUNKS[::-1], "Question: When?"))
    assert begun.trace.tokens_prefix <= len(cached.prefix(messages())) + len(CHUNKS[-1])


def test_entries_that_were_evicted_are_swept_from_the_tree(cached, monkeypatch):
    monkeypatch.setattr("ragfuse.engine.prefix_cache.SWEEP_NODES", 1)
    asked(cached, ONCE)
    cached.store.clear()
    cached.prefixes._sweep_at = 1
    asked(cached, "Nobody saw the ships of the other harbour come in this year.")
    assert len(cached.prefixes._tree.keys) < 3


@pytest.fixture
def patient(monkeypatch):
    """Prompts wait for what others save, also on a busy machine."""
    monkeypatch.setattr("ragfuse.engine.prefix_cache.PREFIX_SAVE_WAIT_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_prompts_of_a_batch_share_what_they_begin_with(cached):
    questions = [[SYSTEM, ("user", f"What happened in year {number}?")] for number in range(4)]
    answers = cached.batch(questions)
    shared = [answer.trace.tokens_prefix > len(SYSTEM[1]) for answer in answers]
    assert sum(shared) == len(questions) - 1  # whichever was first computed it
    for question, answer in zip(questions, answers, strict=True):
        assert answer.token_ids == cached.answer(question, Ask(reuse=False)).token_ids


def test_two_tenants_never_share_a_beginning(on):
    with (
        Engine(on) as mine,
        Engine(on.model_copy(update={"salt": "theirs"}), mine.model, mine.store) as theirs,
    ):
        asked(mine, FIRST)
        assert asked(theirs, FIRST).trace.tokens_reused == 0


@pytest.mark.parametrize("beside", [(CHUNKS[0],), ("x", CHUNKS[0][1:-1], "x")])
def test_a_forgotten_chunk_is_in_no_prefix_also_where_its_ends_were_joined_with_others(
    cached, beside
):
    question = [("user", f"{INSTRUCTION}{CHUNKS[0]}\n\n{QUESTION}")]
    asked(cached, question)
    cached.forget(["".join(beside)])
    assert asked(cached, question).trace.tokens_reused == 0


def test_a_shared_prefix_is_exact_also_where_disk_keeps_conversations_in_fewer_bits(on):
    said = [SYSTEM, ("user", "Which ship came first, and who of the keepers saw it come in?")]
    levels = (("disk", ("int8",)),)
    with Engine(on.model_copy(update={"levels": levels})) as engine:
        engine.answer(said, Ask(session="one"))
        engine.flush()
        entries = engine.store.entries()
        assert any("raw" not in entry.sizes for entry in entries)
        ready = engine.prepare(engine.prompt(said))
        assert ready.plan.fetches
        assert {fetch.level for fetch in ready.plan.fetches} == {"raw"}
        assert is_full_prefill(engine, ready)
        memory = engine.store.tier("memory")
        memory.delete([entry.key for entry in memory.list()])
        assert is_full_prefill(engine, engine.prepare(engine.prompt(said)))


def test_what_a_conversation_keeps_is_not_kept_twice(cached):
    said = [SYSTEM, ("user", "Which ship came first, and who of the keepers saw it come in?")]
    answer = asked(cached, said, session="one")
    said += [("assistant", answer.text), ("user", "Go on.")]
    asked(cached, said, session="one")
    rows = sum(entry.n_tokens for entry in cached.store.entries() if entry.tier == "memory")
    assert rows <= len(cached.prompt(said)) + 40


@pytest.mark.usefixtures("patient")
def test_a_prompt_waits_for_the_prefix_that_another_one_computes(cached):
    text = f"{ONCE[:-1]}, and "
    with ThreadPoolExecutor(2) as pool, cached.model.lock:
        first = pool.submit(cached.answer, f"{text}one of them")
        until(lambda: cached.model.lock.waiting)
        second = pool.submit(cached.answer, f"{text}two of them")
        cached.model.lock.release()
        assert first.result(60).trace.tokens_prefix == 0
        assert second.result(60).trace.tokens_prefix >= len(text)
        cached.model.lock.acquire()


def test_with_reuse_false_nothing_is_read_and_nothing_kept(cached):
    asked(cached, ONCE, reuse=False)
    assert asked(cached, ONCE).trace.tokens_reused == 0


trees = st.lists(
    st.tuples(
        st.integers(0, 99),
        st.lists(st.sampled_from("abcdef"), min_size=1, max_size=30).map("".join),
    ),
    min_size=4,
    max_size=8,
)


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(trees)
def test_trees_of_prompts_answer_as_full_prefill_does_in_a_memory_that_drops_the_oldest(
    forgetful, prompts
):
    grown = ["Once upon a time. "]
    for where, what in prompts:
        text = grown[where % len(grown)] + what
        grown.append(text)
        full = forgetful.answer(text, Ask(reuse=False, max_tokens=4))
        assert forgetful.answer(text, Ask(max_tokens=4)).token_ids == full.token_ids


@pytest.fixture(scope="module")
def forgetful(varied_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    small = {"memory_bytes": 600_000, "disk_bytes": 0, "learn": "off"}
    with Engine(
        Settings(model=str(varied_path), dtype="float32", store=folder, home=folder, **small)
    ) as engine:
        yield engine


def test_the_first_chunk_of_a_prompt_is_exact_where_its_beginning_recurred(cached):
    cached.ingest([(text, "") for text in CHUNKS])
    for _ in range(2):
        asked(cached, messages())
    ready = cached.prepare(cached.prompt(messages()))
    n_exact = len(cached.prefix(messages())) + len(CHUNKS[0])
    prefix = [each for each in ready.plan.prompt.segments if each.kind == "prefix"]
    assert sum(len(each.tokens) for each in prefix) == n_exact
    assert is_full_prefill(cached, ready, n_exact, atol=5e-5)
