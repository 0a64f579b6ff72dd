"""Cached runs are placed once, fresh rows land where they belong, and stored tensors stay as they
were.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from ragfuse.fuse.fusor import Buffers, CachedRun, Fusion, LostRun, candidates_of
from ragfuse.fuse.select import policy_named
from ragfuse.types.kv import ChunkKV, Layer, LayerKV, RopeLayout
from tests.twins import reference

N_LAYERS = 4
LAYOUT = RopeLayout((1.0, 0.2))
ROPE = (LAYOUT, None, RopeLayout((0.5,), lo=4, part="values"), LAYOUT)
CPU = torch.device("cpu")


def kv(n_tokens: int, seed: int, in_one: bool = False) -> ChunkKV:
    """Random KV, each layer's in tensors of its own with other strides, or all in one."""
    made = torch.Generator().manual_seed(seed)
    draw = torch.randn(N_LAYERS, 2, 2, n_tokens, 6, generator=made)
    apart = draw.transpose(2, 3).contiguous().transpose(2, 3)
    return ChunkKV(
        tuple(LayerKV(*(pair if in_one else pair.clone())) for pair in (draw if in_one else apart))
    )


@dataclass
class Shelf:
    """A source that counts what is read and can lose a segment from a layer on."""

    chunks: Mapping[int, ChunkKV]
    lost: tuple[int, int] | None = None
    reads: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[list[Layer]]:
        yield [self.layer(at) for at in range(N_LAYERS)]

    def layer(self, at: int) -> Layer:
        self.reads.append(at)
        gone = self.lost is not None and at >= self.lost[1]
        return {
            segment: None if gone and segment == self.lost[0] else chunk.layers[at]
            for segment, chunk in self.chunks.items()
        }


def run(segment: int, lo: int, hi: int, start: int | None = None, blend: bool = True) -> CachedRun:
    return CachedRun(segment, lo, hi, lo if start is None else start, blend)


def placed(layer: int, layer_kv: LayerKV, start: int) -> tuple[Tensor, Tensor]:
    layout = ROPE[layer]
    keys, values = layer_kv.keys.double(), layer_kv.values.double()
    if layout is None:
        return keys, values
    if layout.part == "values":
        return keys, reference.shifted(values, start, layout)
    return reference.shifted(keys, start, layout), values


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), atol=1e-6, rtol=1e-5)


def test_runs_are_rotated_into_their_rows():
    """The last is the first once more, elsewhere; each layer is read once."""
    chunk = kv(5, 1)
    shelf = Shelf({1: chunk, 3: kv(7, 3), 4: chunk})
    runs = [run(1, 2, 7), run(3, 8, 15, start=40), run(4, 15, 20)]
    buffers = Buffers(20, runs, shelf, ROPE, CPU)
    for layer in range(N_LAYERS):
        buffers.open(layer)
        buffers.open(layer)
        keys, values = buffers.get(layer)
        assert keys.shape == values.shape == (1, 2, 20, 6)
        for each in runs:
            wanted = placed(layer, shelf.chunks[each.segment].layers[layer], each.shift)
            same(keys[0, :, each.lo : each.hi], wanted[0])
            same(values[0, :, each.lo : each.hi], wanted[1])
    assert shelf.reads == list(range(N_LAYERS))


def test_stored_tensors_are_never_changed():
    chunk = kv(8, 0)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in chunk.layers]
    buffers = Buffers(
        12, [run(0, 0, 8, blend=False), run(1, 2, 10)], Shelf({0: chunk, 1: chunk}), ROPE, CPU
    )
    for layer in range(N_LAYERS):
        buffers.open(layer)
        buffers.write(layer, torch.arange(12), torch.zeros(1, 2, 12, 6), torch.zeros(1, 2, 12, 6))
    for layer, (keys, values) in zip(chunk.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


@pytest.mark.parametrize("in_one", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("rope", [ROPE, (LAYOUT,) * N_LAYERS, (LAYOUT, LAYOUT, None, LAYOUT)])
def test_layers_that_are_opened_together_are_those_opened_one_by_one(in_one, layers, rope):
    shelf = Shelf({segment: kv(n, segment, in_one) for segment, n in ((1, 5), (3, 7), (6, 1))})
    runs = [run(1, 2, 7), run(3, 10, 17, start=40), run(6, 17, 18, start=0)]
    rows = [row for each in runs for row in range(each.lo, each.hi)]
    sizes = (0, layers * 2 * 20 * 6 * 4)
    one, together = (Buffers(20, runs, shelf, rope, CPU, 3, at_once) for at_once in sizes)
    for layer in range(N_LAYERS):
        one.open(layer)
        together.open(layer)
        n_open = sum(keys is not None for keys in together.keys)
        assert n_open == min(N_LAYERS, layers * (layer // layers + 1))
        for found, wanted in zip(together.get(layer), one.get(layer), strict=True):
            assert torch.equal(found[0, :, rows], wanted[0, :, rows])


@pytest.mark.parametrize("layer", [0, 2])
def test_a_run_that_is_gone_or_of_another_length_is_lost_and_named(layer):
    runs, whole = [run(0, 0, 3), run(4, 3, 7)], {0: kv(3, 0), 4: kv(4, 1)}
    buffers = Buffers(10, runs, Shelf(whole, lost=(4, layer)), ROPE, CPU)
    for before in range(layer):
        buffers.open(before)
    with pytest.raises(LostRun) as caught:
        buffers.open(layer)
    assert caught.value.segment == 4
    for n_tokens in (3, 5):
        other = Shelf({**whole, 4: kv(n_tokens, 1)})
        with pytest.raises(LostRun):
            Buffers(10, runs, other, ROPE, CPU).open(0)


def fusion(policy: str, ratio: float, runs: list[CachedRun], n_tokens: int) -> tuple[Fusion, Shelf]:
    shelf = Shelf({each.segment: kv(each.hi - each.lo, each.segment) for each in runs})
    buffers = Buffers(n_tokens, runs, shelf, ROPE, CPU)
    candidates = candidates_of(runs, n_tokens, N_LAYERS, ratio, CPU)
    return Fusion(buffers, torch.arange(n_tokens), candidates, policy_named(policy)), shelf


def drive(steps: Fusion) -> list[list[int]]:
    """The steps of a prefill with random K and V; gives the rows of each layer."""
    made, rows = torch.Generator().manual_seed(5), []
    for layer in range(N_LAYERS):
        steps.buffers.open(layer)
        if steps.needs_check(layer):
            steps.check(layer, *torch.randn(2, 1, 2, len(steps.rows), 6, generator=made))
        before = steps.rows
        keep = steps.choose(layer)
        assert torch.equal(steps.rows, before if keep is None else before[keep])
        fresh = torch.randn(2, 1, 2, len(steps.rows), 6, generator=made)
        keys, _ = steps.write(layer, *fresh)
        assert torch.equal(keys[:, :, steps.rows], fresh[0])
        rows.append(steps.rows.tolist())
    return rows


RUNS = [run(0, 0, 10, blend=False), run(1, 10, 40), run(3, 45, 75)]


def test_the_check_layer_sees_every_offered_row():
    steps, _ = fusion("hkvd", 0.2, RUNS, 82)
    assert [steps.needs_check(layer) for layer in range(N_LAYERS)] == [False, True, False, False]
    assert len(drive(steps)[0]) == 72
    assert steps.counts == [60, 18, 12, 6]
    assert steps.mean_ratio == pytest.approx(0.2)
    assert len(steps.chosen) == 18


def test_the_last_row_is_computed_though_it_is_cached_and_all_rows_where_nothing_is():
    steps, _ = fusion("none", 0.0, [run(0, 0, 10, blend=False), run(1, 10, 30)], 30)
    assert drive(steps) == [[29]] * N_LAYERS
    steps, shelf = fusion("hkvd", 0.3, [], 9)
    assert drive(steps) == [list(range(9))] * N_LAYERS
    assert shelf.reads == []
    assert steps.mean_ratio == 0.0
