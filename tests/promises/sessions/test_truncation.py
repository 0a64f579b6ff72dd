"""A conversation that is too long: rows and starts change, bytes do not, and nothing is
recomputed.
"""

import pytest

from ragfuse import Ask, Engine
from ragfuse.text.chat_messages import ChatMessage, turn_begins
from ragfuse.types.kv import ChunkKV, LayerKV
from tests.kits.sessions import QUESTIONS, is_full_prefill, talk
from tests.kits.store import same
from tests.kits.tiny import adds_up
from tests.promises.sessions.test_history import history, prepared
from tests.twins import reference


@pytest.fixture
def said(engine):
    """An engine with three turns behind it."""
    talk(engine, QUESTIONS[:3])
    engine.flush()
    return engine


def narrow(engine, **settings):
    """An engine on the same store, whose window is smaller than what was said."""
    return Engine(
        engine.settings.model_copy(update={"window_tokens": 240, **settings}), model=engine.model
    )


@pytest.mark.parametrize("sinks", [0, 5])
def test_a_shortened_prompt_equals_attention_over_the_kept_rows_at_their_new_positions(said, sinks):
    with narrow(said, sinks=sinks) as engine:
        ready = prepared(engine, [("user", QUESTIONS[3])], session="one")
        prompt = ready.plan.prompt
        assert prompt.truncated > 0
        assert not ready.plan.misses
        lo, hi = prompt.last_user_rows
        assert engine.model.tokenizer.decode(prompt.token_ids[lo:hi]) == QUESTIONS[3]
        whole = engine.sessions.show("one").tokens
        full = engine.model.full_prefill(whole).kv
        twin = reference.LlamaTwin(engine.model.model)
        rows = [range(sinks), range(sinks + prompt.truncated, len(whole))]
        runs, at = [], 0
        for row in filter(None, rows):
            part, n = slice(row.start, row.stop), len(row)
            layers = tuple(
                LayerKV(
                    reference.shifted(kv.keys[:, part], -row.start, twin.layout),
                    kv.values[:, part],
                )
                for kv in full.layers
            )
            runs.append(reference.Cached(at, at + n, ChunkKV(layers), at, False))
            at += n
        assert prompt.token_ids[:at] == tuple(whole[at] for row in rows for at in row)
        wanted = twin.fuse(prompt.token_ids, range(len(prompt)), runs, "none", 0.0)
        error = (
            ready.prefill.logits.double().cpu() - wanted.logits
        ).abs().max() / wanted.logits.abs().max()
        assert float(error) < 1e-4


def test_shortening_changes_no_byte_and_no_key_and_computes_the_new_message_alone(said):
    rows = said.sessions.show("one").rows
    keys = [each.key for each in rows if each.lo < 4 or each.hi > 124]
    before = {key: said.store.read_layers(key, 0, said.model.n_layers) for key in keys}
    with narrow(said) as engine:
        answer = engine.answer([("user", QUESTIONS[3])], Ask(session="one"))
        assert answer.trace.truncated == 120
        assert answer.trace.tokens + 12 <= 240
        assert adds_up(answer.trace)
        assert len(keys) < len(rows)
        assert [each.key for each in engine.sessions.show("one").rows][: len(keys)] == keys
        assert engine.sessions.show("one").dropped == 120
        for key, layers in before.items():
            after = engine.store.read_layers(key, 0, engine.model.n_layers)
            assert all(same(*pair) for pair in zip(layers, after, strict=True))
        # only the new message is computed: no <s>, but the newline and what was said last
        fresh = len(engine.prompt([("user", QUESTIONS[3])])) - 1
        assert answer.trace.tokens_fresh == fresh + 2
        sinks, *others = history(answer.trace)
        assert (sinks.n_tokens, sinks.exact, any(segment.exact for segment in others)) == (
            4,
            True,
            False,
        )


def test_a_shortened_conversation_goes_on_and_is_never_taken_for_exact(said):
    with narrow(said) as engine:
        answers = talk(engine, [QUESTIONS[3], *QUESTIONS])
        assert all(answer.trace.tokens + 12 <= 240 for answer in answers)
        assert all(answer.trace.history_reused for answer in answers)
        truncated = [answer.trace.truncated for answer in answers]
        assert truncated == sorted(truncated)
        session = engine.sessions.show("one")
        assert len(session.turns) == 8
        first, *others = session.rows
        assert first.hi == 4
        assert {each.key.encoded for each in others} == {"filler"}


def test_a_lost_row_of_a_shortened_conversation_is_computed_under_a_key_of_its_own(said):
    with narrow(said) as engine:
        talk(engine, QUESTIONS[3:])
        engine.flush()
        session = engine.sessions.show("one")
        lost = session.rows[0]
        engine.store.forget([lost.key])
        answer = engine.answer([("user", "So?")], Ask(session="one"))
        assert [segment.hit for segment in history(answer.trace)].count(False) == 1
        after = engine.sessions.show("one")
        assert lost.key not in after.keys
        assert after.tokens[: session.n_tokens] == session.tokens
        engine.flush()
        assert all(segment.hit for segment in history(talk(engine, ["And?"])[0].trace))


def unknown(turns):
    """A conversation that was had elsewhere, behind a system message."""
    said = [("system", "Answer in one word.")]
    for number in range(turns):
        said += [
            ("user", f"{number}. {QUESTIONS[number % 4]}"),
            ("assistant", f"Nothing is known of that, {number}."),
        ]
    return said


def is_cut_at_a_turn(engine, prompt, asked, most):
    """Whether a prompt has the system message and as many of the last turns as there is
    room for.
    """
    fits = [
        at for at in range(1, len(asked), 2) if len(engine.prompt([asked[0], *asked[at:]])) <= most
    ]
    shorter = engine.prompt([asked[0], *asked[fits[0] :]])
    return fits[0] > 1 and prompt.token_ids == shorter.token_ids


@pytest.mark.parametrize("session", ["one", None])
def test_a_conversation_that_was_had_elsewhere_loses_its_earliest_turns(engine, session):
    asked = [*unknown(8), ("user", QUESTIONS[3])]
    with narrow(engine, window_tokens=400) as other:
        ready = prepared(other, asked, session=session)
        assert is_cut_at_a_turn(other, ready.plan.prompt, asked, 400 - 12)
        assert ready.plan.prompt.truncated == len(other.prompt(asked)) - len(ready.plan.prompt)
        assert is_full_prefill(other, ready)


def test_the_models_own_limit_shortens_a_conversation_that_was_had_elsewhere(engine, monkeypatch):
    monkeypatch.setattr(engine.model.model.config, "max_position_embeddings", 300)
    asked = [*unknown(8), ("user", QUESTIONS[3])]
    answers = []
    for _ in range(3):
        answers.append(engine.answer(asked, Ask(session="one")))
        asked += [("assistant", answers[-1].text), ("user", "So?")]
    assert all(
        answer.trace.truncated and answer.trace.tokens + len(answer.token_ids) <= 301
        for answer in answers
    )
    assert answers[1].trace.history_reused
    assert answers[2].trace.history_reused


def test_what_is_left_of_a_conversation_that_was_had_elsewhere_is_reused(engine):
    asked = [*unknown(8), ("user", QUESTIONS[3])]
    with narrow(engine, window_tokens=400) as other:
        first = other.answer(asked, Ask(session="one"))
        assert other.sessions.show("one").dropped == first.trace.truncated > 0
    with narrow(engine, window_tokens=600) as other:
        again = [*asked, ("assistant", first.text), ("user", "So?")]
        ready = prepared(other, again, session="one")
        assert is_full_prefill(other, ready)
        assert ready.plan.prompt.truncated == first.trace.truncated
        second = other.answer(again, Ask(session="one"))
        assert second.trace.history_reused == first.trace.tokens + len(first.token_ids) - 1
        assert all(segment.exact for segment in history(second.trace))
        third = talk(other, ["And?"])[0]
        assert third.trace.history_reused == second.trace.tokens + len(second.token_ids) - 1
    assert len(engine.sessions.show("one").turns) == 3


def test_turns_begin_with_a_question_and_the_last_one_stays():
    roles = [
        "system",
        "assistant",
        "user",
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    said = [ChatMessage(role, str(at)) for at, role in enumerate(roles)]
    assert turn_begins(said) == (1, [2, 5])
    assert turn_begins(said[:2])[1] == turn_begins(said[:1])[1] == []
