"""Rows that are gathered from a prompt's KV equal those turned back one by one, and share nothing with it."""

import pytest
import torch

from ragfuse.fuse.gather import gathered
from ragfuse.types.kv import ChunkKV, LayerKV, RopeLayout
from tests import reference

HALF = RopeLayout((1.0, 0.31, 0.04, 0.0007))
IN_VALUES = RopeLayout((1.0, 0.2), pairing="interleaved", part="values")
SPANS = [[(0, 12)], [(5, 9)], [(0, 2), (3, 4), (7, 12)]]


def prompt() -> ChunkKV:
    rows = torch.Generator().manual_seed(0)
    return ChunkKV(tuple(LayerKV(*torch.randn(2, 2, 12, 8, generator=rows)) for _ in range(2)))


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("layout", [HALF, IN_VALUES, None])
def test_gathered_rows_equal_those_turned_one_by_one(spans, layout) -> None:
    kv = prompt()
    found = gathered(kv, spans, [layout, None])
    rows = [row for lo, hi in spans for row in range(lo, hi)]
    for layer, (mine, theirs, how) in enumerate(zip(found.layers, kv.layers, (layout, None), strict=True)):
        for part, states in (("keys", theirs.keys), ("values", theirs.values)):
            wanted = [
                reference.shifted(states[:, row : row + 1], at - row, how)
                if how is not None and how.part == part
                else states[:, row : row + 1].double()
                for at, row in enumerate(rows)
            ]
            got = getattr(mine, part).double()
            torch.testing.assert_close(got, torch.cat(wanted, 1), atol=1e-6, rtol=1e-6, msg=f"{layer} {part}")


@pytest.mark.parametrize("spans", SPANS)
def test_what_is_gathered_shares_no_memory_with_the_prompt(spans) -> None:
    kv = prompt()
    found = gathered(kv, spans, [HALF, None])
    before = [layer.keys.clone() for layer in found.layers] + [layer.values.clone() for layer in found.layers]
    for layer in kv.layers:
        layer.keys.fill_(7)
        layer.values.fill_(7)
    after = [layer.keys for layer in found.layers] + [layer.values for layer in found.layers]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
