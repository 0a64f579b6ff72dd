"""The trip of a question over six cached chunks, in the process that ingested them and in
another.
"""

import pytest

from ragfuse import Ask, Engine, Settings
from tests.kits.tiny import (
    CHUNKS,
    INSTRUCTION,
    QUESTION,
    adds_up,
    chunk_hits,
    ingest,
    messages,
    on_disk_only,
    python,
)


@pytest.mark.parametrize("policy", ["hkvd", "lego", "lexical", "query", "random"])
def test_six_cached_chunks_are_reused_and_few_rows_recomputed(engine, policy):
    ingest(engine)
    trace = engine.answer(messages(), Ask(policy=policy)).trace
    assert [(segment.kind, segment.hit) for segment in trace.segments] == [("prefix", True)] + [
        ("chunk", True)
    ] * 6
    assert [segment.exact for segment in trace.segments] == [True] + [False] * 6
    assert adds_up(trace)
    assert 0 < trace.mean_ratio < 0.3
    assert trace.tokens_reused > 4 * trace.tokens_recomputed > 0
    assert trace.tokens_fresh == trace.tokens - sum(segment.n_tokens for segment in trace.segments)
    assert not trace.fallback_reason


SAID = INSTRUCTION + "\n\n".join(CHUNKS) + f"\n\n{QUESTION}"


def test_from_disk_and_from_memory_the_answer_is_the_same(tiny_settings, engine):
    ingest(engine)
    answers = [engine.answer(messages())]
    for opened in (on_disk_only, Engine):
        with opened(tiny_settings) as other:
            answers += [other.answer(messages()) for _ in range(2)]
    tiers = [{segment.tier for segment in answer.trace.segments} for answer in answers]
    # what was read from disk is in memory for the next question
    assert tiers == [{"memory"}, {"disk"}, {"disk"}, {"disk"}, {"memory"}]
    assert len({answer.token_ids for answer in answers}) == 1
    assert answers[1].trace.load_s > 0


@pytest.mark.embedded
def test_a_second_process_on_the_store_hits_and_finds_known_chunks(tiny_settings, engine):
    ingest(engine)
    code = """
        import json, sys
        from ragfuse import Engine, Piece, Settings
        model, store, plain, text = sys.argv[1:]
        given = [sys.argv[3].split(text)[0], Piece(text, "chunk", "given"), "Who?"]
        # which a later answer may or may not meet
        told = {"dtype": "float32", "max_tokens": 12, "prefix_cache": False}
        with Engine(Settings(model=model, store=store, **told)) as engine:
            traces = [engine.answer([("user", said)]).trace.as_dict() for said in (plain, given)]
        print(json.dumps(traces))
    """
    plain, given = python(code, tiny_settings.model, tiny_settings.store, SAID, CHUNKS[0])
    assert [segment["hit"] for segment in plain["segments"]] == [True] * 7
    assert {segment["tier"] for segment in plain["segments"]} == {"disk"}
    assert [(s["hit"], s["kind"]) for s in given["segments"]] == [(True, "prefix"), (True, "chunk")]


@pytest.mark.embedded
def test_the_embedded_model_says_what_full_prefill_says_at_ratio_one(smollm_path, tmp_path):
    settings = Settings(
        model=str(smollm_path), dtype="float32", store=tmp_path, max_tokens=12, prefix_cache=False
    )
    with Engine(settings) as engine:
        ingest(engine, CHUNKS[:3])
        question = messages(
            CHUNKS[:3], "Question: How many ships did the keeper of the southern lighthouse count?"
        )
        fused, full = engine.answer(question, Ask(ratio=1.0)), _full(engine, question)
        # not ingested
        one = messages(
            CHUNKS[3:4], "Question: What colour is the door of the lighthouse? One word."
        )
        exact, alone = engine.answer(one), _full(engine, one)
    assert fused.token_ids == full.token_ids
    assert chunk_hits(fused.trace) == [True] * 3
    assert exact.token_ids == alone.token_ids
    assert [(segment.kind, segment.hit) for segment in exact.trace.segments] == [
        ("prefix", True),
        ("chunk", False),
    ]
    assert exact.trace.tokens_recomputed == 0


def _full(engine, question):
    return engine.answer(question, Ask(reuse=False))
