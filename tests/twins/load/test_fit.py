"""Curves through timings are found again where they are known, and never go below zero."""

from math import isfinite

from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from ragfuse.load.timings import fitted

VALUES = st.just(0.0) | st.floats(1e-6, 10)
TABLES = st.lists(st.tuples(*[VALUES] * 4, st.floats(0.1, 10)), min_size=4, max_size=10)
NOISY = st.lists(st.tuples(*[st.floats(0, 1e9)] * 3, st.floats(0, 1e6)), min_size=1, max_size=8)


@given(TABLES)
def test_weights_are_those_of_the_classical_solver(rows):
    table, seconds = [row[:4] for row in rows], [row[4] for row in rows]
    found = fitted(table, seconds)
    relative = [[value / row[4] for value in row[:4]] for row in rows]
    best = nnls(relative, [1.0] * len(rows))[1] ** 2
    error = sum((sum(w * v for w, v in zip(found, row, strict=True)) - 1) ** 2 for row in relative)
    assert min(found) >= 0
    assert error <= best + 1e-6 * len(rows)


@given(NOISY)
def test_no_noise_makes_a_weight_that_is_no_number_or_below_zero(rows):
    found = fitted([row[:3] for row in rows], [row[3] for row in rows])
    assert all(isfinite(weight) and weight >= 0 for weight in found)
