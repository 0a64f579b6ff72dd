"""Curves through timings are found again where they are known, and never go below zero."""

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from ragfuse.fuse.select import cost_of
from ragfuse.load.timings import fitted
from ragfuse.plan.cost import Blend
from tests.plan.kit import LAYERS, machine

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


def test_known_fused_prefills_are_foretold_also_where_none_was_measured():
    def points(sizes):
        return [
            Blend(cost_of(policy), size, question, size - question - size // 6, ratio)
            for size in sizes
            for question in (16, 96)
            for policy, ratio in (
                ("none", 0.0),
                ("lego", 0.3),
                ("hkvd", 0.1),
                ("hkvd", 0.4),
                ("query", 0.2),
            )
        ]

    timed, known = points((384, 1024, 3072)), machine()
    weights = fitted(
        [blend.features(LAYERS) for blend in timed], [known.fused_s(blend) for blend in timed]
    )
    for blend in points((600, 2048, 4000)):
        foretold = sum(
            weight * times for weight, times in zip(weights, blend.features(LAYERS), strict=True)
        )
        assert foretold == pytest.approx(known.fused_s(blend), rel=0.01)
