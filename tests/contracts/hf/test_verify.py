"""`verify` passes what is right on every kind of model, and notices whatever is broken on
purpose.
"""

import json

import pytest
import torch

from ragfuse.hf.verify import verify
from tests.kits import hf as kit
from tests.kits.broken import BREAKS, WINDOW_BREAKS

SOUND = [
    ("llama", torch.float32),
    ("llama", torch.bfloat16),
    ("falcon-alibi", torch.float32),
    ("gpt-oss-sinks-window", torch.bfloat16),
    pytest.param("mistral-window", torch.float16, marks=pytest.mark.slow),
    pytest.param("stablelm-partial", torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("cohere2-some-nope-window", torch.float32, marks=pytest.mark.slow),
    pytest.param("deepseek-latent", torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("mixtral", torch.bfloat16, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "dtype"), SOUND)
def test_a_sound_model_passes(name, dtype):
    verdict = verify(kit.family(name, dtype))
    assert [check for check in verdict.checks if not check.passed] == []
    assert verdict.passed
    assert all(0 <= check.error <= check.bound < 0.25 for check in verdict.checks)


@pytest.mark.parametrize("policy", ["query", "lexical", "lego-3", "none"])
def test_every_policy_can_be_verified(policy):
    assert verify(kit.family("llama"), policy, 0.3).passed


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        pytest.param(torch.float32, marks=pytest.mark.slow),
        pytest.param(torch.float16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("what", BREAKS)
def test_what_is_broken_is_noticed(what, dtype):
    with BREAKS[what](kit.family("llama", dtype)) as broken:
        verdict = verify(broken)
    failed = [check for check in verdict.checks if not check.passed]
    assert failed
    assert not verdict.passed
    assert max(check.error / check.bound if check.bound else 10 for check in failed) > 2


@pytest.mark.parametrize("what", WINDOW_BREAKS)
def test_a_wrong_window_is_noticed(what):
    with WINDOW_BREAKS[what](kit.family("mistral-window", torch.bfloat16)) as broken:
        verdict = verify(broken)
    assert "prompt longer than the sliding window" in [
        check.name for check in verdict.checks if not check.passed
    ]


def test_weights_that_are_no_numbers_fail():
    model = kit.HFModel(kit.build("llama", {}))
    with torch.no_grad():
        model.model.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    verdict = verify(model)
    assert not verdict.passed
    json.dumps(verdict.as_dict(), allow_nan=False)
