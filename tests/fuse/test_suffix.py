"""Rows that stand together at the prompt's end are attended to without a mask, and see the same."""

import pytest
import torch

from ragfuse.fuse.attend import RowMask, attend


def attended(rows: list[int], total: int, only: slice) -> torch.Tensor:
    made = torch.Generator().manual_seed(3)
    query, keys, values = (torch.randn(1, heads, total, 8, generator=made) for heads in (4, 2, 2))
    mask = RowMask(torch.tensor(rows), torch.arange(total))
    return attend(query[:, :, rows], keys, values, mask, 0.4)[0, only]


@pytest.mark.parametrize(("first", "total"), [(0, 1), (0, 40), (1, 40), (13, 40), (30, 99)])
def test_a_long_suffix_sees_what_its_rows_see_one_by_one(first: int, total: int) -> None:
    rows = list(range(first, total))
    assert RowMask(torch.tensor(rows), torch.arange(total)).is_suffix
    together = attended(rows, total, slice(None))
    alone = torch.cat([attended([row], total, slice(None)) for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "total"),
    [(list(range(15, 40)), 40), (list(range(30)), 40), ([0, *range(2, 40)], 40), ([5], 40)],
    ids=["too short", "not to the end", "with a gap", "one row"],
)
def test_other_rows_are_no_suffix(rows: list[int], total: int) -> None:
    assert not RowMask(torch.tensor(rows), torch.arange(total)).is_suffix
