"""Timings of a machine, written down and read back; what is foreign is None and never an error."""

import json
from dataclasses import replace

import pytest

from ragfuse.plan.cost import CostModel
from tests.plan.kit import machine

WHOLE = replace(
    machine(far=1e-8),
    prefill_points=((100, 0.05), (200, 0.1)),
)


def test_a_profile_comes_back_from_json():
    assert CostModel.from_dict(json.loads(json.dumps(WHOLE.as_dict()))) == WHOLE


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"placed_s": float("nan")},
        {"threads": 0},
        {"fused": {"fixed_s": 1}},
        {"tiers": [1]},
    ],
)
def test_what_is_not_understood_is_none(change):
    assert CostModel.from_dict({**WHOLE.as_dict(), **change}) is None


@pytest.mark.parametrize("data", [None, [], "profile", {}, {"version": 3}])
def test_what_is_no_profile_is_none(data):
    assert CostModel.from_dict(data) is None
