"""The benchmark of conversations on a tiny model: what it says, and that its truncations are what they are called."""

from __future__ import annotations

import json

import pytest
import torch
from ragfuse_bench.conversation import run_conversation
from ragfuse_bench.dialogues import dialogue_of
from ragfuse_bench.options import ConversationOptions
from ragfuse_bench.truncation import perplexity_after, shortened
from rich.console import Console

from ragfuse import Engine, InputError
from tests import reference


def words(text):
    return len(text.split())


def test_a_tiny_conversation_has_the_wanted_keys_and_equal_answers(tiny_path):
    sizes = {"turns": 3, "answer_tokens": 9, "opening_tokens": 300, "window": 64, "texts": 2, "rounds": 1}
    result = run_conversation(ConversationOptions(str(tiny_path), **sizes), Console(quiet=True))
    assert {"ttft_reduction", "token_equal_fp32", "top1_bf16", "ppl_delta", "ppl_naive"} <= set(result)
    assert result["token_equal_fp32"] is True
    assert [turn["reused"] > 0 for turn in result["turns"]] == [False, True, True]
    assert 0.9 < result["top1_bf16"] <= 1
    json.dumps(result)


def test_kept_rows_are_recomputed_ones_where_nothing_was_dropped(engine: Engine):
    ids = engine.tokens("The lighthouse keeper counted forty ships.")
    kept, recomputed, naive, bare = shortened(engine.model, ids, 0)
    for other in (kept, naive, bare):
        torch.testing.assert_close(other.logits, recomputed.logits, atol=1e-3, rtol=1e-3)


def test_naive_truncation_leaves_keys_at_their_old_positions(engine: Engine):
    model, cut = engine.model, 9
    ids = model.tokens("The lighthouse keeper counted forty ships.")
    kept, _, naive, bare = shortened(model, ids, cut)
    whole, twin = model.full_prefill(ids[:-1]).kv, reference.LlamaTwin(model.model)
    n_kept = len(ids) - 1 - cut
    torch.testing.assert_close(naive.kv.layers[1].keys[:, :n_kept], whole.layers[1].keys[:, cut:])
    shifted = reference.shifted(whole.layers[1].keys[:, cut:], -cut, twin.layout)
    for same in (kept, bare):
        torch.testing.assert_close(same.kv.layers[1].keys[:, :n_kept].double(), shifted, atol=1e-5, rtol=1e-5)


def test_truncation_behind_the_first_tokens_leaves_these_as_they_were(engine: Engine):
    model, sinks, cut = engine.model, 3, 9
    ids = model.tokens("The lighthouse keeper counted forty ships.")
    kept, recomputed, naive, bare = shortened(model, ids, cut, sinks)
    left = (*ids[:sinks], *ids[sinks + cut :])
    assert [tuple(way.token_ids) for way in (kept, recomputed, naive, bare)] == [left, left, left, tuple(ids[cut:])]
    whole, layout = model.full_prefill(ids[:-1]).kv.layers[1].keys, reference.LlamaTwin(model.model).layout
    n = len(left) - 1
    torch.testing.assert_close(naive.kv.layers[1].keys[:, sinks:n], whole[:, sinks + cut :])
    shifted = reference.shifted(whole[:, sinks + cut :], -cut, layout)
    torch.testing.assert_close(kept.kv.layers[1].keys[:, sinks:n].double(), shifted, atol=1e-5, rtol=1e-5)
    for way in (kept, naive):
        torch.testing.assert_close(way.kv.layers[1].keys[:, :sinks], whole[:, :sinks])


def test_perplexity_of_a_text_that_is_too_short_is_told(engine: Engine):
    with pytest.raises(InputError, match="found 5"):
        perplexity_after(engine.model, "Short", 64, 1, Console(quiet=True))


def test_our_own_dialogue_has_as_many_turns_and_words_as_asked():
    said = dialogue_of(None, 12, 500, words)
    assert len(said.questions) == 12
    assert words(said.questions[0]) >= 500
    assert max(map(words, said.questions[1:])) < 40


def test_dialogues_are_read_from_a_folder(tmp_path):
    rows = [{"history": [{"user": f"What is asked in dialogue {n}?", "bot": f"This, {n} times."}]} for n in range(9)]
    (tmp_path / "mt_bench.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = dialogue_of(tmp_path, 4, 30, words)
    assert (said.source, len(said.questions)) == ("mt_bench.jsonl", 4)
    assert "This, 0 times." in said.questions[0]
    assert said.questions[1] == "What is asked in dialogue 7?"
    with pytest.raises(InputError, match="found none"):
        dialogue_of(tmp_path / "none", 4, 30, words)
