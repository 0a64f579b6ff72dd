"""Turns of a conversation on a tiny model in float32: what the next reuses, and that it is what
full prefill gives.
"""

from dataclasses import replace

import pytest

from ragfuse import Ask, Engine, Piece
from tests.kits import hf as kit
from tests.kits.sessions import QUESTIONS, built, is_full_prefill, resent, talk
from tests.kits.tiny import CHUNKS, adds_up, ingest, messages, python


def history(trace):
    return [segment for segment in trace.segments if segment.kind == "history"]


def prepared(engine, question, **ask):
    """The next turn's prompt, prefilled but not answered."""
    ask = Ask(**ask)
    return engine.prepare(built(engine, question, ask), ask)


def held(answer):
    """Tokens that the next turn reuses: all but the last one."""
    return answer.trace.tokens + len(answer.token_ids) - 1


def test_each_turn_reuses_all_earlier_ones_and_equals_full_prefill_token_for_token(engine):
    reused = 0
    for turn, question in enumerate(QUESTIONS):
        asked = [("user", question)]
        full = engine.answer(asked, Ask(session="one", reuse=False))
        assert len(engine.sessions.ls()) == bool(turn)  # which was no turn
        ready = prepared(engine, asked, session="one")
        assert len(ready.plan.fetches) == 2 * turn
        assert is_full_prefill(engine, ready)
        answer = engine.answer(asked, Ask(session="one"))
        assert answer.token_ids == full.token_ids
        assert (answer.trace.session, answer.trace.history_reused) == ("one", reused)
        assert all(segment.hit and segment.exact for segment in history(answer.trace))
        assert adds_up(answer.trace)
        reused = held(answer)


@pytest.mark.parametrize("without", ["disk_bytes", "memory_bytes"])
def test_a_session_goes_on_without_disk_or_without_memory(tiny_settings, without):
    with Engine(tiny_settings.model_copy(update={without: 0})) as engine:
        first, second = talk(engine, QUESTIONS[:2])
        assert second.trace.history_reused == held(first)
        (info,) = engine.sessions.ls()
        assert (info.turns, info.persistent) == (2, without == "memory_bytes")


@pytest.mark.slow
def test_a_session_is_gone_on_with_in_another_process(engine, tiny_settings):
    first = talk(engine, QUESTIONS[:1])[0]
    engine.flush()
    found = python(
        """
        import json, sys
        from ragfuse import Ask, Engine, Settings
        settings = Settings(**json.loads(sys.argv[1]))
        with Engine(settings) as engine:
            asked = [("user", sys.argv[2])]
            full = engine.answer(asked, Ask(session="one", reuse=False))
            answer = engine.answer(asked, Ask(session="one"))
            reused, same = answer.trace.history_reused, answer.token_ids == full.token_ids
            print(json.dumps([reused, same, [s.tier for s in answer.trace.segments if s.hit]]))
        """,
        tiny_settings.model_dump_json(include={"model", "dtype", "store", "home", "max_tokens"}),
        QUESTIONS[1],
    )
    assert found == [held(first), True, ["disk", "disk"]]
    third = talk(engine, QUESTIONS[2:3])[0]
    assert len(engine.sessions.show("one").turns) == 3
    assert len(history(third.trace)) == 4


def test_an_edited_question_reuses_what_stands_before_it(engine):
    answers = talk(engine, QUESTIONS[:3])
    edited = resent([QUESTIONS[0], "Which oil?", QUESTIONS[2]], answers[:2])
    assert is_full_prefill(engine, prepared(engine, edited, session="one"))
    answer = engine.answer(edited, Ask(session="one"))
    assert answer.trace.history_reused == held(answers[0])
    assert answer.token_ids == engine.answer(edited, Ask(reuse=False)).token_ids
    assert len(engine.sessions.show("one").turns) == 2


def test_an_answer_that_was_altered_is_not_taken_for_what_was_said(engine):
    answers = talk(engine, QUESTIONS[:2], session="other")
    altered = resent(QUESTIONS[:3], answers)
    altered[1] = ("assistant", "Something else entirely.")
    answer = engine.answer(altered, Ask(session="other"))
    assert answer.trace.history_reused == answers[0].trace.tokens
    assert answer.token_ids == engine.answer(altered, Ask(reuse=False)).token_ids


def test_an_answer_cut_at_a_stop_string_is_resumed_as_it_is_shown(engine):
    whole = engine.answer([("user", QUESTIONS[0])], Ask(reuse=False)).text
    first = engine.answer([("user", QUESTIONS[0])], Ask(session="one", stop=[whole[10:11]]))
    assert first.text == whole[: whole.index(whole[10:11])]
    ready = prepared(engine, [("user", QUESTIONS[1])], session="one")
    said = engine.model.tokenizer.decode(ready.plan.prompt.token_ids)
    assert f"<|assistant|>{first.text}\n<|user|>" in said
    assert is_full_prefill(engine, ready)


def test_lost_entries_are_computed_from_their_tokens_and_kept_again(engine):
    talk(engine, QUESTIONS[:3])
    engine.flush()
    keys = [rows.key for rows in engine.sessions.show("one").rows]
    engine.store.forget(keys[1:4])
    asked = [("user", QUESTIONS[3])]
    full = engine.answer(asked, Ask(session="one", reuse=False))
    ready = prepared(engine, asked, session="one")
    assert len(ready.plan.misses) == 3
    assert is_full_prefill(engine, ready)
    assert engine.answer(asked, Ask(session="one")).token_ids == full.token_ids
    engine.flush()
    assert set(keys) <= set(engine.store.lookup(keys))
    assert [rows.key for rows in engine.sessions.show("one").rows][:6] == keys


def test_a_session_is_unknown_to_another_tenant(engine, tiny_settings):
    talk(engine, QUESTIONS[:2])
    engine.flush()
    with Engine(tiny_settings.model_copy(update={"salt": "theirs"})) as other:
        assert other.sessions.ls() == []
        assert talk(other, QUESTIONS[1:2])[0].trace.history_reused == 0
        assert len(other.sessions.show("one").turns) == 1
    assert len(engine.sessions.show("one").turns) == 2


def test_chunks_of_earlier_turns_stay_and_what_was_blended_is_never_taken_for_exact(engine):
    ingest(engine)
    first = engine.answer(messages(), Ask(session="one"))
    assert first.trace.tokens_reused
    assert not all(segment.exact for segment in first.trace.segments)
    ready = prepared(engine, [("user", QUESTIONS[0])], session="one")
    assert ready.plan.prompt.token_ids[: first.trace.tokens] == engine.prompt(messages()).token_ids
    assert [rows.key.encoded for rows in engine.sessions.show("one").rows] == ["alone", "filler"]
    second = engine.answer([("user", QUESTIONS[0])], Ask(session="one"))
    assert second.trace.history_reused == held(first)
    assert [segment.exact for segment in history(second.trace)] == [True, False]
    kinds = [rows.key.encoded for rows in engine.sessions.show("one").rows]
    assert kinds == ["alone", "filler", "filler"]


def test_a_system_message_that_comes_with_every_turn_is_said_once(engine):
    system = ("system", "Answer in one word.")
    for question in QUESTIONS[:2]:
        engine.answer([system, ("user", question)], Ask(session="one"))
    assert [message.role for message in engine.sessions.show("one").messages] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip


def test_a_model_that_must_not_be_blended_still_has_its_history_and_nothing_is_said_of_it(
    engine, caplog
):
    engine.runtime.learn(replace(engine.runtime.profile, safe=False))
    first, second = talk(engine, QUESTIONS[:2])
    assert second.trace.history_reused == held(first)
    assert "calibrate" not in caplog.text


def over(documents, question):
    """A user's message as a server makes it: documents as chunks before the question."""
    return (
        "user",
        [
            *(part for text in documents for part in (Piece(text, "chunk", "book"), "\n\n")),
            question,
        ],
    )


def test_messages_resent_without_their_documents_go_on_from_what_was_stored(engine):
    answers = []
    for turn, question in enumerate(QUESTIONS[:3]):
        asked = [
            *resent(QUESTIONS[:turn], answers),
            over(CHUNKS[2 * turn : 2 * turn + 2], question),
        ]
        full = engine.answer(asked, Ask(session="one", reuse=False))
        ready = prepared(engine, asked, session="one")
        assert is_full_prefill(engine, ready)
        assert all(
            text in engine.model.tokenizer.decode(ready.plan.prompt.token_ids)
            for text in CHUNKS[: 2 * turn + 2]
        )
        answers.append(engine.answer(asked, Ask(session="one")))
        assert answers[-1].token_ids == full.token_ids
    reused = [answer.trace.history_reused for answer in answers]
    assert reused == [0, *map(held, answers[:-1])]
    assert len(engine.sessions.show("one").turns) == 3


@pytest.mark.parametrize("documents", [CHUNKS[:1], CHUNKS[1::-1], CHUNKS[2:4], CHUNKS[:3]])
def test_other_documents_are_another_question_and_no_session_gets_those_of_another(
    engine, documents
):
    first = engine.answer([over(CHUNKS[:2], QUESTIONS[0])], Ask(session="one"))
    asked = [over(documents, QUESTIONS[0]), ("assistant", first.text), ("user", QUESTIONS[1])]
    prompt = built(engine, asked, Ask(session="one"))
    assert prompt.token_ids == engine.prompt(asked).token_ids
    assert "history" not in [segment.kind for segment in prompt.segments]
    asked[0] = ("user", QUESTIONS[0])  # without documents, in another session
    other = built(engine, asked, Ask(session="two"))
    assert other.token_ids == engine.prompt(asked).token_ids


LINES = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant> "


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "gptj", "bloom-alibi", "llama"])
def test_a_history_is_read_where_it_was_computed_also_where_kv_cannot_be_moved(
    tiny_settings, monkeypatch, name, prefix_cache
):
    with Engine(
        tiny_settings.model_copy(update={"prefix_cache": prefix_cache}), kit.family(name)
    ) as engine:
        monkeypatch.setattr(engine.model.tokenizer, "chat_template", LINES, raising=False)
        answers = talk(engine, QUESTIONS[:3])
        assert all(answer.trace.history_reused for answer in answers[1:])
        ready = prepared(engine, [("user", QUESTIONS[3])], session="one")
        assert {segment.shift for segment in ready.plan.prompt.segments if segment.keys} == {0}
        assert is_full_prefill(engine, ready)
