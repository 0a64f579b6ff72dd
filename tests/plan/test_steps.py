"""Reads begin with one layer and grow: every layer once, in order, never more than allowed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.plan.steps import AHEAD, STEP_NBYTES, layers_a_read, room, spans, steps


@given(st.integers(0, 200), st.integers(1, 200))
def test_steps_take_every_layer_once_and_never_more_than_allowed(n_layers, most):
    sizes = steps(n_layers, most)
    assert sum(sizes) == n_layers
    assert all(0 < size <= most for size in sizes)
    assert [layer for first, end in spans(sizes) for layer in range(first, end)] == list(range(n_layers))


@given(st.integers(1, 200), st.integers(1, 200))
def test_a_step_is_as_large_as_the_one_before_it_to_twice_that_but_for_the_last(n_layers, most):
    sizes = steps(n_layers, most)
    assert sizes[0] == 1
    assert all(one <= two <= 2 * one for one, two in pairwise(sizes[:-1]))


@pytest.mark.parametrize(
    ("n_layers", "most", "wanted"),
    [(12, 5, [1, 2, 4, 5]), (24, 15, [1, 2, 4, 8, 9]), (3, 1, [1, 1, 1]), (1, 9, [1]), (0, 3, [])],
)
def test_steps_by_hand(n_layers, most, wanted):
    assert steps(n_layers, most) == wanted


@given(st.integers(0, 1 << 40), st.integers(1, 100))
def test_as_many_layers_are_read_together_as_fit_and_at_least_one(nbytes, n_layers):
    most = layers_a_read(nbytes, n_layers)
    assert 1 <= most <= n_layers
    assert most == 1 or most * nbytes <= STEP_NBYTES * n_layers
    assert most == n_layers or (most + 1) * nbytes > STEP_NBYTES * n_layers


def test_some_layers_may_wait_and_at_least_one_read():
    assert [room(most) for most in (1, 2, AHEAD, AHEAD + 1, 100)] == [AHEAD, AHEAD // 2, 1, 1, 1]
