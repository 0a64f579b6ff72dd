"""The same on real weights: a trained model's sharper attention, its tokenizer, its chat
template.
"""

import pytest
import torch

from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel, KVSource
from ragfuse.hf.verify import verify
from ragfuse.models.loader import load_model
from tests.kits import hf as kit

pytestmark = pytest.mark.slow
HEAD = "<|im_start|>user\nAnswer from the passages.\n\n"
PASSAGES = (
    "The Eiffel Tower was completed in 1889 in Paris. It is 330 metres tall.\n\n",
    "The Brooklyn Bridge opened in 1883 and spans the East River in New York.\n\n",
    "Big Ben is the nickname of the Great Bell in London, cast in 1858.\n\n",
)
TAIL = "When did the Brooklyn Bridge open?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(smollm_path, request):
    return load_model(smollm_path, request.param)


@pytest.fixture(scope="module")
def prompt(model):
    parts = [model.tokens(HEAD, special=True), *(model.tokens(text) for text in PASSAGES)]
    starts = [sum(len(part) for part in parts[:index]) for index in range(len(parts))]
    spans = zip(starts, parts, strict=True)
    runs = [
        CachedRun(index, lo, lo + len(part), lo, blend=index > 0)
        for index, (lo, part) in enumerate(spans)
    ]
    ids = [token for part in [*parts, model.tokens(TAIL, special=True)] for token in part]
    return ids, runs, KVSource([model.encode(part) for part in parts])


def fused(
    model: HFModel,
    prompt: tuple[list[int], list[CachedRun], KVSource],
    policy: str = "hkvd",
    ratio: float = 1.0,
):
    ids, runs, source = prompt
    return model.fuse(ids, torch.arange(len(ids)), runs, source, policy, ratio)


def test_the_embedded_model_passes_verify(model):
    verdict = verify(model)
    assert [check for check in verdict.checks if not check.passed] == []


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "sampled"]
)
def test_ratio_one_writes_what_transformers_writes(model, prompt, options):
    """In bfloat16 near-equal logits may swap by a rounding, so there the first tokens count."""
    ids, options = prompt[0], {"max_new_tokens": 24, **options}
    wanted = kit.theirs(model, ids, options, seed=3)
    count = None if model.dtype == torch.float32 else 3
    for prefill in (fused(model, prompt), model.full_prefill(ids)):
        assert generate(model, prefill, options, seed=3)[:count] == wanted[:count]


@pytest.mark.parametrize("policy", ["hkvd", "query"])
def test_recomputing_fifteen_percent_is_nearer_to_full_prefill_than_reuse(model, prompt, policy):
    full = model.full_prefill(prompt[0]).logits.float().log_softmax(-1)

    def divergence(policy: str, ratio: float) -> float:
        logits = fused(model, prompt, policy, ratio).logits.float().log_softmax(-1)
        return float((full.exp() * (full - logits)).sum())

    assert divergence(policy, 0.15) < divergence("none", 0.0)
