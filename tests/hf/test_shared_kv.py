"""Rows that several prompts hold alike stand in memory once, and nobody notices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList

from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.hf.shared_kv import MIN_SHARED_ROWS, SharedKV, SharedSpan
from tests.hf import kit
from tests.hf.test_decode import GREEDY, WAIT_S, Noting, model, no_thread_is_left, nothing_failed

__all__ = ["model", "no_thread_is_left", "nothing_failed"]

SIZES = (5, MIN_SHARED_ROWS + 6, 9, MIN_SHARED_ROWS, 8)
SPANS = [SharedSpan(5, 75, "one"), SharedSpan(84, 148, "two")]
"""Two modules of a prompt, with its own rows before, between and behind them."""


def prompts(model: HFModel, count: int = 4) -> list[Prefill]:
    """Prompts that hold the same two modules amid text of their own."""
    first = kit.scene(SIZES, ["fresh", "prefix", "fresh", "prefix", "fresh"])
    source, made = kit.source(model, first), []
    for seed in range(count):
        parts = [
            (tuple(kit.ids(len(part), seed)), kind) if kind == "fresh" else (part, kind)
            for part, kind in first.parts
        ]
        made.append(kit.fuse(model, replace(first, parts=tuple(parts)), "none", 0.0, source))
    return made


def share(model: HFModel, prefills: list[Prefill], common: SharedKV | None = None) -> SharedKV:
    common = common or SharedKV()
    for prefill in prefills:
        common.share(prefill.cache, SPANS, model.profile.windows)
    return common


def held(prefills: list[Prefill]) -> int:
    """Bytes of all that stands in memory for these prompts."""
    places = {}
    for prefill in prefills:
        for layer in prefill.cache.layers:
            for states in (
                layer.keys,
                layer.values,
                *(part for each in layer.common for part in each.kv),
            ):
                places[states.untyped_storage().data_ptr()] = states.untyped_storage().nbytes()
    return sum(places.values())


def test_a_module_stands_in_memory_once(model: HFModel) -> None:
    each = prompts(model, 8)
    before = held(each)
    common = share(model, each)
    own, token = sum(SIZES) - 2 * MIN_SHARED_ROWS - 6, each[0].kv.nbytes // sum(SIZES)
    assert len(common) == 2
    assert held(each) == token * (2 * MIN_SHARED_ROWS + 6 + 8 * (own + 64))
    assert held(each) < before / 2


@pytest.mark.slow  # with them, as what measures coverage keeps frames, and so what they held
def test_what_nobody_holds_any_more_is_gone(model: HFModel) -> None:
    each = prompts(model, 2)
    common = share(model, each)
    for layer in (layer for prefill in each for layer in prefill.cache.layers):
        assert len(common) == 2
        layer.reset()
    assert len(common) == 0


def test_all_rows_are_where_they_were(model: HFModel) -> None:
    each = prompts(model)
    before = [
        [(layer.keys.clone(), layer.values.clone()) for layer in prefill.kv.layers]
        for prefill in each
    ]
    share(model, each)
    for prefill, wanted in zip(each, before, strict=True):
        for copy in (prefill, prefill.copy()):
            found = [(layer.keys, layer.values) for layer in copy.kv.layers]
            assert all(
                torch.equal(a, b)
                for pair in zip(found, wanted, strict=True)
                for a, b in zip(*pair, strict=True)
            )
    assert all(any(layer.common for layer in prefill.cache.layers) for prefill in each)


@pytest.mark.parametrize(
    "name", ["llama", "gemma3-two-ropes", "gpt-oss-sinks-window", "gemma2-softcap-window"]
)
def test_every_answer_has_the_logits_that_it_has_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kit.family(name)
    monkeypatch.setattr(model.batcher, "patience_s", WAIT_S)
    alone, beside = [[Noting() for _ in range(4)] for _ in range(2)]
    options = [
        [{**GREEDY, "logits_processor": LogitsProcessorList([note])} for note in notes]
        for notes in (alone, beside)
    ]
    wanted = [
        generate(model, prefill, way)
        for prefill, way in zip(prompts(model), options[0], strict=True)
    ]
    each = prompts(model)
    common = share(model, each)
    assert len(common) == 2
    asked = [(prefill, {"options": way}) for prefill, way in zip(each, options[1], strict=True)]
    assert kit.together(model, asked) == wanted
    for one, other in zip(alone, beside, strict=True):
        for scores, same in zip(one.scores, other.scores, strict=True):
            assert float((scores - same).abs().max() / scores.std()) < 1e-4


def test_who_goes_on_alone_beside_others_or_last_says_the_same(model: HFModel) -> None:
    """Some end sooner, one goes on when nobody is left."""
    ways = [GREEDY, {**GREEDY, "max_new_tokens": 3}, GREEDY, {**GREEDY, "max_new_tokens": 14}]
    wanted = [
        generate(model, prefill, way) for prefill, way in zip(prompts(model), ways, strict=True)
    ]
    each = prompts(model)
    share(model, each)
    asked = [(prefill, {"options": way}) for prefill, way in zip(each, ways, strict=True)]
    assert kit.together(model, asked) == wanted
    lone = prompts(model, 1)
    share(model, lone)
    assert generate(model, lone[0], ways[0]) == wanted[0]


def test_a_row_that_was_taken_back_is_there_once_it_is_revealed(model: HFModel) -> None:
    """`generate` begins without the last row, and a step that cannot be shared gathers the KV."""
    (prefill,) = prompts(model, 1)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in prefill.kv.layers]
    share(model, [prefill])
    prefill.cache.length -= 1
    for layer in prefill.cache.layers:
        layer.gather()
    prefill.cache.length += 1
    after = [(layer.keys, layer.values) for layer in prefill.kv.layers]
    assert all(
        torch.equal(a, b)
        for one, two in zip(before, after, strict=True)
        for a, b in zip(one, two, strict=True)
    )


def test_a_stretch_that_reaches_the_last_row_leaves_it(model: HFModel) -> None:
    """The last row is taken back before an answer begins."""
    ids = kit.ids(MIN_SHARED_ROWS + 1)
    wanted = generate(model, model.full_prefill(ids), GREEDY)
    prefill = model.full_prefill(ids)
    SharedKV().share(prefill.cache, [SharedSpan(0, len(ids), "all")], [None] * model.n_layers)
    assert [layer.n_buffered for layer in prefill.cache.layers] == [1] * model.n_layers
    assert generate(model, prefill, GREEDY) == wanted


def test_what_is_short_stays_where_it_is(model: HFModel) -> None:
    prefill = model.full_prefill(kit.ids(90))
    common = SharedKV()
    common.share(
        prefill.cache, [SharedSpan(3, 3 + MIN_SHARED_ROWS - 1, "short")], [None] * model.n_layers
    )
    assert len(common) == 0
    assert not any(layer.common for layer in prefill.cache.layers)


def test_layers_that_see_a_window_alone_keep_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kit.family("gemma3-two-ropes")
    each = prompts(model, 2)
    share(model, each)
    windows = model.profile.windows
    assert {bool(window) for window in windows} == {True, False}
    assert [bool(layer.common) for layer in each[0].cache.layers] == [
        window is None for window in windows
    ]
