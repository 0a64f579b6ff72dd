"""Few queries over all keys, compared with one weight at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragfuse.fuse.attend import Ragged, RowMask, Watch, attend, attend_ragged
from tests.twins import reference

SCALING = 0.4
GAPS = [0, 3, 4, 9, 11], [0, 1, 2, 10, 11, 12, 13, 40, 41, 42, 50, 51]
"""Rows, and positions with gaps."""


both_paths = pytest.mark.parametrize(
    "whole", [False, True], ids=["CPU's path", "accelerator's path"]
)


@dataclass(frozen=True)
class Case:
    """Random query [1, Hq, R, 8], keys and values [1, H, T, 8 and 6], standing at rows of T
    positions.
    """

    rows: list[int]
    positions: list[int]
    query: Tensor
    keys: Tensor
    values: Tensor

    def mask(self, whole: bool = False, watch: Watch | None = None) -> RowMask:
        return RowMask(torch.tensor(self.rows), torch.tensor(self.positions), whole, watch=watch)

    def found(
        self, whole: bool = False, mask: RowMask | None = None, window: int | None = None, **options
    ) -> Tensor:
        mask = mask or self.mask(whole)
        return attend(self.query, self.keys, self.values, mask, SCALING, window, **options)[0]

    def to(self, dtype: torch.dtype) -> Case:
        """A copy in that dtype."""
        tensors = (self.query, self.keys, self.values)
        return Case(self.rows, self.positions, *(each.to(dtype, copy=True) for each in tensors))

    def check(self, whole: bool = False, mask: RowMask | None = None, **options: object) -> None:
        """Attention is what its slow twin has."""
        agree(self.found(whole, mask, **options), self.wanted(**options))

    def wanted(self, **options: object) -> Tensor:
        at = [self.positions[row] for row in self.rows]
        tensors = self.query[0], self.keys[0], self.values[0]
        return reference.attention(*tensors, at, self.positions, SCALING, **options)


def case(
    rows: list[int], positions: list[int], heads: int = 2, groups: int = 2, seed: int = 0
) -> Case:
    made = torch.Generator().manual_seed(seed)
    total = len(positions)
    query = torch.randn(1, heads * groups, len(rows), 8, generator=made)
    keys, values = (
        torch.randn(1, heads, total, 8, generator=made),
        torch.randn(1, heads, total, 6, generator=made),
    )
    return Case(rows, positions, query * 2, keys, values)


def agree(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, atol=3e-6, rtol=1e-5)


OPTIONS = {
    "plain": {},
    "window": {"window": 7},
    "window of one": {"window": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.3, -2.0, 4.0, 0.0])},
    "all of them": {"window": 9, "softcap": 2.0, "sinks": torch.tensor([0.3, -2.0, 4.0, 0.0])},
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


@both_paths
@options
@pytest.mark.parametrize(
    "rows",
    [[0], [29], [4, 5, 17, 28], list(range(30)), [0, 29], list(range(20, 30))],
    ids=["the first", "the last", "a few", "all", "both ends", "a suffix"],
)
def test_rows_see_exactly_the_positions_up_to_their_own(rows, options, whole):
    given_case = case(rows, list(range(30)))
    given_case.check(whole, **options)


def some(total: int, count: int) -> list[int]:
    return sorted(
        torch.randperm(total, generator=torch.Generator().manual_seed(count))[:count].tolist()
    )


@options
@pytest.mark.parametrize(
    ("total", "rows"),
    [
        pytest.param(200, [0, 31, 32, 63, 64, 150, 199], id="a few"),
        pytest.param(333, list(range(300, 333)), id="at the end, one more than a block"),
        pytest.param(320, list(range(31, 320, 32)), id="on the tiles"),
        pytest.param(360, some(360, 133), id="several blocks", marks=pytest.mark.slow),
    ],
)
def test_rows_in_blocks_see_what_is_before_them(total, rows, options):
    given_case = case(rows, list(range(total)))
    given_case.check(**options)


@settings(max_examples=60)
@given(data=st.data())
def test_any_heads_see_any_positions_up_to_their_own(data):
    total = data.draw(st.integers(1, 24))
    positions = sorted(data.draw(st.sets(st.integers(0, 60), min_size=total, max_size=total)))
    rows = sorted(data.draw(st.sets(st.integers(0, total - 1), min_size=1)))
    heads, groups = data.draw(st.sampled_from([(1, 1), (4, 1), (1, 6), (3, 2)]))
    given_case = case(rows, positions, heads, groups, seed=total)
    given_case.check(
        whole=data.draw(st.booleans()),
        window=data.draw(st.none() | st.integers(1, 30)),
        softcap=data.draw(st.none() | st.floats(0.5, 5)),
        sinks=data.draw(st.none() | st.just(torch.linspace(-2.0, 4.0, heads * groups))),
    )


@pytest.mark.parametrize("window", [None, 1, 7])
def test_the_dense_mask_says_the_same(window):
    rows, positions = GAPS
    dense = RowMask(torch.tensor(rows), torch.tensor(positions)).dense(torch.float32, window)
    seen = [
        [p <= positions[row] and (window is None or p > positions[row] - window) for p in positions]
        for row in rows
    ]
    assert torch.equal(dense == 0, torch.tensor([[seen]]))


@both_paths
@pytest.mark.parametrize("bias", [0.0, 30.0], ids=["", "a bias in the keys"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@options
def test_low_precision_is_off_by_rounding_only(dtype, options, bias, whole):
    """Scores of hundreds, as of models whose keys are mostly a constant bias, lose nothing that a
    softmax needs.
    """
    low = case(list(range(0, 60, 3)), list(range(60)))
    low.query[..., 0] += bias
    low.keys[..., 0] += bias
    low = low.to(dtype)
    found, wanted = low.found(whole, **options), low.wanted(**options)
    assert found.dtype == dtype
    assert float((found.double() - wanted).norm() / wanted.norm()) < 8 * torch.finfo(dtype).eps


@both_paths
@pytest.mark.parametrize("window", [None, 4])
def test_chosen_queries_are_watched_over_the_keys_that_they_see(window, whole):
    given_case = case([1, 5, 8], list(range(9)))
    watch = Watch(torch.tensor([0.0, 1.0, 1.0]), torch.zeros(9))
    given_case.check(mask=given_case.mask(whole, watch), window=window)
    wanted = torch.zeros(9, dtype=torch.float64)
    for head in range(4):
        for index, row in ((1, 5), (2, 8)):
            seen = range(0 if window is None else row - window + 1, row + 1)
            keys = given_case.keys[0, head // 2, seen.start : seen.stop].double()
            scores = keys @ given_case.query[0, head, index].double() * SCALING
            wanted[seen.start : seen.stop] += torch.softmax(scores, 0)
    torch.testing.assert_close(watch.total.double(), wanted, atol=1e-6, rtol=1e-5)


@options
def test_newest_rows_see_each_its_own_prompt(options):
    """Prompts of one row, of some and of many."""
    cases = [case([n - 1], list(range(n)), seed=n) for n in (1, 5, 90, 40)]
    held = [[(each.keys, each.values)] for each in cases]
    found = attend_ragged(
        torch.cat([each.query for each in cases]), Ragged(held), SCALING, **options
    )
    agree(found, torch.stack([each.wanted(**options) for each in cases]))


def test_stretches_that_prompts_share_are_seen_by_each_of_them():
    """Three prompts hold one stretch, two of them another one; a fourth holds all in one."""
    whole = [case([n - 1], list(range(n)), seed=n) for n in (90, 120, 60, 33)]
    wide = [
        Case(each.rows, each.positions, each.query, each.keys, each.keys.flip(3)) for each in whole
    ]
    first, second = (
        (wide[0].keys[:, :, at], wide[0].values[:, :, at]) for at in (slice(0, 40), slice(40, 50))
    )
    alike = [[first, second], [second, first], [first], []]
    held = [[(each.keys, each.values), *more] for each, more in zip(wide, alike, strict=True)]
    found = attend_ragged(torch.cat([each.query for each in wide]), Ragged(held), SCALING)
    for one, each, stretches in zip(found, wide, held, strict=True):
        keys, values = (torch.cat([kv[at] for kv in stretches], 2) for at in (0, 1))
        last = Case([keys.shape[2] - 1], list(range(keys.shape[2])), each.query, keys, values)
        agree(one, last.wanted())


def test_stretches_come_together_where_no_kernel_tells_its_sums():
    """Values narrower than keys, and a cap on the scores."""
    whole = case([59], list(range(60)))
    parts = [(whole.keys[:, :, at], whole.values[:, :, at]) for at in (slice(0, 25), slice(25, 60))]
    for options in ({}, {"softcap": 1.5}):
        agree(
            attend_ragged(whole.query, Ragged([parts]), SCALING, **options)[0],
            whole.wanted(**options),
        )
