"""The engine on a tiny random model: what an answer is, whatever way it is asked for, and what it
leaves behind.
"""

import copy
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from ragfuse import Ask, Engine, InputError, SettingsError, StoreError
from ragfuse.engine.runtime import MAX_WAITING_JOBS
from ragfuse.hf.probe import decoder_layers
from ragfuse.types.keys import filler_context
from ragfuse.types.kv import ChunkKV, LayerKV
from tests.kits.tiny import (
    CHUNKS,
    INSTRUCTION,
    QUESTION,
    adds_up,
    chunk_hits,
    ingest,
    messages,
    python,
)
from tests.twins.reference import shifted


@pytest.fixture
def filled(engine):
    ingest(engine)
    return engine


def full(engine, prompt=None, **options):
    return engine.answer(prompt or messages(), Ask(reuse=False, **options))


# one answer


@pytest.mark.parametrize("policy", ["full", "hkvd", "lexical", "query", "random"])
@pytest.mark.parametrize("missing", [(), (0,), (2, 4), (5,)])
def test_ratio_one_is_full_prefill_token_for_token(engine, policy, missing):
    ingest(engine, [text for number, text in enumerate(CHUNKS) if number not in missing])
    assert (
        engine.answer(messages(), Ask(policy=policy, ratio=1.0)).token_ids == full(engine).token_ids
    )


def test_ratio_zero_recomputes_nothing(filled):
    trace = filled.answer(messages(), Ask(ratio=0.0)).trace
    assert (trace.tokens_recomputed, trace.recomputed_rows, trace.mean_ratio) == (0, (), 0.0)
    assert adds_up(trace)


@pytest.mark.parametrize("cut", [0, 20])
def test_a_chunk_is_read_where_it_stands_whole_or_cut(filled, cut):
    encoder, ids = filled.runtime.encoder, filled.tokens(CHUNKS[0])
    stored = filled.store.read_layers(encoder.key(ids, encoder.context), 0, 3)
    lo = len(CHUNKS[1]) + 2  # a token is a byte
    ready = filled.prepare(
        filled.prompt(f"{CHUNKS[1]}\n\n{CHUNKS[0][cut:]}\n\n{QUESTION}"), Ask(ratio=0.0)
    )
    for mine, kv, layout in zip(
        ready.prefill.kv.layers, stored, filled.model.profile.rope, strict=True
    ):
        rows = slice(lo, lo + len(ids) - cut)
        wanted = shifted(kv.keys[:, cut:], lo - cut, layout).float()
        torch.testing.assert_close(mine.keys[:, rows], wanted, atol=1e-5, rtol=1e-5)
        assert torch.equal(mine.values[:, rows], kv.values[:, cut:])


def test_rows_in_the_trace_lie_in_chunks_that_are_not_exact(filled):
    trace = filled.answer(messages(), Ask(ratio=0.3)).trace
    blended = [s for s in trace.segments if s.kind == "chunk" and not s.exact]
    rows = {row for s in blended for row in range(s.start, s.start + s.n_tokens)}
    assert set(trace.recomputed_rows) <= rows
    assert [s.recomputed for s in blended] == [
        sum(s.start <= row < s.start + s.n_tokens for row in trace.recomputed_rows) for s in blended
    ]


def test_a_seed_makes_sampling_repeat_and_leaves_other_random_numbers_alone(filled):
    torch.manual_seed(7)
    wanted = torch.rand(1)
    torch.manual_seed(7)
    asks = [Ask(seed=seed, options={"do_sample": True, "temperature": 2.0}) for seed in (1, 1, 2)]
    first, again, other = (filled.answer(messages(), ask).token_ids for ask in asks)
    assert first == again != other
    assert torch.equal(torch.rand(1), wanted)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        *(({"ratio": ratio}, "ratio") for ratio in (-0.1, 1.01, float("nan"), float("inf"))),
        ({"policy": "hkdv"}, "hkvd"),
    ],
)
def test_a_ratio_out_of_bounds_and_an_unknown_policy_are_refused(given, told):
    with pytest.raises(SettingsError, match=told):
        Ask(**given)


# prompts


# tenants


def test_a_tenant_never_hits_an_entry_of_another(tiny_settings, filled):
    with Engine(tiny_settings.model_copy(update={"salt": "b"})) as other:
        trace = other.answer(messages()).trace
        assert chunk_hits(trace) == [False] * 6
        assert other.digest != filled.digest
        other.flush()
    with Engine(tiny_settings.model_copy(update={"salt": "c"})) as other:
        assert [piece.kind for piece in other.prompts.pieces(CHUNKS[0])] == ["fresh"]


# streams


def test_a_stream_gives_the_text_of_the_answer(filled):
    with filled.stream(messages(), Ask(max_tokens=80)) as stream:
        said = list(stream)
        assert (
            stream.answer.text
            == "".join(said)
            == filled.answer(messages(), Ask(max_tokens=80)).text
        )
    assert len(said) > 1 or " " not in stream.answer.text  # whole words at a time
    assert stream.answer.trace.ttft_s > 0


def test_a_stream_that_is_closed_half_way_ends_and_frees_the_model(filled):
    with filled.stream(messages(), Ask(max_tokens=3000)) as stream:
        next(iter(stream))
    with filled.model.lock:
        assert filled.model.lock.waiting == 0
    with pytest.raises(InputError, match="closed"):
        _ = stream.answer


def test_streams_that_are_closed_while_they_wait_for_the_model_compute_nothing(filled, monkeypatch):
    filled.answer(messages())
    computed, fuse = [], filled.model.fuse
    monkeypatch.setattr(
        filled.model, "fuse", lambda *given, **more: computed.append(1) or fuse(*given, **more)
    )
    filled.answer(messages())
    assert len(computed) == 1
    with filled.model.lock:
        streams = [filled.stream(messages(), Ask(max_tokens=3000)) for _ in range(3)]
        for stream in streams:
            stream.cancel()
    for stream in streams:
        stream.close()
    assert len(computed) == 1


@pytest.mark.parametrize("reuse", [True, False], ids=["fused", "full"])
def test_a_stream_that_is_cancelled_during_its_prefill_computes_no_further_layer(filled, reuse):
    filled.answer(messages())
    layers, computed = decoder_layers(filled.model.model), []

    def cancel(*given):
        computed.append(given)
        stream.cancel()

    hooks = [layer.register_forward_hook(cancel) for layer in layers]
    with filled.model.lock:
        stream = filled.stream(messages(), Ask(reuse=reuse))
    with pytest.raises(InputError, match="closed"):
        list(stream)
    for hook in hooks:
        hook.remove()
    assert len(computed) == 1 < len(layers)
    assert filled.answer(messages(), Ask(reuse=reuse)).text


# batches and threads


def test_a_batch_says_what_each_prompt_alone_says(filled):
    prompts = [
        messages(CHUNKS[:2]),
        messages(),
        "Nothing is known of this text.",
        messages(CHUNKS[5:], "Why?"),
    ]
    alone = [filled.answer(prompt, Ask(ratio=1.0)).token_ids for prompt in prompts]
    together = filled.batch(prompts, Ask(ratio=1.0))
    assert [answer.token_ids for answer in together] == alone
    assert all(
        adds_up(answer.trace) and 0 < answer.trace.ttft_s < answer.trace.total_s
        for answer in together
    )
    assert filled.batch([]) == []


def test_each_answer_of_a_batch_ends_at_its_own_end_token(filled):
    ids = filled.answer(messages()).token_ids
    ask = Ask(options={"eos_token_id": ids[3]})
    alone = filled.answer(messages(CHUNKS[:1]), ask)
    ended, other = filled.batch([messages(), messages(CHUNKS[:1])], ask)
    assert (ended.token_ids, ended.finish_reason) == (ids[: ids.index(ids[3])], "stop")
    assert (other.token_ids, other.finish_reason) == (alone.token_ids, alone.finish_reason)


def test_threads_that_ask_at_once_get_their_own_answers(filled):
    prompts = [
        messages(random.Random(seed).sample(CHUNKS, 4), f"Question {seed}?") for seed in range(8)
    ]
    wanted = [filled.answer(prompt).token_ids for prompt in prompts]

    def ask(number):
        if number % 2:
            return filled.answer(prompts[number]).token_ids
        return filled.stream(prompts[number]).answer.token_ids

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == wanted


# what is left behind


def test_closing_while_others_still_ask_neither_hangs_nor_fails(tiny_settings, monkeypatch):
    engine = Engine(tiny_settings)
    begun, check = threading.Semaphore(0), engine._check_open
    monkeypatch.setattr(engine, "_check_open", lambda: (check(), begun.release()))
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(engine.answer, messages()) for _ in range(4)]
        assert all(begun.acquire(timeout=60) for _ in asked)
        engine.close()
        assert len({each.result(60).text for each in asked}) == 1


def test_a_with_block_that_fails_drops_waiting_saves(tiny_settings):
    engine = Engine(tiny_settings)

    def ask_and_fail():
        with engine, engine.model.lock:  # so that nothing is saved before it fails
            engine.answer(messages())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ask_and_fail()
    with Engine(tiny_settings) as again:  # of six chunks, one may have begun
        assert sum(each.key.encoded == "filler" for each in again.store.entries()) <= 1


def test_a_chunk_that_several_prompts_miss_is_encoded_once(engine):
    with engine.model.lock:
        for _ in range(3):
            engine.answer(messages())
        assert len(engine.runtime.jobs) <= 7 < MAX_WAITING_JOBS
    engine.flush()
    assert len({entry.key for entry in engine.store.entries()}) == 6


def test_an_engine_without_disk_knows_its_chunks_while_it_lives(tiny_settings):
    with Engine(tiny_settings.model_copy(update={"disk_bytes": 0})) as engine:
        ingest(engine)
        assert not engine.catalog.strict.is_open
        said = [("user", f"{INSTRUCTION}{CHUNKS[4]}\n\n{QUESTION}")]
        assert chunk_hits(engine.answer(said).trace) == [True]
    assert not tiny_settings.store_path.exists()


def test_engines_of_equal_settings_are_one_until_it_is_closed(tiny_settings):
    engine = Engine.shared(tiny_settings)
    assert Engine.shared(tiny_settings) is engine
    assert engine.answer(messages()).text
    engine.close()
    again = Engine.shared(tiny_settings)
    assert again is not engine
    assert chunk_hits(again.answer(messages()).trace) == [True] * 6
    again.close()


@pytest.mark.slow
def test_a_process_that_ends_without_closing_keeps_what_it_can(tiny_settings):
    code = """
        import sys
        from ragfuse import Engine, Piece, Settings
        engine = Engine(Settings(model=sys.argv[1], dtype="float32", store=sys.argv[2], max_tokens=2))
        engine.answer([("user", ["Some instruction. ", Piece(sys.argv[3], "chunk", "left behind"), " What?"])])
        print("0")
    """
    assert python(code, tiny_settings.model, tiny_settings.store, CHUNKS[0]) == 0
    with Engine(tiny_settings) as engine:
        assert engine.prompts.knows(CHUNKS[0], engine.model.tokens(CHUNKS[0]))
        assert [piece.source for piece in engine.prompts.pieces(CHUNKS[0])] == ["left behind"]
        assert {entry.key.context for entry in engine.store.entries()} == {filler_context("")}


@pytest.mark.parametrize("which", [0, 1, "all"])
def test_entries_of_another_shape_under_the_right_key_are_computed_anew(engine, which):
    ingest(engine)
    expected = engine.answer(messages(), Ask(reuse=False)).text
    keys = sorted({entry.key for entry in engine.store.entries()}, key=str)
    for key in keys if which == "all" else keys[which::2]:
        whole = [engine.store.read_layers(key, layer)[0] for layer in range(engine.model.n_layers)]
        wide = (LayerKV(kv.keys.repeat(2, 1, 1), kv.values.repeat(2, 1, 1)) for kv in whole)
        engine.store.put(key, ChunkKV(tuple(wide)), wait=True)
    assert engine.answer(messages(), Ask(ratio=1.0)).text == expected


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([("user", None)], "message"),
        ([""], "message"),
        ([3.5], "message"),
        ([("user", [1])], "message"),
        (None, "found neither|found None"),
        (7, "found 7"),
        ([], "no messages"),
        ("", "empty"),
    ],
)
def test_what_is_no_question_is_refused(engine, given, told):
    for ask in (engine.answer, engine.plan, engine.prompt):
        with pytest.raises(InputError, match=told):
            ask(given)


def test_an_engine_stays_in_its_process(engine):
    assert copy.copy(engine) is copy.deepcopy(engine) is engine
    with pytest.raises(TypeError, match=r"Engine objects cannot be pickled.*create the Engine"):
        ForkingPickler.dumps(engine)


@pytest.mark.parametrize(
    "given", ["a long text", ["a long text"], [("a", None)], [("a", "b", "c")], [3]]
)
def test_what_is_no_document_is_refused(engine, given):
    for take in (
        engine.know,
        engine.ingest,
        lambda texts: engine.answer("Who?", Ask(documents=texts)),
    ):
        with pytest.raises((InputError, SettingsError), match=r"^[Dd]ocuments"):
            take(given)


def test_every_call_of_a_closed_engine_is_one_clear_error(tiny_settings):
    with Engine(tiny_settings) as engine:
        assert engine.answer("Who?").token_ids
    calls = [
        lambda: engine.answer("Who?"),
        lambda: engine.stream("Who?"),
        lambda: engine.batch(["Who?"]),
        lambda: engine.plan("Who?"),
        lambda: engine.prompt("Who?"),
        lambda: engine.ingest([("A text.", "a.txt")]),
        lambda: engine.know([("A text.", "a.txt")]),
        lambda: engine.forget(["A text."]),
        lambda: engine.__enter__(),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="The engine is closed"):
            call()
    engine.prefetch(["A text."])  # a hint, which is in vain
    engine.flush()
    engine.close()
