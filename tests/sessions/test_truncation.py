"""A conversation that is too long: rows and starts change, bytes do not, and nothing is computed again."""

from __future__ import annotations

import pytest
import torch

from ragfuse import Ask, Engine, InputError
from ragfuse.core import ChunkKV, LayerKV
from tests import reference
from tests.sessions.kit import QUESTIONS, talk
from tests.sessions.test_conversing import history, prepared
from tests.tiny import adds_up


@pytest.fixture
def said(engine):
    """An engine with three turns behind it."""
    talk(engine, QUESTIONS[:3])
    engine.flush()
    return engine


def narrow(engine, **settings):
    """An engine on the same store, whose window is smaller than what was said."""
    return Engine(engine.settings.model_copy(update={"window_tokens": 240, **settings}), model=engine.model)


@pytest.mark.parametrize("sinks", [0, 5])
def test_a_shortened_prompt_equals_attention_over_the_kept_rows_at_their_new_positions(said, sinks):
    with narrow(said, sinks=sinks) as engine:
        ready = prepared(engine, [("user", QUESTIONS[3])], session="one")
        prompt = ready.plan.prompt
        assert prompt.truncated > 0
        assert not ready.plan.misses
        whole = [token for stretch in engine.sessions.show("one").stretches for token in stretch.tokens]
        full = engine.model.full_prefill(whole).kv
        kept = [*range(sinks), *range(sinks + prompt.truncated, len(whole))]
        twin = reference.LlamaTwin(engine.model.model)
        rows = [slice(0, sinks), slice(sinks + prompt.truncated, len(whole))]
        runs, at = [], 0
        for part in (each for each in rows if each.stop > each.start):
            n = part.stop - part.start
            layers = tuple(
                LayerKV(reference.turned(kv.keys[:, part], -part.start, twin.layout), kv.values[:, part])
                for kv in full.layers
            )
            runs.append(reference.Cached(at, at + n, ChunkKV(layers), at, False))
            at += n
        assert prompt.token_ids[:at] == tuple(whole[row] for row in kept)
        wanted = twin.fuse(prompt.token_ids, range(len(prompt)), runs, "none", 0.0)
        error = (ready.prefill.logits.double() - wanted.logits).abs().max() / wanted.logits.abs().max()
        assert float(error) < 1e-4


def test_shortening_changes_no_byte_and_no_key(said):
    keys = [stretch.key for stretch in said.sessions.show("one").stretches]
    before = {key: said.store.read_layers(key, 0, said.model.n_layers) for key in keys}
    with narrow(said) as engine:
        answer = engine.answer([("user", QUESTIONS[3])], Ask(session="one"))
        assert answer.trace.truncated == 120
        assert answer.trace.tokens + 12 <= 240
        assert adds_up(answer.trace)
        assert [stretch.key for stretch in engine.sessions.show("one").stretches][: len(keys)] == keys
        assert engine.sessions.show("one").dropped == 120
        for key, layers in before.items():
            after = engine.store.read_layers(key, 0, engine.model.n_layers)
            assert all(torch.equal(a.keys, b.keys) for a, b in zip(layers, after, strict=True))
            assert all(torch.equal(a.values, b.values) for a, b in zip(layers, after, strict=True))


def test_only_what_is_new_is_computed_after_shortening(said):
    with narrow(said) as engine:
        answer = engine.answer([("user", QUESTIONS[3])], Ask(session="one"))
        fresh = len(engine.prompt([("user", QUESTIONS[3])])) - 1  # no <s>, but the newline and what was said last
        assert answer.trace.tokens_fresh == fresh + 2
        assert not any(segment.exact for segment in history(answer.trace))


def test_a_shortened_conversation_goes_on_and_is_never_taken_for_exact(said):
    with narrow(said) as engine:
        answers = talk(engine, [QUESTIONS[3], *QUESTIONS])
        assert all(answer.trace.tokens + 12 <= 240 for answer in answers)
        assert all(answer.trace.history_reused for answer in answers)
        truncated = [answer.trace.truncated for answer in answers]
        assert truncated == sorted(truncated)
        session = engine.sessions.show("one")
        assert len(session.turns) == 8
        assert {stretch.key.encoded for stretch in session.stretches[6:]} == {"amid"}


def test_a_lost_row_of_a_shortened_conversation_is_computed_under_a_key_of_its_own(said):
    with narrow(said) as engine:
        talk(engine, QUESTIONS[3:])
        engine.flush()
        stretches = engine.sessions.show("one").stretches
        lost = next(stretch for stretch in stretches if stretch.n_kept)
        engine.store.forget([lost.key])
        answer = engine.answer([("user", "So?")], Ask(session="one"))
        assert [segment.hit for segment in history(answer.trace)].count(False) == 1
        after = engine.sessions.show("one")
        assert lost.key not in {stretch.key for stretch in after.stretches if stretch.n_kept}
        assert [t for s in after.stretches for t in s.tokens][: sum(len(s.tokens) for s in stretches)] == [
            t for s in stretches for t in s.tokens
        ]
        engine.flush()
        assert all(segment.hit for segment in history(talk(engine, ["And?"])[0].trace))


def test_a_window_that_the_new_message_alone_overflows_is_told(said):
    longest = said.model.model.config.max_position_embeddings
    with pytest.raises(InputError, match="does not fit"):
        said.answer([("user", "why? " * longest)], Ask(session="one"))
    assert len(said.sessions.show("one").turns) == 3


def test_the_models_own_limit_shortens_a_conversation(engine, monkeypatch):
    monkeypatch.setattr(engine.model.model.config, "max_position_embeddings", 300)
    answers = talk(engine, [*QUESTIONS, *QUESTIONS])
    assert answers[-1].trace.truncated > 0
    assert all(answer.trace.tokens + len(answer.token_ids) <= 301 for answer in answers)


def test_a_session_is_shortened_by_name(said):
    n_before = said.sessions.show("one").n_tokens
    shorter = said.sessions.truncate("one", 50, sinks=3)
    assert (shorter.dropped, shorter.stretches[0].kept) == (n_before - 50, ((0, 3),))
    answer = said.answer([("user", QUESTIONS[3])], Ask(session="one"))
    assert (answer.trace.history_reused, answer.trace.truncated) == (50, n_before - 50)
