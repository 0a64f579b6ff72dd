"""Attention put together from keys that all see and keys under a mask: the same as one weight at a
time.
"""

import pytest
import torch
from torch import Tensor

from ragfuse.fuse.attend import KEY_TILE, RowMask, attend
from tests import reference

BLOCK = 64


def tensors(
    total: int, rows: list[int], heads: int, groups: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(total)
    query = torch.randn(1, heads * groups, len(rows), 16, generator=made)
    keys, values = (torch.randn(1, heads, total, 16, generator=made) for _ in "kv")
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def some(total: int, count: int) -> list[int]:
    return sorted(
        torch.randperm(total, generator=torch.Generator().manual_seed(count))[:count].tolist()
    )


ROWS = {
    "a few": (200, [0, 31, 32, 63, 64, 150, 199]),
    "from the first": (300, some(300, 90)),
    "several blocks": (360, some(360, 2 * BLOCK + 5)),
    "one left over": (400, some(400, BLOCK + 1)),
    "at the end": (333, list(range(300, 333))),
    "on the tiles": (320, list(range(KEY_TILE - 1, 320, KEY_TILE))),
    "the last one": (65, [64]),
}


LARGE = {"from the first", "several blocks", "one left over"}
SHAPES = [
    pytest.param(*shape, id=name, marks=[pytest.mark.slow] if name in LARGE else [])
    for name, shape in ROWS.items()
]


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize(("total", "rows"), SHAPES)
@pytest.mark.parametrize("window", [None, 1, 50])
def test_parts_make_up_the_whole(
    total: int, rows: list[int], heads: int, groups: int, window: int | None
) -> None:
    query, keys, values = tensors(total, rows, heads, groups, torch.float32)
    found = attend(
        query, keys, values, RowMask(torch.tensor(rows), torch.arange(total)), 0.5, window
    )[0]
    wanted = reference.attention(
        query[0], keys[0], values[0], rows, list(range(total)), 0.5, window=window
    )
    torch.testing.assert_close(found.double(), wanted, atol=3e-6, rtol=1e-5)


def test_what_stands_later_leaves_no_trace() -> None:
    rows = [40, 41, 77, 100]
    query, keys, values = tensors(200, rows, 2, 2, torch.float32)
    mask = RowMask(torch.tensor(rows), torch.arange(200))
    before = attend(query, keys, values, mask, 0.5)
    keys[:, :, 78:], values[:, :, 78:] = 1e4, -1e4
    after = attend(query, keys, values, mask, 0.5)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3], after[:, 3])
