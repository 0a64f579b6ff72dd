"""Every policy keeps to its budget; what it picks is compared with its twin in tests/twins/hf/test_fused.py."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from ragfuse.errors import SettingsError
from ragfuse.fuse.select import POLICIES, Candidates, Policy, policy_named
from ragfuse.types.choices import as_setting
from ragfuse.types.plan import schedule
from tests.twins import reference

EVERY = [*(policy.name for policy in POLICIES), "lego-3"]
BY_RATIO = [name for name in EVERY if policy_named(name).cost.is_adjustable]
every = pytest.mark.parametrize("name", EVERY)
by_ratio = pytest.mark.parametrize("name", BY_RATIO)


def view(
    sizes: list[int], ratio: float, n_layers: int = 6, forced: int = 20, seed: int = 0
) -> Candidates:
    """Chunks of these sizes, with a random score per row."""
    offset = torch.tensor([at for size in sizes for at in range(size)], dtype=torch.int64)
    score = torch.rand(len(offset), generator=torch.Generator().manual_seed(seed))
    rows, cached = torch.arange(len(offset)), torch.ones(len(offset), dtype=torch.bool)
    return Candidates(rows, offset, torch.arange(forced), cached, n_layers, ratio, score)


def run(policy: Policy, seen: Candidates, seed: int = 0) -> list[Tensor]:
    """Rows of each layer, as a prefill asks for them, with random deviations."""
    made = torch.Generator().manual_seed(seed)
    alive, kept = torch.arange(len(seen)), []
    for layer in range(seen.n_layers):
        if layer >= policy.check_layer:
            measured = layer == policy.check_layer > 0 or policy.thins(seen, layer, len(alive))
            deviation = torch.rand(len(alive), generator=made) if measured else None
            alive = policy.choose(seen, layer, alive, deviation)
        kept.append(alive)
    return kept


sizes_drawn = st.lists(st.integers(1, 90), max_size=6)
ratios = st.floats(0.01, 1.0)


@every
@given(sizes=sizes_drawn, ratio=ratios, n_layers=st.integers(1, 9), forced=st.integers(1, 50))
def test_rows_are_sorted_and_only_ever_fewer(name, sizes, ratio, n_layers, forced):
    before = set(range(sum(sizes)))
    for rows in run(policy_named(name), view(sizes, ratio, n_layers, forced)):
        assert rows.dtype == torch.int64
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert set(rows.tolist()) <= before
        before = set(rows.tolist())


@by_ratio
@given(sizes=sizes_drawn, ratio=ratios, n_layers=st.integers(2, 9), forced=st.integers(1, 50))
def test_budgets_are_those_of_the_twin(name, sizes, ratio, n_layers, forced):
    policy, candidate_rows = policy_named(name), sum(sizes)
    first = policy.check_layer
    plan = reference.shares(ratio, first, n_layers) if first else [ratio] * n_layers
    assume(all(abs(share * candidate_rows % 1 - 0.5) > 1e-6 for share in plan))
    found = [len(rows) for rows in run(policy, view(sizes, ratio, n_layers, forced))][
        policy.check_layer :
    ]
    budgets = [reference.budget(share, candidate_rows, forced) for share in plan]
    assert found == list(accumulate(budgets, min))


@every
def test_ratio_one_takes_all_and_zero_nothing(name):
    policy = policy_named(name)
    assert policy.name == name
    rows = run(policy, view([40, 50, 7], 1.0))
    assert [len(kept) for kept in rows] == ([0] * 6 if name == "none" else [97] * 6)
    if name in BY_RATIO:
        none = run(policy, view([40, 50, 7], 0.0))[policy.check_layer :]
        assert not any(len(kept) for kept in none)


@given(ratio=st.floats(0, 1), first=st.integers(0, 3), depth=st.integers(1, 40))
def test_the_schedule_falls_evenly_around_the_ratio(ratio, first, depth):
    found = [schedule(ratio, layer, first, first + depth) for layer in range(first, first + depth)]
    assert found == pytest.approx(reference.shares(ratio, first, first + depth))
    assert sum(found) / depth == pytest.approx(ratio)
    assert all(0 <= later <= earlier + 1e-9 <= 1 + 2e-9 for earlier, later in pairwise(found))


def test_random_draws_the_same_rows_again_but_no_pattern():
    seen = view([200], 0.3)
    first, second = (run(policy_named("random"), seen) for _ in range(2))
    assert [kept.tolist() for kept in first] == [kept.tolist() for kept in second]
    steps = set((first[0][1:] - first[0][:-1]).tolist())
    assert len(steps) > 3


@pytest.mark.parametrize(
    "name",
    ["", "hkvd-", "lego-", "lego-x", "HKVD", "best", "hkvd:q", "lego--3", "lego-²", "lego-0"],
)
def test_an_unknown_name_lists_the_known_or_the_one_that_is_meant(name):
    with pytest.raises(SettingsError, match=r"Did you mean \S+\?|hkvd.*lego-16"):
        policy_named(name)
    with pytest.raises(ValueError, match="wanted one of auto, "):
        as_setting(name)
