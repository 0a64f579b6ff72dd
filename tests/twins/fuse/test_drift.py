"""The drift is the mean difference before rotation, beside slow loops; added, it undoes what made
it.
"""

import pytest
import torch
from torch import Tensor

from ragfuse.fuse.rope import added
from ragfuse.types.kv import ChunkKV, LayerKV, RopeLayout
from tests.twins import reference
from tests.twins.fuse.test_rope import LAYOUTS

FREQUENCIES = (1.0, 0.31, 0.04, 0.0007)
ROPES = {
    **{name: (layout, layout) for name, layout in LAYOUTS.items()},
    "no position in one layer": (None, RopeLayout(FREQUENCIES)),
    "carried by the values": (RopeLayout(FREQUENCIES[:2], part="values"), RopeLayout(FREQUENCIES)),
}
roped = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())


def kv(n: int, seed: int, dtype: torch.dtype = torch.float32) -> ChunkKV:
    """Two layers, one with fewer heads; values narrower than keys in it."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (((2, n, 8), (2, n, 8)), ((1, n, 8), (1, n, 6)))
    layers = (
        tuple(torch.randn(shape, generator=draw).to(dtype) for shape in pair) for pair in shapes
    )
    return ChunkKV(tuple(LayerKV(*pair) for pair in layers))


def parts(
    one: ChunkKV, rope: tuple[RopeLayout | None, ...]
) -> list[tuple[Tensor, RopeLayout | None]]:
    """Every tensor with the layout that holds for it."""
    pairs = zip(one.layers, rope, strict=True)
    return [
        (tensor, layout if layout is not None and layout.part == name else None)
        for layer, layout in pairs
        for name, tensor in (("keys", layer.keys), ("values", layer.values))
    ]


def slowly(states: Tensor, delta: int, layout: RopeLayout | None) -> Tensor:
    return states.double() if layout is None else reference.shifted(states, delta, layout)


@roped
def test_every_row_gets_the_drift_as_it_stands_at_its_place(
    rope,
):
    chunk, drift = kv(7, 0), kv(1, 1)
    for (found, _), (old, layout), (one, _) in zip(
        parts(added(chunk, drift, rope), rope), parts(chunk, rope), parts(drift, rope), strict=True
    ):
        for row in range(7):
            wanted = old[:, row : row + 1].double() + slowly(one, row, layout)
            torch.testing.assert_close(
                found[:, row : row + 1].double(), wanted, atol=1e-5, rtol=1e-5
            )


def test_the_dtype_stays_and_the_chunk_is_left_alone():
    chunk, drift, rope = kv(4, 0, torch.bfloat16), kv(1, 1), (RopeLayout(FREQUENCIES),) * 2
    before = [tensor.clone() for tensor, _ in parts(chunk, rope)]
    done = added(chunk, drift, rope)
    assert {tensor.dtype for tensor, _ in parts(done, rope)} == {torch.bfloat16}
    assert all(
        torch.equal(old, tensor)
        for old, (tensor, _) in zip(before, parts(chunk, rope), strict=True)
    )
    assert all(tensor.is_contiguous() for tensor, _ in parts(done, rope))
