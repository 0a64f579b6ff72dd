"""Timings of a machine, written down and read back; what is foreign is an error."""

import json
from dataclasses import replace

import pytest
from pydantic import TypeAdapter, ValidationError

from ragfuse.plan.cost import CostModel
from tests.plan.kit import machine

WHOLE = replace(
    machine(far=1e-8),
    prefill_points=((100, 0.05), (200, 0.1)),
)
READ = TypeAdapter(CostModel).validate_python


def test_a_profile_comes_back_from_json():
    assert READ(json.loads(json.dumps(WHOLE.as_dict()))) == WHOLE


@pytest.mark.parametrize(
    "change",
    [
        {"placed_s": float("nan")},
        {"threads": 0},
        {"fused": {"fixed_s": 1}},
        {"tiers": [1]},
    ],
)
def test_what_is_not_understood_is_refused(change):
    with pytest.raises(ValidationError):
        READ({**WHOLE.as_dict(), **change})
