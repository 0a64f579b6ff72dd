"""Rows that several prompts hold alike stand in memory once, and nobody notices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragfuse.hf.cache import MIN_SHARED_ROWS, SharedKV, SharedSpan
from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel, Prefill
from tests.kits import hf as kit
from tests.twins.hf.test_decode import (
    GREEDY,
    Noting,
    alone,
    beside,
    model,
    no_thread_is_left,
    nothing_failed,
    patient,
    way,
)

__all__ = ["model", "no_thread_is_left", "nothing_failed", "patient"]

SIZES = (5, MIN_SHARED_ROWS + 6, 9, MIN_SHARED_ROWS, 8)
SPANS = [SharedSpan(5, 75, "one"), SharedSpan(84, 148, "two")]
"""Two modules of a prompt, with its own rows before, between and behind them."""


def prompts(model: HFModel, count: int = 4, common: SharedKV | None = None) -> list[Prefill]:
    """Prompts that hold the same two modules amid text of their own, as each has them, or shared.

    The modules stand in `common`, if it is given.
    """
    first = kit.scene(SIZES, ["fresh", "prefix", "fresh", "prefix", "fresh"])
    source, made = kit.source(model, first), []
    for seed in range(count):
        parts = [
            (tuple(kit.ids(len(part), seed)), kind) if kind == "fresh" else (part, kind)
            for part, kind in first.parts
        ]
        made.append(kit.fuse(model, replace(first, parts=tuple(parts)), "none", 0.0, source))
        if common is not None:
            common.share(made[-1].cache, SPANS, model.profile.windows)
    return made


def held(prefills: list[Prefill]) -> int:
    """Bytes of all that stands in memory for these prompts."""
    layers = [layer for prefill in prefills for layer in prefill.cache.layers]
    buffers = [states for layer in layers for states in (layer.keys, layer.values)]
    shared = [states for layer in layers for each in layer.common for states in each.kv]
    storages = [states.untyped_storage() for states in (*buffers, *shared)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_a_module_stands_in_memory_once(model):
    common = SharedKV()
    each = prompts(model, 8, common)
    own, token = sum(SIZES) - 2 * MIN_SHARED_ROWS - 6, each[0].kv.nbytes // sum(SIZES)
    assert len(common) == 2
    assert held(each) == token * (2 * MIN_SHARED_ROWS + 6 + 8 * (own + 64))
    assert held(each) < held(prompts(model, 8)) / 2


@pytest.mark.slow  # with them, as what measures coverage keeps frames, and so what they held
def test_shared_rows_are_freed_with_their_last_prompt(model):
    common = SharedKV()
    each = prompts(model, 2, common)
    while each:
        assert len(common) == 2
        each.pop()
    assert len(common) == 0


def test_sharing_changes_no_row(model):
    """Also where the last row was taken back: `generate` begins without it."""
    for found, wanted in zip(prompts(model, 4, SharedKV()), prompts(model), strict=True):
        assert any(layer.common for layer in found.cache.layers)
        assert kit.apart(found, wanted) == 0.0
        found.cache.length -= 1
        for layer in found.cache.layers:
            last = wanted.cache.layers[layer.layer].rows(sum(SIZES) - 1, sum(SIZES))
            layer.update(*last)
        assert kit.apart(found, wanted) == 0.0


@pytest.mark.parametrize(
    "name", ["llama", "gemma3-two-ropes", "gpt-oss-sinks-window", "gemma2-softcap-window"]
)
def test_every_answer_has_the_logits_that_it_has_alone(name, patient):
    """Some end sooner, one goes on when nobody is left."""
    model, common = patient(name), SharedKV()
    notes, lengths = [[Noting() for _ in range(4)] for _ in range(2)], (10, 3, 10, 14)
    ways = [
        [way(note, max_new_tokens=n) for note, n in zip(row, lengths, strict=True)] for row in notes
    ]
    wanted = alone(model, prompts(model), ways[0])
    each = prompts(model, 4, common)
    assert len(common) == 2
    assert beside(model, each, ways[1]) == wanted
    for one, other in zip(*notes, strict=True):
        for scores, same in zip(one.scores, other.scores, strict=True):
            assert float((scores - same).abs().max() / scores.std()) < 1e-4


def test_a_stretch_that_reaches_the_last_row_leaves_it_and_a_short_one_is_not_shared(
    model,
):
    """The last row is taken back before an answer begins."""
    ids, common = kit.ids(MIN_SHARED_ROWS + 1), SharedKV()
    wanted = generate(model, model.full_prefill(ids), GREEDY)
    for lo, buffered in ((2, len(ids)), (0, 1)):
        prefill = model.full_prefill(ids)
        common.share(prefill.cache, [SharedSpan(lo, len(ids), "all")], [None] * model.n_layers)
        assert [layer.n_buffered for layer in prefill.cache.layers] == [buffered] * model.n_layers
        assert generate(model, prefill, GREEDY) == wanted
